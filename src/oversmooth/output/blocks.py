"""The building blocks of a page: plots, tables, strips, heat maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oversmooth.results.base import format_cell
from oversmooth.results.wording import Highlight

# --- what a page is made of: sections of plots, tables, strips and words ---

Figure = Mapping[str, Any]
"""Traces and layout for Plotly, or steps of them for a slider; colours are names of the page's CSS variables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slider:
    count: int
    first: str
    """What the label says at the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    id: str
    figure: Figure
    caption: str
    alt: str
    """The same in words, for those who cannot see it."""
    slider: Slider | None = None
    kind: str = "plot"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    name: str
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    shown: str
    value: float | None = None
    """What sorting uses."""
    tone: str = ""
    text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    id: str
    label: str
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: str = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class StripItem:
    title: str
    word: str
    tone: str
    lines: tuple[str, ...]
    short_title: str = ""
    short_word: str = ""
    """Both for a strip of many layers, whose cards have room for a number each; empty on cards that need their words."""

    @property
    def whole(self) -> str:
        """Everything it says, in one line."""
        return f"{self.title}: " + "; ".join((self.word, *self.lines))


MANY = 16
"""Cards beyond which a strip shows numbers only; the words appear when a card is pointed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """A card per layer."""

    label: str
    items: tuple[StripItem, ...]
    kind: str = "strip"

    @property
    def is_many(self) -> bool:
        return len(self.items) > MANY and all(item.short_word for item in self.items)

    @property
    def columns(self) -> tuple[int, int, int]:
        """On a wide, a medium and a narrow screen."""
        has_numbers = all(item.short_word for item in self.items)
        most = (20, 12, 6) if self.is_many else (8, 6, 3) if has_numbers else (6, 3, 1)
        wide, medium, narrow = (columns_for(len(self.items), limit) for limit in most)
        return wide, medium, narrow

    @property
    def lone(self) -> str:
        """Screens on which a last card would stand alone whatever is done; it fills its row there."""
        sizes = zip(("wide", "medium", "narrow"), self.columns, strict=True)
        return " ".join(f"lone-{name}" for name, columns in sizes if columns > 1 and len(self.items) % columns == 1)


def columns_for(count: int, most: int) -> int:
    """How many cards of `count` stand side by side: at most `most`, few rows, and no card alone in the last one."""
    if count <= most:
        return max(count, 1)
    fitting = [columns for columns in range(2, most + 1) if count % columns != 1] or [most]
    return min(fitting, key=lambda columns: (-(-count // columns), -count % columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A paragraph, a note or a line of code."""

    text: str
    mark: str = ""
    """proved, computed or observed."""
    kind: str = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    items: tuple[str, ...]
    kind: str = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two plots side by side, one below the other on a narrow screen."""

    plots: tuple[Plot, Plot]
    kind: str = "pair"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    tone: str
    percent: float
    """Of the width of the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    shown: str
    """The number that the length of the bar shows."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRow:
    title: str
    bars: tuple[Bar, ...]
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A row of small bars per layer, and a few words about it."""

    label: str
    columns: tuple[str, ...]
    rows: tuple[BarRow, ...]
    legend: tuple[tuple[str, str], ...]
    """Tone of a segment and what it means."""
    kind: str = "bars"


Block = Plot | Pair | Table | Strip | Words | Items | Bars


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    id: str
    title: str = ""
    lead: str = ""
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    title: str
    eyebrow: str
    verdict: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[PageSection, ...]
    footer: str
    summary: str = ""
    """A few sentences below the verdict."""
    findings: tuple[Highlight, ...] = ()
    """What stands out, each with where to look."""
    updates: str = ""
    """Where a page that is served while a run trains asks for newer numbers; empty for a file."""

    @property
    def tables(self) -> list[Table]:
        return [block for section in self.sections for block in section.blocks if isinstance(block, Table)]

    @property
    def parts(self) -> str:
        """Names of everything whose content changes while the page is watched: two pages with the same are laid out alike."""
        blocks = [block for section in self.sections for block in section.blocks]
        pairs = [block.plots if isinstance(block, Pair) else (block,) for block in blocks]
        plots = [block.id for pair in pairs for block in pair if isinstance(block, Plot)]
        columns = [f"{table.id}({','.join(column.name for column in table.columns)})" for table in self.tables]
        return " ".join([*plots, *columns, *(["findings"] if self.findings else [])])


def cell(value: object, tone: str = "") -> Cell:
    """A value as a cell: numbers are short to read and exact to sort."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return Cell(shown=format_cell(value), tone=tone, text=isinstance(value, str))
    return Cell(shown=format_cell(value), value=float(value), tone=tone)  # type: ignore[arg-type]


def table_of(id: str, label: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """A table from flat rows; columns that are empty throughout are left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] not in (None, "", ()) for row in rows)]
    return Table(
        id=id,
        label=label,
        columns=tuple(
            TableColumn(name=name.replace("_", " "), text=all(isinstance(row[name], str) for row in rows))
            for name in names
        ),
        rows=tuple(tuple(cell(row[name]) for name in names) for row in rows),
    )


# --- layers by heads, or by something else, as a heat map ---

HIGHEST = 900
"""Pixels; of deep models rows become thinner."""
WIDTH_OF_NAMES = 16


def heat_map(
    rows: Sequence[str],
    z: Sequence[Sequence[float | None]],
    *,
    bounds: tuple[float, float],
    colours: Sequence[tuple[float, str]],
    title: str,
    hover: str = "%{y}, head %{x}: %{z}<extra></extra>",
    text: Sequence[Sequence[str]] | None = None,
    columns: Sequence[str] | None = None,
    across: str = "head",
) -> dict[str, Any]:
    """A cell per head, or per named column; `text` is what hovering shows where `hover` asks for it."""
    widest = max(len(row) for row in z)
    trace = {
        "type": "heatmap",
        "x": list(range(widest)) if columns is None else list(columns),
        "y": list(rows),
        "z": [[None if value is None else float(f"{value:.4g}") for value in row] for row in z],
        "zmin": bounds[0],
        "zmax": bounds[1],
        "colorscale": [list(colour) for colour in colours],
        "colorbar": {"title": {"text": title}, "thickness": 12},
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": hover,
    }
    return {
        "traces": [trace if text is None else {**trace, "text": [list(row) for row in text]}],
        "layout": {
            "height": min(HIGHEST, 130 + 24 * len(rows)),
            "xaxis": {
                "title": {"text": across},
                "dtick": max(1, widest // WIDTH_OF_NAMES),
                **({} if columns is None else {"type": "category"}),
            },
            "yaxis": {"autorange": "reversed", "type": "category"},
        },
    }
