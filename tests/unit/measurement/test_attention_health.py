"""Numbers about attention maps: closed forms, and the same from a model's own maps."""

import math

import pytest
import torch

from oversmooth.measurement.attention_health import head_numbers
from oversmooth.measurement.measurement import measure
from tests.contract.tiny_models import tiny_model


@pytest.mark.parametrize("n", [4, 16])
def test_uniform_attention_sees_all_tokens_has_no_sink_and_rank_one(n):
    found = head_numbers(torch.full((2, n, n), 1 / n, dtype=torch.float64))
    for name, expected in (
        ("attention_entropy", 1.0),
        ("effective_tokens", n),
        ("sink", 1 / n),
        ("attention_rank", 1.0),
    ):
        torch.testing.assert_close(getattr(found, name), torch.full((2,), float(expected)).double())
    if n >= 10:
        assert found.of_layer()["sink_rate"] == 0.0


@pytest.mark.parametrize("n", [4, 16])
def test_attention_to_itself_sees_one_token_and_has_full_rank(n):
    found = head_numbers(torch.eye(n, dtype=torch.float64).expand(3, n, n))
    for name, expected in (("attention_entropy", 0.0), ("effective_tokens", 1.0), ("attention_rank", n)):
        torch.testing.assert_close(getattr(found, name), torch.full((3,), float(expected)).double())


def test_a_head_that_looks_at_one_position_is_a_sink_there():
    maps = torch.full((4, 16, 16), 1 / 16, dtype=torch.float64)
    maps[1] = 0.6 / 15
    maps[1, :, 5] = 0.4
    found = head_numbers(maps)
    assert found.of_layer()["sink_rate"] == 0.25
    assert found.sink_position[1] == 5


def test_uniform_causal_attention_is_as_spread_as_it_can_be():
    maps = torch.ones(1, 12, 12, dtype=torch.float64).tril()
    found = head_numbers(maps / maps.sum(-1, keepdim=True))
    torch.testing.assert_close(found.attention_entropy, torch.ones(1).double())
    torch.testing.assert_close(found.effective_tokens, torch.tensor([6.5]).double())
    assert found.of_layer()["sink_rate"] == 0.0


def test_the_rank_is_the_participation_ratio_of_squared_singular_values():
    maps = torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    squares = torch.linalg.svdvals(maps).square()
    torch.testing.assert_close(head_numbers(maps).attention_rank, squares.sum(1).square() / squares.square().sum(1))


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "vit"])
def test_measured_attention_is_that_of_the_models_own_maps(case):
    model, inputs = tiny_model(case)
    result = measure(model, [inputs], metrics=("attention",))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(**inputs, output_attentions=True).attentions
    for depth, maps in enumerate(own, 1):
        a = maps[0].double()
        entropy = torch.special.entr(a).sum(-1)
        expected = entropy.exp().mean().item()
        found = next(v for v in result.values if (v.depth, v.metric) == (depth, "effective_tokens"))
        assert found.mean == pytest.approx(expected, rel=1e-4)
        heads = [head for head in result.heads if head.depth == depth]
        assert [head.sink for head in heads] == pytest.approx(a.mean(1).amax(-1).tolist(), rel=1e-4)
    assert all(0 <= head.entropy <= 1 and math.isfinite(head.rank) for head in result.heads)


def test_a_model_whose_maps_cannot_be_seen_says_why_and_is_measured_all_the_same(monkeypatch):
    monkeypatch.setattr("oversmooth.models.hooks.attention_maps.WATCHED", {})
    model, inputs = tiny_model("bert")
    result = measure(model, [inputs], metrics=("cosine", "attention"))
    (missing,) = [v for v in result.values if v.metric == "sink_rate"]
    assert missing.mean is None
    assert "kernel that cannot be watched" in missing.missing[0].reason
    assert result.curve("cosine")[-1].mean is not None
