"""Training runs as results: `TrainedRun`, `RunGroup`, `FinetuneResult`, and the reader of a monitor's log."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from oversmooth.environment.files import json_object, read_text_file
from oversmooth.errors import BrokenFile
from oversmooth.results.answer import Analysis
from oversmooth.results.base import Missing, Row, SavedResult

# --- what `finetune` found: scores of tasks over seeds, beside the smoothing of the features ---


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


Point = dict[str, float | int]


def read_run(path: Path) -> list[Point]:
    """The monitor's lines, in order of step; a last line cut off by a crash is left out."""
    points: list[Point] = []
    lines = read_text_file(path, "a JSONL file written by the monitor").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            points.append(_logged_point(f"{path}, line {number}", line))
        except BrokenFile:
            if number == len(lines) and points:
                break
            raise
    if not points:
        raise BrokenFile(str(path), "at least one line", "none", "Train for a step first.")
    return by_step(points)


def by_step(points: Iterable[Point]) -> list[Point]:
    """One point per step: a run writes its loss, its evaluation and its smoothing in lines of their own."""
    merged: dict[int, Point] = {}
    for point in points:
        merged.setdefault(int(point["step"]), {}).update(point)
    return [merged[step] for step in sorted(merged)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a Trainer of transformers writes beside a checkpoint."""

    points: Sequence[Point]
    step: int
    steps: int
    """As planned."""


def read_trainer_state(path: Path) -> TrainerState:
    """The numbers in the log of a trainer_state.json."""
    expected = "the trainer_state.json of a Trainer"
    state = json_object(read_text_file(path, expected), str(path), expected)
    history = state.get("log_history")
    if not isinstance(history, list) or not all(isinstance(line, dict) for line in history):
        raise BrokenFile(str(path), f"{expected}, with a log_history", "none", "Give the folder of the Trainer.")
    points = [
        {name: value for name, value in line.items() if isinstance(value, int | float) and not isinstance(value, bool)}
        for line in history
        if type(line.get("step")) is int
    ]
    step, steps = (value if type(value) is int else 0 for value in (state.get("global_step"), state.get("max_steps")))
    return TrainerState(points=by_step(points), step=step, steps=steps)


def _logged_point(place: str, line: str) -> Point:
    """One line: a step, and numbers by name."""
    point = json_object(line, place, "a JSON object with a step")
    if type(point.get("step")) is not int or not 0 <= point["step"] < 2**63:
        found = f"the step {point['step']!r:.40}" if "step" in point else "none"
        raise BrokenFile(place, "a step that is a whole number", found, "Remove the line.")
    return point


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """One run, finished or not: what it was, what it logged and what became of it."""

    where: str
    recipe: str
    variant: str
    seed: int | None = None
    """Unknown of a run that somebody else's program made."""
    settings: tuple[str, ...] = ()
    """What was set otherwise than the recipe says, as key=value."""
    intends: str = ""
    """smoothing or sharpening, for a variant that is made for it."""
    eigenvalues: str = ""
    """Where a variant keeps the eigenvalues of H, in words; empty where it does not."""
    steps: int = 0
    """As planned."""
    is_finished: bool = False
    points: Sequence[Point] = ()
    results: Mapping[str, float] = field(default_factory=dict)
    analysis: Analysis | None = None

    @property
    def name(self) -> str:
        """Variant and seed, as far as known."""
        return self.variant if self.seed is None else f"{self.variant}, seed {self.seed}"

    @property
    def last_step(self) -> int:
        return int(self.points[-1]["step"]) if self.points else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunGroup:
    """The seeds of one variant."""

    name: str
    runs: tuple[TrainedRun, ...]
    short: str = ""
    """The variant alone, where no other group has it: for sentences. Empty where only the whole name tells groups apart."""

    @property
    def said(self) -> str:
        """The name in sentences."""
        return self.short or self.name

    @property
    def words(self) -> str:
        count = len(self.runs)
        what = "seeds" if len({run.seed for run in self.runs} - {None}) == count else "runs"
        return self.name + (f" ({count} {what})" if count > 1 else "")


def grouped(runs: Sequence[TrainedRun]) -> list[RunGroup]:
    """Runs by variant, in the order given; what else differs between them is named too: recipe and settings."""
    several = len({run.recipe for run in runs}) > 1
    shared = set.intersection(*(set(run.settings) for run in runs)) if runs else set()
    by_name: dict[str, list[TrainedRun]] = {}
    for run in runs:
        own = [setting for setting in run.settings if setting not in shared]
        name = ", ".join([f"{run.recipe} {run.variant}" if several else run.variant, *own])
        by_name.setdefault(name, []).append(run)
    variants = [members[0].variant for members in by_name.values()]
    return [
        RunGroup(name=name, runs=tuple(members), short=variant if variants.count(variant) == 1 and not several else "")
        for (name, members), variant in zip(by_name.items(), variants, strict=True)
    ]


def run_names(runs: Sequence[TrainedRun]) -> list[str]:
    """Variant and seed; the same ones twice are numbered."""
    names = [run.name for run in runs]
    return [f"{name} ({k + 1})" if names.count(name) > 1 else name for k, name in enumerate(names)]
