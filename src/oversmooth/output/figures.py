"""Charts of results as files for papers, and inside notebooks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from oversmooth.environment.files import make_folder, write_whole
from oversmooth.output.card import chart_of, picture_of
from oversmooth.output.charts import WIDTHS, Chart, Figure, Mark, Panel, places, png, standalone
from oversmooth.output.page import answers_of
from oversmooth.output.run_pages import axis_of
from oversmooth.output.sections import band_and_line, growth_charts, heads_section, ladder_of, suffix, why_section
from oversmooth.results import Analysis, Inspection, Measurement, Prediction

FORMATS = ("svg", "png")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart that a notebook shows, and that can be saved."""

    figure: Figure

    def svg(self, width: int = WIDTHS["mid"], *, dark: bool = False) -> str:
        return standalone(self.figure, width, theme=int(dark))

    def save(self, path: str | Path, width: int = WIDTHS["mid"], *, dark: bool = False) -> None:
        """Writes SVG, or PNG where the name ends so (needs resvg-py)."""
        text, place = self.svg(width, dark=dark), Path(path)
        content = png(text) if place.suffix.lower() == ".png" else text.encode()
        write_whole(place, partial(_put, content=content))

    def __repr__(self) -> str:
        return f"<Drawing: {self.figure.alt}>"

    def _repr_html_(self) -> str:
        return self.svg()


def analysis_drawing(analysis: Analysis) -> Drawing:
    """The curve of the mean cosine and what each part adds; of weights alone what repeating a layer would do."""
    if analysis.answer is not None:
        return Drawing(chart_of(analysis.answer))
    return inspection_drawing(analysis.inspection)


def inspection_drawing(inspection: Inspection) -> Drawing:
    """Growth of shared directions when a layer is repeated, from weights alone; the first stack that can be read."""
    empty = Chart(id="growth", alt="No layer could be read.", x=places([]), panels=())
    return Drawing(next(growth_charts(inspection), empty))


def prediction_drawing(prediction: Prediction, stack: str | None = None) -> Drawing:
    """The ladder from the theorem to the measurement of one stack, the first by default."""
    return Drawing(ladder_of(prediction.layers[0].stack if stack is None else stack, prediction))


def curve_drawing(measurement: Measurement, metric: str) -> Drawing:
    """A metric over depth with bands of one standard error, a panel per stack."""
    panels, longest = [], 0
    for stack in dict.fromkeys(value.stack for value in measurement.values):
        points = [point for point in measurement.curve(metric, stack) if point.mean is not None]
        final = measurement.final(metric, stack)
        points += [final] if final is not None and final.mean is not None else []
        if points:
            marks: tuple[Mark, ...] = tuple(band_and_line(metric, points))
            axis = axis_of(marks, is_cosine=metric == "cosine", zero=True)
            panels.append(Panel(title=f"{metric} over depth{suffix(stack)}", y=axis, marks=marks))
            longest = max(longest, len(points))
    labels = ["input", *map(str, range(longest - 1))]
    has_norm = any(measurement.final(metric, stack) for stack in {value.stack for value in measurement.values})
    labels = [*labels[:-1], "norm"] if has_norm and longest > 1 else labels
    name = measurement.provenance.name
    return Drawing(
        Chart(id=metric, alt=f"{metric} of {name} over depth.", x=places(labels, "layer"), panels=tuple(panels))
    )


def write_figures(analysis: Analysis, folder: Path) -> list[Path]:
    """Writes every chart of the report as SVG and PNG and returns the paths; the same analysis gives the same bytes."""
    make_folder(folder)
    written = []
    for name, text in _pictures(analysis):
        image = png(text)
        for ending, content in (("svg", text.encode()), ("png", image)):
            written.append(folder / f"{name}.{ending}")
            write_whole(written[-1], partial(_put, content=content))
    return written


def _put(place: Path, content: bytes) -> None:
    place.write_bytes(content)


def _pictures(analysis: Analysis) -> Iterator[tuple[str, str]]:
    for answer in answers_of(analysis):
        name = f"-{answer.stack}" if answer.stack else ""
        yield f"card{name}", picture_of(answer)
        yield f"depth{name}", standalone(chart_of(answer), WIDTHS["wide"])
    for section in (why_section(analysis), heads_section(analysis)):
        for block in section.blocks if section else ():
            if isinstance(block, Figure):
                yield block.id, standalone(block, WIDTHS["mid"])
