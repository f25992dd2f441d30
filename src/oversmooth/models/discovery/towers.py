"""Composite models: every tower that the whole does not run on its example is run by itself."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from oversmooth.errors import NotDiscovered, OversmoothError, RefusedArchitecture
from oversmooth.models.declaration import Arch
from oversmooth.models.discovery.discovery import Discovery, LeftOut, discover_module
from oversmooth.models.discovery.no_attention import cannot_attend
from oversmooth.models.discovery.spelling import distinct, labels_of
from oversmooth.models.examples import examples

TRIES = 32
"""Inputs that are tried before a model counts as one whose inputs only its author knows."""


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
        raise _refusal(target, failed, left_out)
    return joined(target, parts, _without_wrappers(left_out, reached)), fed


def _without_wrappers(left_out: Sequence[LeftOut], reached: Collection[str]) -> list[LeftOut]:
    """A tower that does not run by itself is not left out where the towers inside of it were run."""
    return [
        one
        for one in left_out
        if one.kind != "not run" or not any(path.startswith(f"{one.where}.") for path in reached)
    ]


def _refusal(target: str, failed: OversmoothError, left_out: Sequence[LeftOut]) -> OversmoothError:
    """A tower's own reason says more than a whole that does not run."""
    own = [one for one in left_out if one.kind not in ("not run", "no attention")]
    if isinstance(failed, NotDiscovered) and own:
        return RefusedArchitecture(target, own[0].reason, own[0].kind)
    return failed


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
    failed: NotDiscovered | None = None
    for tried, example in enumerate(examples(model, config)):
        if tried == TRIES:
            break
        example = placed(model, example)
        try:
            return discover_module(model, example, target=target, kind=kind_of(example)), example
        except NotDiscovered as error:
            failed = failed or error
    if failed is None:
        raise NotDiscovered(target, "nobody knows what it is fed", "Give inputs: osm.discover(model, inputs={...}).")
    raise failed


def joined(target: str, parts: Sequence[tuple[str, Discovery]], left_out: Sequence[LeftOut]) -> Discovery:
    """One discovery of all parts, each stack under the name of its tower."""
    archs = [_under(path, arch) for path, part in parts for arch in part.archs]
    labels = labels_of(distinct([arch.paths.block for arch in archs], [f".{arch.paths.o}" for arch in archs]))
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
