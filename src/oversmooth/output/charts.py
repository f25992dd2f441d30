"""Charts as SVG: one description of each serves page, print, notebook, SVG and PNG, with the same numbers.

A chart is drawn at a width in pixels and never stretched: a page holds it at three widths, of which CSS shows one, so that
letters keep their size. Colours are classes; a page gives them the colours of its theme, a file brings its own.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from oversmooth.errors import MissingDependency

# --- colours and letters ---

TONES: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#121418"),
    "panel": ("#f3f4f6", "#1b1f25"),
    "ink": ("#15181d", "#eef0f3"),
    "soft": ("#565d69", "#a3a9b4"),
    "line": ("#d8dbe0", "#343942"),
    "crowded": ("#e1e4e9", "#2d333d"),
    "collapsed": ("#b4bac4", "#59616e"),
    "fan": ("#b4bac4", "#59616e"),
    "null": ("#6f7682", "#8f96a2"),
    "attention": ("#0a5291", "#56aaf0"),
    "attention-norm": ("#8cc1ec", "#2c6597"),
    "cross": ("#2f8f4e", "#c8e89a"),
    "cross-norm": ("#b3dfbe", "#5b7440"),
    "feed-forward": ("#c95a12", "#f28b3f"),
    "feed-forward-norm": ("#f8c596", "#93521f"),
    "final": ("#747b87", "#a0a6b1"),
    "between": ("#c9b458", "#7a6b28"),
    "other": ("#6d5a14", "#d8c268"),
    "apart": ("#0b7d71", "#35b8a8"),
    "series-1": ("#15181d", "#eef0f3"),
    "series-2": ("#8a2b87", "#dd8adb"),
    "series-3": ("#0f8f80", "#2aa596"),
    "series-4": ("#7d6500", "#d9c04a"),
}
"""Light and dark. A hue has one meaning: blue attention, green cross-attention, orange feed-forward, pale their norms."""
PARTS = {
    "attention": "attention",
    "norm after attention": "attention-norm",
    "cross-attention": "cross",
    "norm after cross-attention": "cross-norm",
    "feed-forward": "feed-forward",
    "norm after feed-forward": "feed-forward-norm",
    "other blocks": "other",
    "between blocks": "between",
    "final norm": "final",
}
"""The tone of every part of `PART_NAMES`."""
DASHES = ("", "7 4", "2 3", "9 3 2 3")
WIDTHS = {"wide": 1120, "mid": 700, "narrow": 340}
"""Pixels at which a page holds every chart."""
HALF = {"wide": 544, "mid": 700, "narrow": 340}
"""The same for one of two charts beside each other."""
FONT = (
    "-apple-system, 'Segoe UI', Roboto, 'Noto Sans', Ubuntu, 'Helvetica Neue', 'Liberation Sans', Arial, 'DejaVu "
    "Sans', system-ui, sans-serif"
)
SIZE, LINE = 13, 17
"""Of the letters, and from one line to the next."""
LEVELS = 12
"""Steps of a colour in a heat map."""
Pixels = float | int
ROOM = 0.4
"""Share of the width that names at line ends may take; longer ones stand below."""

_WIDE, _NARROW, _THIN = set("mMW@%—"), set('frt()[]{}-/\\ "*'), set("iljI|.,:;'!`")


def text_width(text: str, size: Pixels = SIZE, *, bold: bool = False) -> Pixels:
    """Pixels in the widest font of the list, DejaVu: fonts differ from machine to machine."""
    return sum(_ems(letter) for letter in text) * size * (1.12 if bold else 1.0)


def _ems(letter: str) -> Pixels:
    if letter in _WIDE or ord(letter) > 0x2E7F:
        return 0.98
    return 0.4 if letter in _NARROW else 0.33 if letter in _THIN else 0.72 if letter.isupper() else 0.625


def wrapped(text: str, room: Pixels, size: Pixels = SIZE, *, bold: bool = False) -> list[str]:
    """Lines that fit; a word that is too long is broken."""
    lines = [""]
    for word in text.split():
        while text_width(word, size, bold=bold) > room and len(word) > 1:
            keep = max(k for k in range(1, len(word)) if k == 1 or text_width(word[:k], size, bold=bold) <= room)
            lines += [word[:keep], ""] if lines[-1] else [""]
            lines[-2] = lines[-2] or word[:keep]
            word = word[keep:]
        joined = f"{lines[-1]} {word}".strip()
        if text_width(joined, size, bold=bold) <= room:
            lines[-1] = joined
        else:
            lines.append(word)
    return [line for line in lines if line] or [""]


def shortened(name: str, room: Pixels) -> str:
    """A name with its middle left out where it has no room: its end tells layers apart."""
    keep = len(name)
    while keep > 8 and text_width(short := f"{name[: keep // 2]}…{name[len(name) - keep // 2 :]}") > room:
        keep -= 2
    return name if text_width(name) <= room or keep <= 8 else short


def style(theme: int | None = None, scope: str = "") -> str:
    """Rules for every class: with literal colours of a theme (0 light, 1 dark), or with the variables of a page."""
    rules = []
    for name, colours in TONES.items():
        colour = f"var(--{name})" if theme is None else colours[theme]
        rules.append(f"{scope}.f-{name}{{fill:{colour}}}{scope}.s-{name}{{stroke:{colour};fill:none}}")
    rules.append(
        f"{scope}text{{font-family:{FONT};font-size:{SIZE:g}px}}{scope}.b{{font-weight:600}}{scope}.e{{text-anchor:end}}"
        f"{scope}.c{{text-anchor:middle}}{scope}.hit{{fill:#000;fill-opacity:0}}"
        f"{scope}.halo{{paint-order:stroke;stroke-width:5px;stroke-linejoin:round}}"
    )
    return "".join(rules)


def variables(theme: int) -> str:
    """The colours of a theme as CSS variables."""
    return "".join(f"--{name}:{colours[theme]};" for name, colours in TONES.items())


# --- what a chart is made of ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    title: str = ""
    zones: tuple[tuple[float, float, str], ...] = ()
    """Names of stretches, beside the ticks where there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    """`None` interrupts the line."""
    tone: str = "ink"
    dash: str = ""
    dots: bool = False
    width: float = 2.4
    value: str = ""
    """What stands behind its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fan:
    """What lies between two lines."""

    name: str
    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    tone: str = "fan"
    strength: float = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Stacked columns: what is above zero upwards, what is below downwards; the dot is the sum."""

    x: tuple[float, ...]
    parts: tuple[tuple[str, str, tuple[float, ...], str], ...]
    """Name, tone, a height for every x, and what stands behind the name."""
    total: str = ""
    """What stands behind the name of the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    titles: tuple[str, ...] = ()
    """What pointing at one shows."""
    labels: tuple[str, ...] = ()
    """What stands at one."""
    tone: str = "ink"
    radius: float = 3.5
    is_open: bool = False


Mark = Line | Fan | Columns | Points


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    y: Axis
    marks: tuple[Mark, ...]
    height: int = 190


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels above each other over one x axis."""

    id: str
    alt: str
    """The same in words, for those who cannot see it."""
    x: Axis
    panels: tuple[Panel, ...]
    notes: tuple[tuple[float, str], ...] = ()
    """At every x, what pointing there shows."""
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A cell per row and column; the colour is ink for what is above `middle`, green for what is below."""

    id: str
    alt: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    low: float
    high: float
    middle: float | None = None
    """Where colours part; `None` for one colour from `low` to `high`."""
    ink_below: bool = False
    """Whether the colours change sides."""
    row_title: str = ""
    column_title: str = ""
    unit: str = ""
    """What the numbers are, at the scale."""
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectRow:
    name: str
    value: float
    low: float
    high: float
    margin: float = 0.0
    tone: str = "ink"
    is_open: bool = False
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectChart:
    """A value with its interval per row; the name stands above."""

    id: str
    alt: str
    title: str
    x: Axis
    rows: tuple[EffectRow, ...]
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A number between 0 and 1 with its bands."""

    id: str
    alt: str
    title: str
    value: float
    said: str
    bands: tuple[tuple[float, str], ...]
    """Where each begins, and its name."""
    start: float
    interval: tuple[float, float] | None = None
    before: float | None = None
    untrained: float | None = None
    limit: float | None = None
    start_name: str = "input"
    tone: str = "ink"
    """Of the value: that of its model in the charts below."""
    end: str = "1"
    """What stands at the end of the scale."""
    caption: str = ""


