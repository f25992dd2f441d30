"""LoRA, rsLoRA and DoRA: the folder and the live model say what the merged model says; what is no LoRA is refused."""

import importlib
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import oversmooth as osm
from oversmooth.errors import BrokenFile, NotSupported, TargetNotFound
from oversmooth.models.opening import open_source
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model

peft = importlib.import_module("peft")  # after oversmooth, beside which torchvision of any build can be imported
TARGETS = {
    "llama": ["v_proj", "o_proj"],
    "bert": ["value", "attention.output.dense"],
    "gpt2": ["c_attn", "attn.c_proj"],
}
KINDS = {
    "LoRA": {"r": 4, "lora_alpha": 8},
    "rsLoRA": {"r": 4, "lora_alpha": 8, "use_rslora": True},
    "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "LoRA with patterns": {"r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5}},
}


def adapted(name, folder, **options):
    """A tiny model saved in `folder/base`, its adapter in `folder/adapter`, and the live adapted model."""
    base, inputs = tiny_model(name)
    base.save_pretrained(folder / "base")
    base.name_or_path = base.config.name_or_path = str(folder / "base")
    options = {"target_modules": TARGETS[name], "fan_in_fan_out": name == "gpt2", **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.2)
            if "magnitude" in parameter_name:
                parameter.mul_(1.1)
    model.save_pretrained(folder / "adapter")
    return model.eval(), inputs


def assert_same_layers(found, expected):
    for ours, theirs in zip(found.rows(), expected.rows(), strict=True):
        for column, value in ours.items():
            if column.endswith(("half_life", "residual")):
                continue  # the inverse of a small difference, and what rounding itself leaves: both magnify it
            is_number = isinstance(value, float)
            other = pytest.approx(theirs[column], rel=1e-5, abs=1e-5) if is_number else theirs[column]
            assert value == other, column


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "LoRA"), ("llama", "DoRA"), ("bert", "rsLoRA"), ("bert", "DoRA"), ("gpt2", "LoRA")]
)
def test_folder_live_model_and_merged_model_have_the_same_spectra_and_ladder(name, kind, tmp_path):
    model, inputs = adapted(name, tmp_path, **KINDS[kind])
    folder = tmp_path / "adapter"
    plain = osm.inspect(tmp_path / "base")
    of_folder, of_live = osm.inspect(folder), osm.inspect(model)
    ladder_of_live = osm.predict(model, [inputs], solve=1)
    ladder_of_folder = osm.predict(folder, [inputs], solve=1)
    assert osm.verify(model, inputs=inputs).passed
    merged = model.merge_and_unload()
    expected, ladder = osm.inspect(merged), osm.predict(merged, [inputs], solve=1)
    assert_same_layers(of_folder, expected)
    assert_same_layers(of_live, expected)
    assert_same_layers(ladder_of_folder, ladder)
    assert_same_layers(ladder_of_live, ladder)
    assert of_folder.layers[0].plain.rho_dc != pytest.approx(plain.layers[0].plain.rho_dc, rel=1e-3)
    assert "with an adapter" in " ".join(of_folder.provenance.weight_dtypes)


def test_patterns_of_ranks_and_scales_are_followed(tmp_path):
    model, _ = adapted("llama", tmp_path, **KINDS["LoRA with patterns"])
    of_folder = osm.inspect(tmp_path / "adapter")
    assert_same_layers(of_folder, osm.inspect(model.merge_and_unload()))


def test_adapters_that_are_switched_off_or_merged_are_read_as_they_act(tmp_path):
    model, _ = adapted("llama", tmp_path, **KINDS["LoRA"])
    with model.disable_adapter():
        assert_same_layers(osm.inspect(model), osm.inspect(tmp_path / "base"))
    model.merge_adapter()
    assert_same_layers(osm.inspect(model), osm.inspect(tmp_path / "adapter"))


def test_norms_that_were_trained_as_a_whole_are_read_from_the_adapter(tmp_path):
    model, _ = adapted("llama", tmp_path, r=4, lora_alpha=8, modules_to_save=["input_layernorm"])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.mul_(-2)
    model.save_pretrained(tmp_path / "adapter")
    found = osm.inspect(tmp_path / "adapter")
    assert found.layers[0].norms[0].negative_share > 0.5
    assert_same_layers(found, osm.inspect(model))


def test_the_base_is_named_in_the_config_or_given(tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    folder = tmp_path / "adapter"
    expected = osm.inspect(folder)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(TargetNotFound, match="give another with --base"):
        osm.inspect(folder)
    assert open_source(folder, base=str(tmp_path / "elsewhere")).kind == "adapter"
    done = oversmooth("inspect", folder, "--base", tmp_path / "elsewhere", "--json")
    assert json.loads(done.stdout)["layers"][0]["plain"]["rho_dc"] == expected.layers[0].plain.rho_dc


def test_compare_shows_a_base_and_its_adapter_on_one_page(tmp_path):
    adapted("bert", tmp_path, **KINDS["LoRA"])
    page = tmp_path / "page.html"
    done = oversmooth("compare", tmp_path / "base", tmp_path / "adapter", "-o", page, "--max-samples", 2)
    assert done.returncode == 0, done.stderr
    assert "adapter" in page.read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "An adapter of the kind 'IA3'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
        ({"alora_invocation_tokens": [1]}, "LoRA with alora_invocation_tokens"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "patterns in alpha_pattern"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_its_name(change, words, tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    done = oversmooth("inspect", tmp_path / "adapter")
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    with pytest.raises(NotSupported, match=re.escape(words)):
        osm.inspect(tmp_path / "adapter")


def test_an_adapter_of_another_model_is_refused(tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    other, _ = tiny_model("bert")
    other.save_pretrained(tmp_path / "bert")
    with pytest.raises(BrokenFile, match="a tensor of the base model with that path"):
        open_source(tmp_path / "adapter", base=str(tmp_path / "bert"))


def test_half_a_pair_is_refused(tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(next(name for name in tensors if name.endswith("lora_B.weight")))
    save_file(tensors, path)
    with pytest.raises(BrokenFile, match="the other factor of the pair"):
        osm.inspect(tmp_path / "adapter")


@pytest.mark.parametrize("config", [peft.LoHaConfig(r=4), peft.IA3Config(feedforward_modules=[])])
def test_other_live_kinds_are_read_by_merging_a_copy_of_each_layer(config):
    base, inputs = tiny_model("llama")
    config.target_modules = ["v_proj", "o_proj"]
    model = peft.get_peft_model(base, config).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "hada" in name or "ia3" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = osm.inspect(model)
    assert osm.verify(model, inputs=inputs).passed
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)
    assert_same_layers(found, osm.inspect(model.merge_and_unload()))


def test_prompts_that_were_learned_are_refused():
    base, _ = tiny_model("llama")
    model = peft.get_peft_model(base, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION"))
    with pytest.raises(NotSupported, match="PROMPT_TUNING"):
        osm.inspect(model)


class SentenceTransformer(nn.Sequential):
    """As sentence-transformers builds it: the first module holds the Transformer, the others pool."""


class Transformer(nn.Module):
    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.auto_model = encoder


def test_a_sentence_transformer_is_its_first_module():
    encoder, inputs = tiny_model("bert")
    model = SentenceTransformer(Transformer(encoder), nn.Identity())
    assert osm.inspect(model).layers == osm.inspect(encoder).layers
    assert osm.measure(model, [inputs]).values == osm.measure(encoder, [inputs]).values
