"""Chances: tensors that are attention probabilities, followed from the softmax to the product with the values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from oversmooth.models.discovery.operations import ALTERING, KEEPS_VALUES, MOVES, SOFTMAX, paused

if TYPE_CHECKING:
    from oversmooth.models.discovery.trace import Trace


@dataclass(frozen=True, slots=True)
class Chances:
    """Attention probabilities, and what was done to them after the softmax."""

    module: str
    altered: tuple[tuple[str, str], ...] = ()
    """Operation and module of every change that was not only a move, a cast, a mask or a dropout."""


def follow_chances(trace: "Trace", op: str, given: list[Tensor], made: list[Tensor], module: str) -> None:
    """Marks what an operation made as probabilities if it is a softmax, or comes from one and still is attention."""
    if op in SOFTMAX or _is_softmax_by_hand(trace, op, given):
        trace.set_chances(made[0], Chances(module))
        return
    known = [chances for tensor in given if (chances := trace.chances(tensor)) is not None]
    is_unchanged = op in MOVES or op in KEEPS_VALUES or (op in ("mul", "div") and len(given) == 1)
    if not known or not (is_unchanged or _alters(trace, op, given, made[0])):
        return
    chances = known[0] if is_unchanged else Chances(known[0].module, (*known[0].altered, (op, module)))
    for tensor in made:
        trace.set_chances(tensor, chances)


def _is_softmax_by_hand(trace: "Trace", op: str, given: list[Tensor]) -> bool:
    """An exponential divided by something, or of a difference with a `logsumexp`."""
    nodes = [trace.node(tensor).root for tensor in given[:2]]
    if op == "div" and nodes:
        return nodes[0].op == "exp"
    is_difference = op == "exp" and nodes[0].op in ("sub", "sub_")
    return is_difference and any(parent.root.op == "logsumexp" for parent in nodes[0].parents)


def _alters(trace: "Trace", op: str, given: list[Tensor], made: Tensor) -> bool:
    """Whether an operation makes other attention out of attention: heads mixed by weights, maps combined."""
    if op in ("bmm", "mm", "addmm", "convolution"):
        return any(trace.is_parameter(tensor) for tensor in given) and not _sums_up(trace, op, given)
    return op in ALTERING and all(tensor.numel() <= made.numel() for tensor in given)


def _sums_up(trace: "Trace", op: str, given: list[Tensor]) -> bool:
    """Whether a product sums over what the softmax was taken over, as logits that choose among rows of a weight."""
    place, chances = next((place, one) for place, one in enumerate(given) if trace.chances(one) is not None)
    axis = 1 if op == "convolution" else -1 if place < len(given) - 1 else -2
    with paused():
        sums = chances.sum(axis)
        return bool(((sums - 1).abs() < 1e-3).all())