Figure = Chart | HeatMap | EffectChart | Gauge

# --- axes ---


def numbers(low: float, high: float, *, count: int = 5, is_change: bool = False, title: str = "") -> Axis:
    """An axis with round ticks that holds both numbers."""
    if not high > low:
        low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first = math.ceil(low / step - 1e-6)
    values = [k * step for k in range(first, math.floor(high / step + 1e-6) + 1)]
    return Axis(low=low, high=high, ticks=tuple((v, _number(v, digits, is_change)) for v in values), title=title)


def _number(value: float, digits: int, is_change: bool) -> str:
    if abs(value) >= 1e5 or (0 < abs(value) < 1e-4 and digits > 5):
        return f"{value:g}"
    text = f"{value:{'+' if is_change else ''}.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text) else "0"


def extent(values: Sequence[float | None], *, zero: bool = False, margin: float = 0.06) -> tuple[float, float]:
    """The smallest and the largest, with a little room."""
    known = [value for value in values if value is not None] + ([0.0] if zero else [])
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    room = margin * (high - low)
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def places(labels: Sequence[str], title: str = "") -> Axis:
    """A place for every label."""
    return Axis(
        low=-0.6, high=len(labels) - 0.4, ticks=tuple((float(k), label) for k, label in enumerate(labels)), title=title
    )


