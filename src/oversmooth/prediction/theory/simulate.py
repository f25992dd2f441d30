"""The theorem made visible: one layer iterated at fixed attention, and the metrics on the way to the limit."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.measurement.metrics import evaluate
from oversmooth.prediction.theory.operator import LayerOperator

SHOWN = ("cosine", "cosine_abs", "hfc_lfc", "effective_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """The metrics after so many repetitions; `None` where a metric has no value."""

    step: int
    values: tuple[float | None, ...]
    """In the order of `SHOWN`."""


def recorded_steps(steps: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... and the last one; 0 is the start."""
    found = [0]
    base = 1
    while base <= steps:
        found += [factor * base for factor in (1, 2, 5) if factor * base <= steps]
        base *= 10
    return sorted({*found, steps})


def simulate(operator: LayerOperator, x: Float[Tensor, "token d_model"], steps: int) -> list[SimulatedStep]:
    """T applied `steps` times to X, rescaled as a whole after every step, which no metric shown can see."""
    shown = [_step(0, x)]
    for earlier, later in pairwise(recorded_steps(steps)):
        for _ in range(later - earlier):
            x = operator.apply(x)
            x = x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny)
        shown.append(_step(later, x))
    return shown


def _step(step: int, x: Float[Tensor, "token d_model"]) -> SimulatedStep:
    keep = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
    found = evaluate(SHOWN, x[None], keep)
    values = tuple(found[name].values.item() if found[name].defined.item() else None for name in SHOWN)
    return SimulatedStep(step=step, values=values)
