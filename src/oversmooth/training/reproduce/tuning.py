"""The learning rate of every variant, chosen on validation images before its test images are looked at."""

from collections.abc import Sequence
from dataclasses import replace

from oversmooth.training.reproduce.experiments import RATES, TUNING
from oversmooth.training.reproduce.workshop import Wanted, Workshop

OURS = ("sharpen", "smooth")
"""What validation has to choose between in claim 8."""


def rate_runs(variants: Sequence[str], is_quick: bool) -> dict[tuple[str, float], Wanted]:
    """One run per variant and rate."""
    experiment = TUNING.for_scale(is_quick)
    rates = RATES[1:2] if is_quick else RATES  # a smoke check has nothing to choose
    variants = [variant for variant in variants if not is_quick or variant in OURS]
    return {
        (variant, rate): _named(experiment.wanted(variant, 0, rate), rate) for variant in variants for rate in rates
    }


def _named(wanted: Wanted, rate: float) -> Wanted:
    return replace(wanted, label=f"{wanted.label}-{rate:g}")


def chosen_rates(workshop: Workshop, variants: Sequence[str]) -> dict[str, float]:
    """Of every variant the rate with the highest validation accuracy; of equal ones the smallest."""
    runs = rate_runs(variants, workshop.is_quick)
    workshop.train(list(runs.values()))
    there = {key: wanted for key, wanted in runs.items() if workshop.there([wanted])}
    found = {key: workshop.trained(wanted).manifest.results["eval_accuracy"] for key, wanted in there.items()}
    workshop.validation = {f"{variant} at {rate:g}": accuracy for (variant, rate), accuracy in found.items()}
    return {
        variant: max((rate for name, rate in found if name == variant), key=lambda rate: (found[variant, rate], -rate))
        for variant in dict.fromkeys(variant for variant, _ in found)
    }
