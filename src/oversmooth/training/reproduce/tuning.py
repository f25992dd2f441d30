"""The learning rate of every variant, chosen on what is held out of the training data before any test is looked at."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oversmooth.training.reproduce.experiments import RATES, Experiment, Rates
from oversmooth.training.reproduce.materials import Materials, Row
from oversmooth.training.reproduce.planned_runs import PlannedRun

OURS = ("sharpen", "smooth")
"""What validation has to choose between in claim 8."""


def rate_runs(tuning: Experiment, variants: Sequence[str], is_quick: bool) -> dict[tuple[str, float], PlannedRun]:
    """One run per variant and rate."""
    if is_quick and not tuning.is_in_quick:
        return {}
    experiment = tuning.for_scale(is_quick)
    rates = RATES[1:2] if is_quick else RATES  # a smoke check has nothing to choose
    variants = [variant for variant in variants if not is_quick or variant in OURS]
    return {
        (variant, rate): _named(experiment.planned(variant, 0, rate), rate) for variant in variants for rate in rates
    }


def _named(planned: PlannedRun, rate: float) -> PlannedRun:
    return replace(planned, label=f"{planned.label}-{rate:g}", analyzes=False)


def chosen_rates(materials: Materials, tuned: Mapping[Experiment, Sequence[str]]) -> Rates:
    """Of every variant the rate that is best on held-out training data, of equal ones the smallest; by who chose it.

    A variant of which not all rates were tried has none. A smoke check, which tries one, leaves the others at the recipe's.
    """
    planned = {tuning: rate_runs(tuning, variants, materials.is_quick) for tuning, variants in tuned.items()}
    materials.train([run for runs in planned.values() for run in runs.values()])
    materials.validation = []
    rates = {tuning: _chosen(materials, tuning, runs) for tuning, runs in planned.items()}
    if materials.is_quick:
        return {
            each.name: {variant: rates[each].get(variant) for variant in variants} for each, variants in tuned.items()
        }
    return {tuning.name: chosen for tuning, chosen in rates.items()}


def _chosen(materials: Materials, tuning: Experiment, runs: Mapping[tuple[str, float], PlannedRun]) -> dict[str, float]:
    there = {key: run for key, run in runs.items() if materials.there([run])}
    scores = {key: materials.scores(run).get(f"eval_{tuning.score}") for key, run in there.items()}
    found = {key: score for key, score in scores.items() if score is not None}
    materials.validation += [
        {"chosen_by": tuning.name, "variant": variant, "rate": rate, f"validation_{tuning.score}": round(score, 6)}
        for (variant, rate), score in found.items()
    ]
    by_variant: dict[str, dict[float, float]] = {}
    for (variant, rate), score in found.items():
        by_variant.setdefault(variant, {})[rate] = score
    tries = Counter(variant for variant, _ in runs)
    return {
        variant: best_rate(tried, tuning.score) for variant, tried in by_variant.items() if len(tried) == tries[variant]
    }


def best_rate(scores: Mapping[float, float], score: str) -> float:
    """The rate with the highest accuracy or the lowest loss; of equal ones the smallest."""
    better = 1 if score == "accuracy" else -1
    return max(scores, key=lambda rate: (better * scores[rate], -rate))


def rates_table(validation: Sequence[Row], needs: Sequence[tuple[Experiment, Sequence[str]]]) -> list[Row]:
    """For readers: what each variant of these experiments came to at every rate, and which rate that chose for it."""
    wanted: dict[tuple[str, str], Experiment] = {}
    for experiment, variants in needs:
        if experiment.tuned_by is not None:
            wanted |= {(experiment.tuned_by.name, variant): experiment.tuned_by for variant in variants}
    rates = sorted({row["rate"] for row in validation})
    found = []
    for (name, variant), tuning in wanted.items():
        scores = {
            row["rate"]: row[f"validation_{tuning.score}"]
            for row in validation
            if (row["chosen_by"], row["variant"]) == (name, variant)
        }
        if scores:
            chosen = best_rate(scores, tuning.score)
            edge = ", the largest tried" if chosen == max(scores) and len(scores) > 1 else ""
            columns = {
                f"{tuning.score} at {rate:g}": round(scores[rate], 3) if rate in scores else None for rate in rates
            }
            found.append({"chosen on": name, "variant": variant, **columns, "chosen": f"{chosen:g}{edge}"})
    return found
