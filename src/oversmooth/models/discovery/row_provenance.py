"""Which row of which weight each entry of a tensor comes from: moves are repeated on its shadow, other operations end it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from oversmooth.models.discovery.operations import (
    COPIES,
    FACTORIES,
    FACTORS,
    KEEPS_VALUES,
    MOVES,
    SHIFT,
    AttentionTimesValues,
    OutputProjection,
    Projection,
    number_of,
)

if TYPE_CHECKING:
    from oversmooth.models.discovery.operations import Node, NormCall
    from oversmooth.models.discovery.trace import Trace


# --- codes: shadows of tensors that say, entry by entry, which row of which weight the entry is ---

NOTHING = -1.0
LARGEST_SHADOW = 2**24
"""Entries of a copied parameter or of an empty buffer up to which it gets a shadow."""

RowProvenance = Float[Tensor, "*shape"]


def follow_codes(
    trace: "Trace", func: Any, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]
) -> None:
    """Gives what an operation made the shadow that it has, if it has one."""
    if op in FACTORIES:
        if made[0].numel() <= LARGEST_SHADOW:
            trace.codes[made[0]] = torch.full(made[0].shape, NOTHING, dtype=torch.float64)
        return
    if op in ("add", "add_"):
        if not _follow_bias(trace, args, made[0]):
            trace.codes.pop(made[0], None)  # an addition in place changes numbers that had codes
        return
    is_same = op in ("mul", "div") and number_of(op, args, kwargs) == 1.0
    if is_same and (codes := trace.codes.get(args[0])) is not None:
        trace.codes[made[0]] = codes
    if op not in MOVES:
        if func._schema.is_mutable:
            trace.codes.pop(made[0], None)
        return
    shadows = _shadows(trace, op, args)
    if not shadows:
        return

    def shadow(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        found = shadows.get(id(leaf))
        if found is not None and op == "as_strided":  # which counts entries of memory: lie there as the tensor does
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=torch.float64).copy_(found)
        return torch.full(leaf.shape, NOTHING, dtype=torch.float64) if found is None else found

    try:
        moved = _move(func, op, tree_map_only(Tensor, shadow, args), kwargs, made[0])
    except (RuntimeError, TypeError, NotImplementedError):
        return  # a move that has no meaning on the shadow's layout: the numbers count as changed
    for tensor, codes in zip(made, moved, strict=False):
        if codes.shape == tensor.shape:
            trace.codes[tensor] = codes


def _shadows(trace: "Trace", op: str, args: tuple[Any, ...]) -> dict[int, RowProvenance]:
    """The shadows of an operation's arguments, by identity."""
    found: dict[int, RowProvenance] = {}
    for leaf in tree_leaves(args):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            codes = trace.codes.get(leaf)
            if codes is None and op in COPIES and leaf.numel() <= LARGEST_SHADOW:
                codes = trace.parameter_codes(leaf)
            if codes is not None:
                found[id(leaf)] = codes
    return found


