"""Spectral radii of a layer: `rho_dc` of what all tokens share and `rho_ac` of what differs between them.

The rows of attention sum to one number per head, so T maps what all tokens share onto itself. Its spectrum is that of
`skip + H / scale` together with that of the centred operator: a small exact problem, and one for Arnoldi.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.prediction.theory.arnoldi import Dominating, dominating, dominating_each, generic_start
from oversmooth.prediction.theory.causal import causal_radius
from oversmooth.prediction.theory.operator import LayerOperator, centre
from oversmooth.prediction.theory.radius import ROUNDING, Radius, exact_radius, krylov_radius, with_idle
from oversmooth.prediction.theory.token_space import Problem, TokenSpace, begun_from

DENSE_DC = 512
"""Largest DC problem whose eigenvalues are all computed; larger ones are searched until only rounding is left."""
DENSE_AC = 256
"""Largest AC problem (tokens times features) whose eigenvalues are all computed."""
COARSE, FINE = 1e-3, {torch.float32: 4e-6, torch.float64: 1e-10}
"""Residuals, relative to the modulus. The coarse one is enough unless DC and AC are closer than its error bound."""
CAUSAL = 1e-5
"""Accuracy of the radius from diagonals, which costs little."""
MAX_APPLICATIONS = 600


# --- what all tokens share ------------------------------------------------------------------------------------------


def dc_radius(operator: LayerOperator) -> Radius:
    """`rho_dc = max |skip + lambda(H) / scale|`, growth of what all tokens share; a problem of the size of H's core."""
    path, shift, factor = operator.path, operator.skip, 1.0 / operator.scale
    is_softmax = bool(torch.isclose(operator.row_sums, torch.ones_like(operator.row_sums), atol=1e-4).all())
    if path.after_weight is not None:  # acts on the skip connection too, so that nothing can be kept or reduced
        value_map = path.dc_map(operator.row_sums)
        eye = torch.eye(path.d_model, dtype=path.w_v.dtype, device=path.w_v.device)
        matrix = path.after(shift * eye + factor * (value_map.left @ value_map.right).T).cpu().double()
        shift, factor = 0.0, 1.0
    else:
        matrix = path.dc_core if is_softmax else path.dc_map(operator.row_sums).core.cpu().double()
    if len(matrix) > DENSE_DC:
        found = _searched(matrix, shift, factor, path.w_v.dtype)
    else:
        is_kept = is_softmax and path.after_weight is None
        values = path.dc_eigenvalues if is_kept else torch.linalg.eigvals(matrix)
        found = exact_radius(shift + factor * values, path.w_v.dtype)
    return with_idle(found, operator.skip, path.idle_features)


def _searched(matrix: Float[Tensor, "size size"], shift: float, factor: float, dtype: torch.dtype) -> Radius:
    """By Arnoldi until only rounding is left; by all eigenvalues where that does not converge."""
    found = dominating(
        lambda x: matrix @ x,
        generic_start(len(matrix), like=matrix),
        shift=shift,
        factor=factor,
        tolerance=ROUNDING[dtype] / 10,
        max_applications=MAX_APPLICATIONS,
    )
    if not found.converged:
        return exact_radius(shift + factor * torch.linalg.eigvals(matrix), dtype)
    radius = krylov_radius(found, abs(found.value))
    margin = ROUNDING[dtype] * radius.value
    return replace(radius, low=radius.low - margin, high=radius.high + margin)


def norm_bound(operator: LayerOperator, head_sizes: Float[Tensor, " head"]) -> float:
    """`(|skip| + sum_h size_h norm(H_h) / scale) norm(N)`, which no eigenvalue exceeds."""
    heads = (head_sizes.abs() * operator.path.head_norms).sum().item()
    return (abs(operator.skip) + heads / abs(operator.scale)) * operator.path.after_norm


# --- what differs between tokens ------------------------------------------------------------------------------------


