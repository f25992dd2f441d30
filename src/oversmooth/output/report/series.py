"""A series of checkpoints on one page: curves and spectra over training, and what the weights themselves give away."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

from oversmooth.output.report.blocks import Block, Page, Section, Words
from oversmooth.output.report.training import Point, training_page
from oversmooth.results import Analysis

METRICS = ("cosine", "hfc_lfc")
SPECTRA = ("rho_dc", "min_real", "max_real")


def series_page(target: str, numbers: Sequence[int], analyses: Sequence[Analysis], warnings: Sequence[str]) -> Page:
    """The numbers of every step as a run that was watched, with warnings about its weights in front."""
    points = [_point(number, analysis) for number, analysis in zip(numbers, analyses, strict=True)]
    page = training_page(PurePath(target), points)
    notes: list[Block] = [Words(text=warning, kind="note") for warning in warnings]
    notes += [
        Words(text=f"Step {number}: {missing.field} is missing. {missing.reason}", kind="note")
        for number, analysis in zip(numbers, analyses, strict=True)
        for missing in analysis.missing
    ]
    if not notes:
        return page
    verdict = page.verdict
    if warnings:
        verdict += f" {len(warnings)} of {len(numbers)} steps are not what their names say; see below."
    return replace(page, verdict=verdict, sections=(Section(id="integrity", blocks=notes), *page.sections))


def _point(number: int, analysis: Analysis) -> Point:
    """One step under the names that the monitor uses."""
    point: Point = {"step": number}
    measurement = analysis.measurement
    if measurement is not None:
        for metric in METRICS:
            for stack in dict.fromkeys(value.stack for value in measurement.values):
                prefix = f"{stack}/" if stack else ""
                for value in measurement.curve(metric, stack):
                    if value.mean is not None:
                        point[f"smoothing/{prefix}{metric}/depth_{value.depth}"] = value.mean
    for layer in analysis.inspection.layers:
        prefix = f"{layer.stack}/" if layer.stack else ""
        for name in SPECTRA if layer.plain is not None else ():
            point[f"smoothing/{prefix}{name}/layer_{layer.layer}"] = getattr(layer.plain, name)
    return point
