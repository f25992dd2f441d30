"""Claims 5 to 8: numbers of training runs, one row per run; nothing is averaged before it is kept."""

import math
from collections.abc import Callable, Sequence
from statistics import mean

from oversmooth.training.reproduce.claim import Observations
from oversmooth.training.reproduce.comparisons import BASELINES
from oversmooth.training.reproduce.experiments import (
    DEEP,
    DIGITS,
    EARLY_EPOCH,
    MINI_BERT,
    TENTH,
    TUNING,
    Experiment,
    runs_of,
)
from oversmooth.training.reproduce.materials import Materials, Row, Trained
from oversmooth.training.reproduce.tuning import OURS

CONTROLS = ("free", "matched", "sharpen-start", "smooth-start", "no-identity")
VARIANTS = ("vanilla", "sharpen", "smooth", *CONTROLS)
FORMS = ("vanilla", "free", "sharpen", "smooth")
MEASURED = ("sharpen-measured", "smooth-measured")
Needs = tuple[tuple[Experiment, tuple[str, ...]], ...]

PARAMETRIZATION: Needs = ((DEEP, (*FORMS, *MEASURED)), (MINI_BERT[-1], FORMS))
VISION: Needs = ((DIGITS, (*VARIANTS, "sharpen-measured")), (TENTH, FORMS), (DEEP, FORMS))
LANGUAGE: Needs = tuple((experiment, FORMS) for experiment in MINI_BERT)
AGAINST: Needs = ((DIGITS, (*OURS, *BASELINES)),)


def training_numbers(materials: Materials, needs: Sequence[tuple[Experiment, Sequence[str]]]) -> list[Row]:
    """One row per run: what it scored, and what its attention did."""
    rows = []
    for experiment, variants in needs:
        small = experiment.for_scale(materials.is_quick)
        for planned in materials.there(runs_of(small, variants, materials.rates)):
            numbers = _numbers(materials.trained(planned))
            rows.append({"setting": small.name, "variant": planned.variant, "unit": planned.seed, **numbers})
    return rows


def _numbers(run: Trained) -> dict[str, float | None]:
    results, changes = run.manifest.results, run.attention_changes()
    found: dict[str, float | None] = {
        "accuracy": results.get("eval_accuracy"),
        "corruption_accuracy": results.get("corruption_accuracy"),
        "early_accuracy": run.evaluations.get(float(EARLY_EPOCH), {}).get("eval_accuracy"),
        "loss": results.get("eval_loss"),
        "last_cosine": run.last("cosine"),
        "attention": sum(changes),
        "worst_layer": min(changes),
        "smoothing_layers": float(sum(change < -SMOOTHS for change in changes)),
    }
    return {
        name: round(value, 6) if value is not None and math.isfinite(value) else None for name, value in found.items()
    }


def what_attention_does(observed: Observations) -> list[Row]:
    """Claim 5, a row per condition and variant: what attention does, where features end, layers that smooth."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in observed.get("runs", ()):
        groups.setdefault((row["setting"], row["variant"]), []).append(row)
    return [
        {
            "setting": setting,
            "variant": variant,
            "runs": len(rows),
            "change_of_log(HFC/LFC)": _of_runs(mean, rows, "attention", 3),
            "cosine_after_last_layer": _of_runs(mean, rows, "last_cosine", 3),
            "attention_layers_that_smooth_by_more_than_0.05": _of_runs(mean, rows, "smoothing_layers", 1),
            "worst_layer": _of_runs(min, rows, "worst_layer", 3),
        }
        for (setting, variant), rows in groups.items()
    ]


def _of_runs(what: Callable[[list[float]], float], rows: Sequence[Row], name: str, digits: int) -> float | None:
    """Over the runs that have the number."""
    values = [row[name] for row in rows if row[name] is not None]
    return round(what(values), digits) if values else None


SMOOTHS = 0.05
"""A fall of log(HFC/LFC) across an attention layer that counts as smoothing."""


def chosen_of_ours(materials: Materials) -> str | None:
    """Sharpen or smooth, whichever was better on validation images at its best rate; none where one was not tried."""
    best: dict[str, float] = {}
    for row in materials.validation:
        if row["chosen_by"] == TUNING.name and row["variant"] in OURS:
            best[row["variant"]] = max(best.get(row["variant"], 0.0), row["validation_accuracy"])
    return max(OURS, key=lambda variant: best[variant]) if len(best) == len(OURS) else None
