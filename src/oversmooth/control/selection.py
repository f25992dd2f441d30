"""Which layers an intervention touches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from oversmooth.errors import BadValue, CannotControl, UnknownName
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.identify import BlockNames
from oversmooth.models.source import Stack
from oversmooth.models.stores.adapters import is_adapted
from oversmooth.models.stores.module import ModuleStore

RULE_PREFIX = "oversmooth_"
"""Prefix of the submodules that interventions on attention add; such a model has no ordinary weights to go back to."""
Layers = str | int | Iterable[int] | None
"""`None` for all, one number, several, or words such as `6-11,14`; -1 is the last."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """One block that was chosen."""

    stack: Stack
    position: int

    @property
    def block(self) -> BlockNames:
        return self.stack.names.blocks[self.position]

    @property
    def words(self) -> str:
        return f"layer {self.block.index}" + (f" of {self.stack.label}" if self.stack.label else "")


def choose(stacks: Sequence[Stack], layers: Layers = None, stack: str | None = None) -> list[Chosen]:
    """The blocks of the chosen layers, in order; of one stack only where it is named."""
    if layers is not None and not isinstance(layers, str | int):
        layers = tuple(layers)  # it is gone through more than once
    labels = [each.label for each in stacks]
    if stack is not None and stack not in labels:
        raise UnknownName("stack", stack, labels)
    inside = [each for each in stacks if stack in (None, each.label)]
    found: list[Chosen] = []
    asked: set[int] = set()
    there: set[int] = set()
    for each in inside:
        indices = [block.index for block in each.names.blocks]
        wanted = _numbers(layers, indices)
        found += [Chosen(each, position) for position, index in enumerate(indices) if index in wanted]
        asked, there = asked | wanted, there | set(indices)
    if unknown := sorted(asked - there):
        raise UnknownName("layer", unknown[0], [str(index) for index in sorted(there)])
    if not found:
        raise BadValue("layers", layers, "at least one layer")
    return found


def require_plain(verb: str, each: Chosen, weights: AttentionWeights) -> None:
    """An interval of eigenvalues guarantees something for `A X W_V W_O` with rows that sum to one, and for nothing else."""
    reason = weights.beyond_plain
    if reason is None and each.stack.arch.value_gain != 1.0:
        reason = f"its values are multiplied by {each.stack.arch.value_gain:g}"
    if reason is not None:
        advice = "Choose other layers, or an intervention that needs no guarantee: osm.apply(model, 'layerscale')."
        raise CannotControl(verb, each.words, f"{reason}, which the guarantee does not cover", advice)


def without_exact_place(weights: AttentionWeights) -> tuple[str, ...]:
    """Steps of attention that a rule cannot change exactly: mixed heads behind a gate or norm, and what is no softmax."""
    has_gains = bool(weights.gains) or "inner_norm" in weights.norms
    is_softmax = not {"sink", "differential"} & set(weights.gains)
    return (*(["mixed"] if has_gains else []), *([] if is_softmax else ["product", "probabilities", "seen"]))


def require_matrices(chosen: Sequence[Chosen], read: Callable[[str], Tensor]) -> None:
    """Weights that are changed in place are matrices of a known orientation, one row or column per channel."""
    for each in {id(each.stack): each for each in reversed(chosen)}.values():
        arch = each.stack.arch
        for name, axes in ((each.block.value.weight, arch.value_axes), (each.block.output.weight, arch.output_axes)):
            if axes or read(name).ndim != 2:
                form = axes or "a convolution"
                reason = f"{name} is stored as {form}, not as a matrix"
                raise CannotControl("A change of the value map", each.words, reason, "Use linear layers there.")


def require_ordinary(verb: str, chosen: Sequence[Chosen], store: ModuleStore) -> None:
    """The value path that is written to is what acts: no adapter of peft adds to it, or stands in its place."""
    for each in chosen:
        name = next((name for name in each.block if is_adapted(store.owner(name))), None)
        if name is not None:
            advice = "Merge it first: model = model.merge_and_unload()."
            raise CannotControl(verb, each.words, f"an adapter of peft acts on {name}", advice)


def _numbers(layers: Layers, indices: Sequence[int]) -> set[int]:
    if layers is None:
        return set(indices)
    listed = [layers] if isinstance(layers, int) else list(_parsed(layers) if isinstance(layers, str) else layers)
    after_last = max(indices) + 1
    return {number + after_last if number < 0 else number for number in listed}


def _parsed(words: str) -> Iterator[int]:
    for part in words.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise BadValue("layers", words, "numbers and ranges such as 6-11,14")
        yield from range(int(first), int(last or first) + 1)
