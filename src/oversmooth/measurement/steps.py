"""What one sub-block does to the stream: how far it turns each token, and what that turn is made of.

A step goes from the stream `X` before a sub-block to the stream `X'` behind it; `f_i = x'_i - x_i` is what it added to token
i, and `u_i`, `u'_i` are the tokens at length one. Everything is a mean over the tokens of one sequence.

    influence = 1 - mean cos(x_i, x'_i) = mean |u'_i - u_i|^2 / 2

and it splits exactly, with LC and HC the shared and the differing part of U (docs/theory.md, section 9):

    influence = smoothing + shared + differing
    smoothing   1 - cos(t' - t), tan t = HFC(U) / LFC(U): how far the balance between the two parts moved
    shared      what the shared part turned by, weighted with its size
    differing   what the differing part turned by, weighted with its size
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.measurement.joining import joined, settled
from oversmooth.measurement.metric import MetricValues
from oversmooth.measurement.moments import Moments, made_of

PerSequence = Float[Tensor, " batch"]
OF_STEP = ("added_norms", "unit_product", "shared_turn")
"""What is computed from the tokens at both ends."""


@dataclass(frozen=True, eq=False)
class Step:
    """The kept tokens of a batch before and behind a sub-block, and what metrics of steps share."""

    before: Moments
    after: Moments
    workspace: Float[Tensor, "batch span d_model"] | None = None
    """Where temporaries may be written, so that no memory has to be found for each."""

    @cached_property
    def is_angular(self) -> Tensor:
        """Whether every kept token of a sequence is nonzero and finite at both ends, so that each has an angle."""
        nonzero = [(moments.nonzero == moments.n) & moments.is_finite for moments in (self.before, self.after)]
        return nonzero[0] & nonzero[1]

    @cached_property
    def turn(self) -> Float[Tensor, "batch span d_model"]:
        """u'_i - u_i, zeros at dropped positions."""
        after = self.after.x * self.after.inverse_norms[..., None]
        return after.addcmul_(self.before.x, self.before.inverse_norms[..., None], value=-1)

    @cached_property
    def turns_squared(self) -> Float[Tensor, "batch span"]:
        """|u'_i - u_i|^2 = (|f_i|^2 - (|x'_i| - |x_i|)^2) / (|x_i| |x'_i|), which needs no tokens at length one.

        Unlike 2 - 2 cos it is small where f is small: rounding leaves a share of |f|, not of 1.
        """
        along = self.after.norms - self.before.norms
        across = (self.added_norms - along) * (self.added_norms + along)
        return across.clamp(min=0) * self.before.inverse_norms * self.after.inverse_norms

    @cached_property
    def influence(self) -> PerSequence:
        return self.mean(self.turns_squared / 2)

    @cached_property
    def added_norms(self) -> Float[Tensor, "batch span"]:
        """|f_i|, f_i = x'_i - x_i."""
        return torch.linalg.vector_norm(torch.sub(self.after.x, self.before.x, out=self.workspace), dim=-1)

    @cached_property
    def sizes(self) -> Float[Tensor, "batch span"]:
        """|f_i| / |x_i|."""
        return self.added_norms * self.before.inverse_norms

    @cached_property
    def balance_turn(self) -> Float[Tensor, " batch"]:
        """1 - cos(t' - t) with tan t = HFC/LFC of the tokens at length one."""
        first, second = (
            torch.atan2(moments.unit_hfc_squared.double().sqrt(), moments.unit_lfc_squared.double().sqrt())
            for moments in (self.before, self.after)
        )
        return 2 * ((second - first) / 2).sin().square()

    @cached_property
    def unit_product(self) -> Float[Tensor, " batch"]:
        """Product of the sums of the tokens at length one, before and behind."""
        return (self.before.unit_sum.double() * self.after.unit_sum.double()).sum(-1)

    @cached_property
    def shared_turn(self) -> Float[Tensor, " batch"]:
        """LFC LFC' (1 - cos(m, m')) / n, m and m' the means of the tokens at length one."""
        sizes = self.before.unit_sum.double().norm(dim=-1) * self.after.unit_sum.double().norm(dim=-1)
        return (sizes - self.unit_product) / self.before.n.square()

    @cached_property
    def differing_turn(self) -> Float[Tensor, " batch"]:
        """HFC HFC' (1 - cos(HC(U), HC(U'))) / n."""
        n = self.before.n
        sizes = (self.before.unit_hfc_squared.double() * self.after.unit_hfc_squared.double()).sqrt()
        together = n * (1 - self.influence.double())
        return (sizes - (together - self.unit_product / n)) / n

    def settled(self) -> "Step":
        """What metrics need of it, without the tokens."""
        ends: dict[str, object] = {"before": settled(self.before), "after": settled(self.after)}
        return made_of(Step, ends | {name: getattr(self, name) for name in OF_STEP})

    @staticmethod
    def joined(steps: "Sequence[Step]") -> "Step":
        """Several steps without tokens, one behind the other, as if they were sequences of one batch."""
        before, after = joined([step.before for step in steps]), joined([step.after for step in steps])
        ends: dict[str, object] = {"before": before, "after": after}
        return made_of(Step, ends | {name: torch.cat([getattr(step, name) for step in steps]) for name in OF_STEP})

    def mean(self, by_token: Float[Tensor, "batch span"]) -> PerSequence:
        """Mean over the kept tokens; dropped ones hold zero."""
        return by_token.sum(1) / self.before.n