def thinned(ticks: Sequence[tuple[float, str]], gap: Pixels = 8.0) -> list[tuple[float, str]]:
    """Labels at pixels that do not touch: words always, layers at round numbers, others evenly."""
    words = {k for k, (_, text) in enumerate(ticks) if not text.lstrip("+\N{MINUS SIGN}").replace(".", "").isdigit()}
    words = words if len(words) <= 3 else set()
    others = [k for k in range(len(ticks)) if k not in words]
    shift = int(ticks[others[0]][1]) - others[0] if others and ticks[others[0]][1].isdigit() else 0
    is_counted = all(ticks[k][1] == str(k + shift) for k in others)
    for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000):
        kept = [k for k in others if (k + shift if is_counted else k) % step == 0]
        free = [k for k in kept if all(_apart(ticks[k], ticks[word], gap) for word in words)]
        chosen = sorted({*free, *words})
        if all(_apart(ticks[a], ticks[b], gap) for a, b in pairwise(chosen)):
            return [ticks[k] for k in chosen]
    return list(ticks[:1])


def _apart(one: tuple[float, str], other: tuple[float, str], gap: float) -> bool:
    return abs(one[0] - other[0]) >= (text_width(one[1]) + text_width(other[1])) / 2 + gap


# --- pieces of SVG; everything that is not ours is escaped ---


def _n(value: Pixels) -> str:
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def lettering(x: Pixels, y: Pixels, text: str, classes: str = "f-soft", size: Pixels = 0.0) -> str:
    """A line of text; names in it come from files, and are escaped."""
    sized = f' style="font-size:{size:g}px"' if size else ""
    return f'<text x="{_n(x)}" y="{_n(y)}" class="{classes}"{sized}>{escape(text)}</text>'


def _rule(x1: Pixels, y1: Pixels, x2: Pixels, y2: Pixels, tone: str = "line", more: str = "") -> str:
    return f'<path d="M{_n(x1)} {_n(y1)}L{_n(x2)} {_n(y2)}" class="s-{tone}"{more}/>'


def _rect(x: Pixels, y: Pixels, width: Pixels, height: Pixels, classes: str, inside: str = "") -> str:
    box = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0))}" height="{_n(max(height, 0))}" class="{classes}"'
    return f"<rect {box}>{inside}</rect>" if inside else f"<rect {box}/>"


def _dot(x: Pixels, y: Pixels, radius: Pixels, tone: str, *, is_open: bool = False, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    look = f's-{tone}" stroke-width="1.8' if is_open else f"f-{tone}"
    return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" class="{look}">{inside}</circle>'


def _shape(path: str, tone: str, *, is_open: bool = False) -> str:
    outline = f'<path d="{path}" class="s-{tone}" stroke-width="1.8"/>' if is_open else ""
    return f'<path d="{path}" class="f-{"paper" if is_open else tone}"/>{outline}'


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of a legend; `at` is where it would like to stand."""

    symbol: str
    tone: str
    name: str
    value: str = ""
    at: Pixels | None = None
    is_bold: bool = False
    dash: str = ""
    strength: float = 1.0

    @property
    def width(self) -> Pixels:
        return 26 + text_width(self.name, bold=self.is_bold) + (10 + text_width(self.value) if self.value else 0)

    def draw(self, x: Pixels, y: Pixels, right: Pixels | None = None) -> str:
        bold = " b" if self.is_bold else ""
        ink = "f-ink" if self.is_bold else "f-soft"
        end = f"{self.name} {self.value}".strip() if right is None else self.name
        words = lettering(x + 24, y, end, ink + bold)
        if right is not None and self.value:
            words += lettering(right, y, self.value, f"{ink} e{bold}")
        return self._symbol(x, y - 4.5) + words

    def _symbol(self, x: Pixels, y: Pixels) -> str:
        if self.symbol == "line":
            dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
            return _rule(x, y, x + 18, y, self.tone, f' stroke-width="{2.4 if self.is_bold else 1.6}"{dash}')
        if self.symbol == "dot":
            return _dot(x + 9, y, 4.0, self.tone)
        if self.symbol == "diamond":
            return _shape(f"M{_n(x + 3)} {_n(y)}l6 -6l6 6l-6 6z", self.tone, is_open=True)
        if self.symbol == "flag":
            return _shape(f"M{_n(x + 4)} {_n(y - 4)}h10l-5 8z", self.tone)
        if self.symbol == "ring":
            return _dot(x + 9, y, 3.5, self.tone, is_open=True)
        faint = f' opacity="{self.strength:g}"'
        return f'<rect x="{_n(x + 2)}" y="{_n(y - 5)}" width="14" height="10" class="f-{self.tone}"{faint}/>'


def _entries(mark: Mark, y_of: "_Scale") -> Iterator[_Entry]:
    if isinstance(mark, Columns):
        yield from (_Entry("box", tone, name, value) for name, tone, _, value in mark.parts)
        if mark.total and len(mark.parts) > 1:
            yield _Entry("dot", "ink", "together", mark.total, is_bold=True)
    elif mark.name and isinstance(mark, Fan):
        yield _Entry(
            "box", mark.tone, mark.name, at=y_of((mark.low[-1] + 3 * mark.high[-1]) / 4), strength=mark.strength
        )
    elif mark.name and isinstance(mark, Line):
        known = [value for value in mark.y if value is not None]
        at, is_bold = y_of(known[-1]) if known else None, mark.width > 2
        yield _Entry("line", mark.tone, mark.name, mark.value, at, is_bold, mark.dash)
    elif mark.name and isinstance(mark, Points):
        yield _Entry("ring" if mark.is_open else "dot", mark.tone, mark.name)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From numbers to pixels."""

    low: Pixels
    high: Pixels
    start: Pixels
    end: Pixels

    def __call__(self, value: Pixels) -> Pixels:
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)


