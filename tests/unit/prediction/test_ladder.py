"""The ladder, the growth over depth and the simulation, each against what it stands for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oversmooth.measurement.statistics import rank_correlation, sign_agreement
from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.prediction.asymptotics import Depth
from oversmooth.prediction.ladder import (
    RUNGS,
    SHOWN,
    STEPS,
    carrying_step,
    climb,
    explaining_rung,
    log_ratios,
    recorded_steps,
    simulate,
    typical,
)
from oversmooth.prediction.operator import AttentionLayer, LayerOperator, ValuePath, centre
from tests.unit.prediction.random_layers import (
    asymptotics,
    dense_reference,
    every_time,
    generator,
    layers,
    normal,
    one_thread,  # noqa: F401  (a fixture for the whole module)
    random_attention,
    seeds,
    varying_basis,
)


@every_time
@given(st.one_of(layers(), layers(is_causal=True), layers(skip=0.0)))
def test_the_closed_form_of_rung_1_is_the_mean_over_all_directions(operator):
    n, d = operator.tokens, operator.path.d_model
    matrix, basis = dense_reference(operator), varying_basis(n, d)
    shared = torch.kron(torch.ones(1, n, dtype=torch.float64) / n**0.5, torch.eye(d, dtype=torch.float64))
    gains = [torch.linalg.matrix_norm(rows @ matrix @ rows.T).item() / len(rows) ** 0.5 for rows in (basis, shared)]
    assert typical(operator) == pytest.approx(math.log(gains[0] / gains[1]), abs=1e-9)


@every_time
@given(seeds)
def test_the_closed_form_of_rung_1_is_what_sampling_gives(seed):
    source = generator(seed)
    path = ValuePath(w_v=normal(source, 2, 2, 5), w_o=normal(source, 5, 2, 2) / 2)
    operator = LayerOperator(path=path, attention=random_attention(source, 2, 4), scale=1.5)
    x = normal(source, 500, 4, 5)
    varying, shared = centre(x), x.mean(1, keepdim=True).expand_as(x)
    ac = [part.square().sum((1, 2)) for part in (operator.centred(varying), varying)]
    dc = [part.square().sum((1, 2)) for part in (operator.apply(shared), shared)]
    ratio = math.exp(2 * typical(operator))
    # Zero on average if the closed form is right: E ac' / E ac = ratio * E dc' / E dc.
    difference = ac[0] / ac[1].mean() - ratio * dc[0] / dc[1].mean()
    assert abs(difference.mean().item()) <= 6 * difference.std().item() / 500**0.5


def test_uniform_attention_leaves_what_differs_as_it_is():
    source = generator(0)
    path = ValuePath(w_v=normal(source, 2, 3, 8), w_o=normal(source, 8, 2, 3))
    uniform = torch.full((2, 5, 5), 0.2, dtype=torch.float64)
    h = sum(path.w_o[:, head] @ path.w_v[head] for head in range(2))
    growth = torch.linalg.matrix_norm(torch.eye(8, dtype=torch.float64) + h).item() / 8**0.5
    assert typical(LayerOperator(path=path, attention=uniform)) == pytest.approx(-math.log(growth))


def pre_norm_layer(source, *, d_model=6, biases=True, kind="layer"):
    return AttentionLayer(
        weights=AttentionWeights(
            w_v=normal(source, 2, 3, d_model),
            w_o=normal(source, d_model, 2, 3),
            b_v=normal(source, 2, 3) if biases else None,
            b_o=normal(source, d_model) if biases else None,
            norms={
                "attn_norm": Norm(
                    kind=kind, weight=normal(source, d_model), bias=normal(source, d_model) if biases else None
                )
            },
            gain=normal(source, d_model),
        ),
        epsilon={"attn_norm": 1e-5},
        dtype=torch.float64,
    )


def test_the_exact_branch_is_torchs_layer_norm_and_attention():
    source = generator(0)
    layer = pre_norm_layer(source)
    weights, norm = layer.weights, layer.weights.norms["attn_norm"]
    x, attention = normal(source, 5, 6) * 3, random_attention(source, 2, 5)
    normed = torch.nn.functional.layer_norm(x, (6,), norm.weight, norm.bias, 1e-5)
    expected = sum(attention[h] @ (normed @ weights.w_v[h].T + weights.b_v[h]) @ weights.w_o[:, h].T for h in range(2))
    torch.testing.assert_close(layer.exact(attention, x).output, (expected + weights.b_o) * weights.gain)


def test_rungs_come_together_where_what_they_add_is_absent():
    source = generator(1)
    layer, attention = pre_norm_layer(source, biases=False, kind="rms"), random_attention(source, 2, 5)
    same_length = torch.nn.functional.normalize(normal(source, 5, 6), dim=-1) * 4
    rungs = climb(layer, attention, same_length).rungs
    assert rungs[2] == pytest.approx(rungs[3], abs=1e-9)  # no biases
    assert rungs[3] == pytest.approx(rungs[4], abs=1e-4)  # all tokens have one scale, up to the norm's epsilon
    uniform = torch.full((2, 5, 5), 0.2, dtype=torch.float64)
    rungs = climb(layer, uniform, same_length).rungs
    assert rungs[1] == pytest.approx(rungs[2], abs=1e-9)  # nothing leaks where all tokens are seen equally


def test_rung_5_is_the_change_of_the_stream():
    source = generator(2)
    layer, attention = pre_norm_layer(source), random_attention(source, 2, 7)
    x = normal(source, 7, 6) * torch.linspace(0.2, 9, 7, dtype=torch.float64)[:, None]
    before, after = log_ratios(torch.stack([x, x + layer.exact(attention, x).output]))
    ladder = climb(layer, attention, x)
    assert ladder.rungs[-1] == pytest.approx(after - before, abs=1e-12)
    assert abs(ladder.rungs[3] - ladder.rungs[4]) > 1e-3  # scales differ between tokens here


def test_rung_2_splits_into_the_gains_of_both_parts():
    source = generator(3)
    layer, attention = pre_norm_layer(source), random_attention(source, 2, 5)
    x = normal(source, 5, 6) + 1
    ladder = climb(layer, attention, x)
    operator = ladder.operator
    varying, shared = centre(x), (x - centre(x))
    gain_ac = (operator.centred(varying).norm() / varying.norm()).item()
    gain_dc = (operator.apply(shared).norm() / shared.norm()).item()
    assert ladder.rungs[1] == pytest.approx(math.log(gain_ac / gain_dc))
    third, before = log_ratios(torch.stack([operator.apply(x), x]))
    assert ladder.rungs[2] == pytest.approx(third - before)


def test_a_mean_of_zero_leaves_rungs_without_a_value():
    source = generator(4)
    one = normal(source, 1, 6)
    x = torch.cat([one, -one])  # whose mean is zero to the last bit
    rungs = climb(pre_norm_layer(source), random_attention(source, 2, 2), x).rungs
    assert rungs[0] is not None
    assert rungs[1:] == (None, None, None, None)


def test_the_step_that_carries_the_difference_is_the_largest():
    assert carrying_step((0.0, 0.1, 0.1, 0.5, 0.5, 0.4)) == "coupling"
    assert carrying_step((0.0, 0.1, None, 0.5, 0.5, 0.4)) is None
    assert len(STEPS) == len(RUNGS) - 1


def test_the_explaining_rung_is_the_first_whose_sign_stays_right():
    assert explaining_rung((0.1, -0.1, 0.2, -0.1, -0.2, -0.3), -0.3) == 3
    assert explaining_rung((-0.1, -0.1, -0.2, -0.1, -0.2, -0.3), -0.3) == 0
    assert explaining_rung((-0.1, -0.1, -0.2, -0.1, -0.2, 0.3), -0.3) is None


# --- over depth -----------------------------------------------------------------------------------------------------


def random_stack(source, layers_=4, tokens=4, d_model=5):
    return [
        LayerOperator(
            path=ValuePath(w_v=normal(source, 2, 2, d_model), w_o=normal(source, d_model, 2, 2)),
            attention=random_attention(source, 2, tokens),
            scale=1.0 + layer,
        )
        for layer in range(layers_)
    ]


def test_growth_over_depth_is_that_of_the_product_of_all_layers():
    stack = random_stack(generator(0))
    basis = varying_basis(4, 5)
    shared = torch.kron(torch.ones(1, 4, dtype=torch.float64) / 2, torch.eye(5, dtype=torch.float64))
    depth = Depth(4, 5, stack[0].path.w_v, probes=15)
    products = [torch.eye(15, dtype=torch.float64), torch.eye(5, dtype=torch.float64)]
    for operator in stack:
        depth.pass_through(operator)
        matrix = dense_reference(operator)
        products = [product @ rows @ matrix @ rows.T for product, rows in zip(products, (basis, shared), strict=True)]
    growth = depth.growth()
    ac, dc = (math.log(torch.linalg.matrix_norm(p).item() / len(p) ** 0.5) for p in products)
    assert growth.log_ac == pytest.approx(ac, abs=1e-9)
    assert growth.log_dc == pytest.approx(dc, abs=1e-9)
    assert growth.exponent == pytest.approx((ac - dc) / 4, abs=1e-9)
    leading = [math.log(torch.linalg.matrix_norm(p, ord=2).item()) for p in products]
    assert (growth.leading_ac, growth.leading_dc) == pytest.approx(leading, abs=1e-9)


def test_a_deep_stack_of_one_layer_grows_at_the_rate_of_its_radii():
    (operator,) = random_stack(generator(1), layers_=1)
    depth = Depth(4, 5, operator.path.w_v)
    for _ in range(400):
        depth.pass_through(operator)
    assert depth.growth().exponent == pytest.approx(asymptotics(operator).exponent, abs=0.02)


def test_a_part_that_vanishes_has_no_growth():
    path = ValuePath(w_v=torch.zeros(1, 1, 3, dtype=torch.float64), w_o=torch.zeros(3, 1, 1, dtype=torch.float64))
    depth = Depth(3, 3, path.w_v)
    depth.pass_through(LayerOperator(path=path, attention=random_attention(generator(0), 1, 3), skip=0.0))
    assert depth.growth() is None


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_simulation_reaches_what_the_theorem_says(sign):
    source = generator(2)
    basis = torch.linalg.qr(normal(source, 6, 6)).Q
    values = sign * torch.linspace(0.3, 0.9, 6, dtype=torch.float64)
    path = ValuePath(w_v=basis.T.reshape(2, 3, 6), w_o=(basis * values).view(6, 2, 3))
    operator = LayerOperator(path=path, attention=random_attention(source, 2, 8))
    steps = simulate(operator, normal(source, 8, 6), 300)
    last = dict(zip(SHOWN, steps[-1].values, strict=True))
    if sign > 0:
        assert asymptotics(operator).regime == "smoothing"
        assert last["cosine"] > 0.9999
    else:
        assert asymptotics(operator).regime == "sharpening"
        assert 1 < last["hfc_lfc"] < 1e3  # not infinite: what differs leaks into what tokens share
        assert last["cosine"] < 0.9


def test_recorded_steps_are_round_numbers_and_the_last():
    assert recorded_steps(30) == [0, 1, 2, 5, 10, 20, 30]
    assert recorded_steps(1) == [0, 1]


# --- agreement ------------------------------------------------------------------------------------------------------


def test_agreement_counts_signs_and_compares_ranks():
    from scipy.stats import spearmanr

    a, b = [0.3, -0.2, 0.1, 0.1, 5.0], [0.2, -0.1, -0.3, 0.4, 0.4]
    assert sign_agreement(a, b) == 0.8
    assert rank_correlation(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert rank_correlation([1.0, 2.0], [1.0, 2.0]) is None
    assert rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
    assert sign_agreement([], []) is None
