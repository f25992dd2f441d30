"""Pairs of tokens, and pairs of sequences: closed forms, and the same numbers computed plainly."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import oversmooth as osm
from oversmooth.measurement.moments import Moments
from oversmooth.measurement.pairs import TOKENS, BetweenGatherer, PairGatherer, between_sequences, effective_rank
from oversmooth.models.hooks.places import Place

BLOCK = Place("", 1, "ffn_sum")


def seen(*batches, keep=None, seed=0):
    """What a gatherer says about states that leave one block."""
    gatherer, before = PairGatherer(seed), 0
    for h in batches:
        gatherer.begin()
        mask = torch.ones(h.shape[:2], dtype=torch.bool) if keep is None else keep
        gatherer.see(BLOCK, Moments.of(h, mask), before)
        gatherer.finish()
        before += len(h)
    (found,) = gatherer.results()
    return found


def test_equal_tokens_are_pairs_of_cosine_one():
    found = seen(torch.ones(2, 5, 8))
    assert min(found.quantiles) > 0.998
    assert found.share_above == 1.0
    assert found.histogram[-1] == 1.0
    assert found.rank == pytest.approx(1.0)


def test_orthogonal_tokens_are_pairs_of_cosine_zero_and_fill_all_directions():
    found = seen(torch.eye(6)[None])
    assert max(map(abs, found.quantiles)) < 2e-3
    assert found.share_above == 0.0
    assert found.rank == pytest.approx(5.0)
    assert found.largest_rank == 5.0


def test_quantiles_and_shares_are_those_of_all_pairs():
    h = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(0)) + 0.8
    u = F.normalize(h[0], dim=1)
    pairs = (u @ u.T)[np.triu_indices(40, 1)]
    found = seen(h)
    torch.testing.assert_close(
        torch.tensor(found.quantiles), pairs.quantile(torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])), atol=5e-3, rtol=0
    )
    assert found.share_above == pytest.approx(float((pairs >= 0.9).float().mean()), abs=1e-9)
    assert sum(found.histogram) == pytest.approx(1.0)


def test_sequences_have_equal_weight_however_long_they_are():
    long, short = torch.ones(1, 30, 8), torch.eye(8)[None, :3]
    found = seen(long, short)
    assert found.share_above == pytest.approx(0.5)
    assert found.sequences == 2


def test_padding_and_the_length_of_tokens_do_not_matter():
    h = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(1))
    keep = torch.arange(9)[None] < torch.tensor([[9], [6]])
    changed = h.clone()
    changed[1, 6:] = torch.nan
    scaled = changed * torch.rand(2, 9, 1, generator=torch.Generator().manual_seed(2)).add(0.5)
    assert seen(changed, keep=keep) == seen(h, keep=keep)
    torch.testing.assert_close(seen(scaled, keep=keep).quantiles, seen(h, keep=keep).quantiles, atol=2e-3, rtol=0)


def test_of_long_sequences_a_seeded_sample_is_compared():
    h = torch.randn(1, TOKENS + 100, 8, generator=torch.Generator().manual_seed(0))
    first, again, other = seen(h), seen(h), seen(h, seed=1)
    assert first == again != other
    assert first.tokens == TOKENS
    torch.testing.assert_close(first.quantiles, other.quantiles, atol=0.05, rtol=0)


def test_the_rank_ignores_what_all_tokens_share():
    u = F.normalize(torch.randn(20, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), dim=1)
    torch.testing.assert_close(effective_rank(u), effective_rank(u + 100.0), rtol=1e-6, atol=1e-6)
    s = np.linalg.svd((u - u.mean(0)).numpy(), compute_uv=False)
    p = s[s > 1e-9] / s.sum()
    assert effective_rank(u) == pytest.approx(float(np.exp(-(p * np.log(p)).sum())), rel=1e-4)


def test_similarity_between_sequences_and_its_jackknife_error():
    means = F.normalize(torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1, dim=1)
    cosines = means @ means.T
    by_hand = [
        float(cosines[np.ix_(left, left)][np.triu_indices(6, 1)].mean())
        for k in range(7)
        for left in [[i for i in range(7) if i != k]]
    ]
    found = between_sequences([means[:3], means[3:]])
    assert found.mean == pytest.approx(float(cosines[np.triu_indices(7, 1)].mean()))
    assert found.standard_error == pytest.approx(float(np.sqrt(6 / 7 * np.square(by_hand - np.mean(by_hand)).sum())))


def test_equal_sequences_are_alike_and_one_sequence_is_compared_with_none():
    gatherer = BetweenGatherer()
    gatherer.see(BLOCK, Moments.of(torch.ones(3, 4, 8), torch.ones(3, 4, dtype=torch.bool)))
    gatherer.finish()
    assert gatherer.results()[BLOCK].mean == pytest.approx(1.0)
    assert between_sequences([torch.ones(1, 4)]).count == 0


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, 3, norm=torch.nn.LayerNorm(16), enable_nested_tensor=False)


def batches(count=6):
    return [torch.randn(count, 7, 16, generator=torch.Generator().manual_seed(0))]


def test_pairs_are_seen_at_the_input_after_each_block_and_after_the_final_norm(encoder):
    found = osm.measure(encoder, batches(), pairs=True)
    assert [(pair.depth, pair.is_final_norm) for pair in found.pairs] == [
        *((0, False), (1, False), (2, False), (3, False), (3, True))
    ]
    for pair, point in zip(found.pairs, [*found.curve("cosine"), found.final("cosine")], strict=True):
        middles = np.arange(-0.975, 1, 0.05)
        assert float(middles @ np.array(pair.histogram)) == pytest.approx(point.mean, abs=0.03)
    assert osm.measure(encoder, batches()).pairs == ()


def test_between_is_a_metric_with_a_value_at_every_place_and_a_limit_of_gate_and_monitor(encoder):
    found = osm.measure(encoder, batches(), metrics=("cosine", "between"))
    assert len(found.curve("between")) == len(found.curve("cosine")) == 4
    assert found.final("between").standard_error > 0
    value = max(point.mean for point in found.curve("between")[1:])
    assert osm.gate(encoder, batches(), rules={"max_between": value + 0.01}).passed
    assert {breach.rule for breach in osm.gate(encoder, batches(), rules={"max_between": -1.0}).breaches} == {
        "max_between"
    }
    numbers = osm.Monitor(encoder, batches(), metrics=("between",), spectra=False).step()
    assert numbers["smoothing/between/depth_3"] == pytest.approx(found.curve("between")[3].mean, abs=1e-6)


def test_a_single_sequence_has_no_similarity_with_others(encoder):
    (point, *_) = osm.measure(encoder, batches(1), metrics=("between",)).curve("between")
    assert point.mean is None
    assert point.missing[0].reason == "no sequence has a value here"
