"""From a target to its stacks: what is opened, how it is identified, and what is refused in which words."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch import nn

import oversmooth as osm
from oversmooth.errors import (
    AdapterMismatch,
    AmbiguousFolder,
    BrokenFile,
    ConfigMismatch,
    HeadsUnknown,
    NoModelInFolder,
    NotLive,
    PackedWeights,
    RefusedArchitecture,
    TargetNotFound,
    UnidentifiedWeights,
    UnknownArchitecture,
)
from oversmooth.models.families import REFUSED
from oversmooth.models.open import open_source
from oversmooth.output.page import page_of
from oversmooth.output.render import render
from oversmooth.output.tables import show_inspection
from tests.contract.tiny_models import TINY, tiny_model


def saved(case, folder, **options):
    """The tiny model, and the folder into which transformers saved it."""
    model, _ = tiny_model(case)
    model.save_pretrained(folder, **options)
    return model


def bare(case, folder):
    """A lone safetensors file without any config."""
    saved(case, folder)
    (folder / "config.json").unlink()
    return folder / "model.safetensors"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def write_model(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    save_file({name: torch.ones(2, 2) for name in tensors}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def message(caught):
    return str(caught.value)


# --- kinds of targets -----------------------------------------------------------------------------------------------


def test_a_folder_with_one_file_and_one_with_shards_say_the_same(tmp_path):
    model = saved("llama", tmp_path / "one")
    saved("llama", tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    one, many = osm.inspect(tmp_path / "one"), osm.inspect(str(tmp_path / "many"))
    assert one.layers == many.layers == osm.inspect(model).layers
    assert len(many.provenance.files) > 1
    assert one.provenance.weights_sha256 == many.provenance.weights_sha256


def test_a_lone_file_beside_its_config_says_the_same_as_its_folder(tmp_path):
    saved("gpt_neox", tmp_path)
    assert osm.inspect(tmp_path / "model.safetensors").layers == osm.inspect(tmp_path).layers


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "weights.pth", "weights.ckpt"])
def test_a_folder_with_a_pickle_says_the_same(name, tmp_path):
    model = saved("bert", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / name)
    assert osm.inspect(tmp_path).layers == osm.inspect(model).layers
    assert osm.inspect(tmp_path / name).provenance.source == "pickle"


def test_a_folder_with_pickled_shards_says_the_same(tmp_path):
    model = saved("bert", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = list(model.state_dict())
    weight_map = {name: f"pytorch_model-{1 + (k % 2):05}-of-00002.bin" for k, name in enumerate(names)}
    for shard in set(weight_map.values()):
        torch.save({n: t for n, t in model.state_dict().items() if weight_map[n] == shard}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert osm.inspect(tmp_path).layers == osm.inspect(model).layers


def test_safetensors_are_preferred_and_a_pickle_beside_them_is_not_even_opened(tmp_path):
    model = saved("bert", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    (tmp_path / "training_args.bin").write_bytes(b"not a pickle")
    assert osm.inspect(tmp_path).layers == osm.inspect(model).layers
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    assert [facts.name for facts in osm.inspect(tmp_path / "other.safetensors").provenance.files] == [
        "other.safetensors"
    ]


def test_one_file_of_any_name_is_the_model_of_its_folder(tmp_path):
    model = saved("bert", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights-v2.safetensors")
    (tmp_path / "optimizer.pt").write_bytes(b"not a pickle")
    assert osm.inspect(tmp_path).layers == osm.inspect(model).layers


def test_a_model_in_the_hub_cache_is_opened_by_its_id(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    model = saved("bert", snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    result = osm.inspect("owner/name")
    assert result.layers == osm.inspect(model).layers
    assert result.provenance.target == "owner/name"
    assert osm.inspect("hf://owner/name").layers == result.layers


def test_opening_reads_no_tensor(tmp_path):
    saved("bert", tmp_path)
    source = open_source(tmp_path)
    assert len(source.stacks()) == 1
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-10_000])
    with pytest.raises(BrokenFile, match="bytes"):
        [source.store.read(name) for name in source.store.names]


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("no/such/path/at/all", ("Tried: a local file or folder.",)),
        ("missing.safetensors", ("Tried: a local file or folder.", "A target is a model folder")),
        ("owner/name", ("a local file or folder; the hub", "HF_HUB_OFFLINE is set")),
        ("owner/na--me", ("the hub",)),
        ("owner/..", ("a local file or folder",)),
    ],
)
def test_a_target_that_does_not_exist_is_refused_with_what_was_tried(target, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TargetNotFound) as caught:
        osm.inspect(target)
    for part in (repr(target), *parts):
        assert part in message(caught)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(NoModelInFolder, match="found nothing"):
        osm.inspect(tmp_path)


def test_a_folder_of_models_is_refused_with_their_names(tmp_path):
    saved("bert", tmp_path / "first")
    saved("bert", tmp_path / "second")
    with pytest.raises(NoModelInFolder, match="Models inside subfolders: first, second"):
        osm.inspect(tmp_path)


def test_a_folder_with_two_candidates_is_refused_with_both(tmp_path):
    saved("bert", tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    with pytest.raises(AmbiguousFolder) as caught:
        osm.inspect(tmp_path)
    assert "a.safetensors, b.safetensors" in message(caught)
    assert f"oversmooth inspect {tmp_path}/a.safetensors" in message(caught)


def test_shards_without_their_index_are_not_taken_for_two_models(tmp_path):
    saved("llama", tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(BrokenFile, match=r"found no model\.safetensors\.index\.json"):
        osm.inspect(tmp_path)


@pytest.mark.parametrize("name", ["model.onnx", "config.json", "README.md"])
def test_a_file_of_another_kind_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(BrokenFile, match="Point at the weights or at their folder"):
        osm.inspect(tmp_path / name)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"text"', "\x00\x01", "[" * 200_000])
def test_a_config_that_is_no_json_object_is_refused(text, tmp_path):
    saved("bert", tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BrokenFile, match=r"config\.json cannot be read: expected a JSON object"):
        osm.inspect(tmp_path)


# --- identity by names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("distilbert", {"n_heads": 4}),
        ("mpnet", {"n_heads": 4}),
        ("modernbert", {"n_heads": 4}),
        ("gemma2", {"n_heads": 4, "n_kv": 2}),
        ("olmo2", {"n_heads": 4, "n_kv": 2}),
        ("t5", {"n_heads": 4}),
        ("dinov2", {"n_heads": 4}),
    ],
)
def test_a_bare_file_with_names_of_its_own_is_identified(case, sizes, tmp_path):
    found = osm.inspect(bare(case, tmp_path), **sizes)
    model, _ = tiny_model(case)
    expected = osm.inspect(model)
    assert found.stacks == expected.stacks
    assert found.layers == expected.layers


@pytest.mark.parametrize(
    ("case", "candidates"),
    [
        ("llama", ("llama", "gemma", "granite")),
        ("opt", ("opt with do_layer_norm_before=False",)),
        ("bart", ("bart", "whisper")),
    ],
)
def test_names_that_fit_several_families_are_refused_with_all_of_them(case, candidates, tmp_path):
    path = bare(case, tmp_path)
    with pytest.raises(UnidentifiedWeights) as caught:
        osm.inspect(path)
    for part in (*candidates, "which differ in mathematics", "--model-type", "oversmooth list architectures"):
        assert part in message(caught)


def test_llama_and_gemma_share_their_names_and_are_told_apart_by_the_user(tmp_path):
    path = bare("gemma", tmp_path)
    with pytest.raises(UnidentifiedWeights) as caught:
        osm.inspect(path)
    for part in ("llama", "gemma", "which differ in mathematics", "--model-type"):
        assert part in message(caught)
    model, _ = tiny_model("gemma")
    found = osm.inspect(path, model_type="gemma", n_heads=4, n_kv=2)
    assert found.layers == osm.inspect(model).layers
    other = osm.inspect(path, model_type="llama", n_heads=4, n_kv=2)
    assert other.layers[0].plain == found.layers[0].plain
    assert other.layers[0].folded != found.layers[0].folded


def test_names_that_fit_nothing_are_refused_with_examples(tmp_path):
    with pytest.raises(UnidentifiedWeights, match=r"no declared family \(for example a\.weight, b\.weight\)"):
        osm.inspect(write_model(tmp_path, ["a.weight", "b.weight"]))


def test_a_model_type_that_does_not_exist_is_refused_with_the_nearest(tmp_path):
    path = bare("llama", tmp_path)
    with pytest.raises(UnknownArchitecture, match=r"Close: .*llama"):
        osm.inspect(path, model_type="lama")


def test_an_unknown_model_type_in_the_config_is_refused_with_the_nearest(tmp_path):
    saved("llama", tmp_path)
    edit_config(tmp_path, model_type="lama")
    with pytest.raises(UnknownArchitecture, match=r"model_type 'lama'\. Close: .*llama"):
        osm.inspect(tmp_path)
    model, _ = tiny_model("llama")
    assert osm.inspect(tmp_path, model_type="llama").layers == osm.inspect(model).layers


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_without_a_head_count_layers_are_exact_and_heads_are_missing_with_a_reason(tmp_path):
    path = bare("distilbert", tmp_path)
    model, _ = tiny_model("distilbert")
    found, expected = osm.inspect(path), osm.inspect(model)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert ours.plain.rho_dc == pytest.approx(theirs.plain.rho_dc)
        assert ours.heads == ()
        assert [entry.field for entry in ours.missing] == ["heads"]
    assert found.stacks[0].n_heads is None
    assert osm.inspect(path, n_heads=4).layers == expected.layers


def test_grouped_values_without_a_head_count_are_refused(tmp_path):
    path = bare("llama", tmp_path)
    with pytest.raises(HeadsUnknown, match=r"v_proj\.weight does not say how many.*\n.*--n-heads \(and --n-kv\)"):
        osm.inspect(path, model_type="llama")
    model, _ = tiny_model("llama")
    assert osm.inspect(path, model_type="llama", n_heads=4, n_kv=2).layers == osm.inspect(model).layers


@pytest.mark.parametrize(
    ("case", "changes", "parts"),
    [
        ("bert", {"num_attention_heads": 5}, ("about the heads", "5 heads", "32 columns")),
        ("bert", {"hidden_size": 48}, ("about the width", "48", "32")),
        ("bert", {"num_hidden_layers": 5}, ("the number of layers", "5", "3")),
        ("llama", {"num_key_value_heads": 4}, ("the value heads", "4 value heads of size 8", "(16, 32)")),
        ("llama", {"num_key_value_heads": 3}, ("the value heads", "3 for 4 heads", "a divisor")),
        ("llama", {"head_dim": 16}, ("about the heads", "4 heads of size 16", "32 columns")),
        ("gpt_neox", {"num_attention_heads": 3}, ("about the heads", "3 heads")),
        ("phi3", {"num_key_value_heads": 4}, ("about the heads", "96 rows", "64 rows")),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused_with_both(case, changes, parts, tmp_path):
    saved(case, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigMismatch) as caught:
        osm.inspect(tmp_path)
    for part in (*parts, "Check that config.json belongs to these weights"):
        assert part in message(caught)


def test_a_missing_block_is_refused_by_its_number(tmp_path):
    saved("bert", tmp_path)
    tensors = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if ".1.attention" not in n}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(AdapterMismatch, match=r"all 3 blocks, found none in blocks 1 \(a missing shard"):
        osm.inspect(tmp_path)


def test_half_precision_is_read_as_stored_and_computed_above(tmp_path):
    model = saved("llama", tmp_path)
    half = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(half, tmp_path / "model.safetensors")
    found = osm.inspect(tmp_path)
    assert (found.provenance.weight_dtypes, found.provenance.compute_dtype) == (("bfloat16",), "float64")
    rounded = model.bfloat16().double()
    expected = osm.inspect(rounded)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert ours.plain.rho_dc == pytest.approx(theirs.plain.rho_dc, rel=1e-6)
        assert ours.value_norm == pytest.approx(theirs.value_norm, rel=1e-6)


def test_output_weights_of_heads_that_share_values_are_summed_above_the_stored_precision():
    model, _ = tiny_model("llama")
    source = open_source(model.bfloat16())
    weights = source.stacks()[0].weights(0, source.store.read)
    expected = weights.w_o.double().unflatten(1, (2, 2)).sum(2)
    torch.testing.assert_close(weights.w_o_shared.double(), expected, rtol=1e-6, atol=1e-7)


# --- composites -----------------------------------------------------------------------------------------------------


def bert2bert():
    from transformers import AutoConfig, EncoderDecoderConfig, EncoderDecoderModel

    encoder = AutoConfig.for_model("bert", **TINY["bert"][1])
    decoder = AutoConfig.for_model("bert", **{**TINY["bert"][1], "num_hidden_layers": 2, "num_attention_heads": 8})
    torch.manual_seed(0)
    return EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)).eval()


def test_an_encoder_and_a_decoder_of_their_own_are_two_labelled_stacks(tmp_path):
    model = bert2bert()
    model.save_pretrained(tmp_path)
    for result in (osm.inspect(model), osm.inspect(tmp_path)):
        facts = [(stack.name, stack.blocks, stack.n_heads) for stack in result.stacks]
        assert facts == [("encoder", 3, 4), ("decoder", 2, 8)]
        assert [layer.stack for layer in result.layers] == ["encoder"] * 3 + ["decoder"] * 2


def test_the_causal_part_of_a_composite_is_settled_by_its_own_config():
    stacks = {stack.label: stack for stack in open_source(bert2bert()).stacks()}
    assert (stacks["encoder"].arch.is_causal, stacks["decoder"].arch.is_causal) == (False, True)


def test_a_part_without_a_declared_family_is_named_as_left_out(tmp_path, capsys):
    bert2bert().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not osm.inspect(tmp_path).missing
    config["decoder"]["model_type"] = "never-heard-of"
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = osm.inspect(tmp_path)
    assert [(part.field, part.reason) for part in result.missing] == [
        ("decoder", "no family is declared for model_type 'never-heard-of'")
    ]
    show_inspection(result, heads=False)
    assert "decoder: left out, no family is declared" in capsys.readouterr().out
    assert "Missing here: decoder" in render(page_of(osm.analyze(tmp_path / "model.safetensors")))


def test_a_composite_without_model_type_is_not_half_read(tmp_path):
    bert2bert().save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    result = osm.inspect(tmp_path)
    assert sorted(stack.blocks for stack in result.stacks) == [2, 3]
    assert len({stack.name for stack in result.stacks}) == 2


# --- timm -----------------------------------------------------------------------------------------------------------

SMALL_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}


def timm_folder(model, folder):
    """As timm itself saves for the hub."""
    from timm.models import save_for_hf

    save_for_hf(model, folder, model_args=SMALL_VIT, safe_serialization=True)


def test_a_folder_as_timm_saves_it_is_read_with_its_sizes(tmp_path):
    model, _ = tiny_model("timm-vit")
    timm_folder(model, tmp_path)
    assert osm.inspect(tmp_path).layers == osm.inspect(model).layers
    assert osm.verify(tmp_path).passed


def test_a_config_that_transformers_own_checks_refuse_ends_in_their_words(tmp_path):
    model, _ = tiny_model("gpt_neo")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["attention_types"], config["attention_layers"]  # whose default is one of 24 layers
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotLive, match="attention_types"):
        osm.measure(tmp_path)


def test_a_folder_that_timm_cannot_build_can_still_be_inspected(tmp_path):
    model, _ = tiny_model("timm-vit")
    timm_folder(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["pretrained_cfg"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert osm.inspect(tmp_path).layers == osm.inspect(model).layers
    with pytest.raises(NotLive, match="timm says"):
        osm.verify(tmp_path)


def test_a_timm_checkpoint_under_a_training_scripts_key_is_identified_by_its_names(tmp_path):
    model, _ = tiny_model("timm-vit")
    torch.save({"model": model.state_dict(), "epoch": 300}, tmp_path / "deit_tiny.pth")
    result = osm.inspect(tmp_path / "deit_tiny.pth", n_heads=4)
    assert result.stacks[0].family == "timm_vit"
    assert result.layers == osm.inspect(model).layers


def test_a_timm_name_is_asked_of_the_hub():
    with pytest.raises(osm.OversmoothError, match="HF_HUB_OFFLINE is set"):
        osm.inspect("vit_tiny_patch16_224")


def test_a_timm_architecture_without_weights_is_refused():
    with pytest.raises(TargetNotFound, match="no pretrained weights for it"):
        osm.inspect("vit_giant_patch14_224")


# --- what is refused ------------------------------------------------------------------------------------------------

LAYER = "model.layers.0.self_attn"
PACKINGS = {
    "GPTQ or AWQ": [f"{LAYER}.v_proj.qweight", f"{LAYER}.v_proj.qzeros", f"{LAYER}.v_proj.scales"],
    "bitsandbytes int8": [f"{LAYER}.v_proj.weight", f"{LAYER}.v_proj.SCB"],
    "bitsandbytes 4-bit": [f"{LAYER}.v_proj.weight", f"{LAYER}.v_proj.weight.absmax"],
    "compressed-tensors": [f"{LAYER}.v_proj.weight_packed"],
    "block-scaled float8": [f"{LAYER}.v_proj.weight", f"{LAYER}.v_proj.weight_scale_inv"],
    "scaled integers or float8": [f"{LAYER}.v_proj.weight", f"{LAYER}.v_proj.weight_scale"],
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_weights_are_refused_with_the_name_of_the_packing(packing, tmp_path):
    folder = write_model(tmp_path, [*PACKINGS[packing], f"{LAYER}.o_proj.weight"], {"model_type": "llama"})
    with pytest.raises(PackedWeights) as caught:
        osm.inspect(folder)
    for part in (f"({packing}, tensor ", "v_proj", "original float checkpoint"):
        assert part in message(caught)


@pytest.mark.parametrize("method", ["hqq", "aqlm", "quanto", "torchao", "higgs"])
def test_a_quantisation_in_the_config_is_refused_by_its_name(method, tmp_path):
    saved("llama", tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": method})
    with pytest.raises(PackedWeights, match=rf"quantization_config: {method}"):
        osm.inspect(tmp_path)


def test_integers_without_any_sign_of_packing_are_refused_by_name(tmp_path):
    saved("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.layer.0.attention.self.value.weight"] = torch.ones(32, 32, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PackedWeights, match=r"value\.weight' has dtype torch\.int8"):
        osm.inspect(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "linear or recurrent attention"),
        ("rwkv", "linear or recurrent attention"),
        ("fnet", "no attention"),
        ("longformer", "two value paths"),
    ],
)
def test_what_has_no_linear_value_path_is_refused_with_the_reason(model_type, reason, tmp_path):
    folder = write_model(tmp_path, [f"{LAYER}.v_proj.weight", f"{LAYER}.o_proj.weight"], {"model_type": model_type})
    with pytest.raises(RefusedArchitecture) as caught:
        osm.inspect(folder)
    for part in (model_type, reason, "no number is shown rather than a wrong one"):
        assert part in message(caught)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (f"{LAYER}.kv_a_layernorm.weight", "made from a latent"),
        (f"{LAYER}.kv_a_proj_with_mqa.weight", "made from a latent"),
        (f"{LAYER}.sinks", "attention has sinks"),
        (f"{LAYER}.g_proj.weight", "attention is gated"),
    ],
)
def test_tensors_that_break_the_value_path_are_refused_by_name(tensor, reason, tmp_path):
    folder = write_model(
        tmp_path, [f"{LAYER}.v_proj.weight", f"{LAYER}.o_proj.weight", tensor], {"model_type": "llama"}
    )
    with pytest.raises(RefusedArchitecture) as caught:
        osm.inspect(folder)
    assert reason in message(caught)
    assert f"tensor {tensor}" in message(caught)


def test_a_composite_with_a_refused_part_is_refused(tmp_path):
    config = {
        "model_type": "kimi_vl",
        "text_config": {"model_type": "mamba"},
        "vision_config": {"model_type": "vit"},
    }
    folder = write_model(tmp_path, [f"{LAYER}.v_proj.weight"], config)
    with pytest.raises(RefusedArchitecture, match="mamba"):
        osm.inspect(folder)


def test_a_refused_model_type_can_be_named_by_the_user(tmp_path):
    folder = write_model(tmp_path, [f"{LAYER}.v_proj.weight"])
    with pytest.raises(RefusedArchitecture, match="linear or recurrent"):
        osm.inspect(folder, model_type="mamba")


def test_nothing_is_both_declared_and_refused():
    from oversmooth.models.identify import declared_for

    assert [model_type for model_type in REFUSED if declared_for(model_type)] == []


def test_every_refused_model_type_of_the_installed_transformers_exists():
    from transformers import CONFIG_MAPPING

    elsewhere = {"rwkv7"}  # code on the hub
    assert [
        model_type for model_type in REFUSED if model_type not in CONFIG_MAPPING and model_type not in elsewhere
    ] == []


def test_a_live_composite_of_torch_is_read_in_both_halves():
    model = nn.Transformer(32, 4, 2, 3, 48, batch_first=True)
    result = osm.inspect(model)
    assert sorted((stack.name, stack.blocks) for stack in result.stacks) == [("decoder", 3), ("encoder", 2)]
