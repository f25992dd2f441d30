"""Discovers a module: runs it, declares what it finds, proves it and caches it."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oversmooth.errors import (
    RUN_ERRORS,
    NoAttentionMaps,
    NotDiscovered,
    OversmoothError,
    RefusedArchitecture,
    first_line,
)
from oversmooth.models.canonical import assemble
from oversmooth.models.declaration import Arch, Discovery, LeftOut, sizes_of
from oversmooth.models.discovery.declare import declared, stack_labels
from oversmooth.models.discovery.layers import Refused, layers_of
from oversmooth.models.discovery.proof import Layered, equal_tokens, prepared
from oversmooth.models.discovery.trace import traced
from oversmooth.models.hooks.attention_maps import awaited
from oversmooth.models.identify import StackNames, resolve
from oversmooth.models.inputs import examples, with_memory
from oversmooth.models.live import call_model, quiet_eval
from oversmooth.models.stores.module import ModuleStore, is_quantised, tensors_of

# --- `discover`: the declaration of a model that nobody declared ---

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest error of the equal-token identity that rounding explains, by the precision in which the model runs."""
NOT_SELF_ATTENTION = ("cross", "pooling", "stage")
"""Kinds of attention that are left out without refusing the model."""

HIDES = "is a kernel that hides the attention it computes"
PLAIN = "Let the model call torch.nn.functional.scaled_dot_product_attention instead, or turn its fused attention off."
OPERATOR = re.compile(r"HigherOrderOperator (\w+)")
NO_SELF_ATTENTION = "no self-attention"
"""Kind of the refusal of a model that has such attention only."""


def discover_module(model: nn.Module, inputs: Mapping[str, Tensor], *, target: str, kind: str = "text") -> Discovery:
    """Finds and proves the value path of every attention that the model runs on the inputs; two forward passes.

    Raises `RefusedArchitecture`, naming the module in the way, if the theory covers none of its attention,
    and `NotDiscovered` if something was found but not proved.
    """
    if hidden := hidden_by(model):
        raise NotDiscovered(target, f"{hidden} hides its operations", "Give the original module, in plain floats.")
    store = ModuleStore(model)
    with quiet_eval(model), store.in_use() as tensors:
        with traced(model, tensors) as trace:
            _run(model, inputs, target)
        found, refused = layers_of(trace)
        archs = declared(trace, found, refused, target, kind)
        left_out = tuple(_left_out(refused))
        if not archs:
            _refuse(target, left_out, [mixing.keys for mixing in trace.mixings], trace.kernels)
        proved = _prove(model, inputs, archs, tensors, store, target)
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


def _refuse(target: str, left_out: Sequence[LeftOut], keys: Sequence[int], kernels: Mapping[str, str]) -> None:
    in_the_way = [one for one in left_out if one.kind not in NOT_SELF_ATTENTION]
    if first := next(iter([*in_the_way, *(one for one in left_out if one.kind == "stage")]), None):
        raise RefusedArchitecture(target, first.reason, kind=first.kind)
    if left_out:
        raise RefusedArchitecture(target, f"it has no self-attention ({left_out[0].reason})", kind=NO_SELF_ATTENTION)
    if 1 in keys:
        words = "all its attention read a single token each: its inputs are too small"
        raise NotDiscovered(target, words, "Give larger inputs: osm.discover(model, inputs={...}).")
    if kernels:
        kernel, where = next(iter(kernels.items()))
        raise NotDiscovered(target, f"{kernel} in {where or 'the model'} {HIDES}", PLAIN)
    raise RefusedArchitecture(target, "no softmax attention was seen while it ran", kind="no attention")


def _prove(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    archs: Sequence[Arch],
    tensors: Mapping[str, Tensor],
    store: ModuleStore,
    target: str,
) -> tuple[Arch, ...]:
    """The declarations with the error of their equal-token identity, from one more pass; raises if it is too large."""
    layers: list[Layered] = []
    counts = []
    for arch in archs:
        blocks = own_stack(arch, tensors.keys()).blocks
        counts.append(len(blocks))
        for position, block in enumerate(blocks):
            weights = assemble(arch, sizes_of({}, arch), block, lambda name: tensors[name].detach(), arch.branch_gain)
            layers.append((block, awaited(arch.name, position, block, weights.n_heads, arch), weights))
    with prepared(layers, store, torch.Generator().manual_seed(0)) as found, equal_tokens(tensors, found):
        try:
            _run(model, inputs, target)
        except NoAttentionMaps as error:
            words = f"expected the attention probabilities of {error.layer}, found {error.found}"
            raise NotDiscovered(target, words, f"{error.advice} Or declare the family by hand.") from error
    checks, proved = iter(found), []
    for arch, count in zip(archs, counts, strict=True):
        worst = max(islice(checks, count), key=lambda check: check.error)
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


