"""Gains of the token that is written, and values from a latent, as theorems: each against what it stands for."""

import dataclasses

import pytest
import torch
from hypothesis import given

from oversmooth.models.canonical import AttentionWeights, Latent, Norm, TokenGains
from oversmooth.prediction.ladder import climb, leak, leaked, log_ratios
from oversmooth.prediction.operator import AttentionLayer, centre
from oversmooth.spectra.spectrum import head_cores
from oversmooth.spectra.value_map import folded_map, plain_map
from tests.unit.prediction.random_layers import (
    every_time,
    generator,
    normal,
    one_thread,  # noqa: F401  (a fixture for the whole module)
    random_attention,
    seeds,
)

TOKENS, D_MODEL, HEADS, KV, D_HEAD, LATENT = 6, 7, 4, 2, 3, 5
FORMS = ["plain", "latent", "inner", "per head", "everything"]


def norm_of(source, width, kind="rms"):
    return Norm(kind=kind, weight=normal(source, width), bias=normal(source, width))


def layer_of(source, form="plain", kind="rms"):
    norms = {"attn_norm": norm_of(source, D_MODEL, kind)}
    latent = None
    if form in ("latent", "everything"):
        latent = Latent(w=normal(source, LATENT, D_MODEL), b=normal(source, LATENT))
        norms["latent_norm"] = norm_of(source, LATENT, kind)
    if form in ("inner", "everything"):
        norms["inner_norm"] = norm_of(source, HEADS * D_HEAD, kind)
    if form == "per head":
        norms["inner_norm"] = norm_of(source, D_HEAD)
    return AttentionLayer(
        weights=AttentionWeights(
            w_v=normal(source, KV, D_HEAD, D_MODEL if latent is None else LATENT),
            w_o=normal(source, D_MODEL, HEADS, D_HEAD),
            b_v=normal(source, KV, D_HEAD),
            b_o=normal(source, D_MODEL),
            latent=latent,
            norms=norms,
        ),
        epsilon=dict.fromkeys(norms, 1e-6),
        dtype=torch.float64,
    )


def gains_of(source, *, channels=D_HEAD):
    return TokenGains(torch.sigmoid(normal(source, TOKENS, HEADS, channels)))


def reference(layer, attention, x, gains):
    """The branch written out token by token and head by head, with torch's own norms."""
    weights, norms = layer.weights, layer.weights.norms

    def normed(role, x):
        norm, width = norms[role], x.shape[-1:]
        if norm.kind == "layer":
            return torch.nn.functional.layer_norm(x, width, norm.weight, norm.bias, 1e-6)
        return torch.nn.functional.rms_norm(x, width, norm.weight, 1e-6) + norm.bias

    x = normed("attn_norm", x)
    if weights.latent is not None:
        x = normed("latent_norm", x @ weights.latent.w.T + weights.latent.b)
    heads = []
    for head in range(HEADS):
        kv = head * KV // HEADS
        mixed = attention[head] @ (x @ weights.w_v[kv].T + weights.b_v[kv])
        heads.append(mixed if gains is None else mixed * gains.before[:, head])
    inner = torch.stack(heads, 1)
    if "inner_norm" in norms:
        per_head = len(norms["inner_norm"].weight) == D_HEAD
        inner = normed("inner_norm", inner if per_head else inner.flatten(1)).reshape(TOKENS, HEADS, D_HEAD)
    return torch.einsum("thk,dhk->td", inner, weights.w_o) + weights.b_o


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("form", FORMS)
def test_the_last_rung_is_the_layer_written_out(form, kind):
    if form == "per head" and kind == "layer":
        kind = "rms"
    source = generator(0)
    layer, attention = layer_of(source, form, kind), random_attention(source, HEADS, TOKENS)
    x, gains = normal(source, TOKENS, D_MODEL) * 3, gains_of(source)
    expected = reference(layer, attention, x, gains)
    ladder = climb(layer, attention, x, gains)
    torch.testing.assert_close(ladder.exact.output, expected)
    before, after = log_ratios(torch.stack([x, x + expected]))
    assert len(ladder.rungs) == 6
    assert ladder.rungs[-1] == pytest.approx(after - before, abs=1e-12)
    assert abs(ladder.rungs[-1] - ladder.rungs[-2]) > 1e-4  # gains differ between tokens here


@every_time
@given(seeds)
def test_the_averaged_operator_leaves_what_all_tokens_share_shared(seed):
    source = generator(seed)
    layer, attention = layer_of(source, "everything"), random_attention(source, HEADS, TOKENS)
    ladder = climb(layer, attention, normal(source, TOKENS, D_MODEL), gains_of(source))
    w = normal(source, D_MODEL)
    moved = ladder.operator.apply(w.expand(TOKENS, -1))
    torch.testing.assert_close(moved, ladder.operator.shared(w).expand(TOKENS, -1))


