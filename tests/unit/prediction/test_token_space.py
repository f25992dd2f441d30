"""Long sequences solved in the space of a few token patterns, beside Arnoldi on the layer itself."""

from dataclasses import replace

import pytest
import torch

from oversmooth.prediction.asymptotics import asymptotics_each
from oversmooth.prediction.operator import LayerOperator, ValuePath
from oversmooth.prediction.radii import FAR, Problem, TokenSpace, begun_from
from oversmooth.prediction.what_if import what_if
from oversmooth.spectra.krylov import EigenvalueRequest, dominating, dominating_each, generic_start
from tests.unit.prediction.random_layers import asymptotics, generator, normal, one_thread

__all__ = ["one_thread"]
TOKENS = 520


def operator_of(kind: str, seed: int = 0) -> LayerOperator:
    """A layer on many tokens, whose attention is smooth over them, looks at neighbours only, or does so for a few tokens."""
    source = generator(seed)
    place = torch.linspace(0, 1, TOKENS, dtype=torch.float64)
    width = {"smooth": 0.3, "local": 0.02, "few": 0.3}[kind]
    scores = -((place[:, None] - place[None, :]) ** 2) / (2 * width**2) + 0.3 * normal(source, 2, TOKENS, TOKENS)
    if kind == "few":
        scores[:, 100:104, 100:104] += 8.0  # four tokens that see little but each other
    path = ValuePath(w_v=normal(source, 2, 3, 8) / 8**0.5, w_o=normal(source, 8, 2, 3) / 6**0.5)
    return LayerOperator(path=path, attention=scores.softmax(-1), scale=0.7)


def variants(operator: LayerOperator) -> list[LayerOperator]:
    return [operator, replace(operator, skip=0.0), replace(operator, scale=-operator.scale)]


@pytest.mark.parametrize("kind", ["smooth", "local", "few"])
def test_the_token_space_gives_the_radii_of_the_layer_itself(kind):
    operator = operator_of(kind)
    for found, alone in zip(
        asymptotics_each(variants(operator), TokenSpace(operator.attention)),
        (asymptotics(each) for each in variants(operator)),
        strict=True,
    ):
        assert found.ac.value == pytest.approx(alone.ac.value, rel=1e-3)
        assert found.dc.value == pytest.approx(alone.dc.value, rel=1e-9)
        assert alone.regime in (found.regime, "undecided")  # the space may decide what Arnoldi could not
        assert found.ac.converged


def test_smooth_attention_needs_few_products_with_the_layer():
    operator = operator_of("smooth")
    (found,) = asymptotics_each([operator], TokenSpace(operator.attention))
    assert found.ac.applications <= 4 < asymptotics(operator).ac.applications


def test_arnoldi_begins_at_what_is_nearly_right_and_anywhere_where_the_space_says_nothing():
    operator = operator_of("local")
    space, problem = TokenSpace(operator.attention), Problem.of(operator)
    wanted = [problem.wanted(operator, None)]
    (found,) = space.dominating_each(operator, wanted, tolerance=1e-9, finest=1e-9, max_applications=600)
    generic = generic_start(found.vector[0].numel(), like=operator.attention)
    near, far = (replace(found, residual=share * abs(found.value)) for share in (0.5 * FAR, 2 * FAR))
    torch.testing.assert_close(begun_from(generic, [near, far]), generic)
    start = torch.nn.functional.normalize(begun_from(generic, [near]), dim=0)
    assert (start @ sum(found.vector)).abs() > 0.9 * torch.linalg.vector_norm(sum(found.vector))


def test_patterns_are_orthonormal_and_centred_however_often_they_are_widened():
    space = TokenSpace(operator_of("local").attention, patterns=8)
    for _ in range(3):
        space.widen(space.basis[:, :3] + 1.0)  # nothing new but rounding, and what all tokens share
    count = space.basis.shape[1]
    torch.testing.assert_close(space.basis.T @ space.basis, torch.eye(count, dtype=torch.float64))
    torch.testing.assert_close(space.basis.sum(0), torch.zeros(count, dtype=torch.float64))


def test_one_krylov_space_answers_for_every_shift_and_factor():
    matrix = normal(generator(3), 150, 150) / 150**0.5
    wanted = [
        EigenvalueRequest(shift=1.0),
        EigenvalueRequest(),
        EigenvalueRequest(shift=1.0, factor=-1.0),
        EigenvalueRequest(shift=1.0, factor=0.5),
    ]
    options = {"tolerance": 1e-6, "max_applications": 3000}
    found = dominating_each(lambda v: matrix @ v, generic_start(150, like=matrix), wanted, **options)
    values = torch.linalg.eigvals(matrix)
    for wish, answer in zip(wanted, found, strict=True):
        assert abs(answer.value) == pytest.approx((wish.shift + wish.factor * values).abs().max().item(), rel=1e-4)
    alone = sum(
        dominating(
            lambda v: matrix @ v, generic_start(150, like=matrix), shift=w.shift, factor=w.factor, **options
        ).applications
        for w in wanted
    )
    assert found[-1].applications < alone


@pytest.mark.parametrize("name", ["no_skip", "flip_norms", "scale:0.5", "layerscale:0.3", "residual_scaling:12"])
def test_a_what_if_that_shifts_or_scales_says_so_as_its_changed_layer_does(name):
    from oversmooth.models.canonical import AttentionWeights, Norm
    from oversmooth.prediction.ladder import climb
    from oversmooth.prediction.operator import AttentionLayer

    source = generator(5)
    weights = AttentionWeights(
        w_v=normal(source, 2, 3, 8),
        w_o=normal(source, 8, 2, 3),
        norms={"attn_norm": Norm(weight=1 + normal(source, 8), bias=normal(source, 8), kind="layer")},
        residual="pre",
    )
    layer = AttentionLayer(weights=weights, dtype=torch.float64)
    attention, x = normal(source, 2, 7, 7).softmax(-1), normal(source, 7, 8)
    change = what_if(name)
    short = change.operator(layer, climb(layer, attention, x).operator)
    whole = climb(change.layer(layer), attention, x).operator
    torch.testing.assert_close(short.apply(x), whole.apply(x))
