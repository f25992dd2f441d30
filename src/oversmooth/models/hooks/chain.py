"""The chain identity: what the hooks report as the stream is the stream of the model.

The equal-token identity proves the weights that are read; a reading can fit them and still look at the wrong features.
On one pass, while the hooks report places, this checks:

    links    what a block gives is, bit for bit, what the next block reads; or a named module made one from the other,
             or an earlier place of the stream was added (that part is called `between`)
    sums     the stream after a sub-block is the stream before it plus what a module of the block gave, times a constant
    ends     what the last block gave is what the final norm reads; that is what a module behind it reads or the model
             returns, and nothing is added to it there
    parts    few parameters act between the first block and the last outside of all blocks and named parts

Links are compared in full; the other relations are elementwise and compared on SAMPLES entries. The check costs about 1% of a
pass and keeps no tensor beyond the next place. Entries that are NaN or infinite on one side are not compared; if none remain,
nothing is judged.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from oversmooth.errors import OtherStream, some_of
from oversmooth.models.hooks.places import features_in, hooked
from oversmooth.results import StreamCheck

if TYPE_CHECKING:
    from oversmooth.models.hooks.taps import BlockTap
    from oversmooth.models.source import Stack

SAMPLES = 1024
"""Entries of a tensor on which elementwise relations are compared."""
ROUNDING = 16
"""Units in the last place that a sum of two tensors, one of them times a gain, may be off by."""
MOVED = 16
"""Tokens that are looked for among those that attention wrote, where windows changed their order."""
OUTSIDE = 0.1
"""Share of the blocks' parameters that may act outside of all parts before a reading counts as partial."""

Sample = Float[Tensor, " _"]


def sample_of(h: Tensor) -> Sample:
    """Entries of a tensor at places that depend on its size alone, in float64."""
    flat = h.detach().reshape(-1)
    return flat[_places(h.numel(), h.device)].double().cpu()


@lru_cache(maxsize=64)
def _places(count: int, device: torch.device) -> Int64[Tensor, " entry"]:
    if count <= SAMPLES:
        return torch.arange(count, device=device)
    step = int(count * 0.6180339887)  # the golden ratio spreads them over tokens and channels alike
    return torch.arange(SAMPLES, device=device).mul_(step).remainder_(count)


