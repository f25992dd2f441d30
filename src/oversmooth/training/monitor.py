"""Watching smoothing during training: metrics and spectra every k steps, to any logger and to a JSONL file."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from oversmooth.data.batches import Batch
from oversmooth.errors import BadValue, UnknownName
from oversmooth.measurement.limits import LOSS, breaches, limits_of, loss_increase, points_of_numbers
from oversmooth.measurement.measurement import measure
from oversmooth.measurement.metrics import Choice
from oversmooth.models.opening import open_source
from oversmooth.results import Breach
from oversmooth.spectra.spectrum import spectrum
from oversmooth.spectra.value_map import plain_map
from oversmooth.training.processes import first_says, is_first, unwrapped
from oversmooth.training.sharded import is_sharded, whole_copy

Logger = Callable[[dict[str, float], int], None]
"""Called with flat names and numbers, and the step."""
MONITOR_METRICS = ("cosine", "hfc_lfc")
ON_COLLAPSE = ("warn", "stop")


class CollapseWarning(UserWarning):
    """A model in training has broken a rule for as long as was allowed."""


class Monitor:
    """Measures a live model on the same few batches every `every` steps.

    Call `step()` once per optimizer step. Names are `smoothing/cosine/depth_3`, `smoothing/rho_dc/layer_2`. The model's
    mode, gradients and random state stay as they are.

    `rules` are those of `gate`, such as `{"max_cosine": 0.95}`; a rule that is broken at `patience` measurements in a row is
    a collapse. Then a warning is given, once; with `on_collapse="stop"`, `should_stop` becomes true as well. Where several
    processes train one model, the first measures and tells the others; all of them call `step()`. DDP and compiled models are
    unwrapped; of weights in shards (FSDP) the first process gathers a whole copy for as long as it measures.

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
        rules: Mapping[str, object] | None = None,
        patience: int = 1,
        on_collapse: str = "warn",
    ):
        for name, number in (("every", every), ("patience", patience)):
            if number < 1:
                raise BadValue(name, number, "at least 1")
        if on_collapse not in ON_COLLAPSE:
            raise UnknownName("on_collapse", on_collapse, ON_COLLAPSE)
        self.model = unwrapped(model)
        self.batches = batches
        self.every = every
        self.limits = limits_of(rules or {})
        self.metrics = _with_those_of_rules(metrics, [limit.metric for limit in self.limits if limit.name != LOSS])
        self.file = Path(file) if file is not None else None
        self.log = log
        self.spectra = spectra
        self.patience = patience
        self.on_collapse = on_collapse
        self.steps = 0
        self.seconds = 0.0
        """Time spent here, to be compared with the time of training."""
        self.broken: tuple[Breach, ...] = ()
        """What the last measurement broke."""
        self.broken_in_a_row = 0
        self.has_collapsed = False
        self._losses: list[float] = []

    @property
    def should_stop(self) -> bool:
        """Whether the loop should end, because it was asked to at a collapse; the same in every process."""
        return self.has_collapsed and self.on_collapse == "stop"

    def step(self, loss: float | None = None) -> dict[str, float] | None:
        """Counts a step and measures at the first and at every `every`-th; returns the numbers when it measured.

        The loss is needed only by the rule `max_loss_increase`.
        """
        if loss is not None:
            self.note_loss(loss)
        due = self.steps % self.every == 0
        self.steps += 1
        return self.measure(self.steps - 1) if due else None

    def note_loss(self, loss: float) -> None:
        """A loss for the rule `max_loss_increase`."""
        # The lowest and the last are all that the rule looks at.
        lowest = min([*(value for value in self._losses if math.isfinite(value)), math.inf])
        self._losses = [*([lowest] if math.isfinite(lowest) else []), float(loss)]

    def measure(self, step: int) -> dict[str, float] | None:
        """Measures now, logs under the given step and appends one line to the file; `None` in other processes."""
        numbers = None
        began = time.perf_counter()
        model = whole_copy(self.model, is_first()) if is_sharded(self.model) else self.model
        if model is not None and is_first():
            numbers = self._numbers(model)
            self.seconds += time.perf_counter() - began
            self._write(numbers, step)
            self._judge(numbers, step)
        if self.limits:
            self.has_collapsed = first_says(self.has_collapsed)
        return numbers

    def _write(self, numbers: dict[str, float], step: int) -> None:
        if self.log is not None:
            self.log(numbers, step)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:  # one write per line: a crash loses at most the last
                file.write(json.dumps({"step": step, **numbers}) + "\n")

    def _judge(self, numbers: dict[str, float], step: int) -> None:
        """Counts measurements that break a rule, and warns once when there were too many in a row."""
        broken = list(breaches(points_of_numbers(numbers), self.limits))
        increase = loss_increase(self._losses)
        broken += [
            Breach(rule=LOSS, stack="", depth=0, value=increase, bound=limit.bound)
            for limit in self.limits
            if limit.name == LOSS and limit.is_broken_by(increase)
        ]
        self.broken = tuple(broken)
        self.broken_in_a_row = self.broken_in_a_row + 1 if broken else 0
        if self.broken_in_a_row >= self.patience and not self.has_collapsed:
            self.has_collapsed = True
            what = "training is asked to stop" if self.on_collapse == "stop" else "training goes on"
            words = f"Collapse at step {step}: {broken[0].rule} is broken, {broken[0].words}; {what}."
            warnings.warn(words, CollapseWarning, stacklevel=2)

    def _numbers(self, model: nn.Module) -> dict[str, float]:
        result = measure(model, self.batches, metrics=self.metrics)
        numbers = {}
        for name, _ in result.definitions:
            for stack in dict.fromkeys(value.stack for value in result.values):
                for point in result.curve(name, stack):
                    if point.mean is not None:
                        prefix = f"{stack}/" if stack else ""
                        numbers[f"smoothing/{prefix}{name}/depth_{point.depth}"] = point.mean
        return numbers | self._spectra(model) if self.spectra else numbers

    def _spectra(self, model: nn.Module) -> dict[str, float]:
        """Extremes of the plain value maps, in float32: training moves them by more than that rounds."""
        source = open_source(model)
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


def _with_those_of_rules(metrics: Choice | Iterable[Choice], needed: Sequence[str]) -> Choice | tuple[Choice, ...]:
    """The chosen metrics, and those that a rule is about."""
    chosen = list(metrics) if isinstance(metrics, Iterable) and not isinstance(metrics, str) else [metrics]
    names = {getattr(choice, "name", choice) for choice in chosen}
    more = [name for name in dict.fromkeys(needed) if name not in names and "all" not in names]
    return (*chosen, *more) if more else metrics if isinstance(metrics, str) else tuple(chosen)