@dataclass(frozen=True, eq=False)
class StepMetric:
    """One number about a step; `None` of a sequence (not finite) where its formula has no value."""

    name: str
    function: Callable[[Step], Tensor]
    definition: str
    missing_when: str = ""
    needs_angles: bool = True

    def on(self, step: Step) -> MetricValues:
        raw = self.function(step)
        is_usable = step.is_angular if self.needs_angles else step.before.is_finite & step.after.is_finite
        return MetricValues(raw, raw.isfinite() & is_usable)


STEP_METRICS: dict[str, StepMetric] = {}
_NO_ANGLE = "a token is zero before or behind the step"


def _step_metric(definition: str, missing_when: str = _NO_ANGLE) -> Callable[[Callable[[Step], Tensor]], StepMetric]:
    def enter(function: Callable[[Step], Tensor]) -> StepMetric:
        name = function.__name__
        STEP_METRICS[name] = StepMetric(name, function, definition, missing_when)
        return STEP_METRICS[name]

    return enter


@_step_metric("mean over i of 1 - cos(x_i, x'_i)")
def influence(step: Step) -> PerSequence:
    """How far a step turns tokens: 0 for the identity and for scaling, 1 for a right angle, 2 for a flip of signs.

    ShortGPT's block influence. Taken from |u' - u|^2 / 2, so that a small one is not what rounding left of 1 - cos.
    """
    return step.influence


@_step_metric("mean over i of arccos(cos(x_i, x'_i)) / pi")
def angular_distance(step: Step) -> PerSequence:
    """The angle itself, as a share of half a turn: 0 for the identity, 1 for a flip of signs."""
    return step.mean((step.turns_squared.sqrt() / 2).clamp(max=1).asin() * (2 / math.pi))


@_step_metric("mean over i of |f_i| / |x_i|")
def contribution(step: Step) -> PerSequence:
    """How large what is added is beside the stream; far below 1 means that a long stream dilutes it."""
    return step.mean(step.sizes)


@_step_metric("mean over i of cos(f_i, x_i)", f"{_NO_ANGLE}, or nothing is added to it")
def alignment(step: Step) -> PerSequence:
    """Whether what is added points along the stream (1), across it (0) or against it (-1)."""
    before, after, added = step.before.norms, step.after.norms, step.added_norms
    # 2 f . x = |x'|^2 - |x|^2 - |f|^2
    along = ((after - before) * (after + before) - added.square()) / 2
    cosines = torch.where(step.before.mask > 0, (along * step.before.inverse_norms / added).clamp(-1, 1), 0.0)
    return step.mean(cosines)


@_step_metric("mean over i of 1 - sqrt(1 - r^2) for r = |f_i| / |x_i| < 1, otherwise 2")
def ceiling(step: Step) -> PerSequence:
    """The largest influence that a branch of this size can have, whichever way it points."""
    r = step.sizes
    reach = torch.where(r < 1, 1 - (1 - r.square()).clamp(min=0).sqrt(), torch.where(r == 1, 1.0, 2.0))
    return step.mean(reach * step.before.mask)


@_step_metric("1 - cos(t' - t), tan t = HFC(U) / LFC(U), u_i = x_i / |x_i|")
def influence_smoothing(step: Step) -> PerSequence:
    """The part of the influence that moves the balance between what tokens share and what differs."""
    return step.balance_turn


@_step_metric("LFC(U) LFC(U') (1 - cos(LC(U), LC(U'))) / n")
def influence_shared(step: Step) -> PerSequence:
    """The part of the influence that turns what all tokens share, and with it all tokens alike."""
    return step.shared_turn


@_step_metric("HFC(U) HFC(U') (1 - cos(HC(U), HC(U'))) / n")
def influence_differing(step: Step) -> PerSequence:
    """The part of the influence that turns what differs between tokens: what tells them apart afterwards."""
    return step.differing_turn


UNDONE = StepMetric(
    "undone",
    lambda step: torch.full_like(step.influence, torch.nan),  # known only when the next sub-block has run
    "-sum over i of (u'_i - u_i) . (v'_i - v_i) / sum over i of |u'_i - u_i|^2, v the same of the next sub-block",
    "there is no next sub-block, or the step turns nothing",
)
STEP_METRICS[UNDONE.name] = UNDONE


def undone_by(first: Step, second: Step) -> MetricValues:
    """Which share of a step the next one takes back: 1 if all of it, 0 if none, below 0 where it goes on the same way."""
    return undone_share(first, second, turned_together(first, second))


def turned_together(first: Step, second: Step) -> PerSequence:
    """Sum over tokens of the product of two turns."""
    return torch.mul(first.turn, second.turn, out=second.workspace).flatten(1).sum(1)


def undone_share(first: Step, second: Step, together: PerSequence) -> MetricValues:
    raw = -together / first.turns_squared.sum(1)
    return MetricValues(raw, raw.isfinite() & first.is_angular & second.is_angular)
