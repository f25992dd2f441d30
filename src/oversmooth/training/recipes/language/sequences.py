"""What a step reads and what an evaluation reads, masked."""

from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from oversmooth.training.recipes.language.budget import Plan
from oversmooth.training.recipes.language.corpus import Corpus
from oversmooth.training.recipes.language.masking import drawn_for, masked

EPOCHS = 2**63
"""Orders of epochs are drawn beyond the places of all sequences."""
VALIDATION_SEED = 2**63
"""Masks of the validation split are the same in every run, whatever its seed."""


class Reading:
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

    def __init__(self, reading: Reading, plan: Plan, *, steps: int, mask: float, vocabulary: int, seed: int):
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
