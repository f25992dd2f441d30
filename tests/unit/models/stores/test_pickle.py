"""Pickled checkpoints: tensors come out, code stays in."""

import io
import json
import os
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.errors import BrokenFile, PackedWeights, UnidentifiedWeights, UnsafePickle
from oversmooth.models.stores.safetensors import read_weight_map
from oversmooth.models.stores.store import LocalFolder
from oversmooth.models.stores.torch_pickle import WRAPPERS, PickleStore, load_tensors

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2, dtype=torch.bfloat16)}


class Payload:
    """Would create a folder when it is unpickled carelessly."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self):
        return (os.mkdir, (str(self.witness),))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_state_dict_is_read_in_the_new_and_in_the_legacy_format(is_zip, tmp_path):
    torch.save(STATE, tmp_path / "x.bin", _use_new_zipfile_serialization=is_zip)
    assert zipfile.is_zipfile(tmp_path / "x.bin") == is_zip
    store = PickleStore.single(tmp_path / "x.bin")
    assert_same({name: store.read(name) for name in store.names}, STATE)
    assert [(facts.name, facts.size_bytes) for facts in store.files()] == [
        ("x.bin", (tmp_path / "x.bin").stat().st_size)
    ]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_state_dict_is_found_under_the_keys_of_training_scripts(wrapper, tmp_path):
    torch.save({wrapper: STATE, "epoch": 3, "optimizer": {"state": {0: torch.ones(1)}}}, tmp_path / "x.pt")
    assert_same(load_tensors(tmp_path / "x.pt"), STATE)


def test_a_wrapper_wins_over_tensors_that_lie_beside_it(tmp_path):
    torch.save({"step": torch.tensor(7), "model": {"state_dict": STATE}}, tmp_path / "x.pt")
    assert_same(load_tensors(tmp_path / "x.pt"), STATE)


def test_entries_that_are_no_named_tensors_are_left_out(tmp_path):
    torch.save({**STATE, "version": 2, 5: torch.ones(3), "note": "text"}, tmp_path / "x.pt")
    assert_same(load_tensors(tmp_path / "x.pt"), STATE)


def test_parameters_count_as_tensors(tmp_path):
    torch.save({"w": nn.Parameter(torch.ones(2, 2))}, tmp_path / "x.pt")
    assert_same(load_tensors(tmp_path / "x.pt"), {"w": nn.Parameter(torch.ones(2, 2))})


def test_shards_are_loaded_only_when_one_of_their_tensors_is_read(tmp_path):
    weight_map = {"a.weight": "one.bin", "a.bias": "two.bin"}
    for name, shard in weight_map.items():
        torch.save({name: STATE[name]}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    store = PickleStore(tmp_path, read_weight_map(LocalFolder(tmp_path), "pytorch_model.bin.index.json"))
    assert store.files() == ()
    torch.testing.assert_close(store.read("a.bias"), STATE["a.bias"])
    assert [facts.name for facts in store.files()] == ["two.bin"]


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path):
    torch.save(STATE, tmp_path / "one.bin")
    with pytest.raises(BrokenFile, match="the tensor 'ghost', as the index says"):
        PickleStore(tmp_path, {"ghost": "one.bin"}).read("ghost")


# --- code in the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_nothing_runs(is_zip, tmp_path):
    witness = tmp_path / "executed"
    torch.save({**STATE, "x": Payload(witness)}, tmp_path / "x.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsafePickle) as caught:
        load_tensors(tmp_path / "x.bin")
    assert not witness.exists()
    for part in (
        str(tmp_path / "x.bin"),
        f"{os.mkdir.__module__}.mkdir",
        "nothing was executed",
        "Convert it to safetensors",
    ):
        assert part in str(caught.value)


def test_the_payload_above_does_run_where_pickles_are_trusted(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_a_plain_pickle_that_would_run_code_is_refused_and_nothing_runs(tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    with pytest.raises(UnsafePickle):
        load_tensors(tmp_path / "x.pt")
    assert not (tmp_path / "executed").exists()


def test_a_pickled_module_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "x.pt")
    with pytest.raises(UnsafePickle, match=r"torch\.nn\.modules\.linear\.Linear"):
        load_tensors(tmp_path / "x.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_torchs_advice_to_unpickle_all_the_same_is_not_passed_on(is_zip, tmp_path):
    """As fairseq saves its checkpoints: the arguments of the command line beside the weights."""
    path = tmp_path / "x.pt"
    torch.save({"args": Namespace(a=1), "model": STATE}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnsafePickle) as caught:
        load_tensors(path)
    assert caught.value.reason == "it names argparse.Namespace"
    assert [word for word in ("safe_globals", "weights_only", "allowlist") if word in str(caught.value)] == []


# --- files that are broken ------------------------------------------------------------------------------------------


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", bytes(range(256)) * 8, b"PK\x03\x04" + bytes(100), saved(STATE)[:-100], saved(STATE)[:100]],
    ids=["empty", "text", "bytes", "zip-like", "cut-at-the-end", "cut-at-the-start"],
)
def test_what_is_no_checkpoint_is_refused(content, tmp_path):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(BrokenFile) as caught:
        load_tensors(tmp_path / "x.bin")
    for part in (str(tmp_path / "x.bin"), "a PyTorch state dict", "Download or copy the file again"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("value", "found"),
    [([1, 2], "a list"), (torch.ones(2), "a Tensor"), ({"epoch": 1}, "the keys ['epoch']"), ({}, "the keys []")],
)
def test_a_checkpoint_without_a_state_dict_is_refused_with_what_it_holds(value, found, tmp_path):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(BrokenFile) as caught:
        load_tensors(tmp_path / "x.pt")
    for part in ("a state dict of tensors", found, "Known wrappers: state_dict"):
        assert part in str(caught.value)


# --- archives that lie ----------------------------------------------------------------------------------------------


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """The archive of `STATE` with every record passed through `change(name, bytes)`."""
    with zipfile.ZipFile(io.BytesIO(saved(STATE))) as old, zipfile.ZipFile(path, "w", compression) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return path


def test_an_archive_written_by_another_zip_library_is_read(tmp_path):
    assert_same(load_tensors(rewritten(tmp_path / "x.bin", lambda name, data: data)), STATE)


def test_a_record_whose_own_header_is_broken_is_refused_as_torch_refuses_it(tmp_path):
    content = bytearray(saved(STATE))
    content[content.index(b"/data/0") - 37] ^= 0xFF  # in the signature PK34 of the header that precedes the name
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match="invalid header"):
        torch.load(path, weights_only=True)
    with pytest.raises(BrokenFile, match="Bad magic number"):
        load_tensors(path)


def test_compressed_records_are_refused_because_mapped_they_would_be_taken_for_numbers(tmp_path):
    path = rewritten(tmp_path / "x.bin", lambda name, data: data, zipfile.ZIP_DEFLATED)
    mapped = torch.load(path, weights_only=True, mmap=True)["a.weight"]
    assert not torch.equal(mapped, STATE["a.weight"])
    with pytest.raises(BrokenFile, match="neither compressed nor encrypted"):
        load_tensors(path)


@pytest.mark.parametrize("change", [lambda data: data[:8], lambda data: data + b"12345678", lambda data: b""])
def test_a_record_of_another_length_than_its_storage_is_refused(change, tmp_path):
    path = rewritten(tmp_path / "x.bin", lambda name, data: change(data) if name.endswith("data/0") else data)
    with pytest.raises(RuntimeError, match=r"record size|numel"):
        torch.load(path, weights_only=True)
    with pytest.raises(BrokenFile, match="expected 24 bytes in its record '0', found"):
        load_tensors(path)


def test_a_record_that_is_missing_is_refused(tmp_path):
    path = rewritten(tmp_path / "x.bin", lambda name, data: data)
    content = path.read_bytes().replace(b"data/0", b"data/7")
    path.write_bytes(content)
    with pytest.raises(BrokenFile, match="record '0', found no such record"):
        load_tensors(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_record_that_stands_twice_is_refused(tmp_path):
    path = rewritten(tmp_path / "x.bin", lambda name, data: data)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(next(name for name in archive.namelist() if name.endswith("data/0")), bytes(24))
    with pytest.raises(BrokenFile, match="data/0' 2 times"):
        load_tensors(path)


HUGE = b"\x8a\x06" + (2**40).to_bytes(6, "little")  # LONG1


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02cbuiltins\nbytearray\n" + HUGE + b"\x85R.",
        b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
        b"\x80\x02]r" + (2**31 - 1).to_bytes(4, "little") + b".",
        b"\x80\x02(((((.",
        b"\x80\x02\x86.",
        b"\x80\x02Nh\x07.",
        b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b".",
    ],
    ids=["bytearray", "BYTEARRAY8", "memo", "marks", "empty stack", "memo unknown", "nested"],
)
def test_a_pickle_that_asks_for_more_than_it_brings_is_refused(pickled, tmp_path):
    path = rewritten(tmp_path / "x.bin", lambda name, data: pickled if name.endswith("data.pkl") else data)
    (tmp_path / "y.bin").write_bytes(pickled)
    for file in (path, tmp_path / "y.bin"):
        with pytest.raises((BrokenFile, UnsafePickle)):
            load_tensors(file)


# --- tensors that are no numbers in memory --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.ones(1).expand(2**20, 2**20), "of its own numbers"),
        (lambda: torch.ones(4).expand(1000, 4), "strides (0, 1) in a file of"),
        (lambda: torch.empty(3, 3, device="meta"), "on the meta device"),
        (lambda: torch.eye(3).to_sparse(), "a sparse_coo Tensor"),
        (lambda: torch.eye(3).to_sparse_csr(), "a sparse_csr Tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested Tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "torch.qint8"),
    ],
    ids=["terabytes", "expanded", "meta", "sparse", "csr", "nested", "quantised"],
)
def test_a_tensor_that_is_more_than_its_bytes_is_refused_where_it_is_read(make, expected, tmp_path):
    torch.save({**STATE, "odd": make()}, tmp_path / "x.bin")
    store = PickleStore.single(tmp_path / "x.bin")
    torch.testing.assert_close(store.read("a.weight"), STATE["a.weight"])
    with pytest.raises((BrokenFile, PackedWeights)) as caught:
        store.read("odd")
    assert expected in str(caught.value)


def test_a_tensor_whose_sign_is_only_marked_is_read_with_its_sign(tmp_path):
    odd = torch.complex(torch.zeros(3), torch.ones(3)).conj().imag
    torch.save({"w": odd}, tmp_path / "x.bin")
    found = PickleStore.single(tmp_path / "x.bin").read("w")
    assert not found.is_neg()
    torch.testing.assert_close(found, -torch.ones(3))


def test_a_bare_file_of_a_class_of_the_users_own_is_refused_with_what_helps(tmp_path):
    torch.save({"q.weight": torch.ones(8, 8), "v.weight": torch.ones(8, 8)}, tmp_path / "own.pt")
    with pytest.raises(
        UnidentifiedWeights, match=r"class of your own, build it in Python.*osm\.discover\(model, inputs\)"
    ):
        osm.inspect(tmp_path / "own.pt")
