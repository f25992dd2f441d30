"""What each sub-block does to the stream: influence and its parts, and changes between any two depths.

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
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.measurement.metrics import MetricValues, joined, settled
from oversmooth.measurement.moments import Moments, behind_each_other, made_of
from oversmooth.models.hooks.places import PART_OF, Place
from oversmooth.results import SpanDistances

# --- what one sub-block does to the stream: how far it turns each token, and what that turn is made of ---

PerSequence = Float[Tensor, " batch"]
OF_STEP = ("added_norms", "unit_product", "shared_turn")
"""What is computed from the tokens at both ends."""


@dataclass(frozen=True, eq=False)
class SubBlockStep:
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

    def settled(self) -> "SubBlockStep":
        """What metrics need of it, without the tokens."""
        ends: dict[str, object] = {"before": settled(self.before), "after": settled(self.after)}
        return made_of(SubBlockStep, ends | {name: getattr(self, name) for name in OF_STEP})

    @staticmethod
    def joined(steps: "Sequence[SubBlockStep]") -> "SubBlockStep":
        """Several steps without tokens, one behind the other, as if they were sequences of one batch."""
        before, after = joined([step.before for step in steps]), joined([step.after for step in steps])
        ends: dict[str, object] = {"before": before, "after": after}
        own = {name: behind_each_other([getattr(step, name) for step in steps]) for name in OF_STEP}
        return made_of(SubBlockStep, ends | own)

    def mean(self, by_token: Float[Tensor, "batch span"]) -> PerSequence:
        """Mean over the kept tokens; dropped ones hold zero."""
        return by_token.sum(1) / self.before.n


@dataclass(frozen=True, eq=False)
class StepMetric:
    """One number about a step; `None` of a sequence (not finite) where its formula has no value."""

    name: str
    function: Callable[[SubBlockStep], Tensor]
    definition: str
    missing_when: str = ""
    needs_angles: bool = True

    def on(self, step: SubBlockStep) -> MetricValues:
        raw = self.function(step)
        is_usable = step.is_angular if self.needs_angles else step.before.is_finite & step.after.is_finite
        return MetricValues(raw, raw.isfinite() & is_usable)


STEP_METRICS: dict[str, StepMetric] = {}
_NO_ANGLE = "a token is zero before or behind the step"


def _step_metric(
    definition: str, missing_when: str = _NO_ANGLE
) -> Callable[[Callable[[SubBlockStep], Tensor]], StepMetric]:
    def enter(function: Callable[[SubBlockStep], Tensor]) -> StepMetric:
        name = function.__name__
        STEP_METRICS[name] = StepMetric(name, function, definition, missing_when)
        return STEP_METRICS[name]

    return enter


@_step_metric("mean over i of 1 - cos(x_i, x'_i)")
def influence(step: SubBlockStep) -> PerSequence:
    """How far a step turns tokens: 0 for the identity and for scaling, 1 for a right angle, 2 for a flip of signs.

    ShortGPT's block influence. Taken from |u' - u|^2 / 2, so that a small one is not what rounding left of 1 - cos.
    """
    return step.influence


@_step_metric("mean over i of arccos(cos(x_i, x'_i)) / pi")
def angular_distance(step: SubBlockStep) -> PerSequence:
    """The angle itself, as a share of half a turn: 0 for the identity, 1 for a flip of signs."""
    return step.mean((step.turns_squared.sqrt() / 2).clamp(max=1).asin() * (2 / math.pi))


@_step_metric("mean over i of |f_i| / |x_i|")
def contribution(step: SubBlockStep) -> PerSequence:
    """How large what is added is beside the stream; far below 1 means that a long stream dilutes it."""
    return step.mean(step.sizes)


@_step_metric("mean over i of cos(f_i, x_i)", f"{_NO_ANGLE}, or nothing is added to it")
def alignment(step: SubBlockStep) -> PerSequence:
    """Whether what is added points along the stream (1), across it (0) or against it (-1)."""
    before, after, added = step.before.norms, step.after.norms, step.added_norms
    # 2 f . x = |x'|^2 - |x|^2 - |f|^2
    along = ((after - before) * (after + before) - added.square()) / 2
    cosines = torch.where(step.before.mask > 0, (along * step.before.inverse_norms / added).clamp(-1, 1), 0.0)
    return step.mean(cosines)


@_step_metric("mean over i of 1 - sqrt(1 - r^2) for r = |f_i| / |x_i| < 1, otherwise 2")
def ceiling(step: SubBlockStep) -> PerSequence:
    """The largest influence that a branch of this size can have, whichever way it points."""
    r = step.sizes
    reach = torch.where(r < 1, 1 - (1 - r.square()).clamp(min=0).sqrt(), torch.where(r == 1, 1.0, 2.0))
    return step.mean(reach * step.before.mask)


@_step_metric("1 - cos(t' - t), tan t = HFC(U) / LFC(U), u_i = x_i / |x_i|")
def influence_smoothing(step: SubBlockStep) -> PerSequence:
    """The part of the influence that moves the balance between what tokens share and what differs."""
    return step.balance_turn


@_step_metric("LFC(U) LFC(U') (1 - cos(LC(U), LC(U'))) / n")
def influence_shared(step: SubBlockStep) -> PerSequence:
    """The part of the influence that turns what all tokens share, and with it all tokens alike."""
    return step.shared_turn


@_step_metric("HFC(U) HFC(U') (1 - cos(HC(U), HC(U'))) / n")
def influence_differing(step: SubBlockStep) -> PerSequence:
    """The part of the influence that turns what differs between tokens: what tells them apart afterwards."""
    return step.differing_turn


UNDONE_METRIC = StepMetric(
    "undone",
    lambda step: torch.full_like(step.influence, torch.nan),  # known only when the next sub-block has run
    "-sum over i of (u'_i - u_i) . (v'_i - v_i) / sum over i of |u'_i - u_i|^2, v the same of the next sub-block",
    "there is no next sub-block, or the step turns nothing",
)
STEP_METRICS[UNDONE_METRIC.name] = UNDONE_METRIC


def turned_together(first: SubBlockStep, second: SubBlockStep) -> PerSequence:
    """Sum over tokens of the product of two turns."""
    return torch.mul(first.turn.to(second.turn.device), second.turn, out=second.workspace).flatten(1).sum(1)


def undone_share(first: SubBlockStep, second: SubBlockStep, together: PerSequence) -> MetricValues:
    raw = -together / first.turns_squared.sum(1)
    return MetricValues(raw, raw.isfinite() & first.is_angular & second.is_angular)


# --- what is gathered about steps while the model runs: from place to place, over whole blocks ---

BLOCK = "block"
"""The place of what a whole block does, from what enters it to what leaves it."""
SUB_BLOCK_PARTS = ("attention", "cross-attention", "feed-forward", "other", "between")
SPAN_NUMBERS = 2**24
"""Numbers of hidden states that are kept for the distances between depths: 64 MiB, whatever the size of the model."""

Note = Callable[[Sequence[Place], str, MetricValues], None]
"""Called with places, the name of a metric and its values at the first place, at the second, and so on."""


@dataclass
class StepGatherer:
    """The stream of one stack during one batch: the last place, the last sub-block, and what entered the block."""

    chosen: tuple[StepMetric, ...]
    arrived: Callable[[Place], None]
    """Called with the place of every step, when it is done."""
    _last: tuple[Place, Moments] | None = None
    _entered: Moments | None = None
    _sub_block: tuple[Place, SubBlockStep, SubBlockStep] | None = None
    """The last one with its tokens, and without."""
    _workspace: Tensor | None = None
    """Temporaries of every step are written here: fresh memory costs more than what is computed in it."""
    _done: list[tuple[Place, SubBlockStep]] = field(default_factory=list)
    """Every step so far, without its tokens."""
    _undone: list[tuple[Place, SubBlockStep, SubBlockStep, Tensor]] = field(default_factory=list)
    """Sub-blocks with their next one, and how much of their turns goes together."""

    def see(self, place: Place, moments: Moments) -> None:
        """The stream has reached its next place."""
        if self._last is None:
            self._last, self._entered = (place, moments), moments
            return
        before_place, before = self._last
        if place.depth != before_place.depth or place.name == "final_norm":
            self.leave_block()
        step = self._step(before, moments)
        done = self._keep(place, step)
        if PART_OF[place.name] in SUB_BLOCK_PARTS and UNDONE_METRIC in self.chosen:
            if self._sub_block is not None:
                first_place, first, first_done = self._sub_block
                self._undone.append((first_place, first_done, done, turned_together(first, step)))
            self._sub_block = (place, step, done)
        self._last = (place, moments)

    def leave_block(self) -> None:
        """The last place is what leaves its block."""
        if self._last is None or self._entered is None:
            return
        place, moments = self._last
        if place.depth > 0 and moments is not self._entered and place.name != "final_norm":
            self._keep(Place(place.stack, place.depth, BLOCK), self._step(self._entered, moments))
        self._entered = moments

    def _step(self, before: Moments, after: Moments) -> SubBlockStep:
        if self._workspace is None or self._workspace.device != after.x.device:
            self._workspace = torch.empty_like(after.x)
        return SubBlockStep(before.on(after.x.device), after, self._workspace)

    def _keep(self, place: Place, step: SubBlockStep) -> SubBlockStep:
        self.arrived(place)
        self._done.append((place, step.settled()))
        return self._done[-1][1]

    def finish(self, note: Note) -> None:
        """The batch is complete: metrics of all its steps."""
        self.leave_block()
        if self._done:
            places, steps = zip(*self._done, strict=True)
            together = SubBlockStep.joined(steps)
            for metric in self.chosen:
                if metric is not UNDONE_METRIC:
                    note(places, metric.name, metric.on(together))
        if self._undone:
            places, firsts, seconds, products = zip(*self._undone, strict=True)
            found = undone_share(SubBlockStep.joined(firsts), SubBlockStep.joined(seconds), behind_each_other(products))
            note(places, UNDONE_METRIC.name, found)


@dataclass
class SpanGatherer:
    """Distances between what leaves any two blocks, on so many tokens of each sequence that memory stays small."""

    stack: str
    depths: int
    """How many there are, the embedding included."""
    tokens: int = 0
    """Largest number of tokens that was used of a sequence."""
    sequences: int = 0
    _last: tuple[int, Moments] | None = None
    """The stream where it stands; only what leaves a block is kept."""
    _states: Float[Tensor, "batch few depth d_model"] | None = None
    """Tokens at length one, depth by depth; the memory of one batch serves the next."""
    _kept: Float[Tensor, "batch few"] | None = None
    _held: tuple[int, ...] = ()
    """Depths of the batch that have come so far."""
    _order: tuple[int, ...] = ()
    """Depths of the last batch that is complete."""
    _angles: Tensor | None = None
    _influences: Tensor | None = None

    def see(self, depth: int, moments: Moments) -> None:
        """The stream as it stands at a depth; the last call of a depth counts."""
        if self._last is not None and self._last[0] != depth:
            self._leave()
        self._last = (depth, moments)

    def _leave(self) -> None:
        """Keeps the last state of a depth."""
        if self._last is None:
            return
        (depth, moments), self._last = self._last, None
        batch, span, d_model = moments.x.shape
        few = max(1, min(span, SPAN_NUMBERS // (batch * d_model * self.depths)))
        columns: slice | Tensor = slice(None)
        if few < span:
            columns = torch.linspace(0, span - 1, few, device=moments.x.device).round().long()
        shape = (batch, few, self.depths, d_model)
        if self._states is None or self._states.shape != shape:
            self._states = moments.x.new_empty(shape)
        u = self._states[:, :, len(self._held)]
        x, scales = moments.x[:, columns], moments.inverse_norms[:, columns, None]
        torch.mul(x.to(u.device), scales.to(u.device), out=u)
        self._kept = moments.mask[:, columns].to(u.device)
        self._held += (depth,)

    def finish(self) -> None:
        """Adds the distances of a batch that is complete."""
        self._leave()
        if len(self._held) < 2 or self._states is None or self._kept is None:
            return
        self._order = self._held
        u = self._states[:, :, : len(self._order)]
        cosines = (u @ u.mT).clamp(-1, 1)
        is_whole = (cosines.diagonal(dim1=2, dim2=3) > 0.5).all(2) & (self._kept > 0)
        weights = is_whole.to(u.dtype) / is_whole.sum(1, keepdim=True)
        usable = (is_whole.sum(1) > 0) & cosines.flatten(1).isfinite().all(1)
        flat = torch.eye(len(self._order), dtype=torch.bool, device=u.device)
        angles = (cosines.acos() / torch.pi).masked_fill(flat, 0)
        for name, values in (("_angles", angles), ("_influences", (1 - cosines).masked_fill(flat, 0))):
            found = torch.einsum("bt,btij->bij", weights, values)[usable].double().sum(0).cpu()
            setattr(self, name, found if getattr(self, name) is None else getattr(self, name) + found)
        self.sequences += int(usable.sum())
        self.tokens = max(self.tokens, u.shape[1])

    def begin(self) -> None:
        self._held, self._last = (), None

    def result(self) -> SpanDistances | None:
        if self._angles is None or self._influences is None or not self.sequences:
            return None
        rows = [
            tuple(tuple(row) for row in (table / self.sequences).tolist()) for table in (self._angles, self._influences)
        ]
        return SpanDistances(
            stack=self.stack,
            depths=tuple(self._order),
            angular_distance=rows[0],
            influence=rows[1],
            sequences=self.sequences,
            tokens=self.tokens,
        )
