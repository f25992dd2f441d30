"""Watching smoothing during training: metrics and spectra every k steps, to any logger and to a JSONL file."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.errors import BadValue
from oversmooth.measurement.measurement import measure
from oversmooth.measurement.metrics import Choice
from oversmooth.models.opening import open_source
from oversmooth.spectra.spectrum import spectrum
from oversmooth.spectra.value_map import plain_map

Logger = Callable[[dict[str, float], int], None]
"""Called with flat names and numbers, and the step."""
MONITOR_METRICS = ("cosine", "hfc_lfc")


class Monitor:
    """Measures a live model on the same few batches every `every` steps.

    Call `step()` once per optimizer step. Names are `smoothing/cosine/depth_3`, `smoothing/rho_dc/layer_2`. The model's
    mode, gradients and random state stay as they are.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> monitor = osm.Monitor(model, [torch.randn(2, 10, 32)], every=10)
    >>> [monitor.step() is not None for _ in range(11)].count(True)
    2
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        *,
        every: int = 100,
        metrics: Choice | Iterable[Choice] = MONITOR_METRICS,
        file: str | Path | None = None,
        log: Logger | None = None,
        spectra: bool = True,
    ):
        if every < 1:
            raise BadValue("every", every, "at least 1")
        self.model = model
        self.batches = batches
        self.every = every
        self.metrics = metrics
        self.file = Path(file) if file is not None else None
        self.log = log
        self.spectra = spectra
        self.steps = 0
        self.seconds = 0.0
        """Time spent here, to be compared with the time of training."""

    def step(self) -> dict[str, float] | None:
        """Counts a step and measures at the first and at every `every`-th; returns the numbers when it measured."""
        due = self.steps % self.every == 0
        self.steps += 1
        return self.measure(self.steps - 1) if due else None

    def measure(self, step: int) -> dict[str, float]:
        """Measures now, logs under the given step and appends one line to the file."""
        began = time.perf_counter()
        numbers = self._numbers()
        self.seconds += time.perf_counter() - began
        if self.log is not None:
            self.log(numbers, step)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:  # one write per line: a crash loses at most the last
                file.write(json.dumps({"step": step, **numbers}) + "\n")
        return numbers

    def _numbers(self) -> dict[str, float]:
        result = measure(self.model, self.batches, metrics=self.metrics)
        numbers = {}
        for name, _ in result.definitions:
            for stack in dict.fromkeys(value.stack for value in result.values):
                for point in result.curve(name, stack):
                    if point.mean is not None:
                        prefix = f"{stack}/" if stack else ""
                        numbers[f"smoothing/{prefix}{name}/depth_{point.depth}"] = point.mean
        return numbers | self._spectra() if self.spectra else numbers

    def _spectra(self) -> dict[str, float]:
        """Extremes of the plain value maps, in float32: training moves them by more than that rounds."""
        source = open_source(self.model)
        numbers = {}
        for stack in source.stacks():
            place = f"smoothing/{stack.label}/" if stack.label else "smoothing/"
            for position, block in enumerate(stack.names.blocks):
                weights = stack.weights(position, source.store.read)
                if torch.isfinite(weights.w_v).all() and torch.isfinite(weights.w_o).all():
                    found = spectrum(plain_map(weights, torch.float32))
                    for name in ("rho_dc", "min_real", "max_real"):
                        numbers[f"{place}{name}/layer_{block.index}"] = getattr(found, name)
        return numbers