def ac_radius(
    operator: LayerOperator,
    *,
    tolerance: float = COARSE,
    against: float | None = None,
    max_applications: int = MAX_APPLICATIONS,
) -> Radius:
    """`rho_ac`: spectral radius of `X -> P T(X)` on centred X, growth of what differs between tokens.

    All eigenvalues where the problem is small, the diagonals where attention is causal, otherwise Arnoldi until the
    residual is below `tolerance` times the modulus, and below what separates the radius from `against`. Undefined for a
    single token.
    """
    return ac_radii([operator], [against], tolerance=tolerance, max_applications=max_applications)[0]


def ac_radii(
    operators: Sequence[LayerOperator],
    against: Sequence[float | None],
    *,
    space: TokenSpace | None = None,
    tolerance: float = COARSE,
    max_applications: int = MAX_APPLICATIONS,
) -> list[Radius]:
    """`rho_ac` of operators with one value path and one attention, which differ in skip connection and scale only.

    All are read from one Krylov space, in the token space of a long sequence where it is given.
    """
    first = operators[0]
    assert first.tokens > 1, "one token has nothing to differ from"
    if first.tokens * first.path.d_model <= DENSE_AC:
        return [dense_ac_radius(operator) for operator in operators]
    if first.is_causal:
        finer = min(tolerance, CAUSAL)
        return [causal_radius(item, tolerance=finer, max_applications=max_applications) for item in operators]
    if not first.path.is_reducible and len(operators) > 1:  # the norm after the sum acts on the skip connection too
        each = [ac_radii([a], [b], space=space, tolerance=tolerance) for a, b in zip(operators, against, strict=True)]
        return [radius for (radius,) in each]
    problem = Problem.of(first)
    wanted = [problem.wanted(item, number) for item, number in zip(operators, against, strict=True)]
    options = {"tolerance": tolerance, "finest": FINE[first.path.w_v.dtype], "max_applications": max_applications}
    start = centre(generic_start(first.tokens, problem.width, like=first.path.w_v)).flatten()
    found: list[Dominating | None] = [None] * len(wanted)
    if space is not None:
        in_space = space.dominating_each(first, wanted, **options)  # type: ignore[arg-type]
        found = [answer if answer.converged else None for answer in in_space]
        start = begun_from(start, [answer for answer in in_space if not answer.converged])
    rest = [wish for wish, answer in zip(wanted, found, strict=True) if answer is None]
    direct = iter(dominating_each(problem.step, start, rest, **options))  # type: ignore[arg-type]
    answers = [answer or next(direct) for answer in found]
    return [_ac_radius(*item) for item in zip(operators, answers, against, strict=True)]


def _ac_radius(operator: LayerOperator, found: Dominating, against: float | None) -> Radius:
    """What was found for one operator, with its direction in the features unless `against` dominates it."""
    path, n = operator.path, operator.tokens
    vector = None
    if against is None or abs(found.value) >= against:
        parts = torch.stack(found.vector).view(2, n, -1)
        vector = tuple(operator.mixed(parts) @ path.output_rows if path.is_reducible else parts)
    upper = float("inf") if found.converged else norm_bound(operator, attention_norms(operator))
    radius = krylov_radius(found, upper, vector=vector)
    return with_idle(radius, operator.skip, (n - 1) * path.idle_features)


def dense_ac_radius(operator: LayerOperator) -> Radius:
    """The same from all eigenvalues of the matrix of the centred operator, of size tokens times d_model."""
    n, d = operator.tokens, operator.path.d_model
    eye = torch.eye(n * d, dtype=operator.path.w_v.dtype, device=operator.path.w_v.device).view(n * d, n, d)
    matrix = operator.centred(centre(eye)).flatten(1)
    values, vectors = torch.linalg.eig(matrix.T.cpu().double())  # rows of features are mapped from the right
    dominating_one = vectors[:, values.abs().argmax()].view(n, d).to(matrix.device)
    return replace(exact_radius(values, matrix.dtype), vector=(dominating_one.real, dominating_one.imag))


def attention_norms(operator: LayerOperator) -> Float[Tensor, " head"]:
    """Upper bounds `sqrt(norm_1 norm_inf)` of the largest singular value of every `P A_h`."""
    varying = operator.attention - operator.attention.mean(1, keepdim=True)
    return (varying.abs().sum(1).amax(-1) * varying.abs().sum(2).amax(-1)).sqrt()
