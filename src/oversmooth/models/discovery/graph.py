"""The tensors of one forward pass and what was made of what."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from oversmooth.models.discovery.operations import SAME_TOKENS

SUMS = ("add", "add_")
FACTORS = ("mul", "mul_", "div", "div_")


@dataclass(eq=False, slots=True)
class Node:
    """One tensor: the operation that made it and where."""

    op: str
    module: str
    parents: tuple["Node", ...]
    order: int
    shape: tuple[int, ...]
    parameter: str = ""
    """The parameter that it is, or is a view of."""
    number: float | None = None
    """The plain number that an operation was given (a factor, a divisor)."""
    children: list["Node"] = field(default_factory=list)
    root: "Node" = field(init=False)
    """The same numbers before they were moved, cast or masked."""

    def __post_init__(self) -> None:
        same = self.op in SAME_TOKENS and self.parents
        self.root = self.parents[0].root if same else self
        for parent in self.parents:
            parent.children.append(self)


def number_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The factor of a product with a number, or the `alpha` of a sum."""
    if op in SUMS:
        return float(kwargs.get("alpha", 1))
    numbers = [arg for arg in args if isinstance(arg, int | float)] if op in FACTORS else []
    return float(numbers[0]) if numbers else None


def uses(node: Node) -> list[Node]:
    """The operations that read a tensor, seen through moves, in order."""
    found: dict[int, Node] = {}
    waiting = [node]
    visited: set[int] = set()
    while waiting:
        for child in waiting.pop().children:
            if id(child) in visited:
                continue
            visited.add(id(child))
            if child.root is node.root:
                waiting.append(child)
            else:
                found[id(child)] = child
    return sorted(found.values(), key=lambda child: child.order)


def leads_to(start: Node, end: Node, *, avoiding: Collection[int] = ()) -> bool:
    """Whether one tensor is computed from another, other than through the nodes with these identities."""
    waiting, visited = [end], set(avoiding)
    while waiting:
        node = waiting.pop()
        if node.root is start or node is start:
            return True
        for parent in node.parents:
            if id(parent) not in visited and parent.order >= start.order:
                visited.add(id(parent))
                waiting.append(parent)
    return False