def _run(model: nn.Module, inputs: Mapping[str, Tensor], target: str) -> Any:
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    try:
        return call_model(model, {**inputs, "use_cache": False} if takes_cache else inputs)
    except RUN_ERRORS as error:
        words = first_line(error)
        if operator := OPERATOR.search(words):  # it has no operations of its own that could be watched
            raise NotDiscovered(target, f"{operator[1]} {HIDES}", PLAIN) from error
        advice = "Give inputs that it accepts: osm.discover(model, inputs={...})."
        raise NotDiscovered(target, f"it does not run on {shapes_of(inputs)}: {words}", advice) from error


def shapes_of(inputs: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name or 'input'} {tuple(value.shape)}" for name, value in inputs.items())


# --- models that cannot attend, by their code: no class of any of their modules speaks of attention ---

WORDS = re.compile(
    r"attn|(?<!no)(?<!no )(?<!has_)attention|softmax|scaled_dot_product|logsumexp|\bexp\(", re.IGNORECASE
)


def cannot_attend(model: nn.Module) -> bool:
    """Whether no module of a model of transformers computes attention; a name in a comment is enough for a doubt.

    Only for code that names what it does as transformers does: it is read, not run.
    """
    if any(type(part).__module__.partition(".")[0] not in ("torch", "transformers") for part in model.modules()):
        return False
    bases = {base for part in model.modules() for base in type(part).__mro__}
    own = [base for base in bases if base.__module__.startswith("transformers.models.")]
    classes = [base for base in own if not base.__name__.endswith("PreTrainedModel")]  # these only speak of attention
    try:
        return bool(classes) and not any(WORDS.search(inspect.getsource(one)) for one in classes)
    except (OSError, TypeError):  # a class without source may compute anything
        return False


# --- composite models: every tower that the whole does not run on its example is run by itself ---

TRIES = 32
"""Inputs that are tried before a model is given up."""


def watch(model: nn.Module, config: Mapping[str, Any]) -> tuple[Discovery, Mapping[str, Tensor]]:
    """What running a model on made-up inputs shows, its towers included, and the inputs of the whole."""
    target = type(model).__name__
    fed: Mapping[str, Tensor] = {}
    parts: list[tuple[str, Discovery]] = []
    failed: OversmoothError | None = None
    try:
        whole, fed = _watch_one(model, config, target)
        parts, reached = [("", whole)], whole.reached
    except (NotDiscovered, RefusedArchitecture) as error:
        failed, reached = error, frozenset()
    left_out: list[LeftOut] = []
    for path, tower in towers_of(model):
        if path in reached:
            continue
        if cannot_attend(tower):
            left_out.append(LeftOut(where=path, kind="no attention", reason=f"no module of {path} computes attention"))
            continue
        try:
            part, _ = _watch_one(tower, dict(tower.config.to_dict()), target)
            parts.append((path, part))
            reached |= {f"{path}.{inner}".rstrip(".") for inner in part.reached}
        except RefusedArchitecture as error:
            left_out.append(LeftOut(where=path, kind=error.kind, reason=error.reason))
            reached |= {inner for inner, _ in towers_of(model) if inner.startswith(f"{path}.")}
        except NotDiscovered as error:
            left_out.append(LeftOut(where=path, kind="not run", reason=error.found))
    if not parts:
        assert failed is not None, "a model that was not found has a reason"
        own = [one for one in left_out if one.kind not in ("not run", "no attention")]
        if isinstance(failed, NotDiscovered) and own:  # a tower's own reason says more than a whole that does not run
            raise RefusedArchitecture(target, own[0].reason, own[0].kind)
        raise failed
    # A tower that does not run by itself is not left out where the towers inside of it were run.
    ran_inside = {one.where for one in left_out if any(path.startswith(f"{one.where}.") for path in reached)}
    kept = [one for one in left_out if one.kind != "not run" or one.where not in ran_inside]
    return joined(target, parts, kept), fed


