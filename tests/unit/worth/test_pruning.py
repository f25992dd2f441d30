"""A pruned checkpoint is an ordinary one, and the same model as the live one without those blocks."""

import json
import resource
from contextlib import ExitStack

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import BadValue, CannotControl, Conflict, MissingValue, NotWritable, UnknownName
from oversmooth.models.hooks.removal import removed
from oversmooth.models.live import call_model
from oversmooth.models.open import open_source
from tests.contract.tiny_models import tiny_model

FEW = [{"input_ids": torch.arange(3, 15)[None] + shift} for shift in range(4)]


def saved(case, tmp_path):
    model, inputs = tiny_model(case)
    model.save_pretrained(tmp_path / "whole")
    return model, inputs, tmp_path / "whole"


def images(model, inputs):
    name, shape = next((name, value.shape) for name, value in inputs.items())
    generator = torch.Generator().manual_seed(0)
    return [{name: torch.rand(4, *shape[1:], generator=generator)}] if name else [torch.rand(4, *shape[1:])]


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "vit", "dinov2"])
def test_a_pruned_checkpoint_loads_in_plain_transformers_and_equals_the_ablated_live_model(case, tmp_path):
    from transformers import AutoModel

    model, inputs, folder = saved(case, tmp_path)
    data = FEW if "input_ids" in inputs else images(model, inputs)
    result = osm.prune(folder, tmp_path / "out", data, blocks="1")
    smaller = AutoModel.from_pretrained(tmp_path / "out").eval()
    source = open_source(model)
    (stack,) = source.stacks()
    with torch.no_grad(), removed(stack, source.store, 1, "block"):
        expected = call_model(model, inputs)[0]
    with torch.no_grad():
        torch.testing.assert_close(call_model(smaller, inputs)[0], expected)
    assert len(open_source(tmp_path / "out").stacks()[0].names.blocks) == 2
    manifest = json.loads((tmp_path / "out" / "pruning.json").read_text())
    assert manifest["removed"] == [1] == list(result.removed)
    assert manifest["after"]["loss"] == result.after.loss


def test_a_pruned_timm_model_loads_in_plain_timm_and_equals_the_ablated_live_model(tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=32, num_heads=4, depth=3, num_classes=5
    ).eval()
    from timm.models._hub import save_for_hf

    sizes = {"img_size": 32, "embed_dim": 32, "num_heads": 4, "depth": 3}
    save_for_hf(model, tmp_path / "whole", model_args=sizes)
    pictures = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    batch = {"x": pictures, "labels": torch.tensor([0, 1, 2, 3])}
    osm.prune(tmp_path / "whole", tmp_path / "out", [batch], blocks="0")
    smaller = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    source = open_source(model)
    (stack,) = source.stacks()
    with torch.no_grad(), removed(stack, source.store, 0, "block"):
        expected = model(pictures)
    with torch.no_grad():
        torch.testing.assert_close(smaller(pictures), expected)


def test_prune_says_that_the_disk_is_full_and_leaves_nothing(tmp_path):
    _, _, folder = saved("gpt2", tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # the weights need more
    try:
        with pytest.raises(NotWritable, match="out cannot be written: File too large"):
            osm.prune(folder, tmp_path / "out", FEW, blocks="1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_several_blocks_leave_in_order_and_the_loss_of_the_rest_is_that_of_the_ablated_model(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=99,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "whole")
    result = osm.prune(tmp_path / "whole", tmp_path / "out", FEW, budget=0.5, by="loss")
    assert (len(result.removed), result.task, result.by) == (2, "causal-lm", "loss")
    again = osm.task_loss(tmp_path / "out", FEW)
    assert again.found.loss == pytest.approx(result.after.loss, rel=1e-5)
    source = open_source(model)
    with torch.no_grad(), ExitStack() as without:
        for layer in result.removed:
            without.enter_context(removed(source.stacks()[0], source.store, layer, "block"))
        expected = model(**FEW[0]).logits
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(smaller(**FEW[0]).logits, expected)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, MissingValue, "blocks"),
        ({"blocks": "1", "budget": 0.5}, Conflict, "budget"),
        ({"blocks": "9"}, UnknownName, "9"),
        ({"blocks": "0-2"}, BadValue, "at least 1"),
        ({"budget": 1.5}, BadValue, "between 0 and 1"),
        ({"budget": 0.01}, BadValue, "enough for one of 3 blocks"),
        ({"budget": 0.5, "by": "size"}, UnknownName, "influence"),
        ({"blocks": "1", "max_loss_increase": -1.0}, CannotControl, "nothing was written"),
    ],
)
def test_what_cannot_be_pruned_is_refused_and_nothing_is_written(options, error, words, tmp_path):
    _, _, folder = saved("bert", tmp_path)
    with pytest.raises(error, match=words):
        osm.prune(folder, tmp_path / "out", FEW, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["albert", "t5"])
def test_shared_layers_and_two_stacks_are_refused(case, tmp_path):
    _, _, folder = saved(case, tmp_path)
    with pytest.raises(CannotControl, match=r"share their weights|2 stacks"):
        osm.prune(folder, tmp_path / "out", FEW, blocks="1")


@pytest.mark.slow
def test_a_pruned_dinov2_loads_in_plain_transformers_and_equals_the_ablated_live_model(tmp_path):
    from transformers import AutoModel

    from tests.real_models import real_model

    folder = real_model("dinov2-small")
    pictures = torch.rand(4, 3, 56, 56, generator=torch.Generator().manual_seed(0))
    batch = {"pixel_values": pictures.half()}  # as it is stored
    result = osm.prune(folder, tmp_path / "out", [batch], budget=0.25, by="influence")
    assert (len(result.removed), result.task) == (3, "similarity")
    whole = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    smaller = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    source = open_source(whole)
    (stack,) = source.stacks()
    with torch.no_grad(), ExitStack() as without:
        for layer in result.removed:
            without.enter_context(removed(stack, source.store, layer, "block"))
        expected = whole(pictures).last_hidden_state
    with torch.no_grad():
        torch.testing.assert_close(smaller(pictures).last_hidden_state, expected)
