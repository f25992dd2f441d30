"""`Monitor`: measures a model while it trains, in one process, several, or shards.

Gathering the weights is something that all processes do together; running the copy is not. So the first process alone
measures, as it does elsewhere, at the price of one whole model in its memory while it does.
"""

import json
import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, distributed, nn

from oversmooth.control.selection import RULE_PREFIX
from oversmooth.data.batches import Batch
from oversmooth.errors import BadValue, NotSupported, PartialReading, UnknownName, user_code
from oversmooth.measurement.gate import LOSS, breaches, limits_of, loss_increase, points_of_numbers
from oversmooth.measurement.measure import measure
from oversmooth.measurement.metrics import Choice
from oversmooth.models.open import open_source
from oversmooth.models.wrappers import unwrapped
from oversmooth.results import Breach
from oversmooth.spectra.spectrum import spectrum
from oversmooth.spectra.value_map import plain_map


def is_first() -> bool:
    """Whether this process measures: the first of several, or the only one."""
    return not _several() or distributed.get_rank() == 0


def first_says(answer: bool) -> bool:
    """The answer of the first process, in every process; all of them have to ask."""
    if not _several():
        return answer
    device = torch.device("cpu")
    if distributed.get_backend() != "gloo":
        device = torch.accelerator.current_accelerator() or device
    said = torch.tensor([int(answer)], device=device)
    distributed.broadcast(said, 0)
    return bool(said.item())


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


# --- models whose weights lie in shards on several processes (FSDP): an ordinary copy of them ---

HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict))
"""Where a module keeps its hooks: those that gather shards must not run in a copy that has none."""
INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Under which name a wrapper keeps the module that it wraps."""


def is_sharded(model: nn.Module) -> bool:
    """Whether some part of the model was given to FSDP, in either of its forms."""
    return any(_wraps(part) or _is_sharding(type(part)) for part in model.modules())


def whole_copy(model: nn.Module, is_kept: bool) -> nn.Module | None:
    """An ordinary model with the whole weights, where it is kept; every process has to ask for it at the same time."""
    if any(RULE_PREFIX in name for name, _ in model.named_modules()):
        reason = "its hooks belong to the modules in shards, and a whole copy would run without it"
        raise NotSupported("Watching an intervention", "under FSDP", reason, "Use DDP, or measure its checkpoints.")
    if any(_wraps(part) for part in model.modules()):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
            return _ordinary(model, lambda weight: weight.detach().clone(), {}) if is_kept else None
    whole: dict[int, Tensor] = {}
    for weight in model.parameters():
        shard = weight.detach()
        gathered = shard.full_tensor() if hasattr(shard, "full_tensor") else shard  # a DTensor is in shards
        if is_kept:
            whole[id(weight)] = gathered
    return _ordinary(model, lambda weight: whole[id(weight)], {}) if is_kept else None


def _wraps(module: nn.Module) -> bool:
    return hasattr(module, "_fsdp_wrapped_module")


def _is_sharding(kind: type) -> bool:
    """Whether `fully_shard` has put its own class in front of a module's."""
    if not distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return issubclass(kind, FSDPModule)


def _ordinary(module: nn.Module, whole: Callable[[Tensor], Tensor], made: dict[int, nn.Module]) -> nn.Module:
    """The same modules without wrappers and hooks, each once, around tensors of their own."""
    inner: Any = module
    while (name := next((name for name in INSIDE if name in inner._modules), None)) is not None:
        inner = inner._modules[name]
    if id(inner) in made:
        return made[id(inner)]
    kind: Any = type(inner)
    kind = kind.__bases__[1] if _is_sharding(kind) else kind  # the module's own class stands behind that of FSDP
    copy: nn.Module = kind.__new__(kind)
    made[id(inner)] = copy
    copy.__dict__.update(inner.__dict__)
    copy.__dict__.update({name: OrderedDict() for name in HOOKS})
    copy._parameters = {
        name: None if weight is None else nn.Parameter(whole(weight), weight.requires_grad)
        for name, weight in inner._parameters.items()
    }
    copy._buffers = dict(inner._buffers)
    copy._modules = {
        name: None if child is None else _ordinary(child, whole, made) for name, child in inner._modules.items()
    }
    return copy


# --- watching smoothing during training: metrics and spectra every k steps ---

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
            with user_code("The log function of the Monitor", self.log):
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
            what = "training is asked to stop" if self.on_collapse == "stop" else "training continues"
            words = f"Collapse at step {step}: {broken[0].rule} is broken, {broken[0].words}; {what}."
            warnings.warn(words, CollapseWarning, stacklevel=2)

    def _numbers(self, model: nn.Module) -> dict[str, float]:
        result = measure(model, self.batches, metrics=self.metrics)
        if self.limits and result.stream is not None and result.stream.partial:
            raise PartialReading(result.provenance.target, result.stream.partial)
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


# --- what the callbacks of all trainers share: options, checked when they are given ---


class WatchOptions(TypedDict, total=False):
    """Keywords of every callback; `Monitor` says what each means."""

    metrics: Choice | Iterable[Choice]
    file: str | Path | None
    rules: Mapping[str, object] | None
    patience: int
    on_collapse: str


class WatchesTraining:
    """Measures `batches` every `every` steps; the other options are those of `Monitor`."""

    def __init__(
        self,
        every: int = 100,
        batches: Sequence[Batch] = (),
        *,
        metrics: Choice | Iterable[Choice] = MONITOR_METRICS,
        file: str | Path | None = None,
        rules: Mapping[str, object] | None = None,
        patience: int = 1,
        on_collapse: str = "warn",
    ):
        limits_of(rules or {})  # a mistake is told now, and not after the data have been prepared
        if every < 1:
            raise BadValue("every", every, "at least 1")
        self.every = every
        self.monitor: Monitor | None = None
        self._batches = batches
        self._options: dict[str, Any] = {"metrics": metrics, "file": file, "rules": rules}
        self._options |= {"patience": patience, "on_collapse": on_collapse}

    def begin(self, model: nn.Module) -> None:
        """Training begins: from now on there is a monitor of this model."""
        self.monitor = Monitor(model, self._batches, every=self.every, **self._options)

    def note_loss(self, loss: object) -> None:
        """A loss of training, where the trainer tells of one."""
        if self.monitor is not None and loss is not None:
            self.monitor.note_loss(float(loss))  # type: ignore[arg-type]  # a number, or a tensor of one

    def measure(self, step: int) -> tuple[dict[str, float] | None, bool]:
        """The numbers, which only the first process has, and whether training should stop, which all of them learn."""
        assert self.monitor is not None, "training has begun"
        return self.monitor.measure(step), self.monitor.should_stop
