"""What a claim is, and what checking it gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oversmooth.training.reproduce.workshop import Wanted, Workshop

Scale = Literal["cpu", "full"]
Judgement = Literal["confirmed", "refuted", "undecided"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A table that a judgement rests on; it holds nothing that differs between two runs, such as seconds."""

    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check came to."""

    judgement: Judgement
    because: str
    """The numbers that decided, in one sentence."""
    evidence: tuple[Evidence, ...]
    runs: tuple[str, ...] = ()
    """Folders of the training runs, each with its manifest, relative to the output folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim of the paper, stated before it is checked."""

    number: int
    name: str
    statement: str
    """What the paper says, in our words."""
    protocol: str
    confirmed_if: str
    refuted_if: str
    """Undecided otherwise."""
    cost: Mapping[str, str]
    """By scale."""
    commands: tuple[str, ...]
    """What `full` scale runs, on a GPU."""
    needs: Callable[[tuple[int, ...]], Sequence[Wanted]]
    """The runs that it needs, by seeds; trained together, because they are independent."""
    check: Callable[[Workshop], Finding]
