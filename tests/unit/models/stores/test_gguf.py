"""GGUF files, written with the gguf package's own names and quantisers, against live models with the same weights."""

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

import oversmooth as osm
from oversmooth.errors import (
    AdapterMismatch,
    BrokenFile,
    ConfigMismatch,
    PackedWeights,
    RefusedArchitecture,
    UnknownArchitecture,
)
from oversmooth.models.families import ARCHITECTURES
from oversmooth.models.identify import declared_for_gguf
from oversmooth.models.stores.gguf import GGUFStore
from tests.contract.tiny_models import tiny_model
from tests.contract.todays_models import todays_model

Quantisation = gguf.GGMLQuantizationType
Form = Callable[[np.ndarray], np.ndarray]


def plain(weight: np.ndarray) -> np.ndarray:
    return weight


def one_added(weight: np.ndarray) -> np.ndarray:
    return weight + 1


def one_removed(weight: np.ndarray) -> np.ndarray:
    return weight - 1


def transposed(weight: np.ndarray) -> np.ndarray:
    return weight.T


def regrouped(n_groups: int, per_group: int) -> tuple[Form, Form]:
    """From rows grouped per value head (its queries, key, value) to all q, all k, all v; and back."""
    rows = np.arange(n_groups * (per_group + 2) * 8).reshape(n_groups, per_group + 2, 8)
    order = np.concatenate([rows[:, :-2].reshape(-1), rows[:, -2].reshape(-1), rows[:, -1].reshape(-1)])
    return (lambda weight: weight[order]), (lambda weight: weight[np.argsort(order)])


@dataclass(frozen=True, kw_only=True)
class Case:
    """How llama.cpp's converter stores a family."""

    tiny: str
    architecture: str
    prefix: str = "model."
    metadata: dict[str, Any] = field(default_factory=dict)
    forms: dict[str, tuple[Form, Form]] = field(default_factory=dict)
    """By a fragment of the live tensor's name: to the stored form, and back."""


GROUPED = {"head_count": 4, "head_count_kv": 2, "value_length": 8}
OFFSET = {"norm": (one_added, one_removed)}
CASES = {
    case.tiny: case
    for case in (
        Case(tiny="llama", architecture="llama", metadata=GROUPED),
        Case(tiny="llama-with-biases", architecture="llama", metadata=GROUPED),
        Case(tiny="qwen2", architecture="qwen2", metadata=GROUPED),
        Case(tiny="phi3", architecture="phi3", metadata=GROUPED),
        Case(tiny="granite", architecture="granite", metadata={**GROUPED, "residual_scale": 0.3}),
        Case(tiny="gemma", architecture="gemma", metadata={**GROUPED, "value_length": 16}, forms=OFFSET),
        Case(tiny="gemma2", architecture="gemma2", metadata=GROUPED, forms=OFFSET),
        Case(tiny="olmo2", architecture="olmo2", metadata=GROUPED),
        Case(tiny="cohere", architecture="command-r", metadata=GROUPED),
        Case(
            tiny="gpt2",
            architecture="gpt2",
            prefix="transformer.",
            metadata={"head_count": 4},
            forms=dict.fromkeys(("c_attn.weight", "c_proj.weight", "c_fc.weight"), (transposed, transposed)),
        ),
        Case(
            tiny="gpt_bigcode",
            architecture="starcoder",
            prefix="transformer.",
            metadata={"head_count": 4, "head_count_kv": 1},
        ),
        Case(tiny="bert", architecture="bert", prefix="", metadata={"head_count": 4}),
        Case(
            tiny="bloom",
            architecture="bloom",
            prefix="transformer.",
            metadata={"head_count": 4, "head_count_kv": 4},
            forms={"query_key_value": regrouped(4, 1)},
        ),
        Case(
            tiny="gpt_neox",
            architecture="gptneox",
            prefix="gpt_neox.",
            metadata={"head_count": 4, "parallel_residual": True},
            forms={"query_key_value": regrouped(4, 1)},
        ),
        Case(
            tiny="gpt_neox-sequential",
            architecture="gptneox",
            prefix="gpt_neox.",
            metadata={"head_count": 4, "parallel_residual": False},
            forms={"query_key_value": regrouped(4, 1)},
        ),
        Case(
            tiny="falcon-multi-query",
            architecture="falcon",
            prefix="transformer.",
            metadata={"head_count": 4, "head_count_kv": 1},
        ),
        Case(
            tiny="falcon-grouped",
            architecture="falcon",
            prefix="transformer.",
            metadata={"head_count": 4, "head_count_kv": 2},
            forms={"query_key_value": regrouped(2, 2)},
        ),
    )
}


