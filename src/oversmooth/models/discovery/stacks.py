"""Which layers are one stack: blocks that are alike and differ in a number of their path."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from oversmooth.models.discovery.blocks import FoundLayer
from oversmooth.models.discovery.layout import Layout
from oversmooth.models.discovery.spelling import NUMBER, shared, template_of, unnumbered


@dataclass(eq=False, slots=True)
class Seen:
    """One layer with its own weights, and every pass through it."""

    layer: FoundLayer
    layout: Layout
    order: list[int] = field(default_factory=list)
    """Which of all attention layers it was, each time it ran."""

    @property
    def name(self) -> str:
        return self.layer.output.weight

    @property
    def module(self) -> str:
        return self.layer.mixings[0].module


Stacked = tuple[str, list[Seen]]
"""Path of the block with `{i}` (or the listed paths of blocks without a number), and its layers."""


def stacks_of(seen: Sequence[Seen], refused: Collection[str]) -> list[Stacked]:
    alike: dict[tuple[object, ...], list[Seen]] = {}
    for one in seen:
        alike.setdefault((unnumbered(one.name), _kind(one)), []).append(one)
    forms = Counter(unnumbered(one.name) for one in seen)
    found: list[Stacked] = []
    listed: dict[tuple[object, ...], list[Seen]] = {}
    for (form, kind), members in alike.items():
        numbers = [NUMBER.findall(member.name) for member in members]
        varying = [place for place in range(len(numbers[0])) if len({number[place] for number in numbers}) > 1]
        if not varying and numbers[0] and forms[str(form)] == len(members):
            varying = [0]
        if varying:
            stages: dict[tuple[str, ...], list[Seen]] = {}
            for member, number in zip(members, numbers, strict=True):
                outer = tuple(value for place, value in enumerate(number) if place != varying[-1])
                stages.setdefault(outer, []).append(member)
            for group in stages.values():
                template = template_of(group[0].name, varying[-1])
                if _is_exact(template, group, seen, set(refused) - {one.module for one in seen}):
                    found.append((template, group))
                else:
                    listed.setdefault((tails_of(group[0]), kind, template), []).extend(group)
        else:
            listed.setdefault((tails_of(members[0]), kind), []).extend(members)
    found += [(",".join(block_of(member) for member in members), members) for members in listed.values()]
    return sorted(found, key=lambda stack: stack[1][0].order[0])


def _is_exact(template: str, group: Sequence[Seen], seen: Sequence[Seen], refused: Collection[str]) -> bool:
    """Whether a template means the blocks of a group and no others, such as one whose attention is refused."""
    pattern = re.compile(re.escape(template).replace(r"\{i\}", r"\d+") + r"\.")
    has_others = any(pattern.match(other) and unnumbered(other) == unnumbered(group[0].module) for other in refused)
    return not has_others and sum(1 for one in seen if pattern.match(one.name)) == len(group)


def _kind(one: Seen) -> tuple[object, ...]:
    """What all blocks of one stack have in common."""
    layout, residual = one.layout, one.layer.residual
    sizes = () if layout.fused is None else (layout.n_heads, layout.n_kv, layout.d_head)
    causal = one.layer.mixings[0].is_causal
    latent = one.layer.latent and one.layer.latent.first
    form = (layout.fused, layout.value_axes, layout.output_axes, latent, one.layer.mixings[0].value_factor)
    return (layout.d_model, *form, "inner_norm" in one.layer.norms, sizes, residual, causal)


def block_of(one: Seen) -> str:
    """The module that holds both projections of a layer and the norms of the same block."""
    block = shared([name.split(".") for name in (one.layer.value.weight, one.name)])
    for call in one.layer.norms.values():
        together = shared([block, call.path.split(".")])
        if together and NUMBER.findall(".".join(together)) == NUMBER.findall(".".join(block)):  # not the next block's
            block = together
    return ".".join(block)


def tails_of(one: Seen) -> tuple[str, ...]:
    block = block_of(one)
    return tuple(name.removeprefix(block) for name in (one.layer.value.weight, one.name))