def _beside(entries: Sequence[_Entry], x: Pixels, right: Pixels, top: Pixels, bottom: Pixels) -> str:
    """Names at line ends, moved apart where they would touch."""
    wanted = sorted(entries, key=lambda e: top if e.at is None else e.at)
    ends: list[Pixels] = []
    for entry in wanted:
        at = (top if entry.at is None else entry.at) + 4.5
        ends.append(max(at, ends[-1] + LINE if ends else top + 10))
    spill = max(0.0, ends[-1] - bottom) if ends else 0.0
    for k in reversed(range(len(ends))):
        limit = ends[k + 1] - LINE if k + 1 < len(ends) else bottom
        ends[k] = min(ends[k], limit) if spill else ends[k]
    has_sums = any(entry.at is None and entry.value for entry in wanted)
    edge = min(right, x + max((e.width for e in wanted), default=0) + 16) if has_sums else None
    return "".join(entry.draw(x, y, edge) for entry, y in zip(wanted, ends, strict=True))


def _below(entries: Sequence[_Entry], left: Pixels, right: Pixels, top: Pixels) -> tuple[str, Pixels]:
    """Entries in rows from the left, long names over several lines; with the height they take."""
    parts, x, y = [], left, top + 12
    for entry in entries:
        if x > left and x + entry.width > right:
            x, y = left, y + LINE + 2
        lines = wrapped(f"{entry.name} {entry.value}".strip(), right - left - 26, bold=entry.is_bold)
        first, *others = lines
        parts.append(replace(entry, name=first, value="").draw(x, y))
        for line in others:
            y += LINE
            parts.append(lettering(x + 24, y, line, "f-soft"))
        x = x + entry.width + 18 if not others else right
    return "".join(parts), (y - top + 6 if entries else 0.0)


# --- a chart of panels ---


def _marks(mark: Mark, x_of: _Scale, y_of: _Scale, step: Pixels) -> str:
    if isinstance(mark, Fan):
        up = [f"{_n(x_of(x))} {_n(y_of(y))}" for x, y in zip(mark.x, mark.high, strict=True)]
        down = [f"{_n(x_of(x))} {_n(y_of(y))}" for x, y in zip(mark.x, mark.low, strict=True)][::-1]
        return f'<path d="M{"L".join(up + down)}Z" class="f-{mark.tone}" opacity="{mark.strength:g}"/>'
    if isinstance(mark, Columns):
        return _columns(mark, x_of, y_of, step)
    if isinstance(mark, Points):
        titles = mark.titles or ("",) * len(mark.x)
        dots = [
            _dot(x_of(x), y_of(y), mark.radius, mark.tone, is_open=mark.is_open, title=title)
            for x, y, title in zip(mark.x, mark.y, titles, strict=True)
        ]
        named = zip(mark.x, mark.y, mark.labels, strict=False)
        return "".join(dots + [lettering(x_of(x), y_of(y) - 8, label, "f-soft c") for x, y, label in named])
    known = [(x_of(x), None if y is None else y_of(y)) for x, y in zip(mark.x, mark.y, strict=True)]
    path, is_down = "", False
    for x, y in known:
        path += "" if y is None else f"{'L' if is_down else 'M'}{_n(x)} {_n(y)}"
        is_down = y is not None
    dash = f' stroke-dasharray="{mark.dash}"' if mark.dash else ""
    line = f'<path d="{path}" class="s-{mark.tone}" stroke-width="{mark.width:g}" stroke-linejoin="round"{dash}/>'
    few = mark.dots and step > 14
    lone = len([y for _, y in known if y is not None]) == 1
    dots = [_dot(x, y, 3.6, mark.tone) for x, y in known if y is not None] if few or lone else []
    return line + "".join(dots)


