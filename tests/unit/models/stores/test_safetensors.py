"""safetensors files: every header is doubted, every dtype is read as the format's own reader does, nothing else."""

import json
import struct

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from oversmooth.errors import BrokenFile, PackedWeights
from oversmooth.models.stores.safetensors import DTYPES, SafetensorsStore, read_header
from oversmooth.models.stores.store import LocalFolder, RangedFile

SOUND = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def raw_file(path, header, data=bytes(24)):
    """A file with exactly this header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def opened(path):
    return SafetensorsStore.single(LocalFolder(path.parent), path.name)


class CountingFolder(LocalFolder):
    """A folder that remembers which ranges of its files were read."""

    def __init__(self, path):
        super().__init__(path)
        self.ranges = []

    def open(self, name):
        file = super().open(name)

        def fetch(start, stop):
            self.ranges.append((name, start, stop))
            return bytes(file.read(start, stop))

        return RangedFile(file.label, file.size, fetch)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_as_safetensors_itself_reads_it(name, tmp_path):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 2, (5, 7), generator=generator)
    tensors = {"matrix": values.to(DTYPES[name]), "number": torch.tensor(1).to(DTYPES[name])}
    tensors["nothing"] = torch.empty(0, 4, dtype=DTYPES[name])
    save_file(tensors, tmp_path / "x.safetensors")
    expected, store = load_file(tmp_path / "x.safetensors"), opened(tmp_path / "x.safetensors")
    assert set(store.names) == set(expected)
    for tensor in expected:
        found = store.read(tensor)
        assert found.dtype == DTYPES[name]
        torch.testing.assert_close(found.double(), expected[tensor].double(), rtol=0, atol=0)


def test_floats_are_read_to_the_last_bit_at_any_alignment(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randint(0, 255, (3,), generator=generator, dtype=torch.uint8)}
    tensors["b"] = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(opened(tmp_path / "x.safetensors").read("b"), tensors["b"], rtol=0, atol=0)


def test_only_the_header_and_the_tensors_asked_for_are_read(tmp_path):
    save_file({"wanted": torch.ones(10, 10), "other": torch.ones(1000, 1000)}, tmp_path / "x.safetensors")
    folder = CountingFolder(tmp_path)
    store = SafetensorsStore.single(folder, "x.safetensors")
    header_bytes = sum(stop - start for _, start, stop in folder.ranges)
    folder.ranges.clear()
    store.read("wanted")
    assert header_bytes < 300
    assert [stop - start for _, start, stop in folder.ranges] == [400]


def test_a_shard_is_opened_only_when_one_of_its_tensors_is_read(tmp_path):
    sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    folder = CountingFolder(tmp_path)
    store = SafetensorsStore.sharded(folder, "model.safetensors.index.json")
    assert store.files() == ()
    store.read("b")
    assert {name for name, _, _ in folder.ranges} == {"model.safetensors.index.json", "two.safetensors"}
    assert [facts.name for facts in store.files()] == ["two.safetensors"]
    assert store.files()[0].size_bytes == (tmp_path / "two.safetensors").stat().st_size


def sharded(folder, weight_map, files=None):
    for file in files if files is not None else set(weight_map.values()):
        tensors = {name: torch.ones(2) for name, shard in weight_map.items() if shard == file}
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# --- headers that lie -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({**SOUND, "shape": [2, 4]}, "[2, 4] numbers of F32 in 'w'"),
        ({**SOUND, "dtype": "F16"}, "[2, 3] numbers of F16 in 'w'"),
        ({**SOUND, "shape": [2, 300], "data_offsets": [0, 2400]}, "as its header promises for 'w'"),
        ({**SOUND, "data_offsets": [2400, 2424]}, "as its header promises for 'w'"),
        ({**SOUND, "data_offsets": [24, 0]}, "ordered sizes for 'w'"),
        ({**SOUND, "shape": [-2, -3]}, "ordered sizes for 'w'"),
        ({**SOUND, "data_offsets": [-24, 0]}, "ordered sizes for 'w'"),
        ({**SOUND, "shape": [2.0, 3.0]}, "ordered sizes for 'w'"),
        ({**SOUND, "shape": [10**30, 0, 10**30], "data_offsets": [0, 8]}, "a shape of 'w' that a tensor can have"),
        ({**SOUND, "dtype": ["F32"]}, "a dtype and whole"),
        ({**SOUND, "data_offsets": [0]}, "dtype, shape and offsets of 'w'"),
        ({"dtype": "F32", "shape": [2, 3]}, "dtype, shape and offsets of 'w'"),
        ({**SOUND, "shape": 6}, "dtype, shape and offsets of 'w'"),
        ("w", "dtype, shape and offsets of 'w'"),
        (None, "dtype, shape and offsets of 'w'"),
    ],
)
def test_a_header_that_lies_about_a_tensor_is_refused_with_its_name(entry, expected, tmp_path):
    path = raw_file(tmp_path / "x.safetensors", {"w": entry})
    with pytest.raises(BrokenFile) as caught:
        opened(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a file of 0 bytes"),
        (b"1234567", "a file of 7 bytes"),
        (struct.pack("<Q", 10**18) + b"{}", f"a header of {10**18} bytes"),
        (struct.pack("<Q", 3) + b"{}", "a header of 3 bytes"),
        (struct.pack("<Q", 2) + b"[]", "a safetensors header in JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "a safetensors header in JSON"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "a safetensors header in JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "header that fits into the file"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(content, expected, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(BrokenFile) as caught:
        opened(tmp_path / "x.safetensors")
    assert expected in str(caught.value)


def entry(start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": [(stop - start) // 4], "data_offsets": [start, stop]}


def text(name, first, last=""):
    """A header in which one key stands twice."""
    one = json.dumps(entry(0, 8))
    return f'{{"{name}": {first or one}, "{name}": {last or one}}}'.encode()


LAYOUTS = {
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' to begin at byte"),
    "the same bytes twice": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "overlaps another tensor"),
    "a gap": ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "leaves a gap"),
    "a gap at the start": ({"a": entry(4, 12)}, 12, "leaves a gap"),
    "bytes of nobody at the end": ({"a": entry(0, 8)}, 12, "as its header promises"),
    "bytes but no tensor": ({}, 4, "as its header promises"),
    "an empty tensor inside another": ({"a": entry(0, 8), "b": entry(4, 4)}, 8, "to begin at byte"),
    "a length that cuts the header": (json.dumps({"a": entry(0, 8)}).encode()[:-1], 9, "no JSON"),
    "another number system": ({"a": entry(0, 8, "F3")}, 8, "a dtype of safetensors for 'a', found 'F3'"),
    "sizes that overflow": ({"a": {**entry(0, 0), "shape": [2**40, 2**40, 0]}}, 0, "a shape of 'a'"),
    "true as a size": ({"a": {**entry(0, 8), "shape": [True, 2]}}, 8, "ordered sizes for 'a'"),
    "minus zero": (json.dumps({"a": entry(0, 8)}).replace("[0,", "[-0,").encode(), 8, "ordered sizes for 'a'"),
    "half a character": (b'{"\\ud800": ' + json.dumps(entry(0, 8)).encode() + b"}", 8, "half a character"),
    "another encoding": (json.dumps({"a": entry(0, 8)}).encode("utf-16"), 8, "not UTF-8"),
    "a number beyond floats": (b'{"a": 1' + b"0" * 400 + b"}", 0, "a number of 401 digits"),
    "a fraction beyond floats": (b'{"a": 1e999}', 0, "a number of 5 digits"),
    "NaN": (b'{"a": NaN}', 0, "NaN, which is no JSON"),
    "metadata of numbers": ({"__metadata__": {"step": 1}, "a": entry(0, 8)}, 8, "__metadata__ of strings"),
    "metadata as a list": ({"__metadata__": [], "a": entry(0, 8)}, 8, "found a list"),
    "metadata twice": (text("__metadata__", "{}", "{}"), 0, "the name '__metadata__' twice"),
    "a field twice": (json.dumps({"a": entry(0, 8)}).replace('"shape"', '"dtype"').encode(), 8, "'dtype' twice"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_the_formats_own_reader_refuses_is_refused(name, tmp_path):
    header, size, expected = LAYOUTS[name]
    path = raw_file(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises(SafetensorError), safe_open(path, "pt"):
        pass
    with pytest.raises(BrokenFile) as caught:
        opened(path)
    assert expected in str(caught.value)


def test_a_name_that_stands_twice_is_refused(tmp_path):
    path = raw_file(tmp_path / "x.safetensors", text("w", ""), bytes(8))
    with pytest.raises(BrokenFile, match="found the name 'w' twice"):
        opened(path)


@pytest.mark.parametrize(
    "header",
    [
        {"b": entry(8, 16), "a": entry(0, 8)},
        {"__metadata__": None, "a": entry(0, 8), "none": entry(8, 8), "b": entry(8, 16)},
        json.dumps({"a": entry(0, 8), "b": entry(8, 16)}).encode() + b"   \n",
        json.dumps({"\U0001f600": entry(0, 8), "": entry(8, 16)}).encode(),
    ],
    ids=["any order", "an empty tensor", "spaces at the end", "names beyond ASCII"],
)
def test_what_the_formats_own_reader_reads_is_read_alike(header, tmp_path):
    path = raw_file(tmp_path / "x.safetensors", header, bytes(range(16)))
    store = opened(path)
    with safe_open(path, "pt") as reference:
        assert set(store.names) == set(reference.keys())
        for name in store.names:
            torch.testing.assert_close(store.read(name), reference.get_tensor(name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kept", [4, 40, -1])
def test_a_truncated_file_is_refused_wherever_it_ends(kept, tmp_path):
    save_file({"w": torch.ones(8, 8)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:kept])
    with pytest.raises(BrokenFile, match="Download or copy the file again"):
        opened(tmp_path / "x.safetensors")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    save_file({"w": torch.ones(8, 8)}, tmp_path / "x.safetensors")
    store = opened(tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(content[:-4])
    with pytest.raises(BrokenFile, match="expected 256 bytes at"):
        store.read("w")


def test_a_sound_header_passes_the_same_checks(tmp_path):
    path = raw_file(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, "w": SOUND})
    entries = read_header(LocalFolder(tmp_path).open("x.safetensors"))
    assert list(entries) == ["w"]
    assert entries["w"].stop == path.stat().st_size


def test_a_dtype_that_torch_lacks_is_refused_only_where_it_is_read(tmp_path):
    header = {"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}, "v": {**SOUND, "data_offsets": [3, 27]}}
    store = opened(raw_file(tmp_path / "x.safetensors", header, bytes(27)))
    assert store.read("v").shape == (2, 3)
    with pytest.raises(PackedWeights, match="'w' has dtype F4"):
        store.read("w")


# --- indices that lie -----------------------------------------------------------------------------------------------


def test_an_index_that_names_an_absent_shard_is_refused(tmp_path):
    sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, files=["one.safetensors"])
    with pytest.raises(BrokenFile, match=r"no two\.safetensors\.\nDownload the missing shards"):
        SafetensorsStore.sharded(LocalFolder(tmp_path), "model.safetensors.index.json")


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a\\b.safetensors", 3, None])
def test_an_index_that_points_out_of_its_folder_is_refused(shard, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(BrokenFile, match="the index points elsewhere"):
        SafetensorsStore.sharded(LocalFolder(folder), "model.safetensors.index.json")


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused_when_it_is_read(tmp_path):
    sharded(tmp_path, {"a": "one.safetensors"})
    index = {"weight_map": {"a": "one.safetensors", "ghost": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    store = SafetensorsStore.sharded(LocalFolder(tmp_path), "model.safetensors.index.json")
    torch.testing.assert_close(store.read("a"), torch.ones(2))
    with pytest.raises(BrokenFile, match="the tensor 'ghost', as the index says"):
        store.read("ghost")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "[" * 200_000])
def test_an_index_without_a_weight_map_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BrokenFile, match="a JSON index with a weight_map"):
        SafetensorsStore.sharded(LocalFolder(tmp_path), "model.safetensors.index.json")
