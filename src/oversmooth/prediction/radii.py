"""The spectral radii rho_dc and rho_ac of a layer, with error bounds.

No token sees a later one, so T is block lower-triangular over tokens, with blocks `skip + sum_h a^h_tt H_h / scale`,
and its spectrum is that of the blocks. Token 1 sees only itself: its block is the DC block. So

    rho_ac = max over t >= 2 of rho(skip + sum_h a^h_tt H_h / scale).

Each block acts on one token, in the value channels where the layer can be reduced to them. Where all blocks together
are small, all their eigenvalues are computed. Otherwise a few Arnoldi steps on all tokens at once rank them, and the
leading ones are solved until none of the rest can exceed the best.

Every view of a layer, and every what-if that leaves attention alone, mixes tokens by the same maps `A_h`. Those maps
carry most features into a small space of patterns over tokens, which a random sketch finds. With Q its orthonormal
basis, `Q^T A_h Q` stands for `A_h`, and Arnoldi in that space costs a fraction of a product with the layer:

    sketch     Q = orth [P A_1 G_1, ..., P A_H G_H], G_h random, twice passed through A_h
    solve      the dominating eigenpair (theta, z) with Q^T A_h Q in place of A_h
    check      residual of Q z under the layer itself: one product (two for a conjugate pair)
    widen      where it is too large, Q takes the patterns of the residual in, and the problem is solved again

An answer is accepted by the same residual as one from Arnoldi on the layer itself. Where it does not become small, the
vector found is where Arnoldi begins. Attention that looks at neighbours only is not carried into few patterns: there the
first residual is large, and Arnoldi begins anywhere, because a direction that is nearly an eigenvector would hide a larger
eigenvalue of a few tokens.

The rows of attention sum to one number per head, so T maps what all tokens share onto itself. Its spectrum is that of
`skip + H / scale` together with that of the centred operator: a small exact problem, and one for Arnoldi.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from oversmooth.prediction.operator import LayerOperator, centre
from oversmooth.spectra.krylov import (
    DominantEigenvalue,
    EigenvalueRequest,
    dominating,
    dominating_each,
    generic_start,
    is_converged,
)

# --- A spectral radius with everything that is known about it ---

TIE = 1e-6
"""Moduli that differ by less, relatively, count as equal."""
REAL = 1e-6
"""Imaginary parts below this, relative to the modulus, count as zero."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 3e-6}
"""Relative error that rounding leaves in an eigenvalue of a matrix of this precision."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Radius:
    """The largest modulus of an eigenvalue, with bounds and the eigenvalue that has it."""

    value: float
    eigenvalue: complex
    low: float
    high: float
    """Bounds of the radius: to first order from the residual where it converged, otherwise `high` from norms."""
    residual: float
    """Relative to the modulus; 0 where every eigenvalue was computed."""
    route: str
    """`dense`: every eigenvalue; `krylov`: restarted Arnoldi; `diagonals`: each token's block (causal attention)."""
    applications: int
    """Applications of the operator."""
    converged: bool
    dimension: int
    """Eigenvalues that have this modulus, as far as they are known."""
    vector: tuple[Float[Tensor, "token d_model"], Float[Tensor, "token d_model"]] | None = None
    """Real and imaginary part of the features in the dominating direction, where they were computed."""


def exact_radius(values: Complex[Tensor, " count"], dtype: torch.dtype, route: str = "dense") -> Radius:
    """The radius of a list of all eigenvalues of a matrix that was computed in `dtype`."""
    moduli = values.abs()
    best = values[moduli.argmax()]
    rho = best.abs().item()
    return Radius(
        value=rho,
        eigenvalue=complex(best),
        low=rho * (1 - ROUNDING[dtype]),
        high=rho * (1 + ROUNDING[dtype]),
        residual=0.0,
        route=route,
        applications=0,
        converged=True,
        dimension=int((moduli >= rho * (1 - TIE)).sum()),
    )


