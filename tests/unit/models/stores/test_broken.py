"""Packed weights that contradict their config or themselves: one message that names the tensor, and exit code 2."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.command_line import oversmooth
from tests.unit.models.stores import checkpoints as made

VALUE = "layers.1.self_attn.v_proj"


def _settings(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def _tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors")
    for ending, change in changes.items():
        found = change(tensors.pop(VALUE + ending))
        if found is not None:
            tensors[VALUE + ending] = found.contiguous()
    save_file(tensors, folder / "model.safetensors")


def _refused(folder):
    done = oversmooth("inspect", folder)
    assert done.returncode == 2, done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("packing", "tensor", "words"),
    [
        (lambda: made.gptq(4, 16), "scales", "expected the shape (4, 32), one number per group of 16 of 64 input"),
        (lambda: made.gptq(4, 16), "qzeros", "expected the shape (4, 4)"),
        (lambda: made.awq(16), "scales", "expected the shape (4, 32), one number per group of 16 of 64 input"),
        (
            lambda: made.float8([16, 16]),
            "weight_scale_inv",
            "expected the shape (2, 4), one scale per block of 16 x 16",
        ),
        (made.modelopt_nvfp4, "weight_scale", "expected the shape (32, 4), one scale per 16 of 64 inputs"),
        (made.bitsandbytes_8bit, "SCB", "expected the shape (32,), one number per row of the weight"),
        (
            lambda: made.bitsandbytes_4bit("nf4", double=True),
            "weight.nested_absmax",
            "expected the shape (1,), one number per block of 256",
        ),
    ],
)
def test_a_truncated_scale_is_named_with_the_shape_that_it_should_have(packing, tensor, words, tmp_path):
    made.write(tmp_path, packing())
    _tensors(tmp_path, **{f".{tensor}": lambda scale: scale[:-1]})
    said = _refused(tmp_path)
    for part in (f"{VALUE}.{tensor}", words, "quantization_config in config.json"):
        assert part in said


@pytest.mark.parametrize(
    ("packing", "change"),
    [
        (lambda: made.gptq(4, 16), {"group_size": 32}),
        (lambda: made.awq(16), {"group_size": 8}),
        (lambda: made.float8([16, 16]), {"weight_block_size": [32, 32]}),
        (lambda: made.gptq(4, 16), {"bits": 8}),
    ],
)
def test_a_config_of_another_size_than_the_tensors_is_refused(packing, change, tmp_path):
    made.write(tmp_path, packing())
    _settings(tmp_path, **change)
    assert "belongs to these weights" in _refused(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint_format": "marlin"}, "gptq with checkpoint_format='marlin'; readable is gptq or gptq_v2"),
        ({"checkpoint_format": 3}, "gptq with checkpoint_format=3"),
        ({"bits": 5}, "gptq with bits=5; readable is 2 or 3 or 4 or 8"),
        ({"bits": "four"}, "gptq with bits='four'"),
        ({"bits": True}, "gptq with bits=True"),
        ({"group_size": 0}, "gptq with group_size=0"),
        ({"group_size": None}, "gptq with group_size=None"),
        ({"quant_method": "hqq"}, "quantization_config: hqq; readable are awq, bitsandbytes"),
        ({"quant_method": ["gptq"]}, "quantization_config: ['gptq']"),
    ],
)
def test_an_unknown_version_of_a_format_is_refused_by_its_name(change, words, tmp_path):
    made.write(tmp_path, made.gptq(4, 16))
    _settings(tmp_path, **change)
    said = _refused(tmp_path)
    assert words in said
    assert "cannot be read exactly" in said


def test_compressed_tensors_that_are_rotated_sparse_or_of_an_unknown_format_are_refused(tmp_path):
    arguments = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    for number, (change, words) in enumerate(
        [
            ({"transform_config": {"config_groups": {}}}, "transform_config"),
            ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24-bitmask'"),
            ({"format": "marlin-24"}, "format='marlin-24'"),
            ({"config_groups": {}}, "config_groups={}; readable is at least one group"),
            ({"config_groups": {"g": 1}}, "g=1; readable is an object"),
        ]
    ):
        folder = tmp_path / str(number)
        made.write(folder, made.compressed("int-quantized", **arguments))
        _settings(folder, **change)
        assert words in _refused(folder)


def test_another_layout_of_awq_is_refused(tmp_path):
    made.write(tmp_path, made.awq(16))
    _settings(tmp_path, version="gemv")
    assert "awq with version='gemv'; readable is gemm" in _refused(tmp_path)


def test_a_scale_that_is_missing_is_named(tmp_path):
    made.write(tmp_path, made.gptq(4, 16))
    _tensors(tmp_path, **{".scales": lambda scale: None})
    assert f"{VALUE}.scales" in _refused(tmp_path)


def test_a_float8_weight_without_its_scale_is_not_read_as_it_is(tmp_path):
    made.write(tmp_path, made.float8([16, 16]))
    _tensors(tmp_path, **{".weight_scale_inv": lambda scale: None})
    assert "expected a scale beside a weight of float8_e4m3fn, found none" in _refused(tmp_path)


def test_groups_that_do_not_exist_are_refused(tmp_path):
    made.write(tmp_path, made.gptq(4, 16, act_order=True))
    _tensors(tmp_path, **{".g_idx": lambda index: index + 1})
    assert "expected groups from 0 to 3, found 1 to 4" in _refused(tmp_path)


def test_integers_in_an_order_of_a_gpu_kernel_are_refused(tmp_path):
    made.write(tmp_path, made.bitsandbytes_8bit())
    _tensors(tmp_path, **{".weight_format": lambda found: torch.ones_like(found)})
    assert "an order of a GPU kernel" in _refused(tmp_path)


def test_a_state_that_is_no_json_is_refused(tmp_path):
    made.write(tmp_path, made.bitsandbytes_4bit("nf4", double=True))
    _tensors(tmp_path, **{".weight.quant_state.bitsandbytes__nf4": lambda state: state[:-4]})
    assert "expected JSON with blocksize and shape" in _refused(tmp_path)


def _int8(**more):
    return made.compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True, **more)


def test_a_pattern_that_would_never_end_ends_in_words(tmp_path):
    made.write(tmp_path, _int8())
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    groups["group_0"]["targets"] = ["re:(" + "[a-z._0-9]+" * 8 + ")+!(?i)"]
    _settings(tmp_path, config_groups=groups)
    assert "compressed-tensors with the pattern 're:([a-z._0-9]+" in _refused(tmp_path)
    groups["group_0"]["targets"] = ["re:([a-z._0-9]+)+!", r"re:.*self_attn\.[qkvo]_proj$"]
    _settings(tmp_path, config_groups=groups)
    assert oversmooth("inspect", tmp_path).returncode == 0


@pytest.mark.parametrize("groups", [16, "g", [1], True])
def test_groups_that_are_no_object_are_refused(groups, tmp_path):
    made.write(tmp_path, _int8())
    _settings(tmp_path, config_groups=groups)
    assert f"config_groups={groups!r}; readable is at least one group" in _refused(tmp_path)


def test_columns_in_order_of_activations_are_not_read_in_plain_order(tmp_path):
    made.write(tmp_path, made.gptq(4, 16, act_order=True))
    _tensors(tmp_path, **{".g_idx": lambda index: None})
    said = _refused(tmp_path)
    assert "expected the group of each input channel, which desc_act shuffles, found none" in said
    _settings(tmp_path, desc_act="yes")
    assert "gptq with desc_act='yes'; readable is true or false" in _refused(tmp_path)


@pytest.mark.parametrize(
    ("packing", "ending"),
    [
        (lambda: made.gptq(4, 16), ".scales"),
        (lambda: made.awq(16), ".scales"),
        (lambda: made.float8([16, 16]), ".weight_scale_inv"),
        (_int8, ".weight_scale"),
    ],
)
def test_negative_scales_are_refused(packing, ending, tmp_path):
    made.write(tmp_path, packing())
    _tensors(tmp_path, **{ending: lambda scales: -scales})
    assert f"{VALUE}{ending}' cannot be read: expected scales of 0 or more, found the scale -" in _refused(tmp_path)


@pytest.mark.parametrize(
    ("packing", "ending"),
    [
        (lambda: made.bitsandbytes_4bit("nf4", double=False), ".weight"),
        (lambda: made.gptq(4, 16), ".qweight"),
        (_int8, ".weight"),
    ],
)
def test_codes_that_are_true_or_false_are_refused(packing, ending, tmp_path):
    made.write(tmp_path, packing())
    _tensors(tmp_path, **{ending: lambda codes: codes > 0})
    assert f"{VALUE}{ending}' cannot be read: expected numbers, found true and false" in _refused(tmp_path)


@pytest.mark.parametrize(
    ("packing", "ending", "change", "words"),
    [
        (lambda: made.gptq(4, 16), ".g_idx", lambda index: index[0], "the group of each input channel, found the shape ()"),
        (lambda: made.gptq(4, 16), ".g_idx", lambda index: index[:0], "found the shape (0,)"),
        (lambda: made.gptq(4, 16), ".qweight", lambda words: words[0, 0], "a matrix of numbers, found the shape ()"),
        (lambda: made.float8([16, 16]), ".weight", lambda codes: codes[:0], "a matrix of numbers, found the shape (0, 64)"),
        (lambda: made.float8(None), ".weight", lambda codes: codes[:, :0], "a matrix of numbers, found the shape (32, 0)"),
        (
            lambda: made.bitsandbytes_4bit("nf4", double=True),
            ".weight.quant_state.bitsandbytes__nf4",
            lambda state: state[None],
            "expected a row of bytes, found the shape (1, ",
        ),
    ],
)  # fmt: skip
def test_tensors_of_another_rank_or_without_numbers_are_refused(packing, ending, change, words, tmp_path):
    made.write(tmp_path, packing())
    _tensors(tmp_path, **{ending: change})
    said = _refused(tmp_path)
    assert f"{VALUE}{ending}" in said
    assert words in said
