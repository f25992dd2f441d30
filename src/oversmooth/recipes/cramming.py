"""The Cramming recipe: budgets in steps or hours, growing batches, masking.

The draws belong to a sequence's place in the run, not to the process that loads it: processes, workers and resumed runs
see the same masks. Counts are exact, not expected: of 128 tokens 32 are asked for, 26 hidden, 3 replaced, 3 left.
"""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from oversmooth.environment.versions import without_kernel_hint
from oversmooth.recipes.corpus import MASK, SPECIAL_TOKENS, Corpus

CLOCK_FILE = "clock.json"
Batch = tuple[int, int]
"""The place of its first sequence in the run, and how many there are."""


def triangle(share: float, *, peak: float, start_share: float = 0.25, peak_at: float = 0.75) -> float:
    """Linear from `start_share * peak` to `peak` at `peak_at` of the budget, then linear to 0 at its end.

    >>> [triangle(s, peak=1.0) for s in (0.0, 0.375, 0.75, 0.875, 1.0)]
    [0.25, 0.625, 1.0, 0.5, 0.0]
    """
    if share < peak_at:
        return peak * (start_share + (1 - start_share) * share / peak_at)
    return peak * max(0.0, (1 - share) / (1 - peak_at))


def ramped_batch(share: float, *, batch: int, ramp: float, quantum: int) -> int:
    """The batch at a share of the budget: grows by `quantum` sequences and reaches `batch` at `ramp` of the budget.

    >>> [ramped_batch(s, batch=8192, ramp=0.6, quantum=128) for s in (0.0, 0.3, 0.59, 0.6, 1.0)]
    [128, 4224, 8064, 8192, 8192]
    """
    if share >= ramp:
        return batch
    return min(batch, (int(batch * share / ramp / quantum) + 1) * quantum)


@runtime_checkable
class Plan(Protocol):
    """What a training run asks at every step."""

    def share(self, step: int) -> float:
        """Of the budget, spent before this step."""
        ...

    def batch_of(self, step: int) -> Batch: ...


class StepPlan:
    """A budget of steps: everything is a function of the step, so that a run can be repeated and taken up anywhere."""

    def __init__(self, steps: int, *, batch: int, ramp: float, quantum: int):
        self.steps = steps
        sizes = (ramped_batch(s / steps, batch=batch, ramp=ramp, quantum=quantum) for s in range(steps))
        self.firsts = [0, *accumulate(sizes)]
        """Sequences before each step, and at the end those of the whole run."""

    def share(self, step: int) -> float:
        return step / self.steps

    def batch_of(self, step: int) -> Batch:
        return self.firsts[step], self.firsts[step + 1] - self.firsts[step]


class ClockPlan:
    """A budget of hours: the time is looked at once per step, in the first process, and shared with the others.

    `save` and `load` carry the spent time and the place in the corpus over an interruption.
    """

    def __init__(
        self, hours: float, *, batch: int, ramp: float, quantum: int, now: Callable[[], float] = time.monotonic
    ):
        self.seconds = hours * 3600
        self.batch, self.ramp, self.quantum = batch, ramp, quantum
        self.spent = 0.0
        self.place = 0
        self._now = now
        self._began: float | None = None

    def begin(self) -> None:
        self._began = self._now() - self.spent

    def measured(self) -> float:
        """Seconds that are spent by now, over all sessions; `tick` makes them count."""
        return self.spent if self._began is None else self._now() - self._began

    def tick(self, spent: float) -> None:
        self.spent = spent

    @property
    def is_over(self) -> bool:
        return self.spent >= self.seconds

    def share(self, step: int) -> float:
        return min(1.0, self.spent / self.seconds)

    def batch_of(self, step: int) -> Batch:
        size = ramped_batch(self.share(step), batch=self.batch, ramp=self.ramp, quantum=self.quantum)
        first = self.place
        self.place += size
        return first, size

    def save(self, folder: Path) -> None:
        text = json.dumps({"spent": self.spent, "place": self.place})
        (folder / CLOCK_FILE).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        saved = json.loads((folder / CLOCK_FILE).read_text(encoding="utf-8"))
        self.spent, self.place = float(saved["spent"]), int(saved["place"])


# --- masking: a quarter of the tokens is asked for; of these 80% are hidden ---

MASK_ID = SPECIAL_TOKENS.index(MASK)
IGNORED = -100
HIDDEN_SHARE, REPLACED_SHARE = 0.8, 0.1


def mask_counts(length: int, share: float) -> tuple[int, int, int]:
    """How many tokens are asked for, how many of these are hidden and how many replaced.

    >>> mask_counts(128, 0.25)
    (32, 26, 3)
    """
    asked = round(share * length)
    hidden = round(HIDDEN_SHARE * asked)
    return asked, hidden, min(round(REPLACED_SHARE * asked), asked - hidden)


def drawn_for(seed: int, place: int) -> numpy.random.Generator:
    """Random numbers that belong to a place in a run; every pair has a stream of its own."""
    key = numpy.asarray([seed, place], numpy.uint64)  # a list would become float64 beyond 2^63 and lose its last digits
    return numpy.random.Generator(numpy.random.Philox(key=key))


