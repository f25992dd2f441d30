"""Fields of configs: whatever a family reads is checked by name, and a wrong one is refused rather than guessed about."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import oversmooth as osm
from oversmooth.errors import (
    AdapterMismatch,
    BadConfig,
    BrokenFile,
    ConfigMismatch,
    NotDiscovered,
    OversmoothError,
    TargetNotFound,
)
from oversmooth.models.declaration import LARGEST_DEPTH, SIZE_ALIASES, STACK_ALIASES, check_timm_arguments, sizes_of
from oversmooth.models.families import ARCHITECTURES
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model

NO_SIZE = [0, -1, True, 2.0, 2.5, math.nan, math.inf, 2**31, 2**63, 10**400, "8", "", [8], {}, {"a": 1}]
NO_FLAG = [None, 0, 1, "true", "", [], {}, 1.0]
NO_NUMBER = [None, math.nan, math.inf, -math.inf, True, "0.2", [0.2], {}, 10**400]


def size_keys(arch):
    own = [alias.format(stack=arch.stack) for aliases in STACK_ALIASES.values() for alias in aliases if arch.stack]
    return [*own, *(alias for aliases in SIZE_ALIASES.values() for alias in aliases)]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_size_that_a_family_reads_is_a_whole_number(family):
    for key in size_keys(ARCHITECTURES[family]):
        for value in NO_SIZE:
            with pytest.raises(BadConfig, match=f"The field '{key}' of the config must be a whole number from 1"):
                sizes_of({key: value}, ARCHITECTURES[family])
        assert sizes_of({key: None}, ARCHITECTURES[family]) == sizes_of({}, ARCHITECTURES[family])


CONDITIONS = [(name, condition.key) for name, arch in ARCHITECTURES.items() for condition in arch.when]


@pytest.mark.parametrize(("family", "key"), CONDITIONS)
def test_every_switch_that_a_family_reads_is_true_or_false(family, key):
    for value in NO_FLAG:
        with pytest.raises(BadConfig, match=f"The field '{key}' of the config must be true or false"):
            ARCHITECTURES[family].for_config({key: value})


def saved(case, folder, **fields):
    model, _ = tiny_model(case)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize("value", NO_NUMBER, ids=lambda value: repr(value)[:20])
def test_a_multiplier_of_branches_is_a_finite_number(value, tmp_path):
    with pytest.raises(BadConfig, match="'residual_multiplier' of the config must be a finite number"):
        osm.inspect(saved("granite", tmp_path, residual_multiplier=value))


def test_a_multiplier_near_the_overflow_of_floats_is_refused(tmp_path):
    """LAPACK does not come to an end with it."""
    with pytest.raises(BadConfig, match="'residual_multiplier' of the config must be at most 1e"):
        osm.inspect(saved("granite", tmp_path, residual_multiplier=1e308))


@pytest.mark.parametrize("value", [-1, 1.5, True, "4", 2**63])
def test_a_number_of_registers_is_a_whole_number(value, tmp_path):
    with pytest.raises(BadConfig, match="'num_register_tokens' of the config must be a whole number from 0"):
        osm.inspect(saved("dinov2-registers", tmp_path, num_register_tokens=value))


@pytest.mark.parametrize("value", [5, True, ["bert"], {"a": 1}, 1.5])
def test_a_model_type_is_a_word(value, tmp_path):
    with pytest.raises(BadConfig, match="'model_type' of the config must be a name"):
        osm.inspect(saved("bert", tmp_path, model_type=value))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *(("text_config", value, "an object") for value in (True, "x", 3, [1])),
        *(("architecture", value, "a name") for value in ({}, 3, [])),
        *(("architectures", value, "a list of names") for value in ({"a": 1}, "BertModel", [3])),
    ],
)
@pytest.mark.parametrize("verb", ["inspect", "measure", "verify", "verify --print-declaration"])
def test_a_field_that_decides_on_the_class_is_of_the_kind_that_is_expected(verb, key, value, expected, tmp_path):
    done = oversmooth(*verb.split(), saved("bert", tmp_path, **{key: value}))
    assert done.returncode == 2
    assert f"The field '{key}' of the config must be {expected}" in done.stderr


def test_a_config_that_transformers_refuses_is_refused_in_its_words(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "image_seq_length": "many"}))
    save_file({"x": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(NotDiscovered, match=r"no small model can be built from its config: .*image_seq_length"):
        osm.inspect(tmp_path)


def test_a_depth_that_no_model_has_is_refused_before_anything_is_counted(tmp_path):
    with pytest.raises(BadConfig, match="num_hidden_layers"):
        osm.inspect(saved("albert", tmp_path, num_hidden_layers=LARGEST_DEPTH + 1))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("null", "found null"),
        ("[1, 2]", "found a list"),
        ('"bert"', "found a string"),
        ("3", "found a number"),
        ("true", "found true or false"),
        ("", "found an empty text"),
        ("{", "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ('{"model_type": "\\ud800"}', "half a character"),
        ("\xff\xfe", "not UTF-8"),
    ],
    ids=str,
)
def test_a_config_that_is_no_object_is_refused_with_what_it_is(text, found, tmp_path):
    saved("bert", tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BrokenFile) as caught:
        osm.inspect(tmp_path)
    assert "config.json cannot be read: expected a JSON object, " in str(caught.value)
    assert found in str(caught.value)


# --- what timm would be told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [1],
        "depth",
        {"depth": 10**9},
        {"embed_dim": 2**63},
        {"img_size": [10**9, 16]},
        {"mlp_ratio": math.nan},
        {"pretrained": True},
        {"checkpoint_path": "/etc/passwd"},
        {"pretrained_cfg": {"file": "x.pth"}},
    ],
)
def test_arguments_that_read_files_or_never_end_are_not_given_to_timm(arguments):
    with pytest.raises(BadConfig, match="model_args"):
        check_timm_arguments(arguments)


@pytest.mark.parametrize("arguments", [{"depth": "three"}, {"embed_dim": -4}, {"no_such": 1}, {"num_heads": 7}])
def test_arguments_that_timm_refuses_are_refused_in_its_words(arguments, tmp_path):
    save_file({"blocks.0.attn.proj.weight": torch.eye(4)}, tmp_path / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadConfig, match="arguments of timm's vit_tiny_patch16_224; got"):
        osm.inspect(tmp_path)


# --- tensors that do not belong to each other -----------------------------------------------------------------------


def with_tensors(case, folder, change):
    """The tiny model with `change` applied to its tensors by name."""
    tensors = load_file(saved(case, folder) / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("value.bias", torch.ones(31)),
        ("value.bias", torch.ones(32, 1)),
        ("output.dense.bias", torch.ones(33)),
        ("output.LayerNorm.weight", torch.ones(1)),
        ("output.LayerNorm.bias", torch.tensor(1.0)),
    ],
)
def test_a_vector_of_another_length_than_its_matrix_is_refused(name, tensor, tmp_path):
    full = f"encoder.layer.1.attention.{'self.' if name.startswith('value') else ''}{name}"
    folder = with_tensors("bert", tmp_path, lambda tensors: tensors.update({full: tensor}))
    with pytest.raises(ConfigMismatch) as caught:
        osm.inspect(folder)
    assert full in str(caught.value)


@pytest.mark.parametrize("shape", [(), (32,), (1, 32, 32), (0, 32), (32, 0)])
@pytest.mark.parametrize("name", ["self.value.weight", "output.dense.weight"])
def test_a_weight_that_is_no_matrix_of_numbers_is_refused(name, shape, tmp_path):
    full = f"encoder.layer.0.attention.{name}"
    folder = with_tensors("bert", tmp_path, lambda tensors: tensors.update({full: torch.ones(shape)}))
    with pytest.raises(AdapterMismatch, match="a matrix of numbers in"):
        osm.inspect(folder)


@pytest.mark.parametrize("case", ["llama", "bert", "gpt2"])
def test_a_missing_value_tensor_is_named(case, tmp_path):
    def drop(tensors):
        names = {"llama": "layers.1.self_attn.v_proj.weight", "bert": "encoder.layer.1.attention.self.value.weight"}
        del tensors[names.get(case, "h.1.attn.c_attn.weight")]

    with pytest.raises(OversmoothError) as caught:
        osm.inspect(with_tensors(case, tmp_path, drop))
    assert "values beside every output projection" in str(caught.value)
    assert ".1." in str(caught.value)
    assert "config.json that names" not in str(caught.value)


def test_a_declared_family_without_any_of_its_tensors_is_not_told_that_its_config_is_missing(tmp_path):
    with pytest.raises(AdapterMismatch, match="'bert' does not fit this model: expected attention layers"):
        osm.inspect(
            with_tensors("bert", tmp_path, lambda tensors: [tensors.pop(n) for n in list(tensors) if "att" in n])
        )


@pytest.mark.parametrize("number", ["9999999999", "9" * 30, "9" * 5000, "00", "٣"])
def test_a_block_number_that_no_model_has_costs_nothing(number, tmp_path):
    def add(tensors):
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0.", f"layers.{number}.")] = tensors[name].clone()

    folder = with_tensors("llama", tmp_path, add)
    try:
        assert len(osm.inspect(folder).layers) == 3  # a number that is none names no block
    except AdapterMismatch as error:
        assert "none in blocks 3, 4, 5, 6" in str(error)  # noqa: PT017 - either is right, by the length of the number


@pytest.mark.parametrize(
    "target", ["a" * 300, "a" * 300 + ".safetensors", "a/" * 3000, "x\0y", "~nobody-is-called-so/x"]
)
def test_a_name_that_no_file_can_have_is_not_found(target):
    with pytest.raises(TargetNotFound, match=re.escape(repr(target)[:20])):
        osm.inspect(target)
