"""What mixed heads go through between attention and the output projection without ceasing to be mixed heads."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oversmooth.models.discovery.graph import FACTORS
from oversmooth.models.discovery.operations import MOVES
from oversmooth.models.discovery.products import Mixing, Product
from oversmooth.models.discovery.weights import SHIFT

if TYPE_CHECKING:
    from oversmooth.models.discovery.graph import Node
    from oversmooth.models.discovery.norms import NormCall
    from oversmooth.models.discovery.trace import Trace

PASSED = (*FACTORS, "sub", "sub_")
LOOKS_BACK = 8
"""Operations between the sum of a row of scores and the factor that it becomes."""


@dataclass(frozen=True, eq=False, slots=True)
class Passage:
    """A gate, a norm or a difference of attentions that mixed heads went through."""

    kind: str
    """gate, sink, norm or differential."""
    where: str
    """Path of the module."""
    mixings: tuple[Mixing, ...]
    norm: "NormCall | None" = None


def follow_products(trace: "Trace", op: str, args: tuple[Any, ...], made: Tensor, module: str) -> None:
    """Values times a number are values; mixed heads stay mixed heads when something multiplies or subtracts."""
    if op in MOVES and args and isinstance(args[0], Tensor) and (factor := trace.factor(args[0])) != 1.0:
        trace.set_factor(made, factor)
    if op not in PASSED or len(args) < 2 or any(isinstance(arg, int | float) and arg == 1.0 for arg in args[:2]):
        return  # what is multiplied by one is followed as a move
    for data, other in (args[:2], args[1::-1]):
        codes = _whole_codes(trace, data, made)
        if codes is None:
            continue
        sources, is_first = _sources(trace, codes), data is args[0]
        if is_first and isinstance(other, int | float) and all(isinstance(source, Product) for source in sources):
            trace.set_codes(made, codes)
            trace.set_factor(made, trace.factor(data) * (other if op.startswith("mul") else 1.0 / other))
            return
        mixings = tuple(source for source in sources if isinstance(source, Mixing))
        kind = _kind(trace, op, codes, other, is_first=is_first) if len(mixings) == len(sources) else ""
        if kind:
            trace.set_codes(made, codes)
            trace.passed.append(Passage(kind, module, mixings))
            return


def follow_norm(trace: "Trace", call: "NormCall", read: Tensor | None, made: Tensor | None) -> None:
    """A norm on mixed heads: their channels are still what they are, and what it does inside is no gate."""
    codes = None if made is None else _whole_codes(trace, read, made)
    if codes is None or made is None:
        return
    sources = _sources(trace, codes)
    mixings = tuple(source for source in sources if isinstance(source, Mixing))
    if len(mixings) == len(sources):
        trace.passed = [one for one in trace.passed if not f"{one.where}.".startswith(f"{call.path}.")]
        trace.set_codes(made, codes)
        trace.passed.append(Passage("norm", call.path, mixings, call))


def one_token(trace: "Trace", tensor: Tensor | None) -> Tensor | None:
    """The codes of the channels of one token, where all tokens have the same."""
    codes = None if tensor is None else trace.codes(tensor)
    if codes is None or codes.ndim < 2:
        return None
    rows = codes.reshape(-1, codes.shape[-1])
    return rows[0].clone() if bool((rows == rows[:1]).all()) else None


def _whole_codes(trace: "Trace", data: Any, made: Tensor) -> Tensor | None:
    """The codes of a tensor of which every entry has one, and of the shape of what was made of it."""
    codes = trace.codes(data) if isinstance(data, Tensor) else None
    if codes is None or codes.shape != made.shape or not codes.numel() or bool(codes.min() < 0):
        return None
    return codes


def _sources(trace: "Trace", codes: Tensor) -> list[Any]:
    low, high = int(codes.min() // SHIFT), int(codes.max() // SHIFT)
    numbers = [low] if low == high else [int(number) for number in (codes // SHIFT).unique().tolist()]
    return [trace.sources[number] for number in numbers]


def _kind(trace: "Trace", op: str, codes: Tensor, other: Any, *, is_first: bool) -> str:
    """What an operation does to mixed heads; empty where they cease to be mixed heads."""
    theirs = trace.codes(other) if isinstance(other, Tensor) else None
    is_mixed = theirs is not None and theirs.numel() > 0 and _is_mixing(trace, theirs)
    if op in ("sub", "sub_"):
        return "differential" if is_first and is_mixed and _same_values(trace, codes, theirs) else ""
    if is_mixed or (op.startswith("div") and not is_first):
        return ""
    return "sink" if isinstance(other, Tensor) and _is_from_row_sums(trace.node(other)) else "gate"


def _is_from_row_sums(node: "Node") -> bool:
    """Whether a factor is made from what rows of scores sum to: a sink that acts behind attention."""
    waiting = [node]
    for _ in range(LOOKS_BACK):
        waiting = [parent for one in waiting for parent in one.parents]
        if any(one.op == "logsumexp" for one in waiting):
            return True
    return False


def _is_mixing(trace: "Trace", codes: Tensor) -> bool:
    top = float(codes.max())
    return top >= 0 and isinstance(trace.sources[int(top // SHIFT)], Mixing)


def _same_values(trace: "Trace", codes: Tensor, theirs: Tensor | None) -> bool:
    """Whether two tensors of mixed heads hold the same value channels, mixed by different attentions."""
    if theirs is None or theirs.shape != codes.shape:
        return False
    first, second = (_values(trace, part) for part in (codes, theirs))
    return first is not None and second is not None and torch.equal(first, second)


def _values(trace: "Trace", codes: Tensor) -> Tensor | None:
    """The code of the value channel behind every mixed channel."""
    found = torch.empty_like(codes)
    for number in (codes // SHIFT).unique().tolist():
        mixing, own = trace.sources[int(number)], codes // SHIFT == number
        if not isinstance(mixing, Mixing) or mixing.value_codes is None:
            return None
        positions = (codes[own] % SHIFT).long()
        found[own] = mixing.value_codes[positions // mixing.channels, positions % mixing.channels]
    return found
