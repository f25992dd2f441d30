"""What is gathered about steps while the model runs: from place to place, over whole blocks, and between any two depths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.measurement.attribution import PART_OF
from oversmooth.measurement.metric import MetricValues
from oversmooth.measurement.moments import Moments
from oversmooth.measurement.steps import UNDONE, Step, StepMetric, turned_together, undone_share
from oversmooth.models.hooks.places import Place
from oversmooth.results import SpanDistances

BLOCK = "block"
"""The place of what a whole block does, from what enters it to what leaves it."""
SUB_BLOCK_PARTS = ("attention", "cross-attention", "feed-forward", "other")
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
    _sub_block: tuple[Place, Step, Step] | None = None
    """The last one with its tokens, and without."""
    _workspace: Tensor | None = None
    """Temporaries of every step are written here: fresh memory costs more than what is computed in it."""
    _done: list[tuple[Place, Step]] = field(default_factory=list)
    """Every step so far, without its tokens."""
    _undone: list[tuple[Place, Step, Step, Tensor]] = field(default_factory=list)
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
        if PART_OF[place.name] in SUB_BLOCK_PARTS and UNDONE in self.chosen:
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

    def _step(self, before: Moments, after: Moments) -> Step:
        if self._workspace is None:
            self._workspace = torch.empty_like(after.x)
        return Step(before, after, self._workspace)

    def _keep(self, place: Place, step: Step) -> Step:
        self.arrived(place)
        self._done.append((place, step.settled()))
        return self._done[-1][1]

    def finish(self, note: Note) -> None:
        """The batch is complete: metrics of all its steps."""
        self.leave_block()
        if self._done:
            places, steps = zip(*self._done, strict=True)
            together = Step.joined(steps)
            for metric in self.chosen:
                if metric is not UNDONE:
                    note(places, metric.name, metric.on(together))
        if self._undone:
            places, firsts, seconds, products = zip(*self._undone, strict=True)
            found = undone_share(Step.joined(firsts), Step.joined(seconds), torch.cat(products))
            note(places, UNDONE.name, found)


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
        torch.mul(moments.x[:, columns], moments.inverse_norms[:, columns, None], out=u)
        self._kept = moments.mask[:, columns]
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
        weights = is_whole / is_whole.sum(1, keepdim=True)
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
