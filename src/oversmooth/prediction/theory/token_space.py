"""Eigenvalues of long sequences from a few patterns over their tokens: Rayleigh-Ritz, with the true residual.

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
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.prediction.theory.arnoldi import Dominating, Wanted, dominating_each, generic_start, is_converged
from oversmooth.prediction.theory.operator import LayerOperator, centre

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
        wanted: Sequence[Wanted],
        *,
        tolerance: float,
        finest: float,
        max_applications: int,
    ) -> list[Dominating]:
        """As `arnoldi.dominating_each` answers for the centred operator; not `converged` where the space is too small.

        Products are counted where they are with the layer itself. The operator must mix tokens by the attention of this
        space.
        """
        true = Problem.of(operator)
        answers: list[Dominating] = []
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
        wanted: Wanted,
        found: Dominating,
        steps: dict[complex, list[Tensor]],
        tolerance: float,
        finest: float,
    ) -> tuple[Dominating, complex]:
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
        path = operator.path
        finish = torch.flatten if is_centred else lambda x: centre(x).flatten()
        if path.is_reducible:
            width = path.channels
            return cls(
                step=lambda v: finish(operator.mixed(v.view(-1, width)) @ path.core), width=width, is_reduced=True
            )
        width = path.d_model
        return cls(step=lambda v: finish(operator.apply(v.view(-1, width))), width=width, is_reduced=False)

    def wanted(self, operator: LayerOperator, against: float | None) -> Wanted:
        """What an operator with this map, a skip connection and a scale of its own asks for."""
        if not self.is_reduced:
            return Wanted(against=against)
        return Wanted(shift=operator.skip, factor=1.0 / operator.scale, against=against)

    def residual(self, parts: Sequence[Tensor], theta: complex) -> list[Tensor]:
        """`(step - theta) z` for the real part of z, and for its imaginary part where theta has one."""
        if theta.imag == 0.0:
            return [self.step(parts[0]).view_as(parts[0]) - theta.real * parts[0]]
        first, second = (self.step(part).view_as(part) - theta.real * part for part in parts)
        return [first + theta.imag * parts[1], second - theta.imag * parts[0]]


def how_far(found: Dominating) -> float:
    """The residual relative to the modulus."""
    return found.residual / abs(found.value) if found.value else float("inf")


def _nearer(new: Dominating | None, old: Dominating | None) -> Dominating:
    """The answer with the smaller residual: a wider space can show an eigenvalue that the layer does not have."""
    both = [answer for answer in (new, old) if answer is not None]
    return min(both, key=lambda answer: (not answer.converged, how_far(answer)))


def begun_from(generic: Float[Tensor, " size"], found: Sequence[Dominating]) -> Float[Tensor, " size"]:
    """A start for Arnoldi from directions that are nearly right, with a generic part; generic where one of them is far."""
    if not found or any(how_far(item) > FAR for item in found):
        return generic
    return GENERIC_PART * torch.nn.functional.normalize(generic, dim=0) + sum(sum(item.vector) for item in found)
