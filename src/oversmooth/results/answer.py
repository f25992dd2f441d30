"""`Answer`: does the model oversmooth, where, by which part, how sure; `Analysis`: everything about one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from oversmooth.results.base import SHOWN_DIGITS, Interval, Missing, Row, SavedResult
from oversmooth.results.inspection import Inspection, Verification
from oversmooth.results.measurement import Measurement
from oversmooth.results.prediction import Prediction

if TYPE_CHECKING:
    from oversmooth.output.figures import Drawing

# --- the answer: one quantity (the mean cosine), one state, and the sentences that everybody shows ---


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """How alike tokens are at one depth: the mean cosine, and how the cosines of all pairs are spread."""

    label: str
    """input, the number of the layer (from 0), or final norm."""
    mean: float
    quantiles: tuple[float, float, float, float, float] | None = None
    """10, 25, 50, 75 and 90 per cent of all pairs of tokens; `None` where pairs were not sampled."""
    histogram: tuple[float, ...] = ()
    """Share of pairs in equal bins from -1 to 1."""
    share_above: float | None = None
    """Share of pairs with a cosine of at least 0.9."""
    untrained: float | None = None
    """The mean of the same architecture with fresh weights, on the same inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """What one layer, or the final norm, adds to the mean cosine."""

    label: str
    change: float
    parts: tuple[tuple[str, float], ...]
    """Each part with its change; they add up to `change`. The names are those of `PART_NAMES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """What one kind of part adds to the mean cosine in all layers together."""

    part: str
    change: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One heading of the answer: a sentence, the numbers behind it, and a command to paste."""

    title: str
    text: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether one stack of a model oversmooths, where, by which part, how sure that is, and what to do."""

    model: str
    """Short name."""
    stack: str
    """Which stack of several; empty for the only one."""
    subject: str
    """What was run, such as `6 layers, 20 built-in texts, 1,556 tokens`."""
    state: str
    """distinct, crowded or collapsed."""
    is_sure: bool
    """Whether the state is known: enough inputs, no border inside the interval, no random ids, the whole model."""
    input: float
    output: float
    """Mean cosine of what the model gives out: after the final norm where there is one."""
    before_norm: float | None
    """Mean cosine after the last block, where a final norm follows."""
    interval: tuple[float, float] | None
    """95% interval of `output` over sequences; `None` below four."""
    values: tuple[float, ...]
    """`output` of every sequence (the first hundred)."""
    shape: str
    """flat, falls, rises and falls, at once, last layers, steady, or one layer."""
    points: tuple[CurvePoint, ...]
    layers: tuple[LayerChange, ...]
    """They add up to `output - input`."""
    parts: tuple[PartChange, ...]
    """So do these."""
    rank: tuple[float, float, int] | None
    """Effective rank of the centred tokens at input and output, and the largest possible."""
    between: tuple[float, float] | None
    """Mean cosine between different sequences (mean tokens), at input and output; `None` for a single one."""
    between_interval: tuple[float, float] | None = None
    """95% interval of the latter over sequences; `None` below four."""
    between_values: tuple[float, ...] = ()
    """The same for every sequence with all others."""
    untrained_missing: str = ""
    """Why `untrained` is missing in `points`; empty where it is there."""
    limit: float
    """A limit for `gate --max-cosine` that this model keeps."""
    headline: str
    deck: str
    """One or two sentences below the headline: the numbers in words."""
    where: Told
    who: Told
    sure: Told
    now: Told
    note: str = ""
    """What has to be known about the model itself; the deck begins with it."""


# --- two models ---

SEEN = 0.05
"""A change counts from here on: fresh weights of several seeds differ by 0.01 to 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One mean cosine at the output of two models, on the same inputs."""

    before: float
    after: float
    interval: Interval | None
    """95% interval of the difference over inputs in pairs; `None` for fewer than four, or inputs that are not the same."""
    inputs: int

    @property
    def change(self) -> float:
        """As it is shown: the difference of the rounded numbers."""
        return round(self.after, SHOWN_DIGITS) - round(self.before, SHOWN_DIGITS)

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves no doubt about the sign."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]

    @property
    def seen(self) -> int:
        """1 for more alike, -1 for more distinct, 0 for about the same."""
        moved = self.after - self.before
        return 0 if abs(moved) < SEEN else 1 if moved > 0 else -1

    @property
    def way(self) -> int:
        """The same, and 0 where that is not sure."""
        return self.seen if self.is_clear else 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(SavedResult):
    """The answers of two models on the same inputs."""

    kind: ClassVar[str] = "comparison"
    names: tuple[str, str]
    first: Answer
    other: Answer
    tokens: Difference
    """Of tokens of one input."""
    inputs: Difference | None
    """Of different inputs, where `between` was measured in both."""
    headline: str
    """Which model is better at what, where the numbers show it."""
    deck: str
    """The numbers of the headline."""
    sure: Told

    def rows(self) -> list[Row]:
        """One flat row per depth: the mean cosine in both; none where the models differ in depth."""
        labels = [[point.label for point in answer.points] for answer in (self.first, self.other)]
        if labels[0] != labels[1]:
            return []
        pairs = zip(self.first.points, self.other.points, strict=True)
        return [{"layer": a.label, "first": a.mean, "other": b.mean, "difference": b.mean - a.mean} for a, b in pairs]

    def __repr__(self) -> str:
        ends = f"mean cosine {self.first.output:.2f} and {self.other.output:.2f}"
        return f"<Comparison of {self.names[0]} and {self.names[1]}: {ends}>"

    def _title(self) -> str:
        return f"{self.names[0]} and {self.names[1]}"


# --- everything about one model ---


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Analysis(SavedResult):
    """What a report is made from. Parts that could not be made are `None`, with the reason in `missing`."""

    kind: ClassVar[str] = "analysis"
    inspection: Inspection
    verification: Verification | None = None
    measurement: Measurement | None = None
    prediction: Prediction | None = None
    command: str = ""
    """The command that repeats it."""
    missing: tuple[Missing, ...] = ()

    @property
    def answers(self) -> tuple[Answer, ...]:
        """Does it oversmooth, where, by which part: one answer per stack; none where nothing could be measured."""
        return self.measurement.answers if self.measurement is not None else ()

    @property
    def answer(self) -> Answer | None:
        """The answer that speaks for the model; `None` where nothing could be measured."""
        return self.measurement.answer if self.measurement is not None else None

    def rows(self) -> list[Row]:
        """One flat row per layer of what the weights say."""
        return self.inspection.rows()

    def _title(self) -> str:
        return f"Analysis of {self.inspection.provenance.name}"

    def save_html(self, path: str | Path) -> None:
        """Writes the report as one self-contained HTML file (needs jinja2)."""
        from oversmooth.output.page import page_of
        from oversmooth.output.render import write_page

        write_page(page_of(self), Path(path))

    def plot(self) -> "Drawing":
        """The mean cosine over depth and what each part adds, shown in a notebook; `.save(path)` keeps it."""
        from oversmooth.output.figures import analysis_drawing

        return analysis_drawing(self)

    def _repr_html_(self) -> str:
        chart = self.plot()._repr_html_() if self.answer is not None else ""
        return SavedResult._repr_html_(self) + chart

    def __repr__(self) -> str:
        parts = [name for name in ("measurement", "prediction") if getattr(self, name) is not None]
        return f"<Analysis of {self.inspection.provenance.name}: inspection{''.join(', ' + part for part in parts)}>"