def _columns(mark: Columns, x_of: _Scale, y_of: _Scale, step: Pixels) -> str:
    width = max(1.5, min(44, 0.62 * step))
    paths: dict[str, str] = {}
    sums = []
    for k, x in enumerate(mark.x):
        ends = {True: 0.0, False: 0.0}
        for _, tone, heights, _ in mark.parts:
            start = ends[heights[k] >= 0]
            ends[heights[k] >= 0] = end = start + heights[k]
            top, bottom = sorted((y_of(start), y_of(end)))
            if bottom - top >= 0.25:
                box = f"M{_n(x_of(x) - width / 2)} {_n(top)}h{_n(width)}v{_n(bottom - top)}h-{_n(width)}z"
                paths[tone] = paths.get(tone, "") + box
        sums.append(_dot(x_of(x), y_of(sum(h[k] for _, _, h, _ in mark.parts)), 4.0 if step > 14 else 2.0, "ink"))
    edge = ' stroke-width="1.2"' if step > 14 else ""
    shapes = [
        f'<path d="{d}" class="f-{tone}"/>'
        + (f'<path d="{d}" class="s-{_strong(tone)}"{edge}/>' if edge and _strong(tone) else "")
        for tone, d in paths.items()
    ]
    rings = [dot.replace('class="', 'stroke-width="1.5" class="s-paper ', 1) for dot in sums] if step > 14 else []
    return "".join(shapes) + "".join(rings) + "".join(sums if len(mark.parts) > 1 else [])


def _strong(tone: str) -> str:
    """Around a pale colour its strong one, so that it is seen on paper."""
    return tone.removesuffix("-norm") if tone.endswith("-norm") else ""


def _chart(chart: Chart, width: Pixels, *, again: bool) -> tuple[str, Pixels]:
    zones = [name for panel in chart.panels for _, _, name in panel.y.zones] if width > 600 else []
    ticks = [text for panel in chart.panels for _, text in panel.y.ticks]
    left = max((text_width(text) for text in ticks), default=0) + 12
    left += max(text_width(name) for name in zones) + 12 if zones else 0
    blank = _Scale(0.0, 1.0, 0.0, 1.0)
    each = [[e for mark in panel.marks for e in _entries(mark, blank)] for panel in chart.panels]
    widest = max((entry.width for entries in each for entry in entries), default=0.0)
    fits = all(LINE * len(entries) <= panel.height for entries, panel in zip(each, chart.panels, strict=True))
    is_beside = 0 < widest <= ROOM * width and width > 400 and fits
    right = width - (widest + 32 if is_beside else 12)
    x_of = _Scale(chart.x.low, chart.x.high, left, right)
    step = (right - left) / max(chart.x.high - chart.x.low, 1e-9) * _spacing(chart.x)
    parts, top, first, bottom, below = [], 0.0, 0.0, 0.0, 0.0
    for panel in chart.panels:
        title, top = _title(panel.title, width, top)
        parts += title
        top += 10
        first = first or top
        y_of = _Scale(panel.y.low, panel.y.high, top + panel.height, top)
        parts.append(_frame(panel, y_of, left, right, zones))
        parts += [_marks(mark, x_of, y_of, step) for mark in panel.marks]
        entries = [entry for mark in panel.marks for entry in _entries(mark, y_of)]
        bottom = top + panel.height
        if is_beside:
            parts.append(_beside(entries, right + 10, width, top, bottom + 4))
            top = bottom + 10
        else:
            is_last = panel is chart.panels[-1]
            drop = 42 if is_last and chart.x.title else 24 if is_last else 6
            legend, below = _below(entries, 0, width, bottom + drop)
            parts.append(legend)
            top = bottom + below + drop + 6
    under = bottom + 17
    parts += _labels([(x_of(value), text) for value, text in chart.x.ticks], under, width)
    parts.append(lettering((left + right) / 2, under + LINE, chart.x.title, "f-soft c") if chart.x.title else "")
    end = under + (LINE if chart.x.title else 0) + 6 + below
    return "".join(parts) + _hits(chart.notes, x_of, (left, right, first, bottom), again=again), end


def _labels(ticks: Sequence[tuple[Pixels, str]], y: Pixels, width: Pixels) -> list[str]:
    """Below an axis, inside the picture, as many as do not touch."""
    halves = [text_width(text) / 2 for _, text in ticks]
    kept = [(min(max(x, half), width - half), text) for (x, text), half in zip(ticks, halves, strict=True)]
    return [lettering(x, y, text, "f-soft c") for x, text in thinned(kept)]


def _spacing(axis: Axis) -> Pixels:
    values = [value for value, _ in axis.ticks]
    if len(values) < 2:
        return axis.high - axis.low
    return min((b - a for a, b in pairwise(values)), default=1.0)


def _frame(panel: Panel, y_of: _Scale, left: Pixels, right: Pixels, zones: Sequence[str]) -> str:
    parts: list[str] = []
    written: list[float] = []
    for value, text in sorted(
        panel.y.ticks, key=lambda tick: tick[0] not in (panel.y.ticks[0][0], panel.y.ticks[-1][0])
    ):
        y = y_of(value)  # both ends first: a label between them that has no room is left out
        is_zero = value == 0 and panel.y.low < 0
        parts.append(_rule(left, y, right, y, "soft" if is_zero else "line"))
        if all(abs(y - other) >= SIZE for other in written):
            parts.append(lettering(left - 7, y + 4.5, text, "f-soft e"))
            written.append(y)
    for low, high, name in panel.y.zones if zones else ():
        parts.append(lettering(0.0, y_of((low + high) / 2) + 4.5, name))
    return "".join(parts)


