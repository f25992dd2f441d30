"""What holds for any attention: the parametrization, Dobrushin's coefficient, norms, and known interventions."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oversmooth.control.interventions import uniform_attention
from oversmooth.control.projection import EigenvalueForm, kept_weights
from oversmooth.errors import BadValue, NotSupported, UnknownName
from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.prediction.asymptotics import certificate, channel_eigenvalues, dobrushin
from oversmooth.prediction.operator import AttentionLayer, LayerOperator, ValuePath
from oversmooth.prediction.radii import dense_ac_radius
from oversmooth.prediction.what_if import WHAT_IFS, attn_scale, centred_attention, counts, feat_scale, gfsa, what_if
from tests.unit.prediction.random_layers import (
    assert_same_spectrum,
    asymptotics,
    dense_reference,
    every_time,
    generator,
    normal,
    one_thread,  # noqa: F401  (a fixture for the whole module)
    random_attention,
    seeds,
)


def spread(source, count, sign):
    """Numbers in [0.05, 1] with one sign."""
    return sign * (0.05 + 0.95 * torch.rand(count, generator=source, dtype=torch.float64))


@every_time
@given(seeds, st.integers(2, 5), st.integers(1, 3), st.integers(1, 3), st.sampled_from([-1.0, 1.0]))
def test_the_parametrization_decides_for_every_attention(seed, tokens, heads, d_head, sign):
    """`H = V diag(lambda) V^-1`, heads taking slices of the eigenbasis."""
    source = generator(seed)
    d_model = heads * d_head
    basis = normal(source, d_model, d_model)
    values = spread(source, d_model, sign)
    path = ValuePath(
        w_v=(torch.diag(values) @ torch.linalg.inv(basis)).view(heads, d_head, d_model),
        w_o=basis.view(d_model, heads, d_head),
    )
    operator = LayerOperator(path=path, attention=random_attention(source, heads, tokens))
    assert asymptotics(operator).regime == ("smoothing" if sign > 0 else "sharpening")
    found = channel_eigenvalues(path)
    assert_same_spectrum(found, values.to(found.dtype))


@every_time
@given(seeds, st.integers(2, 5), st.integers(1, 2), st.integers(1, 3), st.integers(2, 3), st.sampled_from([-1.0, 1.0]))
def test_the_grouped_parametrization_decides_for_every_attention(seed, tokens, n_kv, d_head, group, sign):
    """`W_V^g = V_g^T`, `W_O^h = V_g diag(lambda^h)`: channel j moves by `sum_h lambda_j^h`."""
    source = generator(seed)
    d_model = n_kv * d_head
    basis = torch.linalg.qr(normal(source, d_model, d_model)).Q.view(d_model, n_kv, d_head)
    shares = spread(source, d_model * group, sign).view(n_kv, group, d_head) / group
    w_o = (basis[:, :, None] * shares[None]).flatten(1, 2)
    path = ValuePath(w_v=basis.permute(1, 2, 0), w_o=w_o)
    operator = LayerOperator(path=path, attention=random_attention(source, n_kv * group, tokens))
    assert asymptotics(operator).regime == ("smoothing" if sign > 0 else "sharpening")
    found = channel_eigenvalues(path)
    assert_same_spectrum(found, shares.sum(1).flatten().to(found.dtype))


@every_time
@given(seeds, st.integers(2, 5), st.sampled_from([(-1.0, 0.0), (0.0, 1.0)]), st.sampled_from([(3, 3), (4, 2)]))
def test_replacing_the_spectrum_of_h_keeps_the_guarantee(seed, tokens, interval, heads):
    source = generator(seed)
    n_heads, n_kv = heads
    weights = AttentionWeights(
        w_v=normal(source, n_kv, 2, 6), w_o=normal(source, 6, n_heads, 2), b_v=normal(source, n_kv, 2)
    )
    replaced = kept_weights(weights, EigenvalueForm(low=interval[0], high=interval[1]))
    path = ValuePath(w_v=replaced.w_v, w_o=replaced.w_o)
    found = channel_eigenvalues(path)
    assert found is not None
    assert interval[0] - 1e-9 <= found.real.min()
    assert found.real.max() <= interval[1] + 1e-9
    operator = LayerOperator(path=path, attention=random_attention(source, n_heads, tokens))
    wrong = "sharpening" if interval[1] > 0 else "smoothing"
    assert asymptotics(operator).regime != wrong  # clipped eigenvalues can be zero, and then ties are ties


# --- Dobrushin ------------------------------------------------------------------------------------------------------


def oscillation(y):
    return (y.max(0).values - y.min(0).values).item()


@every_time
@given(seeds, st.integers(2, 7), st.floats(0.01, 3.0), st.floats(0.01, 1.0))
def test_dobrushins_coefficient_bounds_how_channels_contract(seed, tokens, growing, shrinking):
    source = generator(seed)
    attention = random_attention(source, 1, tokens)
    tau = dobrushin(attention).item()
    overlaps = torch.minimum(attention[0][:, None], attention[0][None]).sum(-1)
    assert tau == pytest.approx(1 - overlaps.min().item(), abs=1e-9)
    y = normal(source, tokens, 1)
    mixed = attention[0] @ y
    assert oscillation(mixed) <= tau * oscillation(y) + 1e-12
    assert oscillation(y + growing * mixed) <= (1 + growing * tau) * oscillation(y) + 1e-12
    assert oscillation(y - shrinking * mixed) >= (1 - shrinking * tau) * oscillation(y) - 1e-12


@every_time
@given(seeds, st.integers(2, 6), st.integers(1, 5), st.sampled_from([-1.0, 1.0]))
def test_a_certificate_holds_for_any_features(seed, tokens, channels, sign):
    source = generator(seed)
    attention = random_attention(source, 1, tokens)
    values = spread(source, channels, 0.9 * sign)
    found = certificate(values.to(torch.complex128), dobrushin(attention).item())
    y = normal(source, tokens, channels) + 1.0
    after = y + attention[0] @ y * values
    rates = [oscillation(after[:, j]) / oscillation(y[:, j]) / (1 + values[j].item()) for j in range(channels)]
    assert found.regime == ("smoothing" if sign > 0 else "sharpening")
    if sign > 0:
        assert max(rates) <= found.rate + 1e-9
        assert found.rate < 1
    else:
        assert min(rates) >= found.rate - 1e-9
        assert found.rate > 1


@pytest.mark.parametrize("values", [[0.5, -0.5], [0.0], [-1.5], [0.5 + 0.5j]])
def test_there_is_no_certificate_where_signs_are_mixed_or_eigenvalues_complex(values):
    assert certificate(torch.tensor(values, dtype=torch.complex128), 0.5) is None


def test_coupled_heads_have_no_channels_of_their_own():
    source = generator(0)
    assert channel_eigenvalues(ValuePath(w_v=normal(source, 2, 3, 6), w_o=normal(source, 6, 2, 3))) is None


# --- norms ----------------------------------------------------------------------------------------------------------


@every_time
@given(seeds, st.integers(2, 8), st.sampled_from([-1.0, 1.0]))
def test_positive_norm_weights_keep_the_signs_of_h_and_mixed_ones_do_not(seed, d_model, sign):
    source = generator(seed)
    basis = torch.linalg.qr(normal(source, d_model, d_model)).Q
    h = basis @ torch.diag(spread(source, d_model, sign)) @ basis.T
    weight = normal(source, d_model)
    weight = weight.sign() * (weight.abs() + 0.05)
    weight[0] = -weight[0].abs()
    kept = torch.linalg.eigvals(torch.diag(weight.abs()) @ h)
    torch.testing.assert_close(kept.imag, torch.zeros(d_model, dtype=torch.float64), rtol=0, atol=1e-7)
    assert bool((kept.real * sign > 0).all())
    broken = torch.linalg.eigvals(torch.diag(weight) @ h)
    assert int((broken.real * sign < 0).sum()) == int((weight < 0).sum())


# --- interventions --------------------------------------------------------------------------------------------------


def without_one(attention):
    """Eigenvalues except the one of the all-ones vector."""
    found = torch.linalg.eigvals(attention)
    return (
        torch.cat([found[:k] if k else found[:0], found[k + 1 :]])
        if (k := int((found - 1).abs().argmin())) >= 0
        else found
    )


def both(first, rest):
    return torch.cat([torch.full((1,), first, dtype=torch.complex128), rest])


attention_cases = st.builds(
    lambda seed, tokens, is_causal: random_attention(generator(seed), 1, tokens, is_causal=is_causal)[0],
    seeds,
    st.integers(2, 6),
    st.booleans(),
)


@every_time
@given(attention_cases, st.floats(-0.5, 2.0))
def test_attnscale_scales_every_eigenvalue_but_one(attention, w):
    changed = attn_scale(attention[None], w)[0]
    is_causal = not attention.triu(1).any()
    if is_causal:  # the eigenvalues are the diagonal
        expected = uniform_attention(attention[None])[0].diagonal() * -w + (1 + w) * attention.diagonal()
        assert_same_spectrum(torch.linalg.eigvals(changed), expected.to(torch.complex128))
    else:
        assert_same_spectrum(torch.linalg.eigvals(changed), both(1.0, (1 + w) * without_one(attention)))
    torch.testing.assert_close(changed.sum(-1), torch.ones(len(attention), dtype=torch.float64))


@every_time
@given(attention_cases)
def test_centered_attention_takes_the_one_away(attention):
    changed = centred_attention(attention[None])[0]
    torch.testing.assert_close(changed.sum(-1), torch.zeros(len(attention), dtype=torch.float64))
    if attention.triu(1).any():
        assert_same_spectrum(torch.linalg.eigvals(changed), both(0.0, without_one(attention)))


@every_time
@given(attention_cases, st.floats(-1, 1), st.floats(-1, 1), st.floats(-1, 1))
def test_gfsa_maps_every_eigenvalue_by_its_polynomial(attention, w0, w1, w_k):
    changed = gfsa(attention[None], w0, w1, w_k)[0]
    values = torch.linalg.eigvals(attention)
    expected = w0 + w1 * values + w_k * (values + 3 * (values**2 - values))
    assert_same_spectrum(torch.linalg.eigvals(changed), expected)


@every_time
@given(
    seeds, st.integers(2, 5), st.sampled_from(["attnscale:0.7", "centered", "gfsa:0.2,0.9,-0.3", "featscale:0.3,-0.2"])
)
def test_an_operator_with_changed_attention_still_splits_into_two_parts(seed, tokens, text):
    source = generator(seed)
    attention = what_if(text).attention(random_attention(source, 2, tokens))
    path = ValuePath(w_v=normal(source, 2, 2, 5), w_o=normal(source, 5, 2, 2))
    operator = LayerOperator(path=path, attention=attention)
    verdict = asymptotics(operator)
    whole = torch.linalg.eigvals(dense_reference(operator)).abs().max().item()
    assert max(verdict.dc.value, dense_ac_radius(operator).value) == pytest.approx(whole, rel=1e-6)


def test_featscale_scales_both_parts_of_what_attention_returns():
    source = generator(0)
    attention, x = random_attention(source, 1, 5), normal(source, 5, 3)
    y, changed = attention[0] @ x, feat_scale(attention, 0.3, -0.2)[0] @ x
    torch.testing.assert_close(changed, 1.3 * y.mean(0) + 0.8 * (y - y.mean(0)))
    causal = random_attention(source, 1, 5, is_causal=True)
    y, changed = causal[0] @ x, feat_scale(causal, 0.3, -0.2)[0] @ x
    common = y.cumsum(0) / torch.arange(1, 6)[:, None]  # causal rows see their prefix only
    torch.testing.assert_close(changed, 1.3 * common + 0.8 * (y - common))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("no_skipp", ("what-if", "no_skip")),
        ("neutreno", ("not supported as a what-if", "layer 0", "osm.measure")),
        ("contranorm", ("not supported", "features", "osm.measure")),
    ],
)
def test_unknown_changes_are_named_with_what_is_known(text, pieces):
    with pytest.raises((UnknownName, NotSupported)) as caught:
        what_if(text)
    for piece in pieces:
        assert piece in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "scale",
        "scale:a",
        "scale:1,2",
        "interval:1,0",
        "no_skip:3",
        "gfsa:1",
        "scale:nan",
        "tempscale:0",
        "differential:2",
        "layernorm_scaling:0",
    ],
)
def test_wrong_numbers_are_refused_with_the_right_form(text):
    with pytest.raises(BadValue, match="what_if"):
        what_if(text)


def test_every_change_can_be_made():
    numbers = {0: "", 1: ":0.5", 2: ":-1,0", 3: ":0,1,0.2"}
    whole = {"residual_scaling": ":2", "layernorm_scaling": ":2"}
    source = generator(0)
    weights = AttentionWeights(
        w_v=normal(source, 1, 3, 6),  # read by two heads, so that they can be paired
        w_o=normal(source, 6, 2, 3),
        b_v=normal(source, 1, 3),
        b_o=normal(source, 6),
        norms={"attn_norm": Norm(kind="layer", weight=normal(source, 6), bias=normal(source, 6))},
    )
    layer = AttentionLayer(weights=weights, dtype=torch.float64)
    attention, x = random_attention(source, 2, 5), normal(source, 5, 6)
    before = layer.exact(attention, x).output
    for name, (form, _) in WHAT_IFS.items():
        fewest, _ = counts(form)
        change = what_if(name + whole.get(name, numbers[fewest]))
        assert change.why_not(layer) is None
        changed = change.layer(layer)
        after = changed.exact(change.attention(attention), x).output
        moved = not torch.allclose(changed.skip * x + after, x + before)
        assert moved, name


def test_flipping_the_norms_of_a_post_norm_layer_means_nothing():
    source = generator(0)
    norm = Norm(kind="layer", weight=normal(source, 6))
    weights = AttentionWeights(
        w_v=normal(source, 2, 3, 6), w_o=normal(source, 6, 2, 3), residual="post", norms={"attn_norm": norm}
    )
    assert "modulus" in what_if("flip_norms").why_not(AttentionLayer(weights=weights))
    wide = dataclasses.replace(weights, w_v=normal(source, 4, 3, 6), w_o=normal(source, 6, 4, 3))
    assert "orthonormal" in what_if("interval:-1,0").why_not(AttentionLayer(weights=wide))