def towers_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The models inside a model of transformers that have a config of their own, each before those inside of it."""
    configs = {"": getattr(model, "config", None)}
    for path, part in model.named_modules():
        config = getattr(part, "config", None)
        if not path or not hasattr(part, "main_input_name") or not hasattr(config, "to_dict"):
            continue
        outer = max((other for other in configs if f"{path}.".startswith(f"{other}." if other else "")), key=len)
        if config is not configs[outer]:
            configs[path] = config
            yield path, part


def _watch_one(model: nn.Module, config: Mapping[str, Any], target: str) -> tuple[Discovery, Mapping[str, Tensor]]:
    failed: NotDiscovered | RefusedArchitecture | None = None
    for example in islice(examples(model, config), TRIES):
        found: tuple[Discovery, Mapping[str, Tensor]] | None = None
        for inputs in (example, *with_memory(model, example)):
            fed = placed(model, inputs)
            try:
                one = discover_module(model, fed, target=target, kind=kind_of(fed))
            except NotDiscovered as error:
                failed = failed or error
            except RefusedArchitecture as error:
                if len(inputs) == 1 or hasattr(model, "main_input_name"):
                    raise
                # Its arguments may be meant for one and the same sequence, or be masks.
                is_better = not isinstance(failed, RefusedArchitecture) or failed.kind == NO_SELF_ATTENTION
                failed = error if is_better else failed
            else:
                crosses = any(part.kind == "cross" for part in one.left_out)
                found = (one, fed) if found is None or crosses else found
        if found is not None:
            return found
    if failed is None:
        raise NotDiscovered(target, "nobody knows what it is fed", "Give inputs: osm.discover(model, inputs={...}).")
    raise failed


def joined(target: str, parts: Sequence[tuple[str, Discovery]], left_out: Sequence[LeftOut]) -> Discovery:
    """One discovery of all parts, each stack under the name of its tower."""
    archs = [_under(path, arch) for path, part in parts for arch in part.archs]
    labels = stack_labels([arch.paths.block for arch in archs], [f".{arch.paths.o}" for arch in archs])
    named = tuple(
        replace(arch, stack=label, name=f"{target}.{label}" if label else target)
        for arch, label in zip(archs, labels, strict=True)
    )
    inner = [_named_in_full(path, one) for path, part in parts for one in part.left_out]
    return Discovery(
        target=target,
        archs=named,
        left_out=(*inner, *left_out),
        largest_error=max(part.largest_error for _, part in parts),
        forward_passes=sum(part.forward_passes for _, part in parts),
        reached=frozenset().union(*(part.reached for _, part in parts)),
    )


def _named_in_full(path: str, one: LeftOut) -> LeftOut:
    if not path:
        return one
    where = f"{path}.{one.where}".rstrip(".")
    return replace(one, where=where, reason=one.reason.replace(one.where, where) if one.where else one.reason)


def _under(path: str, arch: Arch) -> Arch:
    """A declaration of a part as one of the whole."""
    if not path:
        return arch
    paths = arch.paths
    changed = {
        name: "|".join(f"^{path}.{one[1:]}" if one.startswith("^") else one for one in value.split("|"))
        for name in paths.__dataclass_fields__
        if (value := getattr(paths, name)) and "^" in value
    }
    block = ",".join(f"{path}.{one}".strip(".") for one in paths.block.split(","))
    outer = {name: f"{path}.{value}" for name in ("final_norm", "end") if (value := getattr(paths, name))}
    return replace(arch, paths=replace(paths, block=block, **outer, **changed))


def placed(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs where the model is and in the precision in which it runs."""
    some = next(model.parameters())
    return {
        name: value.to(some.device, some.dtype) if value.is_floating_point() else value.to(some.device)
        for name, value in inputs.items()
    }


def kind_of(inputs: Mapping[str, Tensor]) -> str:
    """What the inputs are: text, image or audio."""
    if any(name in inputs for name in ("input_values", "input_features")):
        return "audio"
    if "input_ids" in inputs:
        return "text"
    has_grid = "grid_thw" in inputs  # patches that were cut out beforehand
    is_image = has_grid or any(name.startswith("pixel_values") for name in inputs)
    return "image" if is_image or ("" in inputs and inputs[""].ndim > 3) else "text"


# --- what running a model has shown, kept with the model: a module is watched once ---


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    names: tuple[str, ...]
    discovery: Discovery
    inputs: Mapping[str, Tensor]
    replaces_declaration: bool = False
    """Whether the family's declaration was tried and reads another stream than the model's own."""


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def discovered(model: nn.Module, config: Mapping[str, Any], *, inputs: Mapping[str, Tensor] | None = None) -> Discovery:
    """The declaration of a live module, from memory where it was watched before and has not changed its tensors."""
    if inputs is not None:
        return _discovered_on(model, inputs)
    if (known := _known(model)) is not None:
        return known.discovery
    found, fed = watch(model, config)
    _KNOWN[model] = _Known(tuple(tensors_of(model)), found, fed)
    return found


def rediscovered(model: nn.Module, inputs: Mapping[str, Tensor]) -> Discovery:
    """Discovery on these inputs, used from now on in place of a declaration that does not fit the model."""
    return _discovered_on(model, inputs, replaces_declaration=True)


def _discovered_on(model: nn.Module, inputs: Mapping[str, Tensor], *, replaces_declaration: bool = False) -> Discovery:
    fed = placed(model, inputs)
    found = discover_module(model, fed, target=type(model).__name__, kind=kind_of(fed))
    _KNOWN[model] = _Known(tuple(tensors_of(model)), found, fed, replaces_declaration)
    return found


def _known(model: nn.Module) -> _Known | None:
    """What is known of a module, unless its tensors have changed; parametrizing one keeps its name."""
    known = _KNOWN.get(model)
    return known if known is not None and known.names == tuple(tensors_of(model)) else None


def replacement(model: nn.Module) -> Discovery | None:
    """What replaces the declaration of this module, if anything does."""
    known = _known(model)
    return known.discovery if known is not None and known.replaces_declaration else None


def known_inputs(model: nn.Module) -> Mapping[str, Tensor] | None:
    """The inputs that a model was watched on."""
    known = _KNOWN.get(model)
    return None if known is None else known.inputs