def unit_of(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


@dataclass(slots=True, eq=False)
class Seen:
    """The stream at one place: enough to compare it with later places."""

    words: str
    numel: int
    unit: float
    sample: Sample
    tensor: Tensor | None = None
    version: int = -1

    @classmethod
    def at(cls, words: str, h: Tensor) -> "Seen":
        return cls(words, h.numel(), unit_of(h.dtype), sample_of(h), h, version_of(h))

    def is_same(self, h: Tensor) -> bool:
        """Whether a tensor has, bit for bit, the values that were seen."""
        before = self.tensor
        if before is None or before.numel() != h.numel() or before.dtype != h.dtype:
            return False
        if version_of(before) != self.version:  # written into since: only the sample still has the values
            return agree(self.sample, sample_of(h))
        same_place = before.data_ptr() == h.data_ptr() and before.device == h.device
        if same_place and before.stride() == h.stride() and before.shape == h.shape:
            return True
        return agree(before.reshape(-1), h.reshape(-1).to(before.device))

    def holds(self, h: Tensor) -> bool:
        """Whether a smaller tensor is some tokens of what was seen, or their mean, as heads read it."""
        before = self.tensor
        if before is None or before.ndim != 3 or h.ndim < 2 or h.shape[-1] != before.shape[-1] or not h.numel():
            return False
        h = h.to(before.device)
        if h.ndim == 2 and len(h) == len(before):
            left, largest = (h.float() - before.float().mean(1)).abs(), _finite(before.float().abs())
            if (judged := _finite(left)).numel() and bool(judged.amax() <= 1e-3 * largest.amax()):
                return True
            judged = torch.isfinite(before) & torch.isfinite(h[:, None])
            is_token = ((before == h[:, None]) | ~judged).all(-1) & judged.any(-1)
            return bool(judged.any()) and bool((is_token.any(1) | ~judged.any(-1).any(-1)).all())
        if h.ndim != 3 or len(h) != len(before) or h.shape[1] > before.shape[1]:
            return False
        return agree(h, before[:, : h.shape[1]]) or agree(h, before[:, -h.shape[1] :])

    def is_turned(self, h: Tensor) -> bool:
        """Whether a tensor has the values that were seen with channels before tokens."""
        before = self.tensor
        if before is None or not before.ndim == h.ndim == 3 or before.mT.shape != h.shape:
            return False
        return agree(before.mT, h.to(before.device))

    def with_other_tokens(self, h: Tensor) -> str:
        """Whether tokens were put before or behind what was seen, or dropped there, in words; empty where not."""
        before = self.tensor
        if before is None or version_of(before) != self.version or not before.ndim == h.ndim == 3:
            return ""
        count, other = before.shape[1], h.shape[1]
        if count == other or before.shape[0] != h.shape[0] or before.shape[2] != h.shape[2] or before.dtype != h.dtype:
            return ""
        n, h = min(count, other), h.to(before.device)
        is_rest = agree(before[:, :n], h[:, :n]) or agree(before[:, count - n :], h[:, other - n :])
        return f"{abs(count - other)} tokens {'dropped' if other < count else 'added'}" if is_rest else ""

    def is_same_but_for_zeros(self, h: Tensor) -> bool:
        """Whether some tokens were set to zero, as models do with padding, and all others are what was seen."""
        before = self.tensor
        if before is None or version_of(before) != self.version or before.shape != h.shape or not h.ndim:
            return False
        h = h.to(before.device)
        judged = torch.isfinite(before) & torch.isfinite(h)
        same = ((before == h) | ~judged).all(-1)
        return bool((same & judged.any(-1)).any()) and bool((same | (h == 0).all(-1)).all())


@dataclass(slots=True, eq=False)
class Call:
    """A module that ran, with samples of what it got and gave."""

    path: str
    got: list[Sample]
    gave: Sample
    numel: int


def version_of(h: Tensor) -> int:
    """A number that changes when a tensor is written into; inference tensors have none."""
    return -1 if h.is_inference() else h._version


def agree(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal, bit for bit, wherever both are finite; they are not if that is nowhere."""
    if first.shape != second.shape or torch.equal(first, second):
        return first.shape == second.shape
    judged = torch.isfinite(first) & torch.isfinite(second)
    if not judged.any() or judged.all():
        return False
    return torch.equal(first[judged], second[judged])


def _finite(h: Tensor) -> Tensor:
    return h[torch.isfinite(h)]


def _all_finite(*samples: Sample) -> tuple[Tensor, ...]:
    """The entries that are finite in all of several samples."""
    judged = torch.stack([torch.isfinite(sample) for sample in samples]).all(0)
    return samples if judged.all() else tuple(sample[judged] for sample in samples)


def can_judge(first: Float[Tensor, " a"], second: Float[Tensor, " b"]) -> bool:
    """Whether two places can be compared at all: of the same entries, some are finite in both."""
    return len(first) != len(second) or bool((torch.isfinite(first) & torch.isfinite(second)).any())


def is_sum(total: Sample, before: Sample, added: Sample, unit: float) -> bool:
    """Whether `total = before + c * added` for one number c, up to rounding."""
    total, before, added = _all_finite(total, before, added)
    if not len(total):
        return False
    difference = total - before
    size = float(added.square().sum())
    if size == 0:
        return bool((difference == 0).all())
    gain = float(difference.dot(added)) / size
    gain = 1.0 if abs(gain - 1.0) < 1e-3 else gain
    left = (difference - gain * added).abs()
    return bool((left <= ROUNDING * unit * (before.abs() + (gain * added).abs() + total.abs()) + 1e-30).all())


def is_mixture(total: Sample, first: Sample, second: Sample, unit: float) -> bool:
    """Whether `total = a * first + b * second` for two numbers, up to rounding."""
    if not len(total) == len(first) == len(second):
        return False
    total, first, second = _all_finite(total, first, second)
    if len(total) < 8:
        return False
    both = torch.stack([first, second], 1)
    weights = torch.linalg.lstsq(both, total[:, None], driver="gelsd").solution[:, 0]
    left = (total - both @ weights).abs()
    return bool((left <= ROUNDING * unit * ((both * weights).abs().sum(1) + total.abs()).clamp(min=1e-30)).all())


def is_sum_of_moved(total: Tensor, before: Seen, branch: Tensor, gain: Tensor | None) -> bool:
    """Whether the change of each token is what attention wrote for some token, times a gain, as where windows are undone.

    Tokens that attention sees but the stream does not contain, such as the padding of windows, are skipped. MOVED tokens
    are looked for.
    """
    if before.tensor is None or version_of(before.tensor) != before.version or before.numel != total.numel():
        return False
    width = branch.shape[-1]
    rows = branch.detach().reshape(-1, width).float() * (1.0 if gain is None else gain.detach().float())
    if total.numel() % width or rows.shape[0] < total.numel() // width:
        return False
    after, earlier = (h.detach().reshape(-1, width).float() for h in (total, before.tensor))
    chosen = torch.linspace(0, len(after) - 1, min(MOVED, len(after))).round().long().unique()
    for here in chosen.tolist():
        room = ROUNDING * before.unit * (after[here].abs() + earlier[here].abs()) + 1e-30
        left = (rows - (after[here] - earlier[here])).abs()
        judged = torch.isfinite(rows) & torch.isfinite(after[here]) & torch.isfinite(earlier[here])
        is_row = ((left <= room) | ~judged).all(1) & judged.any(1)
        if not bool(is_row.any()) and bool(judged.any()):
            return False
    return True


class StackChain:
    """What is known of one stack while the model runs; the hooks of its blocks report to it."""

    def __init__(self, chain: "Chain", stack: "Stack"):
        self.chain = chain
        self._label = stack.label
        self._token_axis = stack.arch.token_axis
        self.writers = {block.output.weight.rpartition(".")[0] for block in stack.names.blocks}
        """Paths of the output projections of attention."""
        self.last: Seen | None = None
        self.in_block = False
        self.past: list[Seen] = []
        """Places of the stream so far, their tensors dropped."""
        self.calls: list[Call] = []
        """Modules that ran since `last`."""
        self.branch: Sample | None = None
        """What was added last."""
        self.written: Tensor | None = None
        """What the output projection of attention gave, until it is added."""
        self.links = self.sums = 0
        self.between: dict[str, str] = {}
        """Where something acts between two blocks, and what it is."""
        self.broken: list[tuple[str, str]] = []
        """Pairs of places that should agree and do not."""
        self.unmatched: list[str] = []
        """Sub-blocks whose change of the stream no module of the block explains."""
        self.is_over = False
        """Whether the last block has ended."""
        self.over_since = 0
        """How many modules had begun by then: only later ones read what is behind it."""
        self.is_handed_over = False
        """Whether another stack continues with it."""
        self.read_by = ""
        """What reads the stream behind the last block."""
        self.goes_on = ""
        """What adds to the stream behind the last block."""
        self.other_reads: dict[str, Sample] = {}
        """What reads something else of the stream's size there, and what it reads."""
        self.unsure: BlockTap | None = None
        """The first block, if it received several features."""
        self.inputs_at: list[int] = []
        """Which of several features the stream was, wherever that was seen."""

    def _as_in_model(self, h: Tensor) -> Tensor:
        """Features in the order of axes in which the model's own modules pass them on."""
        return h.transpose(0, 1) if self._token_axis == 0 and h.ndim == 3 else h

    def _reached(self, words: str, h: Tensor) -> None:
        if self.last is not None:
            self.last.tensor = None
            self.past.append(self.last)
        self.last = Seen.at(words, h)

    # --- what the hooks of its blocks report ---

    def began(self, words: str, h: Tensor) -> None:
        """The stream begins."""
        self.last, self.in_block, self.is_over, self.chain.inside = None, True, False, True
        for kept in (self.past, self.calls, self.other_reads):
            kept.clear()
        self.is_handed_over, self.read_by, self.goes_on = False, "", ""
        for other in self.chain.stacks.values():
            if other.is_over and not other.read_by and other._goes_on_in(other._as_in_model(h)):
                other.is_handed_over, other.read_by = True, words
        self._reached(words, self._as_in_model(h))

    def _goes_on_in(self, h: Tensor) -> bool:
        """Whether the first block of another stack reads this stream, perhaps beside something else."""
        last = self.last
        if last is None or last.numel != h.numel() or last.is_same(h):
            return last is not None and last.is_same(h)
        target, unit = sample_of(h), max(last.unit, unit_of(h.dtype))
        others = [call.gave for call in self.calls if call.numel == h.numel()]
        return any(is_mixture(target, last.sample, other, unit) for other in others)

    def entered(self, block: str, h: Tensor, *, over_other: bool) -> bool:
        """A block reads the stream; whether something other than a declared block changed it since it was last seen."""
        words, last, acts_between, h = f"the input of {block or 'the block'}", self.last, False, self._as_in_model(h)
        self.chain.inside = self.in_block = True
        self.is_over = False
        if last is not None:
            self.links += 1
            if not last.is_same(h) and can_judge(last.sample, sample_of(h)):
                acts_between = not over_other
                names = self._explanation(last, h)
                if names is None:
                    self.broken.append((last.words, words))
                else:
                    self.chain.named |= set(names)
                    self.between[words] = ", ".join(dict.fromkeys(names))
                if over_other:
                    self.between.pop(words, None)
        self.calls.clear()
        self._reached(words, h)
        return acts_between

    def _explanation(self, last: Seen, h: Tensor) -> list[str] | None:
        """Names of what made the input of a block from the output of the one before; `None` if nothing did."""
        target, reached, through = sample_of(h), [last.sample], []
        for call in self.calls:
            if any(agree(got, one) for got in call.got for one in reached):
                reached.append(call.gave)
                through.append(call.path)
                if agree(call.gave, target):
                    return through
        if last.is_same_but_for_zeros(h):
            return [*through, "tokens set to zero"]
        if tokens := last.with_other_tokens(h):
            return [*through, tokens]
        unit = max(last.unit, unit_of(h.dtype))
        sources = [(place.words, place.sample) for place in self.past if place.numel == h.numel()]
        sources += [(call.path, call.gave) for call in self.calls if call.numel == h.numel()]
        sources += self.chain.parameters_for(h)
        for one in reversed(reached):
            if len(one) == len(target) and is_sum(target, torch.zeros_like(one), one, unit):
                return [*through, "a constant factor"]
            for name, other in sources:
                if is_mixture(target, one, other, unit):
                    return [*through, name]
        return None

    def same_among(self, candidates: Sequence[Tensor]) -> int | None:
        """Which of several tensors is the stream as it was last seen."""
        same = (self.last is not None and self.last.is_same(self._as_in_model(h)) for h in candidates)
        return next((place for place, is_same in enumerate(same) if is_same), None)

    def sum_among(self, candidates: Sequence[Tensor]) -> int | None:
        """Which of several tensors is the stream plus what a module gave."""
        found = (self._branch_of(self._as_in_model(h)) is not None for h in candidates)
        return next((place for place, is_one in enumerate(found) if is_one), None)

    def adds_to(self, candidates: Sequence[Tensor], h: Tensor) -> None:
        """The first block added a branch: notes which of the features that it received this is the sum with."""
        total, unit = sample_of(self._as_in_model(h)), unit_of(h.dtype)
        branches = [call.gave for call in self.calls if call.numel == h.numel()]
        for place, before in enumerate(candidates):
            if before.numel() == h.numel():
                sample = sample_of(self._as_in_model(before))
                if any(is_sum(total, sample, branch, unit) for branch in branches):
                    self.inputs_at.insert(0, place)
                    return

    def added(
        self,
        block: str,
        sub: str,
        h: Tensor,
        *,
        gain: Tensor | None = None,
        bias: Tensor | None = None,
        must: bool = False,
        is_read: bool = False,
    ) -> None:
        """The stream after a branch was added; some module of the block gave that branch, before a gain per channel.

        `bias`: of the output projection, which some models add outside of it. `is_read`: the stream is seen where a module
        reads it, so that something that a module made of it, such as a norm, is not the sum.
        `must`: some module is known to give the branch, so a sum without such a module is not of this stream.
        """
        words, last, h = f"the sum behind {sub} in {block or 'the block'}", self.last, self._as_in_model(h)
        if last is not None and last.numel == h.numel() and can_judge(last.sample, sample_of(h)):
            self.sums += 1
            self.branch = self._branch_of(h, gain, bias)
            written = self.written if must and self.branch is None else None
            if written is not None and is_sum_of_moved(h, last, written, gain):
                pass  # in the order of windows, which no module undoes
            elif self.branch is None and (must or (is_read and self._was_made(h))):
                self.broken.append((f"{last.words} and what {sub} gives", words))
            elif self.branch is None:
                self.unmatched.append(words)
        else:
            self.branch = None
        self.written = None if must else self.written
        self._reached(words, h)

    def _branch_of(self, h: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Sample | None:
        """What a module gave that, times a gain per channel or with a bias, makes a tensor of the stream before it."""
        last = self.last
        if last is None or last.numel != h.numel():
            return None
        total, unit = sample_of(h), unit_of(h.dtype)
        gains = 1.0 if gain is None or h.numel() % gain.numel() else _spread(gain, h)
        added = None if bias is None or h.numel() % bias.numel() else _spread(bias, h)
        for branch in (call.gave for call in reversed(self.calls) if call.numel == h.numel()):
            if is_sum(total, last.sample, gains * branch, unit) or is_sum(total, last.sample, branch, unit):
                return branch
            if added is not None and is_sum(total, last.sample, gains * (branch + added), unit):
                return branch
        return None

    def _was_made(self, h: Tensor) -> bool:
        """Whether a module inside of the block gave just these features."""
        sample = sample_of(h)
        inner = (call for call in self.calls if not any(_is_under((call.path,), writer) for writer in self.writers))
        return any(call.numel == h.numel() and agree(call.gave, sample) for call in inner)

    def became(self, words: str, h: Tensor) -> None:
        """The stream is replaced, by declaration: for example by the output of a norm."""
        self._reached(words, self._as_in_model(h))

    def is_earlier(self, h: Tensor) -> bool:
        """Whether these are the features of a place before the last one."""
        h = self._as_in_model(h)
        if self.last is None or self.last.is_same(h):
            return False
        sample = sample_of(h)
        return any(agree(place.sample, sample) for place in self.past if place.numel == h.numel())

    def must_be(self, words: str, h: Tensor, *, ours: bool = False) -> None:
        """A place that must have the values last seen; `ours`: the hooks summed those, in another order."""
        last, h = self.last, self._as_in_model(h)
        if last is None:
            return
        self.links += 1
        is_same = last.is_same(h)
        if not is_same and ours and last.numel == h.numel():
            seen, before = _all_finite(sample_of(h), last.sample)
            room = ROUNDING * last.unit * (seen.abs() + before.abs()).clamp(min=float(seen.abs().mean()))
            is_same = bool(((seen - before).abs() <= room).all())
        if not is_same and can_judge(last.sample, sample_of(h)):
            self.broken.append((last.words, words))

    def left(self, *, is_last: bool) -> None:
        """A block has ended."""
        self.in_block, self.is_over, self.over_since = False, is_last, self.chain.begun
        self.written = None
        self.calls.clear()
        if is_last:
            self.chain.inside = False

    # --- what ran beside the blocks, and what is behind the last one ---

    def module_ran(self, path: str, begun: int, received: Any, gave: Sequence[Tensor]) -> None:
        """Any module of the model ran; `begun`: how many modules had begun before it."""
        if self.last is None:
            return
        numel = self.last.numel
        if self.in_block and path in self.writers and gave:
            self.written = gave[0]
        got = [] if self.in_block else features_in(received)
        self._behind(path, got if begun > self.over_since else (), gave)
        if any(h.numel() == numel for h in gave):
            samples = [one for h in got for one in _samples(h, numel)]
            self.calls += [Call(path, samples, sample_of(h), numel) for h in gave if h.numel() == numel]

    def _behind(self, path: str, got: Sequence[Tensor], gave: Sequence[Tensor]) -> None:
        """A module ran behind the last block: it may read the stream, or show that something was added to it."""
        last = self.last
        if not self.is_over or last is None or self.goes_on or self.is_handed_over or not last.sample.isfinite().any():
            return
        if not self.read_by and any(last.is_same(h) or last.is_turned(h) or last.holds(h) for h in got):
            self.read_by = path
        if not self.read_by:
            for h in (h for h in got if h.numel() == last.numel):
                self.other_reads.setdefault(path, sample_of(h))
        streams = [last, *self.past[-1:]]  # the final norm may be a norm in front of one more sub-block
        for h in (h for h in (*got, *gave) if h.numel() == last.numel):
            total, unit = sample_of(h), unit_of(h.dtype)
            branches = [call.gave for call in self.calls if call.numel == h.numel()]
            for stream in (one.sample for one in streams if one.numel == last.numel):
                if agree(total, stream):
                    break
                if any(is_sum(total, stream, one, unit) and not agree(total, one) for one in branches):
                    self.goes_on = path
                    return

    def returned(self, outputs: Sequence[Tensor]) -> None:
        """The model has run. What it returns shows where the stream ends, and may not be a branch that was never added."""
        last = self.last
        if last is None:
            return
        given = [sample_of(h) for h in outputs]
        self._behind("what the model returns", outputs, ())
        is_returned = any(agree(last.sample, one) for one in given)
        if self.branch is not None and not is_returned and any(agree(self.branch, one) for one in given):
            self.broken.append((last.words, "what the model returns"))
        elif self.is_over and not self.read_by and not self.goes_on and last.sample.isfinite().any():
            self.goes_on = self._changed_behind(last)

    def _changed_behind(self, last: Seen) -> str:
        """What changes the stream behind the last block, if something of its size is computed from it."""
        shown = [*self.other_reads.values(), *(call.gave for call in self.calls if call.numel == last.numel)]
        if any(is_sum(one, torch.zeros_like(one), last.sample, last.unit) for one in shown if one.any()):
            self.read_by = "a constant factor"
            return ""
        sources = [(place.words, place.sample) for place in self.past if place.numel == last.numel]
        sources += [] if last.tensor is None else self.chain.parameters_for(last.tensor)
        for total in shown:
            for name, other in sources:
                if is_mixture(total, last.sample, other, last.unit):
                    return name
        return next(iter(self.other_reads), "")

    def not_known(self) -> str:
        """What is unknown about the end of the stack, in words."""
        name = f" of {self._label}" if self._label else ""
        if self.last is None:
            return ""  # a tower that these inputs do not reach has no numbers
        if not self.is_over:
            return f"what the last block{name} gives was not seen"
        if self.unsure is not None and not self.inputs_at:
            return f"which input of the first block{name} is the stream is not known"
        if self.goes_on:
            return f"the stream{name} goes on behind the last block, in {self.goes_on}"
        return ""


class Chain:
    """The check of one pass of a model through its stacks, whose hooks report to `stacks`; `found` is the result."""

    def __init__(self, model: nn.Module, stacks: Sequence["Stack"]):
        self._blocks: set[str] = set()
        """Paths of all blocks of all stacks."""
        for stack in stacks:
            every = stack.names.paths_of_all(stack.arch.paths.block) if stack.arch.is_hybrid else {}
            self._blocks |= set(every.values()) or {block.path for block in stack.names.blocks}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._sizes = {
            path: sum(parameter.numel() for parameter in module.parameters(recurse=False))
            for path, module in model.named_modules()
        }
        self._free = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if parameter.numel() and not _is_under(self._blocks, name)
        }
        """Parameters outside of all blocks, which may be added to the stream between two of them."""
        self._running: list[tuple[str, int]] = []
        self._outside: dict[str, int] = {}
        """Modules with parameters of their own that ran between the first block and the last, outside of all blocks."""
        self.begun = 0
        """How many modules have begun."""
        self.inside = False
        """Whether the pass is between a first block and a last one."""
        self.named: set[str] = set()
        """What acts between blocks."""
        self.writes_into_stream = False
        """Whether a block wrote into the stream that it was given."""
        self.stacks = {stack.label: StackChain(self, stack) for stack in stacks}

    def parameters_for(self, h: Tensor) -> list[tuple[str, Sample]]:
        """Names and samples of the free parameters that could be added to every token, or to every sequence."""
        return [(name, _spread(one, h)) for name, one in self._free.items() if h.numel() % one.numel() == 0]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes the modules that run inside."""
        begins = torch_modules.register_module_forward_pre_hook(self._begins)
        ends = torch_modules.register_module_forward_hook(self._ends, with_kwargs=True)
        with hooked((begins, ends)):
            yield

    def _begins(self, module: nn.Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is not None:
            self.begun += 1
            self._running.append((path, self.begun))

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        begun = 0
        while self._running:
            name, begun = self._running.pop()
            if name == path:
                break
        if self._sizes[path] and self.inside and not _is_under(self._blocks, path):
            self._outside[path] = self._sizes[path]
        gave = features_in(output)
        for stack in self.stacks.values():
            stack.module_ran(path, begun, (args, kwargs), gave)

    def returned(self, output: Any) -> None:
        """The model has run."""
        outputs = features_in(output)
        for stack in self.stacks.values():
            stack.returned(outputs)

    def chose_other_inputs(self) -> bool:
        """Corrects which of their inputs the first blocks take for the stream; whether any took another."""
        changed = False
        for stack in self.stacks.values():
            if stack.unsure is not None and stack.inputs_at and stack.unsure.input_at != stack.inputs_at[0]:
                stack.unsure.input_at, changed = stack.inputs_at[0], True
        return changed

    def require(self, target: str) -> StreamCheck:
        """What was found, if every place is what the place before it explains; else raises `OtherStream`."""
        found = self.found()
        if found.broken:
            raise OtherStream(target, *found.broken[0])
        return found

    def found(self) -> StreamCheck:
        stacks = self.stacks.values()
        sizes = sum(size for path, size in self._sizes.items() if _is_under(self._blocks, path))
        outside = {path: size for path, size in self._outside.items() if path not in self.named}
        share = sum(outside.values()) / max(sizes + sum(outside.values()), 1)
        unread = [words for stack in stacks if (words := stack.not_known())]
        if share >= OUTSIDE:
            names = some_of(list(outside), shown=3)
            unread.append(f"{share:.0%} of the parameters that run are in no part ({names})")
        return StreamCheck(
            links=sum(stack.links for stack in stacks),
            sums=sum(stack.sums for stack in stacks),
            between=tuple(f"{where}: {what}" for stack in stacks for where, what in stack.between.items()),
            broken=tuple(pair for stack in stacks for pair in stack.broken),
            unmatched=tuple(words for stack in stacks for words in stack.unmatched),
            outside=tuple(outside),
            outside_share=share,
            ends=tuple(stack.read_by for stack in stacks),
            partial=f"partial reading: {'; '.join(unread)}" if unread else "",
        )


def _samples(h: Tensor, numel: int) -> Iterator[Sample]:
    """The sample of a tensor, or of its parts where several of that size lie side by side."""
    if h.numel() == numel:
        yield sample_of(h)
    elif numel and h.ndim and h.numel() % numel == 0 and h.shape[-1] % (h.numel() // numel) == 0:
        for part in h.chunk(h.numel() // numel, -1):
            yield sample_of(part)


def _spread(parameter: Tensor, h: Tensor) -> Sample:
    """The entries of a parameter that is added to every token, or to every sequence, at the places of the sample of `h`."""
    places = _places(h.numel(), h.device).to(parameter.device).remainder(parameter.numel())
    return parameter.reshape(-1)[places].double().cpu()


def _is_under(outer: Collection[str], path: str) -> bool:
    """Whether a path is one of these or below one of them."""
    return any(not one or path == one or path.startswith(f"{one}.") for one in outer)
