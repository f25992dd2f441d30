"""Losses against the models' own, and what is said where there is none."""

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import NotSupported, UnknownName, WrongBatch
from tests.contract.tiny_models import tiny_model

FEW = [{"input_ids": torch.arange(3, 15)[None] + shift} for shift in range(4)]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


def causal():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def test_the_loss_of_a_language_model_is_its_own():
    model = causal()
    with torch.no_grad():
        own = torch.stack([model(**batch, labels=batch["input_ids"]).loss for batch in FEW])
    found = osm.task_loss(model, FEW)
    assert found.task == "causal language"
    assert found.found.loss == pytest.approx(own.mean().item(), rel=1e-5)
    assert found.found.perplexity == pytest.approx(own.mean().exp().item(), rel=1e-5)
    assert found.counted == 4 * 11


def test_padding_is_not_asked_about():
    model = causal()
    ids = FEW[0]["input_ids"]
    padded = torch.nn.functional.pad(ids, (0, 5))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 5))
    one = osm.task_loss(model, [{"input_ids": ids}])
    two = osm.task_loss(model, [{"input_ids": padded, "attention_mask": mask}])
    assert two.counted == one.counted
    assert two.found.loss == pytest.approx(one.found.loss, rel=1e-5)


def test_a_classifier_is_judged_by_labels_and_data_without_them_are_refused():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)).eval()
    pictures, labels = torch.rand(5, 3, 16, 16), torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        logits = model(pictures).logits
    found = osm.task_loss(model, [{"pixel_values": pictures, "labels": labels}])
    assert found.found.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found.found.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    with pytest.raises(WrongBatch, match="labels, for the loss of a classifier"):
        osm.task_loss(model, [{"pixel_values": pictures}])


def test_an_embedding_model_keeps_its_own_similarities_and_needs_an_original():
    model, _ = tiny_model("bert")
    assert osm.task_loss(model, FEW, original=model).found.loss == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(WrongBatch, match="an original to compare with"):
        osm.task_loss(model, FEW)


@pytest.mark.parametrize(
    ("task", "error", "words"), [("masked language", NotSupported, "no head"), ("sums", UnknownName, "sums")]
)
def test_a_task_that_the_model_has_no_head_for_is_refused(task, error, words):
    model, _ = tiny_model("bert")
    with pytest.raises(error, match=words):
        osm.task_loss(model, FEW, task=task)


def test_removing_a_part_costs_what_the_model_without_it_loses():
    from oversmooth.models.hooks.removal import removed
    from oversmooth.models.opening import open_source

    model = causal()
    result = osm.ablate(model, FEW, theory=False)
    assert {item.part for item in result.removals} == {"attention", "feed-forward", "block"}
    source = open_source(model)
    for item in result.removals:
        with removed(source.stacks()[0], source.store, item.layer, item.part):
            alone = osm.task_loss(model, FEW).found.loss
        assert item.loss == pytest.approx(alone, rel=1e-5)
        assert item.increase == pytest.approx(alone - result.whole.loss, abs=1e-5)
        assert "influence" in dict(item.cheap)
    assert result.passes <= 1 + 3 * (2 + 1) / 2
    assert osm.Ablation.from_dict(result.to_dict()) == result


def test_a_block_that_does_nothing_costs_nothing_and_has_no_influence():
    model = causal()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight.zero_()
    result = osm.ablate(model, FEW, theory=False)
    (item,) = [item for item in result.removals if (item.layer, item.part) == (1, "block")]
    assert item.increase == pytest.approx(0.0, abs=1e-6)
    assert dict(item.cheap)["influence"] == pytest.approx(0.0, abs=1e-9)
