"""What one sub-block does to the stream: closed forms, the exact split of influence, and what the next one takes back."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oversmooth as osm
from oversmooth.measurement.moments import Moments
from oversmooth.measurement.steps import STEP_METRICS, SubBlockStep, turned_together, undone_share

BOUNDED = settings(derandomize=True, deadline=None, max_examples=25)
seeds = st.integers(0, 10_000)
SPLIT = ("influence_smoothing", "influence_shared", "influence_differing")


def undone_by(first, second):
    return undone_share(first, second, turned_together(first, second))


def tokens(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).add(0.4).to(dtype)


def step(before, after, keep=None):
    keep = torch.ones(before.shape[:2], dtype=torch.bool) if keep is None else keep
    return SubBlockStep(Moments.of(before, keep), Moments.of(after, keep))


def value(name, before, after):
    found = STEP_METRICS[name].on(step(before, after))
    assert found.defined.all()
    return found.values


# --- independent references: one sequence, numpy, token by token -----------------------------------------------------


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def centring(n):
    return np.eye(n) - np.full((n, n), 1 / n)


def turned(first, second, projection):
    """|PU| |PU'| (1 - cos(PU, PU')) / n for a projection of tokens."""
    a, b = (projection @ unit(x) for x in (first, second))
    return (np.linalg.norm(a) * np.linalg.norm(b) - (a * b).sum()) / len(first)


def balance(first, second):
    angles = [
        math.atan2(
            np.linalg.norm(centring(len(x)) @ unit(x)), np.linalg.norm((np.eye(len(x)) - centring(len(x))) @ unit(x))
        )
        for x in (first, second)
    ]
    return 1 - math.cos(angles[1] - angles[0])


REFERENCES = {
    "influence": lambda x, y: np.mean([1 - cosine(a, b) for a, b in zip(x, y, strict=True)]),
    "angular_distance": lambda x, y: np.mean([math.acos(cosine(a, b)) / math.pi for a, b in zip(x, y, strict=True)]),
    "contribution": lambda x, y: np.mean(np.linalg.norm(y - x, axis=1) / np.linalg.norm(x, axis=1)),
    "alignment": lambda x, y: np.mean([cosine(b - a, a) for a, b in zip(x, y, strict=True)]),
    "ceiling": lambda x, y: np.mean(
        [1 - math.sqrt(1 - r * r) if r < 1 else 2 for r in np.linalg.norm(y - x, axis=1) / np.linalg.norm(x, axis=1)]
    ),
    "influence_smoothing": balance,
    "influence_shared": lambda x, y: turned(x, y, np.eye(len(x)) - centring(len(x))),
    "influence_differing": lambda x, y: turned(x, y, centring(len(x))),
}


def test_every_metric_of_steps_has_an_independent_reference():
    assert {*REFERENCES, "undone"} == set(STEP_METRICS)


@pytest.mark.parametrize("name", REFERENCES)
@BOUNDED
@given(n=st.integers(2, 6), d_model=st.integers(2, 6), seed=seeds)
def test_a_metric_of_steps_equals_its_reference_whatever_stands_at_dropped_positions(name, n, d_model, seed):
    before, after = tokens(2, 7, d_model, seed=seed), tokens(2, 7, d_model, seed=seed + 1)
    keep = torch.zeros(2, 7, dtype=torch.bool)
    keep[0, 7 - n :] = True
    keep[1, :n] = True
    expected = [REFERENCES[name](x[m].numpy(), y[m].numpy()) for x, y, m in zip(before, after, keep, strict=True)]
    spoilt = [h.masked_fill(~keep[..., None], math.nan) for h in (before, after)]
    found = STEP_METRICS[name].on(step(*spoilt, keep))
    assert found.defined.all()
    torch.testing.assert_close(found.values, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=1e-9)


@BOUNDED
@given(n=st.integers(2, 8), d_model=st.integers(2, 8), seed=seeds, size=st.sampled_from([1e-3, 0.1, 1.0, 10.0]))
def test_the_parts_of_the_influence_add_up_to_it_and_none_is_negative(n, d_model, seed, size):
    before = tokens(3, n, d_model, seed=seed)
    after = before + size * tokens(3, n, d_model, seed=seed + 1)
    parts = [value(name, before, after) for name in SPLIT]
    torch.testing.assert_close(sum(parts), value("influence", before, after), rtol=1e-9, atol=1e-12)
    assert min(part.min() for part in parts) > -1e-12


@BOUNDED
@given(n=st.integers(2, 6), d_model=st.integers(2, 6), seed=seeds, size=st.sampled_from([0.01, 0.5, 0.99, 3.0]))
def test_no_step_turns_tokens_further_than_its_size_allows(n, d_model, seed, size):
    before = tokens(2, n, d_model, seed=seed)
    added = tokens(2, n, d_model, seed=seed + 1)
    after = before + size * added * (before.norm(dim=-1) / added.norm(dim=-1))[..., None]
    assert (value("influence", before, after) <= value("ceiling", before, after) + 1e-12).all()


# --- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("factor", "influence", "angle"), [(1.0, 0.0, 0.0), (7.0, 0.0, 0.0), (-1.0, 2.0, 1.0)])
def test_the_identity_and_scaling_have_no_influence_and_a_flip_of_signs_has_two(factor, influence, angle):
    x = tokens(2, 5, 4)
    torch.testing.assert_close(value("influence", x, factor * x), torch.full((2,), influence).double())
    torch.testing.assert_close(value("angular_distance", x, factor * x), torch.full((2,), angle).double())


def test_a_rotation_of_all_tokens_alike_turns_both_parts_and_smooths_nothing():
    x = tokens(1, 6, 4)
    rotated = x @ torch.linalg.qr(tokens(4, 4, seed=3)).Q
    torch.testing.assert_close(value("influence_smoothing", x, rotated), torch.zeros(1).double(), rtol=0, atol=1e-12)
    assert value("influence_shared", x, rotated) > 0.01
    assert value("influence_differing", x, rotated) > 0.01


def test_equal_tokens_that_stay_equal_only_turn_what_is_shared():
    x, y = (tokens(1, 1, 4, seed=seed).expand(1, 5, 4) for seed in (0, 1))
    torch.testing.assert_close(value("influence_shared", x, y), value("influence", x, y))


def test_averaging_all_tokens_of_length_one_is_smoothing_in_its_own_part():
    x = torch.nn.functional.normalize(tokens(1, 5, 4), dim=-1)
    mean = x.mean(1, keepdim=True).expand_as(x)
    torch.testing.assert_close(value("influence_shared", x, mean), torch.zeros(1).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(value("influence_differing", x, mean), torch.zeros(1).double(), rtol=0, atol=1e-12)


def test_small_influences_are_not_what_rounding_leaves():
    x = tokens(1, 16, 64, dtype=torch.float32)
    y = x + 1e-4 * tokens(1, 16, 64, seed=1, dtype=torch.float32)
    exact = value("influence", x.double(), y.double()).float()
    torch.testing.assert_close(value("influence", x, y), exact, rtol=1e-3, atol=0)


def test_a_step_that_the_next_one_takes_back_is_undone_and_one_that_goes_on_is_not():
    x = tokens(2, 5, 4)
    y = x + 0.1 * tokens(2, 5, 4, seed=1)
    back = undone_by(step(x, y), step(y, x)).values
    torch.testing.assert_close(back, torch.ones(2).double())
    again = undone_by(step(x, y), step(x, y)).values
    torch.testing.assert_close(again, -torch.ones(2).double())


def test_what_is_undone_follows_from_the_influence_of_both_steps_together():
    x, y, z = (tokens(2, 5, 4, seed=seed) for seed in range(3))
    both = value("influence", x, z)
    first, second = value("influence", x, y), value("influence", y, z)
    found = undone_by(step(x, y), step(y, z)).values
    torch.testing.assert_close(found, (first + second - both) / (2 * first))


def test_a_zero_token_has_no_angle_and_its_sequence_no_value():
    x = tokens(2, 4, 3)
    x[0, 1] = 0
    defined = STEP_METRICS["influence"].on(step(x, tokens(2, 4, 3, seed=1))).defined
    assert defined.tolist() == [False, True]


def test_distances_between_depths_are_those_of_the_models_own_hidden_states():
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 99}
    model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=3)).eval()
    ids = torch.randint(3, 99, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    (spans,) = osm.measure(model, [{"input_ids": ids, "attention_mask": mask}], metrics="influence").spans
    seen = []
    hooks = [layer.register_forward_hook(lambda module, args, output: seen.append(output)) for layer in model.layers]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    states = [model.embed_tokens(ids).detach(), *(out[0] if isinstance(out, tuple) else out for out in seen)]
    assert spans.depths == (0, 1, 2, 3)
    for i, first in enumerate(states):
        for j, second in enumerate(states):
            cosines = torch.nn.functional.cosine_similarity(first, second, dim=-1).clamp(-1, 1)
            kept = [cosines[row][mask[row].bool()] for row in range(2)]
            influence = sum((1 - c).mean() for c in kept) / 2
            angle = sum((c.acos() / torch.pi).mean() for c in kept) / 2
            assert spans.influence[i][j] == pytest.approx(influence.item(), abs=1e-5)
            assert spans.angular_distance[i][j] == pytest.approx(angle.item(), abs=1e-3)
    assert spans.sequences == 2


@pytest.mark.parametrize("name", [name for name in STEP_METRICS if name != "undone"])
def test_steps_without_their_tokens_give_together_what_each_gives_with_them(name):
    x, y, z = (tokens(2, 5, 6, seed=seed, dtype=torch.float32) for seed in range(3))
    y[1, 3] = 0  # a token without an angle
    steps = [step(x, y), step(y, z)]
    together = STEP_METRICS[name].on(SubBlockStep.joined([one.settled() for one in steps]))
    alone = [STEP_METRICS[name].on(one) for one in steps]
    assert torch.equal(together.defined, torch.cat([found.defined for found in alone]))
    torch.testing.assert_close(
        together.values, torch.cat([found.values for found in alone]), rtol=0, atol=0, equal_nan=True
    )


def test_what_is_undone_is_the_same_once_the_tokens_are_gone():
    x, y, z = (tokens(2, 5, 6, seed=seed) for seed in range(3))
    first, second = step(x, y), step(y, z)
    found = undone_share(first.settled(), second.settled(), turned_together(first, second))
    torch.testing.assert_close(found.values, undone_by(first, second).values, rtol=0, atol=0)