def write(path, architecture, tensors, metadata, *, blocks=3, width=32):
    """A GGUF file; `tensors` maps names to (bytes as stored, quantisation)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(blocks)
    writer.add_embedding_length(width)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def exported(case: Case, kind: Quantisation, path):
    """The tiny model as a GGUF file, and the live model made to hold exactly what the file holds."""
    model, _ = tiny_model(case.tiny)
    enum = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(enum, 3)
    tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored_name = names.get_name(f"{case.prefix}{name}", try_suffixes=(".weight", ".bias"))
            if stored_name is None:
                continue  # what llama.cpp does not store under a name of its own, such as BERT's pooler
            forms = (pair for fragment, pair in case.forms.items() if fragment in name)
            to_stored, to_live = next(forms, (plain, plain))
            chosen = kind if parameter.ndim == 2 and "attn" in stored_name else Quantisation.F32
            stored = np.ascontiguousarray(to_stored(parameter.numpy()))
            tensors[stored_name] = (quantize(stored, chosen), chosen)
            values = to_live(dequantize(tensors[stored_name][0], chosen).reshape(stored.shape))
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return write(path, case.architecture, tensors, case.metadata), model, tensors


EXACT = [Quantisation.F32, Quantisation.F16, Quantisation.BF16]
PACKED = [Quantisation.Q8_0, Quantisation.Q4_0, Quantisation.Q5_1]


@pytest.mark.parametrize("kind", [*EXACT, *PACKED], ids=lambda kind: kind.name)
def test_tensors_are_what_the_gguf_package_itself_dequantises(kind, tmp_path):
    path, _, tensors = exported(CASES["llama"], kind, tmp_path / "x.gguf")
    store = GGUFStore(path)
    assert set(store.names) == set(tensors)
    for name, (data, stored) in tensors.items():
        expected = torch.from_numpy(dequantize(data, stored).astype("float32"))
        torch.testing.assert_close(store.read(name), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Quantisation.Q4_K, Quantisation.Q6_K], ids=lambda kind: kind.name)
def test_blocks_of_256_are_dequantised_in_the_shape_of_the_matrix(kind, tmp_path):
    _, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (4, 2 * bytes_per_block), dtype=np.uint8)
    path = write(tmp_path / "x.gguf", "llama", {"blk.0.attn_v.weight": (data, kind)}, {}, width=512)
    found = GGUFStore(path).read("blk.0.attn_v.weight")
    assert found.shape == (4, 512)
    torch.testing.assert_close(found, torch.from_numpy(dequantize(data, kind)), rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_says_the_same_as_the_live_model_with_its_weights(name, tmp_path):
    path, model, _ = exported(CASES[name], Quantisation.Q8_0, tmp_path / "x.gguf")
    assert_same_inspection(osm.inspect(path), osm.inspect(model))


@pytest.mark.parametrize("kind", EXACT[:2], ids=lambda kind: kind.name)
def test_a_gguf_file_of_plain_floats_says_the_same_too(kind, tmp_path):
    path, model, _ = exported(CASES["bloom"], kind, tmp_path / "x.gguf")
    assert_same_inspection(osm.inspect(path), osm.inspect(model))


def assert_same_inspection(found, expected):
    ours, theirs = found.stacks[0], expected.stacks[0]
    for fact in ("family", "d_model", "n_heads", "n_kv", "d_head", "residual", "blocks"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact
    rows, live_rows = found.rows(), expected.rows()
    assert len(rows) == len(live_rows) == ours.blocks
    for row, live in zip([*rows, *found.head_rows()], [*live_rows, *expected.head_rows()], strict=True):
        for column, value in row.items():
            is_number = isinstance(value, float)
            assert value == (pytest.approx(live[column], rel=1e-4, abs=1e-6) if is_number else live[column]), column


def test_the_comparison_above_can_fail(tmp_path):
    path, model, _ = exported(CASES["bloom"], Quantisation.F32, tmp_path / "x.gguf")
    with torch.no_grad():
        model.h[1].self_attention.query_key_value.weight.mul_(1.01)
    with pytest.raises(AssertionError, match="rho_dc"):
        assert_same_inspection(osm.inspect(path), osm.inspect(model))


def test_every_family_with_a_gguf_name_has_norms_under_those_names():
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    for arch in ARCHITECTURES.values():
        for name in arch.gguf:
            stored = {
                gguf.TENSOR_NAMES[tensor].removeprefix("blk.{bid}.") for tensor in gguf.MODEL_TENSORS[known[name]]
            }
            paths = declared_for_gguf(name).paths
            assert {paths.o} <= stored, name
            assert {paths.v, paths.qkv} & stored, name
            declared = {role for role in ("attn_norm", "attn_branch_norm") if getattr(arch.paths, role)}
            for role in declared:
                assert set(getattr(paths, role).split("|")) & stored, (name, role)


TODAYS = {
    "deepseek_v3": ("deepseek2", {"self_attn.kv_b_proj": "attn_kv_b"}),
    "deepseek_v3 with values apart": ("deepseek2", {"self_attn.kv_b_proj": "attn_v_b"}),
    "gpt_oss": ("gpt-oss", {"self_attn.v_proj": "attn_v"}),
    "qwen3_next": ("qwen3next", {"self_attn.v_proj": "attn_v"}),
    "granitemoehybrid": ("granitehybrid", {"self_attn.v_proj": "attn_v"}),
}
SHARED_NAMES = {
    "self_attn.o_proj": "attn_output",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "input_layernorm": "attn_norm",
    "linear_attn.out_proj": "ssm_out",
    "mamba.out_proj": "ssm_out",
}


@pytest.mark.parametrize("name", TODAYS)
def test_latent_gated_and_hybrid_files_say_the_same_as_the_live_model(name, tmp_path):
    model, _ = todays_model(name.partition(" ")[0])
    architecture, own = TODAYS[name]
    tensors = {}
    for path, tensor in model.state_dict().items():
        match = re.fullmatch(r"layers\.(\d+)\.(.*)\.(weight|bias)", path)
        stored = match and (own | SHARED_NAMES).get(match[2])
        if not match or not stored:
            continue
        if stored == "attn_v_b":  # llama.cpp cuts the keys off, and keeps heads apart
            tensor = tensor.unflatten(0, (4, -1))[:, 6:].contiguous()
        if stored == "attn_norm" and name == "qwen3_next":
            tensor = tensor + 1  # as its converter does
        tensors[f"blk.{match[1]}.{stored}.{match[3]}"] = (tensor.numpy(), None)
    sizes = {"head_count": 4, "head_count_kv": model.config.num_key_value_heads, "key_length": 8, "value_length": 8}
    blocks = model.config.num_hidden_layers
    gain = {"residual_scale": 0.6} if architecture == "granitehybrid" else {}
    path = write(tmp_path / "x.gguf", architecture, tensors, sizes | gain, blocks=blocks)
    assert_same_inspection(osm.inspect(path), osm.inspect(model))


# --- what is refused ------------------------------------------------------------------------------------------------

VALUE = {"blk.0.attn_v.weight": (np.ones((32, 32), np.float32), None)}
BLOCK = {**VALUE, "blk.0.attn_output.weight": (np.ones((32, 32), np.float32), None)}


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    path = write(tmp_path / "x.gguf", "lama", BLOCK, {"head_count": 4}, blocks=1)
    with pytest.raises(UnknownArchitecture) as caught:
        osm.inspect(path)
    for part in ("'lama'", "Close: llama", "command-r", "--model-type"):
        assert part in str(caught.value)


def test_an_unknown_architecture_is_read_as_the_model_type_that_the_user_names(tmp_path):
    path = write(tmp_path / "x.gguf", "lama", BLOCK, {"head_count": 4}, blocks=1)
    result = osm.inspect(path, model_type="llama")
    assert [layer.plain.rho_dc for layer in result.layers] == pytest.approx([1 + 32**2])


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("mamba", "linear or recurrent"), ("rwkv7", "linear or recurrent")],
)
def test_an_architecture_without_a_linear_value_path_is_refused_with_the_reason(architecture, reason, tmp_path):
    path = write(tmp_path / "x.gguf", architecture, BLOCK, {"head_count": 4}, blocks=1)
    with pytest.raises(RefusedArchitecture, match=reason):
        osm.inspect(path)


def test_heads_that_contradict_the_tensors_are_refused(tmp_path):
    path = write(tmp_path / "x.gguf", "llama", BLOCK, {"head_count": 5}, blocks=1)
    with pytest.raises(ConfigMismatch, match="5 heads"):
        osm.inspect(path)


def test_blocks_that_are_missing_are_refused(tmp_path):
    path = write(tmp_path / "x.gguf", "llama", BLOCK, {"head_count": 4}, blocks=2)
    with pytest.raises(ConfigMismatch, match="the number of layers"):
        osm.inspect(path)


def test_a_file_without_attention_is_refused(tmp_path):
    path = write(tmp_path / "x.gguf", "llama", VALUE, {"head_count": 4}, blocks=1)
    with pytest.raises(AdapterMismatch, match="attention layers under its names"):
        osm.inspect(path)


def test_sizes_that_differ_between_layers_are_refused(tmp_path):
    path = write(tmp_path / "x.gguf", "llama", BLOCK, {"head_count": [4, 8]}, blocks=1)
    with pytest.raises(PackedWeights, match=r"attention\.head_count differs between layers: \[4, 8\]"):
        osm.inspect(path)


def test_layers_without_attention_do_not_make_sizes_differ(tmp_path):
    path = write(tmp_path / "x.gguf", "llama", BLOCK, {"head_count": 4, "head_count_kv": [0, 4]}, blocks=1)
    assert GGUFStore(path).config["num_key_value_heads"] == 4


def test_a_type_that_gguf_cannot_dequantise_is_refused_by_name(tmp_path):
    tensors = {"blk.0.attn_v.weight": (np.ones((32, 32), np.int8), None)}
    store = GGUFStore(write(tmp_path / "x.gguf", "llama", tensors, {}, blocks=1))
    with pytest.raises(PackedWeights, match=r"'blk\.0\.attn_v\.weight' is I8"):
        store.read("blk.0.attn_v.weight")


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut in the header", "cut in the tensors"])
def test_a_broken_file_is_refused(damage, tmp_path):
    path = write(tmp_path / "x.gguf", "llama", BLOCK, {"head_count": 4}, blocks=1)
    content = path.read_bytes()
    damaged = {"empty": b"", "garbage": bytes(range(256)), "cut in the header": content[:90]}
    path.write_bytes(damaged.get(damage, content[:-2000]))
    with pytest.raises(BrokenFile) as caught:
        osm.inspect(path)
    for part in (str(path), "a GGUF file", "Download or copy the file again"):
        assert part in str(caught.value)


def test_a_file_without_an_architecture_is_refused(tmp_path):
    path = write(tmp_path / "x.gguf", "llama", BLOCK, {}, blocks=1)
    content = path.read_bytes().replace(b"general.architecture", b"general.xrchitecture")
    path.write_bytes(content)
    with pytest.raises(BrokenFile, match=r"metadata general\.architecture"):
        osm.inspect(path)


# --- headers that lie -----------------------------------------------------------------------------------------------


def raw_gguf(values=(), tensors=(), *, data=bytes(256), version=3, counts=None):
    """A file with exactly this header: `values` are (key, type, bytes), `tensors` are (name, shape, type, offset)."""

    def text(word):
        return struct.pack("<Q", len(word)) + word

    architecture = (b"general.architecture", 8, text(b"llama"))
    body = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in (architecture, *values))
    for name, shape, kind, offset in tensors:
        body += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    counts = counts or (len(tensors), 1 + len(values))
    content = b"GGUF" + struct.pack("<IQQ", version, *counts) + body
    return content + bytes(-len(content) % 32) + data


ROW = (8,)  # 32 bytes of F32
LIES = {
    "overlapping tensors": (raw_gguf(tensors=[(b"a", ROW, 0, 0), (b"b", ROW, 0, 0)]), "'b' at offset 32"),
    "a gap": (raw_gguf(tensors=[(b"a", ROW, 0, 0), (b"b", ROW, 0, 64)]), "'b' at offset 32"),
    "off its alignment": (raw_gguf(tensors=[(b"a", (9,), 0, 0), (b"b", ROW, 0, 36)]), "'b' at offset 64"),
    "an offset beyond the file": (raw_gguf(tensors=[(b"a", ROW, 0, 2**40)]), "'a' at offset 0"),
    "a tensor beyond the file": (raw_gguf(tensors=[(b"a", (65,), 0, 0)]), "bytes or more, for 'a'"),
    "2^40 tensors": (raw_gguf(counts=(2**40, 1)), f"{2**40} tensors"),
    "2^40 values": (raw_gguf(counts=(0, 2**40)), f"{2**40} values of metadata"),
    "2^40 numbers in a list": (raw_gguf([(b"x", 9, struct.pack("<IQ", 4, 2**40))]), f"{2**40} numbers in a list"),
    "2^40 words in a list": (raw_gguf([(b"x", 9, struct.pack("<IQ", 8, 2**40))]), f"{2**40} words in a list"),
    "2^40 letters in a word": (raw_gguf([(b"x", 8, struct.pack("<Q", 2**40))]), f"{2**40} bytes more"),
    "lists in lists": (raw_gguf([(b"x", 9, struct.pack("<IQ", 9, 1))]), "a list of type 9"),
    "2^40 axes": (raw_gguf(tensors=[(b"a", (1,) * 5, 0, 0)]), "at most 4 axes"),
    "sizes that overflow": (raw_gguf(tensors=[(b"a", (2**32, 2**32), 0, 0)]), "bytes or more, for 'a'"),
    "blocks that are not whole": (raw_gguf(tensors=[(b"a", (31, 32), 8, 0)]), "rows of 'a' in blocks of 32"),
    "an unknown quantisation": (raw_gguf(tensors=[(b"a", ROW, 77, 0)]), "type 77"),
    "an unknown type": (raw_gguf([(b"x", 13, b"")]), "type 13"),
    "a tensor twice": (raw_gguf(tensors=[(b"a", ROW, 0, 0), (b"a", ROW, 0, 32)]), "'a' twice"),
    "a key twice": (raw_gguf([(b"x", 4, bytes(4)), (b"x", 4, bytes(4))]), "the key 'x' twice"),
    "a name that is no text": (raw_gguf(tensors=[(b"\xff", ROW, 0, 0)]), "in UTF-8"),
    "an alignment of 0": (raw_gguf([(b"general.alignment", 4, bytes(4))]), "a power of two"),
    "an alignment of 24": (raw_gguf([(b"general.alignment", 4, struct.pack("<I", 24))]), "a power of two"),
    "an alignment of another type": (raw_gguf([(b"general.alignment", 10, struct.pack("<Q", 32))]), "a power of two"),
    "another version": (raw_gguf(version=4), "version 4"),
    "the other byte order": (raw_gguf(version=3 << 24), "the other byte order"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_at_once(name, tmp_path):
    content, expected = LIES[name]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(BrokenFile) as caught:
        GGUFStore(tmp_path / "x.gguf")
    assert expected in str(caught.value)


def test_a_header_that_does_not_lie_passes_the_same_checks(tmp_path):
    numbers = np.arange(64, dtype=np.float32)
    words = struct.pack("<IQ", 8, 2) + 2 * (struct.pack("<Q", 1) + b"w")
    tensors = [(b"a", (4, 2), 0, 0), (b"b", ROW, 0, 32)]
    (tmp_path / "x.gguf").write_bytes(raw_gguf([(b"words", 9, words)], tensors, data=numbers.tobytes()))
    store = GGUFStore(tmp_path / "x.gguf")
    torch.testing.assert_close(store.read("a"), torch.arange(8.0).reshape(2, 4))
    torch.testing.assert_close(store.read("b"), torch.arange(8.0, 16.0))


@pytest.mark.parametrize("kind", [*EXACT, *PACKED], ids=lambda kind: kind.name)
def test_every_tensor_is_what_the_gguf_packages_own_reader_gives(kind, tmp_path):
    path, _, _ = exported(CASES["llama"], kind, tmp_path / "x.gguf")
    store, reference = GGUFStore(path), gguf.GGUFReader(path)
    assert list(store.names) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype("float32"))
        torch.testing.assert_close(store.read(tensor.name), expected, rtol=0, atol=0)


def test_an_architecture_that_is_no_word_is_refused(tmp_path):
    content = raw_gguf().replace(
        struct.pack("<I", 8) + struct.pack("<Q", 5) + b"llama", struct.pack("<IIII", 4, 0, 0, 0)
    )
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(BrokenFile, match=r"metadata general\.architecture"):
        GGUFStore(tmp_path / "x.gguf")
