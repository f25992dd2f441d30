"""Series of checkpoints as one target: revisions of a hub repository, or a folder of a Trainer's `checkpoint-*` folders.

    hf://owner/name@step1000..step143000     every branch between the two whose name differs only in its number
    runs/my-model                            runs/my-model/checkpoint-500, runs/my-model/checkpoint-1000, ...

A series is also checked: weights that are those of another step, or that return to an earlier one, are no training.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oversmooth.errors import MissingDependency, RemoteUnavailable, TargetNotFound, first_line
from oversmooth.models.open import WHOLE_MODELS, local_path
from oversmooth.results import Inspection

SERIES = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)@(?P<first>[^/@]+?)\.\.(?P<last>[^/@]+)")
NUMBERED = re.compile(r"(?P<before>.*?)(?P<number>\d{1,18})(?P<after>\D*)")
CHECKPOINT = re.compile(r"checkpoint-(?P<number>\d{1,18})")


@dataclass(frozen=True, slots=True)
class SeriesCheckpoint:
    """One checkpoint of a series."""

    number: int
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlag:
    """A change of weights that training cannot cause."""

    kind: Literal["identical", "back"]
    """`identical`: the weights are those of the other step. `back`: they are closer to it than to the step before."""
    step: int
    other: int

    @property
    def sentence(self) -> str:
        if self.kind == "identical":
            return f"Step {self.step} has exactly the weights of step {self.other}."
        return f"Step {self.step} jumps back: its weights are closer to those of step {self.other} than to the step before."


def steps_of(target: str) -> tuple[SeriesCheckpoint, ...]:
    """The checkpoints of a series, in order of their numbers; empty if the target is one model."""
    if match := SERIES.fullmatch(target):
        return _revisions(target, match["repo"], match["first"], match["last"])
    path = local_path(target)
    if path is None or not path.is_dir() or any((path / name).is_file() for name in WHOLE_MODELS):
        return ()
    found = [
        SeriesCheckpoint(int(match["number"]), str(entry))
        for entry in path.iterdir()
        if entry.is_dir() and (match := CHECKPOINT.fullmatch(entry.name))
    ]
    return tuple(sorted(found, key=lambda step: step.number)) if len(found) > 1 else ()


def _revisions(target: str, repo: str, first: str, last: str) -> tuple[SeriesCheckpoint, ...]:
    ends = [NUMBERED.fullmatch(name) for name in (first, last)]
    if ends[0] is None or ends[1] is None or ends[0].group("before", "after") != ends[1].group("before", "after"):
        raise TargetNotFound(target, ["two revisions whose names differ only in a number, such as step1000..step2000"])
    low, high = sorted(int(end["number"]) for end in ends if end)
    found = []
    for name in _branches(repo):
        match = NUMBERED.fullmatch(name)
        is_alike = match is not None and match.group("before", "after") == ends[0].group("before", "after")
        if match and is_alike and low <= int(match["number"]) <= high:
            found.append(SeriesCheckpoint(int(match["number"]), f"hf://{repo}@{name}"))
    if not found:
        raise TargetNotFound(target, [f"the branches and tags of {repo}, none of which lies between the two"])
    return tuple(sorted(found, key=lambda step: step.number))


def _branches(repo: str) -> list[str]:
    """The names of all branches and tags of a repository."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingDependency("huggingface_hub", "hf", "reading from the hub") from error
    try:
        refs = HfApi().list_repo_refs(repo)
    except Exception as error:  # errors of HTTP, of names and of being offline have no common base
        raise RemoteUnavailable(f"the branches of {repo!r}", first_line(error)) from error
    return sorted({ref.name for ref in (*refs.branches, *refs.tags)})


def integrity(numbers: Sequence[int], inspections: Sequence[Inspection]) -> tuple[StepFlag, ...]:
    """What a series shows that training does not: weights of another step, and jumps back to an earlier one.

    Equal weights are found by their hash. A jump back is seen in the spectra of all layers: a step that lies less than half
    as far from an earlier step as from the one before it.
    """
    flags = []
    prints = [_fingerprint(inspection) for inspection in inspections]
    hashes = [inspection.provenance.weights_sha256 for inspection in inspections]
    for at in range(1, len(numbers)):
        same = next((other for other in range(at) if hashes[other] == hashes[at]), None)
        if same is not None:
            flags.append(StepFlag(kind="identical", step=numbers[at], other=numbers[same]))
            continue
        earlier = range(at - 1)
        if not earlier or len(prints[at]) != len(prints[at - 1]):
            continue
        nearest = min(earlier, key=lambda other: _distance(prints[at], prints[other]))
        if _distance(prints[at], prints[nearest]) < 0.5 * _distance(prints[at], prints[at - 1]):
            flags.append(StepFlag(kind="back", step=numbers[at], other=numbers[nearest]))
    return tuple(flags)


def _fingerprint(inspection: Inspection) -> list[float]:
    """Numbers of every layer that move when its weights move."""
    found = []
    for layer in inspection.layers:
        if layer.plain is not None:
            found += [layer.plain.rho_dc, layer.plain.min_real, layer.plain.max_real, layer.value_norm or 0.0]
            found += [head.rho_dc for head in layer.heads]
    return found


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    return math.dist(a, b) if len(a) == len(b) else math.inf