def _hits(notes: Sequence[tuple[float, str]], x_of: _Scale, box: tuple[Pixels, ...], *, again: bool) -> str:
    """Stretches that can be pointed at, each with what it says where it is drawn for the first time."""
    if not notes:
        return ""
    left, right, top, bottom = box
    middles = [(x_of(a) + x_of(b)) / 2 for (a, _), (b, _) in pairwise(notes)]
    edges = [left, *middles, right]
    titles = ["" if again else f"<title>{escape(text)}</title>" for _, text in notes]
    return "".join(
        _rect(a, top, b - a, bottom - top, "hit", title) for (a, b), title in zip(pairwise(edges), titles, strict=True)
    )


# --- heat maps, intervals, gauges ---


def _title(text: str, width: Pixels, top: Pixels = 0.0) -> tuple[list[str], Pixels]:
    """Lines of a title, and where they end."""
    lines = wrapped(text, width - 4, bold=True) if text else []
    parts = [lettering(0.0, top + LINE * (k + 1) - 4, line, "f-ink b") for k, line in enumerate(lines)]
    return parts, top + LINE * len(lines)


def _heat_map(heat: HeatMap, width: Pixels, *, again: bool) -> tuple[str, Pixels]:
    rows, columns = len(heat.rows), max(len(heat.columns), 1)
    parts, top = _title(heat.title, width)
    scale, height_of_scale = _scale_of(heat, width, top + 6)
    top += height_of_scale + 12
    if heat.row_title:
        parts.append(lettering(0.0, top + 8, heat.row_title))
        top += LINE
    names = [shortened(name, 0.4 * width) for name in heat.rows]
    left = max((text_width(name) for name in names), default=0) + 8
    cell = max(3.0, min(24.0, 430 / max(rows, 1)))
    right = min(width - 2, left + columns * 56)
    x_of, bottom = _Scale(0.0, float(columns), left, right), top + rows * cell
    parts.append(_cells(heat, (left, top, right - left, bottom - top), again=again))
    parts.append(f'<path d="M{_n(left)} {_n(top)}H{_n(right)}V{_n(bottom)}H{_n(left)}Z" class="s-line"/>')
    every = max(1, math.ceil(LINE / cell))
    steps = next((k for k in (1, 2, 5, 10, 20, 50, 100, 500) if k >= every), every)
    shown_rows = [(k, name) for k, name in enumerate(names) if k % steps == 0]
    parts += [lettering(left - 6, top + (k + 0.5) * cell + 4.5, name, "f-soft e") for k, name in shown_rows]
    under = bottom + 16
    columns_named = [(x_of(k + 0.5), shortened(name, 0.3 * width)) for k, name in enumerate(heat.columns)]
    parts += _labels(columns_named, under, width)
    if heat.column_title:
        under += LINE
        parts.append(lettering((left + right) / 2, under, heat.column_title, "f-soft c"))
    area = f'data-area="{_n(left)},{_n(top)},{_n(right)},{_n(bottom)}"'
    return f"<g {area}>{scale}{''.join(parts)}</g>", under + 7


def _cells(heat: HeatMap, box: tuple[Pixels, ...], *, again: bool) -> str:
    """A unit square per cell, stretched to the box; what is on the page already is used again."""
    name = "cells-" + re.sub(r"[^A-Za-z0-9-]+", "-", heat.id)
    x, y, width, height = (_n(value) for value in box)
    frame = f'<svg x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none" '
    frame += f'viewBox="0 0 {max(len(heat.columns), 1)} {len(heat.rows)}" shape-rendering="crispEdges">'
    if again:
        return f'{frame}<use href="#{name}"/></svg>'
    paths = "".join(
        f'<path d="{path}" class="f-{tone}" fill-opacity="{level / LEVELS:.2f}"/>'
        for (level, tone), path in sorted(_levels(heat).items())
    )
    return f'{frame}<g id="{name}">{paths}</g></svg>'


def _levels(heat: HeatMap) -> dict[tuple[int, str], str]:
    """Cells of one colour as one path: neighbours in a row are one box."""
    paths: dict[tuple[int, str], str] = {}
    for r, row in enumerate(heat.values):
        shades = [None if value is None else shade(heat, value) for value in row]
        start = 0
        for k in range(1, len(shades) + 1):
            if k == len(shades) or shades[k] != shades[start]:
                key = shades[start]
                if key is not None and key[0]:
                    paths[key] = paths.get(key, "") + f"M{start} {r}h{k - start}v1h-{k - start}z"
                start = k
    return paths


def shade(heat: HeatMap, value: Pixels) -> tuple[int, str]:
    """How strong a cell is, and in which colour."""
    middle = heat.low if heat.middle is None else heat.middle
    reach = (heat.high - middle if value >= middle else middle - heat.low) or 1.0
    level = round(LEVELS * min(abs(value - middle) / reach, 1.0))
    return level, "ink" if (value >= middle) != heat.ink_below else "apart"