@pytest.mark.parametrize("form", ["plain", "latent"])
def test_gains_of_one_change_no_bit(form):
    source = generator(3)
    layer, attention = layer_of(source, form), random_attention(source, HEADS, TOKENS)
    x = normal(source, TOKENS, D_MODEL)
    plain = climb(layer, attention, x)
    ones = climb(layer, attention, x, TokenGains(torch.ones(TOKENS, HEADS, D_HEAD, dtype=torch.float64)))
    assert ones.rungs[:5] == plain.rungs
    assert ones.rungs[5] == plain.rungs[4]
    assert torch.equal(ones.exact.output, plain.exact.output)
    assert torch.equal(ones.operator.path.w_o, plain.operator.path.w_o)
    assert ones.leak == plain.leak == 0.0


def test_gains_that_are_equal_leak_nothing_and_scale_the_map():
    source = generator(4)
    layer, attention = layer_of(source), random_attention(source, HEADS, TOKENS)
    x, half = normal(source, TOKENS, D_MODEL), TokenGains(torch.full((TOKENS, HEADS, 1), 0.5, dtype=torch.float64))
    ladder = climb(layer, attention, x, half)
    assert ladder.leak == 0.0
    torch.testing.assert_close(ladder.operator.path.w_o, 0.5 * layer.branch.w_o)


@every_time
@given(seeds)
def test_the_leak_is_what_differs_between_tokens_that_were_equal(seed):
    """The formula against `P T(1 w^T)`, with T run on equal tokens: attention, gains and output of every head."""
    source = generator(seed)
    layer, attention = layer_of(source), random_attention(source, HEADS, TOKENS)
    x, gains = normal(source, TOKENS, D_MODEL) + 1, gains_of(source)
    ladder = climb(layer, attention, x, gains)
    path, w = layer.branch, x.mean(0)
    same = w.expand(TOKENS, -1)
    moved = same.clone()
    for head in range(HEADS):
        mixed = attention[head] @ (same @ path.w_v[head * KV // HEADS].T) / ladder.operator.scale
        moved = moved + (mixed * gains.before[:, head]) @ path.w_o[:, head].T
    torch.testing.assert_close(leaked(path, ladder.operator, gains.before, w), centre(moved), rtol=1e-6, atol=1e-9)
    assert ladder.leak == pytest.approx((centre(moved).norm() / moved.norm()).item(), rel=1e-6)
    assert 0 < ladder.leak < 1


def test_row_sums_of_softmax_leak_nothing_but_rounding():
    source = generator(5)
    layer, attention = layer_of(source), random_attention(source, HEADS, TOKENS)
    sums = TokenGains(torch.ones(TOKENS, HEADS, 1, dtype=torch.float64)).times(attention.sum(-1))
    ladder = climb(layer, attention, normal(source, TOKENS, D_MODEL), sums)
    assert ladder.leak == pytest.approx(0.0, abs=1e-12)


def test_the_leak_of_a_layer_that_removes_everything_has_no_value():
    source = generator(6)
    layer = dataclasses.replace(layer_of(source), skip=0.0)
    ladder = climb(layer, random_attention(source, HEADS, TOKENS), normal(source, TOKENS, D_MODEL), gains_of(source))
    zero = torch.zeros(D_MODEL, dtype=torch.float64)
    assert leak(layer.branch, ladder.operator, gains_of(source).before, zero) is None


@pytest.mark.parametrize("latent_width", [2, 9])
@pytest.mark.parametrize("inner", [False, True])
def test_spectra_through_a_latent_are_those_of_the_whole_map(latent_width, inner):
    """Narrower than the value channels, the map is followed in the latent; wider, in the channels."""
    source = generator(7)
    latent, up = normal(source, latent_width, D_MODEL), normal(source, KV, D_HEAD, latent_width)
    w_o = normal(source, D_MODEL, HEADS, D_HEAD)
    norms = {"attn_norm": norm_of(source, D_MODEL), "latent_norm": norm_of(source, latent_width, "layer")}
    if inner:
        norms["inner_norm"] = norm_of(source, HEADS * D_HEAD, "layer")
    weights = AttentionWeights(w_v=up, w_o=w_o, latent=Latent(w=latent), norms=norms)
    found = plain_map(weights, torch.float64)
    assert found.core_size == min(latent_width, KV * D_HEAD)
    by_head = [w_o[:, head] @ up[head * KV // HEADS] @ latent for head in range(HEADS)]
    torch.testing.assert_close(found.left @ found.right, sum(by_head))
    for head, core in enumerate(head_cores(weights, torch.float64)):
        expected = torch.linalg.eigvals(by_head[head])
        size = expected.abs().max().item()
        assert torch.linalg.eigvals(core).abs().max().item() == pytest.approx(size, rel=1e-9)
    centred = torch.eye(latent_width, dtype=torch.float64) - 1 / latent_width
    through = norms["latent_norm"].weight[:, None] * (centred @ latent * norms["attn_norm"].weight)
    if inner:
        whole = torch.eye(HEADS * D_HEAD, dtype=torch.float64) - 1 / (HEADS * D_HEAD)
        w_o = (w_o.flatten(1) * norms["inner_norm"].weight @ whole).view(w_o.shape)
    expected = sum(w_o[:, head] @ up[head * KV // HEADS] @ through for head in range(HEADS))
    folded = folded_map(weights, torch.float64)
    assert folded is not None
    torch.testing.assert_close(folded[0].left @ folded[0].right, expected)
    assert "norm on the latent" in folded[1]