def _follow_bias(trace: "Trace", args: tuple[Any, ...], made: Tensor) -> bool:
    """A parameter added to the result of a product is a bias: the rows stay what they are."""
    if len(args) < 2 or not all(isinstance(arg, Tensor) for arg in args[:2]):
        return False
    for data, bias in (args[:2], args[1::-1]):
        codes = trace.codes.get(data)
        if codes is None or not (trace.is_parameter(bias) and bias.numel() <= LARGEST_SHADOW):
            continue
        bias_codes = trace.parameter_codes(bias)
        is_whole = codes.shape == made.shape and bias.numel() > 1 and codes.numel() and codes.min() >= 0
        source = trace.sources[int(codes.flatten()[0] // SHIFT)] if is_whole else None
        if bias_codes is None or not isinstance(source, Projection):
            return False
        source.add_bias(codes % SHIFT, bias_codes)
        trace.codes[made] = codes
        return True
    return False


def _move(func: Any, op: str, args: Any, kwargs: dict[str, Any], like: Tensor) -> list[Tensor]:
    """The move repeated on shadows, which may lie differently in memory."""
    if op in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        return [args[0].reshape(like.shape)]
    if op in ("_to_copy", "clone", "contiguous"):
        return [args[0].clone()]
    if op == "where":  # the first argument is the mask
        args = sorted((arg for arg in args[1:] if isinstance(arg, Tensor)), key=lambda codes: -float(codes.max()))
    if op in KEEPS_VALUES:
        return [args[0].expand(like.shape)]
    if op == "constant_pad_nd":
        return [func(args[0], args[1], NOTHING)]
    if op == "im2col":  # it pads with zeros
        return [func(args[0] - NOTHING, *args[1:]) + NOTHING]
    moved = func(*args, **{name: value for name, value in kwargs.items() if name not in ("dtype", "device", "layout")})
    return [moved] if isinstance(moved, Tensor) else list(moved)


# --- what happens to mixed heads between attention and the output projection: gates, sinks, norms, differences ---

PASSED = (*FACTORS, "sub", "sub_")
LOOKS_BACK = 8
"""Operations between the sum of a row of scores and the factor that it becomes."""


@dataclass(frozen=True, eq=False, slots=True)
class HeadTransform:
    """A gate, a norm or a difference of attentions that mixed heads went through."""

    kind: str
    """gate, sink, norm or differential."""
    where: str
    """Path of the module."""
    mixings: tuple[AttentionTimesValues, ...]
    norm: "NormCall | None" = None


def follow_products(trace: "Trace", op: str, args: tuple[Any, ...], made: Tensor, module: str) -> None:
    """Values times a number are values; mixed heads stay mixed heads when something multiplies or subtracts."""
    if op in MOVES and args and isinstance(args[0], Tensor) and (factor := trace.factors.get(args[0], 1.0)) != 1.0:
        trace.factors[made] = factor
    if op not in PASSED or len(args) < 2 or any(isinstance(arg, int | float) and arg == 1.0 for arg in args[:2]):
        return  # what is multiplied by one is followed as a move
    for data, other in (args[:2], args[1::-1]):
        codes = _whole_codes(trace, data, made)
        if codes is None:
            continue
        sources, is_first = _sources(trace, codes), data is args[0]
        if is_first and isinstance(other, int | float) and all(isinstance(source, Projection) for source in sources):
            trace.codes[made] = codes
            trace.factors[made] = trace.factors.get(data, 1.0) * (other if op.startswith("mul") else 1.0 / other)
            return
        mixings = tuple(source for source in sources if isinstance(source, AttentionTimesValues))
        kind = _kind(trace, op, codes, other, is_first=is_first) if len(mixings) == len(sources) else ""
        if kind:
            trace.codes[made] = codes
            trace.passed.append(HeadTransform(kind, module, mixings))
            return


def follow_norm(trace: "Trace", call: "NormCall", read: Tensor | None, made: Tensor | None) -> None:
    """A norm on mixed heads: their channels are still what they are, and what it does inside is no gate."""
    codes = None if made is None else _whole_codes(trace, read, made)
    if codes is None or made is None:
        return
    sources = _sources(trace, codes)
    mixings = tuple(source for source in sources if isinstance(source, AttentionTimesValues))
    if len(mixings) == len(sources):
        trace.passed = [one for one in trace.passed if not f"{one.where}.".startswith(f"{call.path}.")]
        trace.codes[made] = codes
        trace.passed.append(HeadTransform("norm", call.path, mixings, call))


def one_token(trace: "Trace", tensor: Tensor | None) -> Tensor | None:
    """The codes of the channels of one token, where all tokens have the same."""
    codes = None if tensor is None else trace.codes.get(tensor)
    if codes is None or codes.ndim < 2:
        return None
    rows = codes.reshape(-1, codes.shape[-1])
    return rows[0].clone() if bool((rows == rows[:1]).all()) else None


def _whole_codes(trace: "Trace", data: Any, made: Tensor) -> Tensor | None:
    """The codes of a tensor of which every entry has one, and of the shape of what was made of it."""
    codes = trace.codes.get(data) if isinstance(data, Tensor) else None
    if codes is None or codes.shape != made.shape or not codes.numel() or bool(codes.min() < 0):
        return None
    return codes


def _sources(trace: "Trace", codes: Tensor) -> list[Any]:
    low, high = int(codes.min() // SHIFT), int(codes.max() // SHIFT)
    numbers = [low] if low == high else [int(number) for number in (codes // SHIFT).unique().tolist()]
    return [trace.sources[number] for number in numbers]


def _kind(trace: "Trace", op: str, codes: Tensor, other: Any, *, is_first: bool) -> str:
    """What an operation does to mixed heads; empty where they cease to be mixed heads."""
    theirs = trace.codes.get(other) if isinstance(other, Tensor) else None
    top = float(theirs.max()) if theirs is not None and theirs.numel() else -1.0
    is_mixed = top >= 0 and isinstance(trace.sources[int(top // SHIFT)], AttentionTimesValues)
    if op in ("sub", "sub_"):
        if not is_first or not is_mixed or theirs is None or theirs.shape != codes.shape:
            return ""
        first, second = (_values(trace, part) for part in (codes, theirs))  # mixed by two attentions
        return "differential" if first is not None and second is not None and torch.equal(first, second) else ""
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


def _values(trace: "Trace", codes: Tensor) -> Tensor | None:
    """The code of the value channel behind every mixed channel."""
    found = torch.empty_like(codes)
    for number in (codes // SHIFT).unique().tolist():
        mixing, own = trace.sources[int(number)], codes // SHIFT == number
        if not isinstance(mixing, AttentionTimesValues) or mixing.value_codes is None:
            return None
        _, found[own] = mixing.behind(codes[own])
    return found


# --- what an output projection reads: channels of attention over values, as the codes of its input say ---


def reading_of(trace: "Trace", product: Projection) -> None:
    """Fills in what a projection reads, where all of it is attention over known values."""
    codes, product.codes_read = product.codes_read, None
    if codes is None or not codes.numel():
        return
    codes = codes.reshape(-1, codes.shape[-1])
    if bool((codes == codes[:1]).all()):
        product.token_codes = codes[0].clone()
    sources = torch.div(codes, SHIFT, rounding_mode="floor").long()
    whole = (codes >= 0).all(1) & (sources == sources[:, :1]).all(1)
    if not bool(whole.any()):
        product.reading = _doubled(trace, codes, sources)
        return
    found: list[tuple[AttentionTimesValues, Tensor, Tensor]] = []
    for number in sources[whole, 0].unique().tolist():
        mixing = trace.sources[number]
        if not isinstance(mixing, AttentionTimesValues) or mixing.value_codes is None:
            return
        channel, values = mixing.behind(codes[whole & (sources[:, 0] == number)])
        if bool((channel != channel[0]).any()) or bool((values != values[0]).any()):
            return
        found.append((mixing, values[0], channel[0]))
    if found and all(torch.equal(values, found[0][1]) for _, values, _ in found):
        product.reading = OutputProjection(tuple(mixing for mixing, _, _ in found), found[0][1], found[0][2])


def _doubled(
    trace: "Trace", codes: Float[Tensor, "token in"], sources: Int[Tensor, "token in"]
) -> OutputProjection | None:
    """Heads made of two halves, which the same attention mixes in two products: one half behind the other."""
    numbers = list(dict.fromkeys(sources[0].tolist()))
    mixings = (trace.sources[number] for number in numbers if number >= 0)
    known = [one for one in mixings if isinstance(one, AttentionTimesValues) and one.value_codes is not None]
    sizes = {(mixing.queries, mixing.keys, mixing.channels) for mixing in known}
    if len(known) != 2 or len(numbers) != 2 or len(sizes) != 1:
        return None
    channels, values = torch.empty_like(sources), torch.empty_like(codes)
    for half, (number, mixing) in enumerate(zip(numbers, known, strict=True)):
        own = sources == number
        channel, values[own] = mixing.behind(codes[own])
        channels[own] = channel + half * mixing.channels
    is_regular = bool((channels == channels[:1]).all()) and bool((values == values[:1]).all())
    return OutputProjection(tuple(known), values[0], channels[0]) if is_regular else None
