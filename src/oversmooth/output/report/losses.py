"""What models cost, beside what they do to features: the part of a comparison that losses fill."""

from collections.abc import Sequence

from oversmooth.output.report.blocks import Section, Words, table_of
from oversmooth.results import Analysis, TaskLoss

Found = TaskLoss | str
"""A loss, or why there is none."""


def losses_section(names: Sequence[str], analyses: Sequence[Analysis], losses: Sequence[Found]) -> Section:
    """A row per model: its loss and its features, each also as the difference to the first model."""
    rows = []
    first = losses[0]
    for name, analysis, found in zip(names, analyses, losses, strict=True):
        if isinstance(found, str):
            continue
        cosine, before = _last_cosine(analysis), _last_cosine(analyses[0])
        is_comparable = isinstance(first, TaskLoss) and first.task == found.task
        rows.append(
            {
                "model": name,
                "task": found.task,
                "loss": found.found.loss,
                "±": found.found.standard_error,
                "perplexity": found.found.perplexity,
                "accuracy": found.found.accuracy,
                "loss grows by": found.found.loss - first.found.loss
                if is_comparable and isinstance(first, TaskLoss)
                else None,
                "mean cosine": cosine,
                "cosine moves by": None if cosine is None or before is None else cosine - before,
            }
        )
    reasons = [
        Words(text=f"{name} has no loss: {found}", kind="note")
        for name, found in zip(names, losses, strict=True)
        if isinstance(found, str)
    ]
    return Section(
        id="losses",
        title="What it costs",
        lead=losses_words(names, analyses, losses),
        blocks=[*reasons, *([table_of("losses-table", "Loss beside features", rows)] if rows else [])],
    )


def losses_words(names: Sequence[str], analyses: Sequence[Analysis], losses: Sequence[Found]) -> str:
    """How far each model moved the cosine of the first, and what that cost."""
    first, start = losses[0], _last_cosine(analyses[0])
    told = []
    for name, analysis, found in list(zip(names, analyses, losses, strict=True))[1:]:
        cosine = _last_cosine(analysis)
        if isinstance(found, str) or isinstance(first, str) or found.task != first.task:
            continue
        growth = found.found.loss - first.found.loss
        cost = f"its loss is {abs(growth):.3g} {'higher' if growth > 0 else 'lower'}"
        if start is not None and cosine is not None:
            told.append(f"{name} ends {cosine - start:+.3f} in mean cosine, and {cost}")
        else:
            told.append(f"{name}: {cost}")
    return "; ".join(told) + ("." if told else "")


def _last_cosine(analysis: Analysis) -> float | None:
    curve = analysis.measurement.curve("cosine") if analysis.measurement is not None else []
    return curve[-1].mean if curve else None
