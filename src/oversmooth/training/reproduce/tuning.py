"""The learning rate of every variant, chosen on what is held out of the training data before any test is looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from oversmooth.training.reproduce.experiments import RATES, Experiment, Rates
from oversmooth.training.reproduce.materials import Materials, PlannedRun

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
    """Of every variant the rate that is best on held-out training data, of equal ones the smallest; by who chose it."""
    planned = {tuning: rate_runs(tuning, variants, materials.is_quick) for tuning, variants in tuned.items()}
    materials.train([run for runs in planned.values() for run in runs.values()])
    materials.validation = []
    return {tuning.name: _chosen(materials, tuning, runs) for tuning, runs in planned.items()}


def _chosen(materials: Materials, tuning: Experiment, runs: Mapping[tuple[str, float], PlannedRun]) -> dict[str, float]:
    there = {key: run for key, run in runs.items() if materials.there([run])}
    found = {key: materials.scores(run)[f"eval_{tuning.score}"] for key, run in there.items()}
    materials.validation += [
        {"chosen_by": tuning.name, "variant": variant, "rate": rate, f"validation_{tuning.score}": round(score, 6)}
        for (variant, rate), score in found.items()
    ]
    better = 1 if tuning.score == "accuracy" else -1
    return {
        variant: max(
            (rate for each, rate in found if each == variant),
            key=lambda rate: (better * found[variant, rate], -rate),
        )
        for variant in dict.fromkeys(variant for variant, _ in found)
    }
