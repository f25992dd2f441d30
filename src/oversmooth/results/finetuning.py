"""What `finetune` found: scores of tasks over seeds, beside the smoothing of the features."""

from dataclasses import dataclass
from typing import ClassVar

from oversmooth.results.base import Missing, Row, SavedResult


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfDepth:
    """How alike the tokens of the task's own texts are when they leave the last block, and what the theory says."""

    cosine: float | None
    hfc_lfc: float | None
    smoothing_layers: int | None
    """Layers whose predicted regime is smoothing."""
    layers: int
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """One task over its seeds."""

    task: str
    seeds: tuple[int, ...]
    metrics: dict[str, tuple[float, ...]]
    """By metric, one value per seed, on the validation split."""
    scores: tuple[float, ...]
    """The mean of the task's metrics, per seed."""
    mean: float
    spread: float | None
    """Standard deviation over seeds."""
    before: EndOfDepth | None = None
    """None for a diagnostic set, which is answered by the model of another task."""
    after: tuple[EndOfDepth, ...] = ()
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FinetuneResult(SavedResult):
    """The table of `oversmooth finetune`."""

    kind: ClassVar[str] = "finetuning"
    checkpoint: str
    setting: str
    data: str
    seeds: tuple[int, ...]
    tasks: tuple[TaskResult, ...]
    overall: tuple[float, ...] | None
    """Mean over all eight tasks, per seed."""
    missing: tuple[Missing, ...] = ()

    def rows(self) -> list[Row]:
        """One flat row per task and seed."""
        return [
            {"task": task.task, "seed": seed, "score": task.scores[order]}
            | {name: values[order] for name, values in task.metrics.items()}
            for task in self.tasks
            for order, seed in enumerate(task.seeds)
        ]

    def __repr__(self) -> str:
        return f"<FinetuneResult of {self.checkpoint}: {len(self.tasks)} tasks, {len(self.seeds)} seeds>"

    def _title(self) -> str:
        return f"Fine-tuning of {self.checkpoint}"
