"""The learning rate of every variant, chosen on validation images before its test images are looked at."""

from collections.abc import Sequence
from dataclasses import replace

from oversmooth.training.reproduce.experiments import RATES, TUNING
from oversmooth.training.reproduce.materials import Materials, PlannedRun

OURS = ("sharpen", "smooth")
"""What validation has to choose between in claim 8."""


def rate_runs(variants: Sequence[str], is_quick: bool) -> dict[tuple[str, float], PlannedRun]:
    """One run per variant and rate."""
    experiment = TUNING.for_scale(is_quick)
    rates = RATES[1:2] if is_quick else RATES  # a smoke check has nothing to choose
    variants = [variant for variant in variants if not is_quick or variant in OURS]
    return {
        (variant, rate): _named(experiment.planned(variant, 0, rate), rate) for variant in variants for rate in rates
    }


def _named(planned: PlannedRun, rate: float) -> PlannedRun:
    return replace(planned, label=f"{planned.label}-{rate:g}")


def chosen_rates(materials: Materials, variants: Sequence[str]) -> dict[str, float]:
    """Of every variant the rate with the highest validation accuracy; of equal ones the smallest."""
    runs = rate_runs(variants, materials.is_quick)
    materials.train(list(runs.values()))
    there = {key: planned for key, planned in runs.items() if materials.there([planned])}
    found = {key: materials.trained(planned).manifest.results["eval_accuracy"] for key, planned in there.items()}
    materials.validation = {f"{variant} at {rate:g}": accuracy for (variant, rate), accuracy in found.items()}
    return {
        variant: max((rate for name, rate in found if name == variant), key=lambda rate: (found[variant, rate], -rate))
        for variant in dict.fromkeys(variant for variant, _ in found)
    }
