"""Numbers about attention maps: closed forms, and the same from a model's own maps."""

import math

import pytest
import torch

from oversmooth.errors import NoAttentionMaps
from oversmooth.measurement.attention import head_numbers
from oversmooth.measurement.measure import measure
from oversmooth.models.hooks.attention_maps import AttentionMaps
from tests.contract.tiny_models import tiny_model
from tests.contract.todays_models import todays_model


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


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "vit", "gemma2"])
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


def test_a_learned_sink_is_one_more_key_and_no_position():
    n = 16
    uniform = torch.full((1, n, n), 1 / (n + 1), dtype=torch.float64)
    found = head_numbers(uniform, 1 - uniform.sum(-1))
    assert found.attention_entropy.item() == pytest.approx(1)
    assert found.effective_tokens.item() == pytest.approx(n + 1)
    assert found.learned_sink.item() == pytest.approx(1 / (n + 1))
    idle = head_numbers(torch.zeros(1, n, n, dtype=torch.float64) + 1e-12, torch.ones(1, n, dtype=torch.float64))
    assert idle.attention_entropy.item() == pytest.approx(0, abs=1e-6)
    assert (idle.of_layer()["sink_rate"], idle.learned_sink.item()) == (0, 1)


def sink_facts(rows):
    """Entropy over its largest value, tokens seen and the sink's share, row by row, from what the model shows of its maps."""
    entropies, tokens, to_sink = [], [], []
    for row in rows:
        rest = 1 - sum(row)
        outcomes = [p for p in row if p > 0] + [rest] * (rest > 1e-4)  # below is rounding: a layer without a sink
        entropy = -sum(p * math.log(p) for p in outcomes)
        entropies += [entropy / math.log(len(outcomes))] if len(outcomes) > 1 else []
        tokens.append(math.exp(entropy))
        to_sink.append(rest)
    return [sum(numbers) / len(numbers) for numbers in (entropies, tokens, to_sink)]


@pytest.mark.parametrize("case", ["gpt_oss", "mimo_v2_flash"])
def test_attention_with_a_learned_sink_is_measured_as_the_models_own_maps_say(case):
    model, inputs = todays_model(case)
    result = measure(model, [inputs], metrics=("attention",))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(**inputs, output_attentions=True).attentions
    given = {(head.depth, head.head): head for head in result.heads}
    for depth, maps in enumerate(own, 1):
        for number in range(maps.shape[1]):
            facts = [sink_facts(sequence) for sequence in maps[:, number].double().tolist()]
            expected = [sum(column) / len(facts) for column in zip(*facts, strict=True)]
            head = given[depth, number]
            assert [head.entropy, head.effective_tokens] == pytest.approx(expected[:2], rel=1e-4)
            assert head.learned_sink == pytest.approx(expected[2], abs=1e-5)
    assert max(head.learned_sink for head in result.heads) > 0.05


def test_what_goes_to_padding_is_not_taken_for_a_sink():
    keep = torch.tensor([True, True, True, False])
    leaky = AttentionMaps("layer 3", lambda sequence: torch.full((1, 4, 4), 0.2), has_sink=True)
    with pytest.raises(NoAttentionMaps, match="layer 3"):
        leaky.with_sink(0, keep)
    masked = torch.tensor([0.2, 0.2, 0.2, 0.0]).expand(1, 4, 4)
    _, beside = AttentionMaps("layer 3", lambda sequence: masked, has_sink=True).with_sink(0, keep)
    torch.testing.assert_close(beside, torch.full((1, 3), 0.4))


def test_too_few_tokens_for_a_rate_of_sinks_leave_the_other_numbers():
    model, inputs = tiny_model("gpt2")
    result = measure(model, [{"input_ids": inputs["input_ids"][:, :5]}], metrics=("cosine", "attention"))
    found = {value.metric: value for value in result.values if value.place == "attention" and value.depth == 1}
    assert found["sink_rate"].mean is None
    assert found["effective_tokens"].mean is not None
