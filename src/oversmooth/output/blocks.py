"""What a page is made of: a card with the answer, and sections of charts, tables and words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oversmooth.output.charts import Chart, EffectChart, Gauge, HeatMap
from oversmooth.results.answer import Told
from oversmooth.results.base import format_cell
from oversmooth.results.wording import Highlight

Figure = Chart | HeatMap | EffectChart | Gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    name: str
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    shown: str
    value: float | None = None
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    id: str
    label: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A paragraph, a note, a heading or a line of code."""

    text: str
    mark: str = ""
    """proved, computed or observed."""
    kind: str = "text"
    """text, note, heading or code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two charts side by side, one below the other on a narrow screen."""

    charts: tuple[Figure, Figure]


Block = Chart | HeatMap | EffectChart | Gauge | Pair | Table | Words | Items


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    id: str
    title: str = ""
    lead: str = ""
    """Below the title; of a closed section it says what is inside, and its result."""
    blocks: Sequence[Block] = field(default_factory=tuple)
    is_closed: bool = False
    """Whether a reader opens it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The answer about one stack, or one comparison: the first screen of a page."""

    gauges: tuple[Gauge, ...]
    told: tuple[tuple[str, Told], ...] = ()
    """Where, Who, How sure, What now."""
    chart: Chart | None = None
    yardstick: str = ""
    """Why the bands lie where they lie."""
    picture: str = ""
    """The card alone, as an SVG file to share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """Another stack beside the one of the card."""

    name: str
    headline: str
    deck: str
    gauge: Gauge
    told: tuple[tuple[str, Told], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    title: str
    eyebrow: str
    """What is looked at, by its short name."""
    subject: str = ""
    """What was run, behind the name."""
    verdict: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[PageSection, ...]
    summary: str = ""
    """A sentence or two below the verdict."""
    card: Card | None = None
    briefs: tuple[Brief, ...] = ()
    findings: tuple[Highlight, ...] = ()
    """What stands out, each with where to look."""
    updates: str = ""
    """Where a page that is served while a run trains asks for newer numbers; empty for a file."""

    @property
    def tables(self) -> list[Table]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Table)]

    @property
    def figures(self) -> list[Figure]:
        """Every chart below the card."""
        blocks = [block for section in self.sections for block in section.blocks]
        each = [block.charts if isinstance(block, Pair) else (block,) for block in blocks]
        return [block for found in each for block in found if isinstance(block, Figure)]

    @property
    def parts(self) -> str:
        """Names of everything whose content changes while the page is watched: two pages with the same are laid out alike."""
        columns = [f"{table.id}({','.join(column.name for column in table.columns)})" for table in self.tables]
        return " ".join([*(figure.id for figure in self.figures), *columns, *(["findings"] if self.findings else [])])


FOOTER = "Made by oversmooth. This page needs no network and sends nothing anywhere."


def identifier(name: str, stack: str) -> str:
    """A name for the page; stacks are called by whoever wrote the model."""
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{name}-{stack}").strip("-") if stack else name


def cell(value: object) -> Cell:
    """A value as a cell: numbers are short to read and exact to sort."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return Cell(shown=format_cell(value), text=isinstance(value, str))
    return Cell(shown=format_cell(value), value=float(value))  # type: ignore[arg-type]


def table_of(id: str, label: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """A table from flat rows; columns that are empty throughout are left out."""
    each = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in each if any(row.get(name) not in (None, "", ()) for row in rows)]
    return Table(
        id=id,
        label=label,
        columns=tuple(
            TableColumn(name=name.replace("_", " "), text=all(isinstance(row.get(name), str | None) for row in rows))
            for name in names
        ),
        rows=tuple(tuple(cell(row.get(name)) for name in names) for row in rows),
    )


def paired(charts: Sequence[Figure]) -> list[Block]:
    """Side by side, two and two; a last one that is left over stands alone."""
    pairs: list[Block] = [Pair(charts=(a, b)) for a, b in zip(charts[::2], charts[1::2], strict=False)]
    return [*pairs, *charts[len(pairs) * 2 :]]