def krylov_radius(
    found: DominantEigenvalue, upper: float, vector: tuple[Tensor, Tensor] | None = None, route: str = "krylov"
) -> Radius:
    """The radius that Arnoldi found; `upper` bounds it from above where the search ended early."""
    rho = abs(found.value)
    return Radius(
        value=rho,
        eigenvalue=found.value,
        low=max(rho - found.error, 0.0),
        high=rho + found.error if found.converged else max(upper, rho),
        residual=found.residual / max(rho, torch.finfo(torch.float64).tiny),
        route=route,
        applications=found.applications,
        converged=found.converged,
        dimension=found.near,
        vector=vector,
    )


def with_idle(radius: Radius, skip: float, count: int) -> Radius:
    """The radius with `count` further eigenvalues `skip`, those of features outside every value channel."""
    idle = abs(skip)
    if not count or radius.value > idle * (1 + TIE):
        return radius
    ties = radius.dimension if radius.value >= idle * (1 - TIE) else 0
    # Where the other eigenvalues are known to be smaller, the radius is exactly that of the idle features.
    high = max(idle, radius.high) if ties or not radius.converged else idle
    return replace(
        radius, value=idle, eigenvalue=complex(skip), low=idle, high=high, dimension=ties + count, vector=None
    )


# --- `rho_ac` under causal attention, exactly, from the diagonals of the attention maps ---

DENSE_WORK = 4e8
"""Tokens times block size cubed up to which every eigenvalue of every block is computed: about a second."""
DENSE_BLOCK = 512
"""Largest single block that is solved by all its eigenvalues."""
STEPS = 24
"""Arnoldi steps that rank the tokens."""
AT_ONCE = 5e7
"""Numbers in the bases of the tokens that are ranked together."""
SOLVED = 12
"""Tokens that are solved one by one at most."""


def causal_radius(operator: LayerOperator, *, tolerance: float, max_applications: int) -> Radius:
    """The spectral radius of the centred operator of a layer whose attention is causal."""
    blocks = _Blocks(operator)
    count, size = len(blocks.weights), blocks.size
    if count * size**3 <= DENSE_WORK:
        return blocks.with_idle(exact_radius(blocks.eigenvalues(range(count)), blocks.weights.dtype, "diagonals"))
    upper = blocks.ranked()
    best: Radius | None = None
    used = STEPS
    for token in upper.argsort(descending=True)[:SOLVED].tolist():
        if best is not None and upper[token].item() <= best.value * (1 + tolerance):
            break
        found = blocks.solve(token, tolerance, max_applications)
        used += found.applications
        is_better = best is None or found.value > best.value
        best = found if is_better else best
        upper[token] = found.high
    assert best is not None, "causal attention has at least two tokens"
    high = max(best.high, upper.max().item())
    is_certain = high <= best.value * (1 + tolerance) or high <= best.high
    best = replace(best, high=high, applications=used, converged=best.converged and is_certain)
    return blocks.with_idle(best)