def _scale_of(heat: HeatMap, width: Pixels, top: Pixels) -> tuple[str, Pixels]:
    """The colours and what they stand for, above the map."""
    middle = heat.low if heat.middle is None else heat.middle
    low, high = f"{heat.low:.3g}", f"{heat.high:.3g}"
    x = text_width(low) + 6
    boxes, sides = [], [(heat.low, middle, False), (middle, heat.high, True)]
    for start, end, is_above in sides:
        tone = "ink" if is_above != heat.ink_below else "apart"
        for k in range(LEVELS // 2) if end > start else ():
            share = (k + 0.5) / (LEVELS // 2)
            strength = share if is_above else 1 - share
            boxes.append(
                f'<rect x="{_n(x)}" y="{_n(top)}" width="9" height="11" class="f-{tone}" fill-opacity="{strength:.2f}"/>'
            )
            x += 9
    words = wrapped(f"{high}   {heat.unit}".rstrip(), width - x - 8)
    lines = [lettering(x + 6, top + 10 + k * LINE, line) for k, line in enumerate(words)]
    return lettering(0.0, top + 10, low) + "".join(boxes + lines), LINE * len(words)


def _effects(figure: EffectChart, width: Pixels) -> tuple[str, Pixels]:
    parts, top = _title(figure.title, width)
    said = max((text_width(row.said) for row in figure.rows), default=0)
    right = width - said - 16 if said else width - 8
    x_of, first = _Scale(figure.x.low, figure.x.high, 8, right), top + 4
    rows = []
    for row in figure.rows:
        for line in wrapped(row.name, right - 8):
            top += LINE
            halo = lettering(8, top, line, "s-paper halo").replace('class="', 'aria-hidden="true" class="')
            rows.append(halo + lettering(8, top, line, "f-ink"))
        top += 15
        rows.append(_effect(row, x_of, top))
        rows.append(lettering(width - 2, top + 4.5, row.said, "f-soft e") if row.said else "")
        top += 13
    for value, _ in figure.x.ticks:
        parts.append(_rule(x_of(value), first, x_of(value), top, "soft" if value == 0 else "line"))
    parts += [*rows, *_labels([(x_of(value), text) for value, text in figure.x.ticks], top + 16, width)]
    if figure.x.title:
        parts.append(lettering((8 + right) / 2, top + 16 + LINE, figure.x.title, "f-soft c"))
    return "".join(parts), top + 24 + (LINE if figure.x.title else 0)


def _effect(row: EffectRow, x_of: _Scale, y: Pixels) -> str:
    band = (
        _rect(x_of(-row.margin), y - 8, x_of(row.margin) - x_of(-row.margin), 16.0, "f-crowded") if row.margin else ""
    )
    line = _rule(x_of(row.low), y, x_of(row.high), y, row.tone, ' stroke-width="2"')
    ground = _dot(x_of(row.value), y, 4.5, "paper") if row.is_open else ""
    return band + line + ground + _dot(x_of(row.value), y, 4.5, row.tone, is_open=row.is_open, title=row.said)


def _gauge(gauge: Gauge, width: Pixels) -> tuple[str, Pixels]:
    parts, top = _title(gauge.title, width)
    x_of, y = _Scale(0.0, 1.0, 9, width - 9), top + 37
    parts.append(f'<rect x="1" y="{_n(y - 7)}" width="{_n(width - 2)}" height="14" rx="7" class="f-panel"/>')
    ends = [*(start for start, _ in gauge.bands[1:]), 1.0]
    for (start, name), end in list(zip(gauge.bands, ends, strict=True))[1:]:
        edge = width - 1 if end == 1 else x_of(end)
        parts.append(_rect(x_of(start), y - 7, edge - x_of(start), 14.0, f"f-{name if name in TONES else 'crowded'}"))
    at = [x_of(min(max(value, 0.0), 1.0)) for value in (gauge.start, gauge.value)]
    parts.append(_rule(at[0], y, at[1], y, "ink", ' stroke-width="4"'))
    if gauge.interval is not None:
        low, high = (x_of(min(max(value, 0.0), 1.0)) for value in gauge.interval)
        parts.append(
            f'<rect x="{_n(low)}" y="{_n(y - 5)}" width="{_n(high - low)}" height="10" class="f-ink" fill-opacity=".25"/>'
        )
        parts += [_rule(x, y - 6, x, y + 6, gauge.tone, ' stroke-width="2"') for x in (low, high)]
    parts.append(_gauge_marks(gauge, x_of, y))
    parts += [
        _dot(at[1], y, 10.0, "paper"),
        _dot(at[1], y, 8.5, gauge.tone),
        _dot(at[0], y, 5.5, "paper"),
        _dot(at[0], y, 5.0, "ink", is_open=True),
    ]
    value = f"{gauge.value:.2f}".replace("-", "\N{MINUS SIGN}")
    half, words = text_width(value, 19.0, bold=True) / 2, text_width(gauge.said, 15.0) + 8
    x = min(max(at[1] - half, 0), width - 2 * half - words)
    said = f'<tspan class="f-soft" style="font-size:15px;font-weight:400" dx="7">{escape(gauge.said)}</tspan>'
    parts.append(lettering(x, y - 19, value, "f-ink b", 19.0).replace("</text>", f"{said}</text>"))
    parts.append(_bands(gauge, x_of, y + 22, width))
    legend, height = _below(list(_gauge_entries(gauge)), 0, width, y + 32)
    return "".join(parts) + legend, y + 32 + height


def _gauge_marks(gauge: Gauge, x_of: _Scale, y: Pixels) -> str:
    parts = []
    if gauge.untrained is not None:
        x = x_of(max(gauge.untrained, 0.0))
        parts.append(_rule(x, y - 11, x, y + 11, "null", ' stroke-width="2.2" stroke-dasharray="4 2.5"'))
    if gauge.before is not None:
        x = x_of(max(gauge.before, 0.0))
        parts.append(_shape(f"M{_n(x - 6)} {_n(y)}l6 -6l6 6l-6 6z", "ink", is_open=True))
    if gauge.limit is not None:
        x = x_of(gauge.limit)
        parts.append(_shape(f"M{_n(x - 5)} {_n(y - 16)}h10l-5 8z", "series-2"))
    return "".join(parts)


def _bands(gauge: Gauge, x_of: _Scale, y: Pixels, width: Pixels) -> str:
    """The names of the bands below their beginnings; the last one ends with the gauge where it has no room."""
    size = SIZE if width > 400 else SIZE - 2
    start, name = gauge.bands[-1]
    last = f"{start:g} {name}"
    is_cut = x_of(start) + text_width(last) + 24 > width
    place = (width - 1, "f-ink e") if is_cut else (x_of(start), "f-ink")
    parts = [lettering(place[0], y, last, place[1], size)]
    for start, name in gauge.bands[:-1]:
        parts.append(lettering(x_of(start) if start else 0, y, f"{start:g} {name}", "f-ink", size))
    return "".join(parts) + ("" if is_cut else lettering(width - 1, y, gauge.end, "f-soft e"))


def _gauge_entries(gauge: Gauge) -> Iterator[_Entry]:
    yield _Entry("ring", "ink", gauge.start_name, f"{gauge.start:.2f}")
    if gauge.untrained is not None:
        yield _Entry("line", "null", "untrained copy", f"{gauge.untrained:.2f}", dash="4 2.5")
    if gauge.before is not None:
        yield _Entry("diamond", "ink", "before the final norm", f"{gauge.before:.2f}")
    if gauge.interval is not None:
        yield _Entry("box", "ink", "95% interval", f"{gauge.interval[0]:.2f} to {gauge.interval[1]:.2f}", strength=0.3)
    if gauge.limit is not None:
        yield _Entry("flag", "series-2", "limit for gate", f"{gauge.limit:.2f}")


# --- pictures ---


def drawn(figure: Figure, width: Pixels, *, again: bool = False) -> tuple[str, Pixels]:
    """What stands inside the picture, and its height; `again` where the same is on the page at another width already."""
    if isinstance(figure, Chart):
        return _chart(figure, width, again=again)
    if isinstance(figure, HeatMap):
        return _heat_map(figure, width, again=again)
    return _effects(figure, width) if isinstance(figure, EffectChart) else _gauge(figure, width)


def svg(figure: Figure, width: Pixels, name: str = "", *, again: bool = False) -> str:
    """The picture for a page, whose style gives the colours."""
    inside, height = drawn(figure, width, again=again)
    size = f'viewBox="0 0 {_n(width)} {_n(math.ceil(height))}" width="{_n(width)}"'
    label = escape(figure.alt, quote=True)
    return f'<svg class="chart {name}" {size} role="img" aria-label="{label}" tabindex="0">{inside}</svg>'


def standalone(figure: Figure, width: Pixels = 720.0, *, theme: int = 0, frame: Pixels = 16.0) -> str:
    """The picture as a file of its own."""
    inside, height = drawn(figure, width)
    return picture(
        f'<g transform="translate({_n(frame)} {_n(frame)})">{inside}</g>',
        width + 2 * frame,
        math.ceil(height) + 2 * frame,
        theme,
    )


def picture(inside: str, width: Pixels, height: Pixels, theme: int = 0) -> str:
    """An SVG file on paper of its own; rules are bound to it, so that a notebook keeps its own."""
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="oversmooth" {size}><style>{style(theme, ".oversmooth ")}</style>'
        f'<rect width="100%" height="100%" class="f-paper"/>{inside}</svg>'
    )


def png(text: str, zoom: Pixels = 2.0) -> bytes:
    """An SVG as a PNG image."""
    try:
        import resvg_py
    except ImportError as error:
        raise MissingDependency("resvg-py", "report", "a PNG image") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=zoom, sans_serif_family="DejaVu Sans"))
