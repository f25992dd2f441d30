"""LoRA, rsLoRA and DoRA: the folder and the live model say what the merged model says; what is no LoRA is refused."""

import copy
import importlib
import json
import random
import re
import warnings
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import oversmooth as osm
from oversmooth.control.edit import local_checkpoint
from oversmooth.errors import BadConfig, BrokenFile, CannotControl, NotSupported, OversmoothError, TargetNotFound
from oversmooth.models.open import open_source
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
    done = oversmooth("inspect", folder, "--base", tmp_path / "elsewhere", "--format", "json")
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
        ({"target_parameters": ["experts.down_proj"]}, "LoRA with target_parameters"),
        ({"lora_bias": True}, "LoRA with lora_bias"),
        ({"kasa_config": {"beta": 1}}, "LoRA with kasa_config"),
        ({"something_new": "on"}, "LoRA with something_new"),
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


@pytest.mark.parametrize("bias", ["", "some"])
def test_a_bias_that_peft_does_not_know_is_refused(bias, tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": bias}))
    with pytest.raises(BadConfig, match="none, "):
        osm.inspect(tmp_path / "adapter")


# --- what peft itself computes ---------------------------------------------------------------------------------------

SOUND = {
    "lora": ("llama", KINDS["LoRA"]),
    "rslora": ("llama", KINDS["rsLoRA"]),
    "dora": ("llama", KINDS["DoRA"]),
    "dora of a bert": ("bert", KINDS["DoRA"]),
    "rank_pattern and alpha_pattern": ("llama", KINDS["LoRA with patterns"]),
    "patterns that are regular expressions": (
        "llama",
        {
            **KINDS["rsLoRA"],
            "rank_pattern": {r"layers\.[01]\.self_attn\.(v|o)_proj": 3},
            "alpha_pattern": {"^layers.2.self_attn.o_proj": 11, "o_proj": 3},
        },
    ),
    "layers_to_transform": ("llama", {**KINDS["LoRA"], "layers_to_transform": [0, 2], "layers_pattern": "layers"}),
    "exclude_modules": ("llama", {**KINDS["LoRA"], "exclude_modules": ["layers.1.self_attn.o_proj"]}),
    "targets as a pattern": (
        "llama",
        {**KINDS["LoRA"], "target_modules": r".*?(?:self_attn|mlp).*?(?:v_proj|o_proj|down_proj)"},
    ),
    "all-linear": ("llama", {**KINDS["LoRA"], "target_modules": "all-linear"}),
    "norms saved as a whole": ("llama", {**KINDS["LoRA"], "modules_to_save": ["input_layernorm", "embed_tokens"]}),
    "transposed weights": ("gpt2", KINDS["LoRA"]),
    "transposed weights, one of them square, with lengths": ("gpt2", KINDS["DoRA"]),
    "all biases": ("gpt2", {**KINDS["LoRA"], "bias": "all"}),
    "biases of what has factors": ("bert", {**KINDS["LoRA"], "bias": "lora_only"}),
}


def merged_by_peft(name, folder):
    """Every tensor as peft merges it, read from the same folder."""
    base, _ = tiny_model(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = type(base).from_pretrained(folder / "base")
        model = peft.PeftModel.from_pretrained(base, folder / "adapter")
        return model.merge_and_unload().state_dict()


def trained(name, folder, **options):
    """As `adapted`, with every tensor of the adapter away from where it began, biases and saved modules included."""
    model, inputs = adapted(name, folder, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter")
    return model, inputs


def assert_equals_peft(folder, name):
    store, expected = open_source(folder / "adapter").store, merged_by_peft(name, folder)
    assert set(store.names) == set(load_file(folder / "base" / "model.safetensors"))
    for tensor in store.names:
        torch.testing.assert_close(store.read(tensor), expected[tensor], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", SOUND)
def test_every_tensor_equals_what_peft_merges(kind, tmp_path):
    name, options = SOUND[kind]
    trained(name, tmp_path, **options)
    assert_equals_peft(tmp_path, name)


def test_a_damaged_adapter_gives_what_peft_computes_or_is_refused(tmp_path):
    """Random damage to one tensor or one field; the outcomes are counted, so that neither of them is the only one."""
    generator = random.Random(33)
    outcomes = {"equal": 0, "refused": 0}
    for number, (name, options) in enumerate(SOUND.values()):
        folder = tmp_path / str(number)
        trained(name, folder, **options)
        sound = {path.name: path.read_bytes() for path in (folder / "adapter").iterdir() if path.is_file()}
        for _ in range(4):
            for file, content in sound.items():
                (folder / "adapter" / file).write_bytes(content)
            damage = generator.choice([drop, rename, resize, change_field, change_field])(folder / "adapter", generator)
            try:
                store = open_source(folder / "adapter").store
                found = {tensor: store.read(tensor) for tensor in store.names}
            except OversmoothError:
                outcomes["refused"] += 1
                continue
            expected = merged_by_peft(name, folder)
            outcomes["equal"] += 1
            for tensor, value in found.items():
                torch.testing.assert_close(
                    value, expected[tensor], rtol=1e-6, atol=1e-6, msg=f"{name}, {options}: {damage}, {tensor}"
                )
    assert min(outcomes.values()) > 5, outcomes


def with_tensors(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(change(tensors), folder / "adapter_model.safetensors")


def with_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop(folder, generator):
    name = generator.choice(sorted(load_file(folder / "adapter_model.safetensors")))
    with_tensors(folder, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    return f"{name} dropped"


def rename(folder, generator):
    name = generator.choice(sorted(load_file(folder / "adapter_model.safetensors")))
    old, new = generator.choice(
        [
            ("layers.", "layers.1"),
            (".0.", ".1."),
            ("v_proj", "k_proj"),
            ("lora_A", "lora_B"),
            ("model.", ""),
            ("_", "-"),
        ]
    )
    renamed = name.replace(old, new)
    with_tensors(folder, lambda tensors: {renamed if key == name else key: value for key, value in tensors.items()})
    return f"{name} renamed to {renamed}"


def resize(folder, generator):
    name = generator.choice(sorted(load_file(folder / "adapter_model.safetensors")))
    cut = generator.choice([lambda t: t[:-1].clone(), lambda t: t[None].clone(), lambda t: t[..., :1].clone()])
    with_tensors(folder, lambda tensors: {key: cut(t) if key == name else t for key, t in tensors.items()})
    return f"{name} resized"


def change_field(folder, generator):
    field, value = generator.choice(
        [
            *(("r", 2), ("r", 16), ("lora_alpha", 3), ("use_rslora", True), ("use_dora", True), ("use_dora", False)),
            *(("fan_in_fan_out", True), ("fan_in_fan_out", False), ("bias", "none"), ("rank_pattern", {"o_proj": 3})),
            *(("alpha_pattern", {"proj": 3}), ("alpha_pattern", {".*proj": 3}), ("modules_to_save", ["norm"])),
            *(("target_modules", ["v_proj"]), ("target_modules", "all-linear"), ("target_modules", ".*0.*proj")),
            *(("layers_to_transform", [0]), ("exclude_modules", ["o_proj"]), ("lora_dropout", 0.5)),
            *(("inference_mode", False), ("task_type", "FEATURE_EXTRACTION"), ("init_lora_weights", "gaussian")),
        ]
    )
    with_config(folder, **{field: value})
    return f"{field} = {value}"


def only_b(tensors):
    return {name: tensor for name, tensor in tensors.items() if "lora_B" in name}


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def with_whole_weight(tensors):
    return tensors | {"base_model.model.layers.0.self_attn.v_proj.weight": torch.zeros(16, 32)}


UNFIT = {
    "only lora_B": (only_b, {}, "lora_A.weight cannot be read: expected the other factor of the pair"),
    "nothing": (lambda tensors: {}, {}, "expected tensors named lora_A and lora_B, found none"),
    "another layer": (renamed("layers.1.", "layers.5."), {}, "layers.5.self_attn.o_proj.weight cannot be read"),
    "a decoder's": (renamed("model.layers.", "model.decoder.layers."), {}, "a tensor of the base model with that path"),
    "factors beside the whole": (with_whole_weight, {}, "either factors of this weight or the whole of it"),
    "lengths that are missing": (dict, {"use_dora": True}, "expected use_dora to say whether there is one"),
    "another rank": (dict, {"r": 8}, "factors of rank 8, as r and rank_pattern of its config say"),
    "another rank in a pattern": (dict, {"rank_pattern": {"v_proj": 3}}, "factors of rank 3"),
    "rank 0": (dict, {"r": 0}, "The field 'r' of the config must be"),
    "rank 0 in a pattern": (dict, {"rank_pattern": {"v_proj": 0}}, "The field 'v_proj' of the config must be"),
    "other targets": (dict, {"target_modules": ["v_proj"]}, "a module that target_modules of its config names"),
    "other targets by a pattern": (dict, {"target_modules": ".*v_proj"}, "a module that target_modules of its config"),
    "other layers": (
        dict,
        {"layers_to_transform": [0], "layers_pattern": ["layers"]},
        "a module that layers_to_transform of its config names",
    ),
    "a module that was saved and is not there": (dict, {"modules_to_save": ["norm"]}, "none for"),
    "a dropout that is no probability": (
        dict,
        {"lora_dropout": 2147483647},
        "'lora_dropout' of the config must be a prob",
    ),
    "a start that is none": (dict, {"init_lora_weights": [1]}, "'init_lora_weights' of the config must be true, false"),
    "no pattern of ranks": (dict, {"rank_pattern": None}, "'rank_pattern' of the config must be an object"),
    "tokens that were trained": (
        dict,
        {"trainable_token_indices": ""},
        "'trainable_token_indices' of the config must be",
    ),
    "one module that was saved": (dict, {"modules_to_save": "norm"}, "'modules_to_save' of the config must be a list"),
    "a target that is not there": (dict, {"target_modules": ["v_proj", "o_proj", "q_proj"]}, "q_proj.weight"),
    "a bias that was trained": (
        lambda tensors: tensors | {"base_model.model.layers.0.input_layernorm.weight": torch.ones(32)},
        {},
        "modules_to_save or bias of its config",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_adapter_that_does_not_fit_its_config_or_its_base_is_refused_by_name(case, tmp_path):
    change, fields, words = UNFIT[case]
    adapted("llama", tmp_path, **KINDS["LoRA"])
    with_tensors(tmp_path / "adapter", change)
    with_config(tmp_path / "adapter", **fields)
    done = oversmooth("inspect", tmp_path / "adapter")
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())


def test_layer_five_is_not_placed_on_the_only_layer(tmp_path):
    base, _ = tiny_model("llama")
    config = copy.deepcopy(base.config)
    config.num_hidden_layers = 1
    type(base)(config).save_pretrained(tmp_path / "one")
    adapted("llama", tmp_path, **KINDS["LoRA"], layers_to_transform=[2], layers_pattern="layers")
    with pytest.raises(BrokenFile, match=r"layers\.2\.self_attn"):
        open_source(tmp_path / "adapter", base=str(tmp_path / "one"))


def test_an_adapter_whose_base_is_an_adapter_is_refused(tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    with_config(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "adapter"))
    with pytest.raises(NotSupported, match="it is an adapter itself"):
        osm.inspect(tmp_path / "adapter")


def test_names_may_differ_by_the_word_that_a_model_class_puts_in_front(tmp_path):
    """The same adapter of a bare model, on a checkpoint of the model with its head; and one with a new head of its own."""
    adapted("llama", tmp_path, **KINDS["LoRA"])
    plain = osm.inspect(tmp_path / "adapter")
    base = tmp_path / "base" / "model.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in load_file(base).items()}, base, {"format": "pt"})
    assert_same_layers(osm.inspect(tmp_path / "adapter"), plain)
    with_tensors(tmp_path / "adapter", lambda tensors: tensors | {"base_model.model.score.weight": torch.ones(2, 32)})
    with pytest.raises(BrokenFile, match=r"score\.weight"):
        osm.inspect(tmp_path / "adapter")
    with_config(tmp_path / "adapter", modules_to_save=["classifier", "score"])
    assert_same_layers(osm.inspect(tmp_path / "adapter"), plain)
    torch.testing.assert_close(open_source(tmp_path / "adapter").store.read("score.weight"), torch.ones(2, 32))


def test_a_pattern_that_would_run_without_end_is_matched_at_once(tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    plain = osm.inspect(tmp_path / "adapter")
    with_config(tmp_path / "adapter", alpha_pattern={"(.+)+$!": 1})
    assert_same_layers(osm.inspect(tmp_path / "adapter"), plain)


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


WRITING = {
    "sharpen": osm.sharpen,
    "smooth": osm.smooth,
    "constrain": osm.constrain,
    "edit_curve": partial(osm.edit_curve, data=[{"input_ids": torch.arange(12).reshape(2, 6)}], scale_h=0.5),
}


@pytest.mark.parametrize("verb", WRITING)
def test_what_writes_to_values_asks_for_adapters_on_them_to_be_merged_first(verb):
    base, _ = tiny_model("llama")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["v_proj"]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CannotControl, match=re.escape("merge_and_unload()")):
        WRITING[verb](model)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_an_adapter_on_queries_is_in_nobodys_way():
    base, _ = tiny_model("llama")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert osm.sharpen(model).layers[0].after.max_real < 1e-5


@pytest.mark.parametrize("verb", ["edit", "prune"])
def test_what_copies_files_says_so_where_it_is_given_a_live_model(verb):
    with pytest.raises(CannotControl, match="Save it first"):
        local_checkpoint(nn.Linear(2, 2), verb)


def test_the_folder_of_an_adapter_is_not_edited(tmp_path):
    adapted("llama", tmp_path, **KINDS["LoRA"])
    done = oversmooth("edit", tmp_path / "adapter", "--output", tmp_path / "out", "--scale-h", 0.5)
    assert done.returncode == 2
    assert "it is an adapter" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


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
