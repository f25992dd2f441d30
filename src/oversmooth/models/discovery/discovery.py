"""`discover`: the declaration of a model that nobody declared, found by running it and proved by running it again."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from oversmooth.errors import NoAttentionMaps, NotDiscovered, RefusedArchitecture
from oversmooth.models.canonical import assemble
from oversmooth.models.declaration import Arch
from oversmooth.models.discovery.blocks import Refused
from oversmooth.models.discovery.declare import declared
from oversmooth.models.discovery.layers import layers_of
from oversmooth.models.discovery.proof import Layered, equal_tokens, prepared
from oversmooth.models.discovery.trace import traced
from oversmooth.models.hooks.attention_maps import awaited
from oversmooth.models.resolve import StackNames, resolve
from oversmooth.models.sizes import sizes_of
from oversmooth.models.stores.live_quantised import is_quantised
from oversmooth.models.stores.module import ModuleStore, tensors_of

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest error of the equal-token identity that rounding explains, by the precision in which the model runs."""
RUN_ERRORS = (
    *(RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError, NotImplementedError),
    *(AssertionError, ArithmeticError, NameError, LookupError, ImportError),
)
"""What a model may raise of inputs that are not for it."""
NOT_SELF_ATTENTION = ("cross", "pooling", "stage")
"""Kinds of attention that are left out without being in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """An attention that is not analysed, and why."""

    where: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Discovery:
    """What running a model showed: a declaration per stack, each proved by the equal-token identity."""

    target: str
    archs: tuple[Arch, ...]
    left_out: tuple[LeftOut, ...]
    """Cross-attention, pooling, and attention that the theory does not cover."""
    largest_error: float
    """Of the equal-token identity, over all layers."""
    forward_passes: int
    reached: frozenset[str] = frozenset()
    """Paths of the modules that ran."""

    def code(self) -> str:
        """The declarations as Python that could stand in `families.py`."""
        return "\n".join(_code(arch) for arch in self.archs)

    def __repr__(self) -> str:
        stacks = ", ".join(f"{arch.stack or 'blocks'} at {arch.paths.block}" for arch in self.archs)
        left = f", {len(self.left_out)} attentions left out" if self.left_out else ""
        return f"<Discovery of {self.target}: {stacks}{left}, found by running it, error {self.largest_error:.1e}>"


def discover_module(
    model: nn.Module, inputs: Mapping[str, Tensor], *, target: str, kind: str = "text", seed: int = 0
) -> Discovery:
    """Finds and proves the value path of every attention that the model runs on the inputs; two forward passes.

    Raises `RefusedArchitecture` where the theory covers none of its attention, with the module that stands in the way,
    and `NotDiscovered` where something was found but not proved.
    """
    if hidden := hidden_by(model):
        raise NotDiscovered(target, f"{hidden} hides its operations", "Give the original module, in plain floats.")
    with _quiet(model), live_tensors(model) as tensors:
        with traced(model, tensors) as trace:
            _run(model, inputs, target)
        found, refused = layers_of(trace)
        archs = declared(trace, found, refused, target, kind)
        left_out = tuple(_left_out(refused))
        if not archs:
            _refuse(target, left_out, [mixing.keys for mixing in trace.mixings])
        proved = _prove(model, inputs, archs, tensors, target, seed)
    return Discovery(
        target=target,
        archs=proved,
        left_out=left_out,
        largest_error=max(arch.proof or 0.0 for arch in proved),
        forward_passes=2,
        reached=frozenset(call.path for call in trace.calls),
    )


def _left_out(refused: Sequence[Refused]) -> Iterator[LeftOut]:
    """One entry per kind and module, whatever the number of the block."""
    seen = set()
    for one in sorted(refused, key=lambda one: one.obstacle.kind == "other"):  # what has a name of its own first
        obstacle = one.obstacle
        if (obstacle.where, obstacle.reason) not in seen:
            seen.add((obstacle.where, obstacle.reason))
            yield LeftOut(where=obstacle.where, kind=obstacle.kind, reason=obstacle.reason)


def _refuse(target: str, left_out: Sequence[LeftOut], keys: Sequence[int]) -> None:
    own = [one for one in left_out if one.kind not in NOT_SELF_ATTENTION]
    if own:
        raise RefusedArchitecture(target, own[0].reason, kind=own[0].kind)
    if stage := next((one for one in left_out if one.kind == "stage"), None):
        raise RefusedArchitecture(target, stage.reason, kind=stage.kind)
    if left_out:
        raise RefusedArchitecture(target, f"it has no self-attention ({left_out[0].reason})", kind="no self-attention")
    if 1 in keys:
        words = "all its attention read a single token each: its inputs are too small"
        raise NotDiscovered(target, words, "Give larger inputs: osm.discover(model, inputs={...}).")
    reason = "no softmax attention was seen while it ran"
    raise RefusedArchitecture(target, reason, kind="no attention")


def _prove(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    archs: Sequence[Arch],
    tensors: Mapping[str, Tensor],
    target: str,
    seed: int,
) -> tuple[Arch, ...]:
    layers: list[list[Layered]] = []
    for arch in archs:
        layers.append([])
        for position, block in enumerate(own_stack(arch, tensors.keys()).blocks):
            weights = assemble(arch, sizes_of({}, arch), block, lambda name: tensors[name].detach(), arch.branch_gain)
            layers[-1].append((block, awaited(arch.name, position, block, weights.n_heads, arch), weights))
    store, generator = ModuleStore(model, keeps_names=True), torch.Generator().manual_seed(seed)
    flat = [layer for of_stack in layers for layer in of_stack]
    with prepared(flat, store, generator) as found, equal_tokens(tensors, found):
        try:
            _run(model, inputs, target)
        except NoAttentionMaps as error:
            raise NotDiscovered(
                target, f"its attention shows {error}", "Declare the family by hand instead."
            ) from error
    rest = iter(found)
    checks = [[next(rest) for _ in of_stack] for of_stack in layers]
    proved = []
    for arch, of_stack in zip(archs, checks, strict=True):
        worst = max(of_stack, key=lambda check: check.error)
        tolerance = TOLERANCE.get(tensors[worst.output].dtype, 0.05)
        if not worst.error <= tolerance:
            words = f"the equal-token identity fails at {worst.output} by {worst.error:.2g}"
            raise NotDiscovered(target, words, "What was found is not used. Declare the family by hand instead.")
        proved.append(replace(arch, proof=worst.error))
    return tuple(proved)


def own_stack(arch: Arch, names: Collection[str]) -> StackNames:
    """The stack of a discovered declaration among the names of the model it was found in."""
    stacks = [stack for stack in resolve(arch, names) if not stack.prefix]
    assert stacks, f"{arch.paths.block} was found among these names"
    return stacks[0]


def hidden_by(model: nn.Module) -> str:
    """The module because of which the model's operations cannot be watched; empty where all can."""
    for path, part in model.named_modules():
        where = f" ({path}, a {type(part).__name__})" if path else ""
        if isinstance(part, torch.jit.ScriptModule):
            return f"a scripted module{where}"
        if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None:
            return f"a compiled module{where}"
        is_packed = type(part).__module__.startswith("torch.ao.nn") and ".quantized" in type(part).__module__
        if is_packed or any(is_quantised(tensor) for tensor in part.parameters(recurse=False)):
            return f"a quantised module{where}"
    return ""


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def live_tensors(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Every tensor of the model by name, as the model uses it; parametrized ones keep their value inside."""
    with parametrize.cached():
        yield {name: getattr(owner, attribute) for name, (owner, attribute) in tensors_of(model).items()}


def _run(model: nn.Module, inputs: Mapping[str, Tensor], target: str) -> Any:
    named: dict[str, Any] = {name: value for name, value in inputs.items() if name}
    if "use_cache" in inspect.signature(model.forward).parameters:
        named["use_cache"] = False
    try:
        return model(inputs[""], **named) if "" in inputs else model(**named)
    except RUN_ERRORS as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        shapes = ", ".join(f"{name or 'input'} {tuple(value.shape)}" for name, value in inputs.items())
        advice = "Give inputs that it accepts: osm.discover(model, inputs={...})."
        raise NotDiscovered(target, f"it does not run on {shapes}: {words}", advice) from error


def _code(arch: Arch) -> str:
    """One declaration as Python, without what is as usual."""

    def settings(value: Any, skip: tuple[str, ...] = ()) -> list[str]:
        return [
            f"{field.name}={getattr(value, field.name)!r}"
            for field in fields(value)
            if field.name not in skip and getattr(value, field.name) not in (field.default, "", ())
        ]

    own = settings(arch, skip=("paths", "proof", "name", "model_types"))
    paths = settings(arch.paths)
    lines = [
        f"name={arch.name!r}",
        f"model_types={arch.model_types!r}",
        *own,
        "paths=Paths(\n        " + ",\n        ".join(paths) + ",\n    )",
    ]
    return "Arch(\n    " + ",\n    ".join(lines) + ",\n)"