class _Blocks:
    """The diagonal blocks of tokens 2 to n, acting on rows."""

    def __init__(self, operator: LayerOperator):
        self.operator = operator
        self.path = operator.path
        self.weights = operator.facts.diagonals[1:]
        self.is_reduced = self.path.is_reducible
        self.size = self.path.channels if self.is_reduced else self.path.d_model
        self.factor = 1.0 / operator.scale
        self.shift = operator.skip if self.is_reduced else 0.0

    def step(self, x: Float[Tensor, "token size"], weights: Float[Tensor, "token head"]) -> Float[Tensor, "token size"]:
        """One product with every token's block: `theta`, where the eigenvalue of T is `shift + theta`."""
        path = self.path
        values = x if self.is_reduced else x @ path.value_rows.T
        values = values.unflatten(-1, (path.n_kv, path.d_head)).repeat_interleave(path.n_heads // path.n_kv, 1)
        mixed = (values * weights[..., None]).flatten(1)
        if self.is_reduced:
            return self.factor * (mixed @ path.core)
        return path.after(self.operator.skip * x + self.factor * (mixed @ path.output_rows))

    def eigenvalues(self, tokens: range | list[int]) -> Complex[Tensor, " count"]:
        """All eigenvalues of T in the blocks of these tokens."""
        eye = torch.eye(self.size, dtype=self.weights.dtype, device=self.weights.device)
        found = [
            torch.linalg.eigvals(self.step(eye, self.weights[token].expand(self.size, -1)).cpu().double())
            for token in tokens
        ]
        return self.shift + torch.cat(found)

    def with_idle(self, radius: Radius) -> Radius:
        return with_idle(radius, self.operator.skip, len(self.weights) * self.path.idle_features)

    def solve(self, token: int, tolerance: float, max_applications: int) -> Radius:
        if self.size <= DENSE_BLOCK:
            return exact_radius(self.eigenvalues([token]), self.weights.dtype, "diagonals")
        weights = self.weights[token : token + 1]
        found = dominating(
            lambda x: self.step(x[None], weights)[0],
            generic_start(self.size, like=weights),
            shift=self.shift,
            tolerance=tolerance,
            max_applications=max_applications,
        )
        bound = abs(self.operator.skip) + abs(self.factor) * (weights[0].abs() * self.path.head_norms).sum().item()
        return krylov_radius(found, bound * self.path.after_norm, route="diagonals")

    def ranked(self) -> Float[Tensor, " token"]:
        """An upper estimate of the radius of every block, in groups that fit into memory."""
        group = max(1, int(AT_ONCE / (STEPS * self.size)))
        return torch.cat([self._ranked(weights) for weights in self.weights.split(group)])

    def _ranked(self, w: Float[Tensor, "token head"]) -> Float[Tensor, " token"]:
        """Arnoldi without restart on all tokens at once: the radius of each block plus its first-order error bound."""
        count, steps = len(w), min(STEPS, self.size)
        basis = w.new_zeros(steps + 1, count, self.size)
        projected = torch.zeros(count, steps + 1, steps, dtype=torch.float64)
        basis[0] = torch.nn.functional.normalize(generic_start(self.size, like=w).expand(count, -1), dim=-1)
        for j in range(steps):
            x = self.step(basis[j], w)
            for _ in range(2):
                h = torch.einsum("jts,ts->tj", basis[: j + 1], x)
                x = x - torch.einsum("tj,jts->ts", h, basis[: j + 1])
                projected[:, : j + 1, j] += h.double().cpu()
            norm = torch.linalg.vector_norm(x, dim=-1)
            projected[:, j + 1, j] = norm.double().cpu()
            basis[j + 1] = x / norm.clamp(min=torch.finfo(w.dtype).tiny)[:, None]
        values, vectors = torch.linalg.eig(projected[:, :steps])
        best = (self.shift + values).abs().argmax(-1)
        row = torch.arange(count)
        y = vectors[row, :, best]
        lefts = torch.linalg.pinv(vectors)[row, best]  # rows of the inverse: left eigenvectors, condition = their norm
        residual = projected[:, steps, steps - 1].abs() * y[:, -1].abs()
        error = residual * torch.linalg.vector_norm(lefts, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
        return (self.shift + values[row, best]).abs() + error


# --- eigenvalues of long sequences from a few patterns over their tokens: Rayleigh-Ritz ---

MANY_TOKENS = 512
"""Sequences from this length on are solved in their token space; shorter ones cost little as they are."""
PATTERNS = 192
"""Patterns of the first sketch, shared by all heads."""
SKETCHES = 3
"""Passes of the sketch through attention: later ones lean towards what attention keeps."""
WIDENED_BY = 24
"""Patterns taken from each part of a residual."""
ROUNDS = 4
"""Times the problem is solved in the space at most, as long as each halves the residual; then Arnoldi goes on with the
layer itself."""
FAR = 0.05
"""Residual, relative to the modulus, of a first answer that says nothing about the layer itself."""
WIDEST = 0.25
"""Share of all patterns beyond which the space is not widened any more: attention like this needs every pattern."""
GENERIC_PART = 1e-2
"""Generic part of a start that comes from an earlier answer."""
SAME = 1e-9
"""Relative distance of two eigenvalues from one Krylov space up to which they are the same one."""
SHARE = 0.3
"""Share of the tolerance that the search inside the space may use up."""


class TokenSpace:
    """Centred patterns over the tokens of one sequence, and what its attention makes of them."""

    def __init__(self, attention: Float[Tensor, "head token token"], patterns: int = PATTERNS):
        self.attention = attention
        heads, tokens, _ = attention.shape
        each = max(1, min(patterns, tokens - 1) // heads)
        seen = centre(generic_start(heads, tokens, each, like=attention))
        for _ in range(SKETCHES):
            seen = torch.linalg.qr(centre(attention @ seen)).Q
        self.basis: Float[Tensor, "token pattern"] = attention.new_empty(tokens, 0)
        self._moved: Float[Tensor, "head token pattern"] = attention.new_empty(heads, tokens, 0)
        self.widen(seen.transpose(0, 1).flatten(1))

    def widen(self, directions: Float[Tensor, "token direction"]) -> None:
        """Takes more patterns in, as far as they are new."""
        room = len(self.basis) - 1 - self.basis.shape[1]
        directions = directions[:, : max(room, 0)]
        for _ in range(2):  # once is not enough where little is new
            directions = centre(directions)
            directions = torch.linalg.qr(directions - self.basis @ (self.basis.T @ directions)).Q
        self.basis = torch.cat([self.basis, directions], 1)
        self._moved = torch.cat([self._moved, self.attention @ directions], 2)
        self.mixing: Float[Tensor, "head pattern pattern"] = self.basis.T @ self._moved

    def dominating_each(
        self,
        operator: LayerOperator,
        wanted: Sequence[EigenvalueRequest],
        *,
        tolerance: float,
        finest: float,
        max_applications: int,
    ) -> list[DominantEigenvalue]:
        """As `arnoldi.dominating_each` answers for the centred operator; not `converged` where the space is too small.

        Products are counted where they are with the layer itself. The operator must mix tokens by the attention of this
        space.
        """
        true = Problem.of(operator)
        answers: list[DominantEigenvalue] = []
        starts: list[Tensor] = []
        farthest = float("inf")
        for _ in range(ROUNDS):
            pending = [k for k in range(len(wanted)) if not answers or not answers[k].converged]
            small = Problem.of(replace(operator, attention=self.mixing), is_centred=True)
            found = dominating_each(
                small.step,
                self._start(true.width, starts),
                [replace(wanted[k], against=None) for k in pending],
                tolerance=SHARE * tolerance,
                max_applications=max_applications,
            )
            steps: dict[complex, list[Tensor]] = {}  # operators that shift and scale one map share most directions
            checked = [
                self._checked(true, wanted[k], item, steps, tolerance, finest)
                for k, item in zip(pending, found, strict=True)
            ]
            new = dict(zip(pending, (answer for answer, _ in checked), strict=True))
            answers = [_nearer(new.get(k), answers[k] if answers else None) for k in range(len(wanted))]
            open_ones = [k for k, (answer, _) in enumerate(checked) if not answer.converged]
            far = max((how_far(checked[k][0]) for k in open_ones), default=0.0)
            if not open_ones or self.basis.shape[1] >= WIDEST * len(self.basis) or far > min(farthest / 2, FAR):
                break
            farthest = far
            starts = [sum(part.view(-1, true.width) for part in found[k].vector) for k in open_ones]  # type: ignore[misc]
            left = [part for theta in {checked[k][1] for k in open_ones} for part in steps[theta]]
            mixes = generic_start(true.width, WIDENED_BY, like=self.basis)
            self.widen(torch.cat([residual @ mixes for residual in left], 1))
        return answers

    def _start(self, width: int, earlier: Sequence[Float[Tensor, "pattern width"]]) -> Float[Tensor, " size"]:
        """A generic start, or what was found in a smaller space with a generic part, so that nothing is out of sight."""
        generic = torch.nn.functional.normalize(generic_start(self.basis.shape[1] * width, like=self.basis), dim=0)
        if not earlier:
            return generic
        start = GENERIC_PART * generic.view(-1, width)
        for vector in earlier:
            start[: len(vector)] += vector
        return start.flatten()

    def _checked(
        self,
        true: "Problem",
        wanted: EigenvalueRequest,
        found: DominantEigenvalue,
        steps: dict[complex, list[Tensor]],
        tolerance: float,
        finest: float,
    ) -> tuple[DominantEigenvalue, complex]:
        """The answer with its residual under the layer itself, and the eigenvalue of the map under which `steps` keeps it.

        A shift does not move that residual and a factor multiplies it, so that it is computed once.
        """
        lifted = [self.basis @ part.view(-1, true.width) for part in found.vector]
        theta = (found.value - wanted.shift) / wanted.factor
        known = next((key for key in steps if abs(key - theta) <= SAME * abs(theta)), None)
        if known is None:
            steps[theta] = true.residual(lifted, theta)
        residual = steps[theta if known is None else known]
        size = torch.linalg.vector_norm(torch.stack(lifted))
        error = abs(wanted.factor) * (torch.linalg.vector_norm(torch.stack(residual)) / size).item()
        is_enough = is_converged(error, abs(found.value), lambda: found.condition, wanted.against, tolerance, finest)
        answer = replace(
            found,
            residual=error,
            vector=(lifted[0].flatten(), lifted[1].flatten()),
            applications=len(residual) if known is None else 0,
            converged=found.converged and is_enough,
        )
        return answer, theta if known is None else known


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Problem:
    """The centred operator as a map to be shifted and scaled, in value channels where that is possible."""

    step: Callable[[Tensor], Tensor]
    width: int
    is_reduced: bool

    @classmethod
    def of(cls, operator: LayerOperator, *, is_centred: bool = False) -> "Problem":
        """`is_centred` where attention maps between patterns that are centred already."""
        path, is_reduced = operator.path, operator.path.is_reducible
        width = path.channels if is_reduced else path.d_model

        def step(v: Tensor) -> Tensor:
            x = v.view(-1, width)
            x = operator.mixed(x) @ path.core if is_reduced else operator.apply(x)
            return (x if is_centred else centre(x)).flatten()

        return cls(step=step, width=width, is_reduced=is_reduced)

    def wanted(self, operator: LayerOperator, against: float | None) -> EigenvalueRequest:
        """What an operator with this map, a skip connection and a scale of its own asks for."""
        if not self.is_reduced:
            return EigenvalueRequest(against=against)
        return EigenvalueRequest(shift=operator.skip, factor=1.0 / operator.scale, against=against)

    def residual(self, parts: Sequence[Tensor], theta: complex) -> list[Tensor]:
        """`(step - theta) z` for the real part of z, and for its imaginary part where theta has one."""
        if theta.imag == 0.0:
            return [self.step(parts[0]).view_as(parts[0]) - theta.real * parts[0]]
        first, second = (self.step(part).view_as(part) - theta.real * part for part in parts)
        return [first + theta.imag * parts[1], second - theta.imag * parts[0]]


def how_far(found: DominantEigenvalue) -> float:
    """The residual relative to the modulus."""
    return found.residual / abs(found.value) if found.value else float("inf")


def _nearer(new: DominantEigenvalue | None, old: DominantEigenvalue | None) -> DominantEigenvalue:
    """The answer with the smaller residual: a wider space can show an eigenvalue that the layer does not have."""
    both = [answer for answer in (new, old) if answer is not None]
    return min(both, key=lambda answer: (not answer.converged, how_far(answer)))


def begun_from(generic: Float[Tensor, " size"], found: Sequence[DominantEigenvalue]) -> Float[Tensor, " size"]:
    """A start for Arnoldi from directions that are nearly right, with a generic part; generic where one of them is far."""
    if not found or any(how_far(item) > FAR for item in found):
        return generic
    return GENERIC_PART * torch.nn.functional.normalize(generic, dim=0) + sum(sum(item.vector) for item in found)


# --- spectral radii of a layer: `rho_dc` of what all tokens share and `rho_ac` of what differs between ---

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
    is_softmax = bool(torch.isclose(operator.facts.row_sums, torch.ones_like(operator.facts.row_sums), atol=1e-4).all())
    if path.after_weight is not None:  # acts on the skip connection too, so that nothing can be kept or reduced
        value_map = path.dc_map(operator.facts.row_sums)
        eye = torch.eye(path.d_model, dtype=path.w_v.dtype, device=path.w_v.device)
        matrix = path.after(shift * eye + factor * (value_map.left @ value_map.right).T).cpu().double()
        shift, factor = 0.0, 1.0
    else:
        matrix = path.dc_core if is_softmax else path.dc_map(operator.facts.row_sums).core.cpu().double()
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


# --- what differs between tokens ------------------------------------------------------------------------------------


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
    if first.facts.is_causal:
        finer = min(tolerance, CAUSAL)
        return [causal_radius(item, tolerance=finer, max_applications=max_applications) for item in operators]
    if not first.path.is_reducible and len(operators) > 1:  # the norm after the sum acts on the skip connection too
        each = [ac_radii([a], [b], space=space, tolerance=tolerance) for a, b in zip(operators, against, strict=True)]
        return [radius for (radius,) in each]
    problem = Problem.of(first)
    wanted = [problem.wanted(item, number) for item, number in zip(operators, against, strict=True)]
    options = {"tolerance": tolerance, "finest": FINE[first.path.w_v.dtype], "max_applications": max_applications}
    start = centre(generic_start(first.tokens, problem.width, like=first.path.w_v)).flatten()
    found: list[DominantEigenvalue | None] = [None] * len(wanted)
    if space is not None:
        in_space = space.dominating_each(first, wanted, **options)  # type: ignore[arg-type]
        found = [answer if answer.converged else None for answer in in_space]
        start = begun_from(start, [answer for answer in in_space if not answer.converged])
    rest = [wish for wish, answer in zip(wanted, found, strict=True) if answer is None]
    direct = iter(dominating_each(problem.step, start, rest, **options))  # type: ignore[arg-type]
    answers = [answer or next(direct) for answer in found]
    return [_ac_radius(*item) for item in zip(operators, answers, against, strict=True)]


def _ac_radius(operator: LayerOperator, found: DominantEigenvalue, against: float | None) -> Radius:
    """What was found for one operator, with its direction in the features unless `against` dominates it."""
    path, n = operator.path, operator.tokens
    vector = None
    if against is None or abs(found.value) >= against:
        parts = torch.stack(found.vector).view(2, n, -1)
        vector = tuple(operator.mixed(parts) @ path.output_rows if path.is_reducible else parts)
    upper = float("inf") if found.converged else _norm_bound(operator)
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


def _norm_bound(operator: LayerOperator) -> float:
    """`(|skip| + sum_h norm(P A_h) norm(H_h) / scale) norm(N)`, which no eigenvalue exceeds.

    `sqrt(norm_1 norm_inf)` bounds the largest singular value of every `P A_h`.
    """
    varying = (operator.attention - operator.attention.mean(1, keepdim=True)).abs()
    sizes = (varying.sum(1).amax(-1) * varying.sum(2).amax(-1)).sqrt()
    heads = (sizes * operator.path.head_norms).sum().item()
    return (abs(operator.skip) + heads / abs(operator.scale)) * operator.path.after_norm