def masked(
    sequences: NDArray[numpy.integer], places: NDArray[numpy.integer], *, share: float, vocabulary: int, seed: int
) -> dict[str, Tensor]:
    """Input ids and labels; `places` are the numbers of the sequences in the run. Special tokens are never asked for."""
    count, length = sequences.shape
    draws = numpy.empty((count, length))
    words = numpy.empty((count, length), numpy.int64)
    for row, place in enumerate(places):
        generator = drawn_for(seed, int(place))
        draws[row] = generator.random(length)
        words[row] = generator.integers(len(SPECIAL_TOKENS), vocabulary, length)
    inputs = sequences.astype(numpy.int64)
    is_special = inputs < len(SPECIAL_TOKENS)
    draws[is_special] = 2.0  # behind all others
    rank = draws.argsort(1, kind="stable").argsort(1, kind="stable")
    asked, hidden, replaced = mask_counts(length, share)
    is_asked = (rank < asked) & ~is_special
    labels = numpy.where(is_asked, inputs, IGNORED)
    inputs = numpy.where(is_asked & (rank < hidden), MASK_ID, inputs)
    inputs = numpy.where(is_asked & (rank >= hidden) & (rank < hidden + replaced), words, inputs)
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


# --- what a step reads and what an evaluation reads, masked ---

EPOCHS = 2**63
"""Orders of epochs are drawn beyond the places of all sequences."""
VALIDATION_SEED = 2**63
"""Masks of the validation split are the same in every run, whatever its seed."""


class TrainingSequences:
    """The training sequences in the order in which a run reads them, over and over; without the last `held_out`."""

    def __init__(self, corpus: Corpus, *, seed: int, shuffle: bool, fraction: float = 1.0, held_out: int = 0):
        found = corpus.sequences("train")
        self.sequences = found[: len(found) - held_out]
        order = corpus.order()
        self.order = order if order is None or not held_out else order[order < len(self.sequences)]
        self.count = max(1, int(len(self.sequences) * fraction))
        self.seed, self.shuffle = seed, shuffle
        self._epoch = -1
        self._shuffled: NDArray[numpy.integer] = numpy.empty(0, numpy.int64)

    def __call__(self, first: int, count: int) -> NDArray[numpy.uint16]:
        """The sequences at these places of the run."""
        places = numpy.arange(first, first + count)
        rows = numpy.empty(count, numpy.int64)
        for epoch in range(first // self.count, (first + count - 1) // self.count + 1):
            inside = places // self.count == epoch
            rows[inside] = self._rows(epoch, places[inside] % self.count)
        return numpy.asarray(self.sequences[rows])

    def _rows(self, epoch: int, places: NDArray[numpy.int64]) -> NDArray[numpy.integer]:
        if self.shuffle:
            if epoch != self._epoch:
                self._epoch, self._shuffled = epoch, drawn_for(self.seed, EPOCHS + epoch).permutation(self.count)
            return self._shuffled[places]
        return places if self.order is None else numpy.asarray(self.order[places])


class StepBatches(Dataset[dict[str, Tensor]]):
    """The share of one process of every step's batch, by the number of the step."""

    def __init__(self, reading: TrainingSequences, plan: Plan, *, steps: int, mask: float, vocabulary: int, seed: int):
        self.reading, self.plan, self.steps = reading, plan, steps
        self.mask, self.vocabulary, self.seed = mask, vocabulary, seed
        self.process, self.processes = 0, 1

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        first, count = self.plan.batch_of(step)
        share = count // self.processes
        first += self.process * share
        sequences = self.reading(first, share)
        places = numpy.arange(first, first + share)
        return masked(sequences, places, share=self.mask, vocabulary=self.vocabulary, seed=self.seed)


class MaskedValidation(Dataset[dict[str, Tensor]]):
    """Held-out sequences (sequence, token), each with one fixed mask."""

    def __init__(self, sequences: NDArray[numpy.uint16], *, mask: float, vocabulary: int):
        self.sequences = sequences
        self.mask, self.vocabulary = mask, vocabulary

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = masked(
            self.sequences[index][None],
            numpy.asarray([index]),
            share=self.mask,
            vocabulary=self.vocabulary,
            seed=VALIDATION_SEED,
        )
        return {name: tensor[0] for name, tensor in row.items()}


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# --- what cramming needs beyond the Trainer: a batch that grows over the run, and a budget of wall clock ---


def cramming_trainer(batches: StepBatches, plan: Plan, micro_batch: int) -> type:
    """A Trainer for which one batch of the loader is one optimizer step, worked through in parts of `micro_batch`."""
    from transformers import Trainer

    class CrammingTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            batches.process, batches.processes = self.args.process_index, self.args.world_size
            return DataLoader(
                batches,
                batch_size=1,
                collate_fn=_only,
                num_workers=0 if isinstance(plan, ClockPlan) else self.args.dataloader_num_workers,
                pin_memory=self.args.dataloader_pin_memory,
            )

        def training_step(self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
            """Losses are sums over the tokens of the whole batch, so parts of unequal size weigh what they hold."""
            rows = len(inputs["input_ids"])
            starts = range(0, rows, micro_batch or rows)
            total = torch.zeros((), device=self.args.device)
            for start in starts:
                part = {name: tensor[start : start + (micro_batch or rows)] for name, tensor in inputs.items()}
                is_last = start == starts[-1]
                with nullcontext() if is_last else self.accelerator.no_sync(model):
                    total += super().training_step(model, part, num_items_in_batch)
            return total

    return CrammingTrainer


def _only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return items[0]


def clock_callback(plan: ClockPlan) -> Any:
    """Looks at the clock after every step, tells the other processes, and ends the run when the budget is spent."""
    with without_kernel_hint():
        from transformers import TrainerCallback

    class ClockCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            plan.begin()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            """After the weights have moved and before the next rate is looked up."""
            spent = torch.tensor(plan.measured(), dtype=torch.float64, device=args.device)
            if args.world_size > 1:
                torch.distributed.broadcast(spent, 0)
            plan.tick(spent.item())

        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            control.should_training_stop |= plan.is_over

    return ClockCallback()
