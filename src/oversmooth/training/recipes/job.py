"""What the runner is given: everything about one training run, and nothing about where it is written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from oversmooth.data.batches import Batch
from oversmooth.training.recipes.schema import Recipe

Numbers = dict[str, float]
Evaluate = Callable[[Dataset[Any], str], Numbers]
"""Called with a dataset and a word that its numbers start with; returns the job's metrics on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How often things happen, in optimizer steps."""

    log: int
    monitor: int
    evaluate: int
    save: int
    keep_checkpoints: int = 2


class EpochSampler(Sampler[Any]):
    """Examples in the order of one epoch; the runner sets `epoch` before each, so a resumed run sees the same order."""

    epoch: int = 0


@runtime_checkable
class SavedState(Protocol):
    """Something that goes on where it was when a run is resumed."""

    def save(self, folder: Path) -> None:
        """Into the folder of a checkpoint."""

    def load(self, folder: Path) -> None:
        """From the folder of a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: how the model is built, what it learns from, how it is judged and saved."""

    recipe: Recipe
    build: Callable[[], nn.Module]
    """A fresh model; called after seeding."""
    train: Dataset[Any]
    evaluate: Dataset[Any] | None
    collate: Callable[[list[Any]], dict[str, Any]]
    """Examples to the keyword arguments of the model, and `labels`; called in the workers."""
    collate_evaluation: Callable[[list[Any]], dict[str, Any]]
    steps: int
    batch: int
    """Examples of one optimizer step, over all processes and accumulated parts."""
    learning_rate: Callable[[int, int], float]
    """The rate of a step, from its number and the number of all steps."""
    rhythm: Rhythm
    probe: Sequence[Batch]
    """Batches on which smoothing is measured during training and at the end."""
    save: Callable[[nn.Module, Path], None]
    """Writes a model with ordinary weights into a folder, in the format of its own library."""
    sampler: EpochSampler | None = None
    loss: Callable[[Any, Tensor], Tensor] | None = None
    """Mean loss from outputs and labels; without it the model returns its own."""
    metrics: Callable[[Any], Numbers] | None = None
    """Numbers from transformers' `EvalPrediction`."""
    decays: Callable[[str, nn.Parameter], bool] = lambda name, parameter: parameter.ndim > 1
    """Whether weight decay acts on a parameter."""
    ema_decay: float | None = None
    """Also keep an exponential moving average of the weights."""
    final: Callable[[Evaluate], Numbers] | None = None
    """More numbers about the trained model, such as accuracy on other data."""
    preview: Callable[[Path], None] | None = None
    """Writes something to look at before training into the folder of the run."""
    callbacks: Sequence[Any] = ()
    """More callbacks of transformers."""
    state: SavedState | None = None
    """Saved and loaded with every checkpoint."""
    trainer_base: Callable[[], type] | None = None
    """A subclass of transformers' Trainer to build on, where a kind has to change its steps."""
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More `TrainingArguments`; they win over those of the runner."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest should say about the data: sources, sizes and hashes of splits."""
