"""What a metric is, and the table of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oversmooth.measurement.moments import Moments


@dataclass(frozen=True, eq=False)
class MetricValues:
    """One metric on a batch: `values[i]` is a finite number where `defined[i]`, and means nothing where not."""

    values: Float[Tensor, " batch"]
    defined: Bool[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class Metric:
    """One measure of oversmoothing; call it with `(h, keep)`, or let `evaluate` share work between several."""

    name: str
    function: Callable[[Moments], Tensor]
    """One raw number per sequence, not finite where the formula has no value."""
    definition: str
    """The formula in one line, for reports."""
    smoothed: float | None = None
    """Value when all tokens are the same nonzero vector; None when that depends on the vector or on the sizes."""
    missing_when: str = ""
    """When a sequence of finite tokens has no value, for reports; empty when it always has one."""
    images_only: bool = False
    """Whether the kept tokens have to be a square grid of image patches, row by row."""
    scales: bool = False
    """Whether one token of large norm can decide the value; then `measure` also gives it without the largest token."""
    of_sums: bool = False
    """Whether it needs no tokens, only sums over them, so that `measure` computes it for all places together."""
    is_costly: bool = False
    """Whether `measure` takes it on every eighth sequence only, so that it stays cheap beside the forward pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.function.__doc__)

    def __call__(self, h: Float[Tensor, "batch token d_model"], keep: Bool[Tensor, "batch token"]) -> MetricValues:
        with torch.no_grad():
            return self.on(Moments.of(h, keep))

    def on(self, moments: Moments) -> MetricValues:
        """The values of this metric, from sums that other metrics may have asked for already."""
        raw = self.function(moments)
        defined = raw.isfinite() & moments.is_finite
        return MetricValues(raw.to(moments.dtype).masked_fill(~defined, 0), defined)


METRICS: dict[str, Metric] = {}


def metric(
    definition: str, smoothed: float | None = None, missing_when: str = "", **kinds: bool
) -> Callable[[Callable[[Moments], Tensor]], Metric]:
    """Enter a function into the table under its own name; the name then stands for the `Metric`."""

    def enter(function: Callable[[Moments], Tensor]) -> Metric:
        name = function.__name__
        METRICS[name] = Metric(name, function, definition, smoothed, missing_when, **kinds)
        return METRICS[name]

    return enter
