"""The tensors of a traced pass and what made them: projections, attention probabilities, norms.

A weight reaches a matrix product as a view of a parameter (`weight.t()`), so its storage and strides say which entry
stands where, without reading a single number. Positions count the entries of the parameter's own memory.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from oversmooth.models.canonical import epsilon_of
from oversmooth.models.declaration import NormKind, norm_centres, norm_offset

if TYPE_CHECKING:
    from oversmooth.models.discovery.trace import Trace


# --- PyTorch's operations by what they do to numbers: move them, keep them, or make new ones ---


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


KEEPS_VALUES = _names("masked_fill masked_fill_ nan_to_num where native_dropout")
"""Numbers stay what they are except where a mask says that they do not count."""

MOVES = KEEPS_VALUES | _names(
    "view _unsafe_view reshape _reshape_alias transpose t permute expand slice select split split_with_sizes chunk "
    "unbind squeeze unsqueeze clone contiguous alias detach cat stack index_select index gather roll flip repeat "
    "repeat_interleave constant_pad_nd _to_copy copy_ unfold im2col movedim narrow lift_fresh "
    "index_put index_put_ slice_scatter select_scatter pixel_shuffle pixel_unshuffle as_strided"
)
"""The result holds numbers of the arguments and nothing else, perhaps in another order, precision or number."""

SAME_TOKENS = MOVES - _names("cat stack index_put index_put_ slice_scatter select_scatter flip")
"""Moves after which a tensor still is the same features as before; a flip puts one sequence in the place of another."""

COPIES = _names("clone _to_copy cat stack contiguous index_select index repeat permute constant_pad_nd")
"""Moves that make new memory, after which the storage no longer says which parameter it was."""

FACTORIES = _names("zeros empty zeros_like empty_like new_zeros new_empty full new_full ones")
SOFTMAX = _names("_softmax _safe_softmax")
ALTERING = _names("add add_ sub sub_ mul mul_ div div_ native_layer_norm native_batch_norm")
"""Operations between attention maps that leave them attention maps, of another kind."""
PRODUCTS = _names("mm addmm bmm baddbmm convolution")
"""Operations that make every number out of many."""


paused = torch.utils._python_dispatch._disable_current_modes
"""Operations of our own inside a traced pass are not the model's."""


@contextmanager
def plain_operations() -> Iterator[None]:
    """PyTorch's fused fast path of nn.MultiheadAttention is off, so that a mode sees every operation."""
    was_on = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_on)


# --- the tensors of one forward pass and what was made of what ---

SUMS = ("add", "add_")
DIFFERENCES = ("sub", "sub_")
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
    """The factor of a product with a number, or the `alpha` of a sum or difference."""
    if op in SUMS or op in DIFFERENCES:
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


# --- which parameter a tensor is a view of, and which of its entries it shows ---

SHIFT = 2.0**32
"""A code is the number of its source times this, plus a position; float64 holds such numbers exactly."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named tensor of the model and where it lies in its storage."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    end: int


class Parameters:
    """The parameters of a model by the memory they lie in."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._by_storage: dict[int, list[Parameter]] = {}
        for name, tensor in tensors.items():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = int(tensor.storage_offset())
            found = Parameter(name, tuple(tensor.shape), tensor.stride(), begin, begin + int(reach))
            self._by_storage.setdefault(_storage(tensor), []).append(found)
        for members in self._by_storage.values():
            members.sort(key=lambda member: member.begin)
        self.by_name = {member.name: member for members in self._by_storage.values() for member in members}
        self.aliases = frozenset(
            member.name
            for members in self._by_storage.values()
            for before, member in pairwise(members)
            if (before.begin, before.end, before.shape) == (member.begin, member.end, member.shape)
        )
        """Further names of parameters that have one already."""

    def of(self, view: Tensor) -> Parameter | None:
        """The parameter that a tensor is a view of; `None` if it is data."""
        members = self._by_storage.get(_storage(view))
        if not members or not view.numel():
            return None
        at = bisect_right([member.begin for member in members], view.storage_offset()) - 1
        # Of tied parameters, which lie in the same place, the first name counts.
        while at > 0 and members[at - 1].begin == members[at].begin:
            at -= 1
        return members[at] if at >= 0 and view.storage_offset() < members[at].end else None

    def positions(self, view: Tensor, parameter: Parameter) -> Int[Tensor, "*shape"]:
        """For every entry of a view, its position in the parameter."""
        found = torch.tensor(view.storage_offset() - parameter.begin)
        for axis, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            steps = torch.arange(size) * stride
            found = found + steps.reshape(-1, *[1] * (view.ndim - axis - 1))
        return found


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


# --- the two kinds of matrix products that matter: features times a parameter, and attention times values ---


@dataclass(eq=False, slots=True)
class Projection:
    """Features times a parameter: which entries of the parameter made which channel."""

    weight: str
    read: "Node"
    made: "Node"
    rows: Int[Tensor, "*batch out"]
    """Position of each output channel's first entry in the parameter."""
    columns: Int[Tensor, "*batch in"]
    """Position of each input channel's first entry."""
    in_step: int
    """Distance in the parameter between neighbouring inputs of one output."""
    out_step: int
    codes_read: Float[Tensor, "*batch token in"] | None = None
    token_codes: Float[Tensor, " in"] | None = None
    """Where each input channel comes from, where that is one row of a weight."""
    reading: "OutputProjection | None" = None
    biases: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Pairs of rows and the codes of the biases that were added to them."""

    def add_bias(self, rows: Tensor, codes: Tensor) -> None:
        self.biases.append((rows, codes.expand(rows.shape)))

    def bias_in(self, sources: Sequence[Any]) -> str:
        """The name of the parameter that was added as a bias; empty where there was none."""
        added = (sources[int(codes.reshape(-1)[0] // SHIFT)] for _, codes in self.biases)
        return next((source.name for source in added if isinstance(source, Parameter)), "")


@dataclass(eq=False, slots=True)
class AttentionTimesValues:
    """Attention probabilities times values."""

    module: str
    chances: "AttentionProbabilities"
    values: "Node"
    made: "Node"
    value_codes: Float[Tensor, "item channel"] | None
    """For every item of the batched product (sequence and head), the code of each value channel; `None` if lost."""
    over_channels: bool
    """Whether what is mixed are channels, not tokens."""
    varies: bool
    """Whether the rows of the value weight are not the same at every token."""
    queries: int
    keys: int
    row_sums: tuple[float, float]
    """Smallest and largest sum of a row of the probabilities."""
    is_causal: bool = False
    is_merged: bool = False
    """Whether the same softmax also reads another sequence, whose values the same weight makes."""
    value_factor: float = 1.0
    """A number that the values were multiplied by."""

    @property
    def channels(self) -> int:
        return 0 if self.value_codes is None else self.value_codes.shape[1]

    def behind(self, codes: Float[Tensor, "*shape"]) -> tuple[Int[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """For codes of its result: the number of each channel in its head, and the code of the value it was mixed from."""
        assert self.value_codes is not None
        item, channel = (codes % SHIFT).long() // self.channels, (codes % SHIFT).long() % self.channels
        return channel, self.value_codes[item, channel]

    @property
    def is_stochastic(self) -> bool:
        return all(abs(total - 1) < 2e-3 for total in self.row_sums)

    @property
    def has_sink(self) -> bool:
        """Whether rows sum to less than one: something else took the rest."""
        low, high = self.row_sums
        return low > 0 and high < 1 + 2e-3 and not self.is_stochastic


@dataclass(frozen=True, eq=False, slots=True)
class OutputProjection:
    """A projection that reads attention: for each of its input channels, the value channel that was mixed into it."""

    mixings: tuple[AttentionTimesValues, ...]
    value_codes: Float[Tensor, " in"]
    channels: Int[Tensor, " in"]
    """Number of the channel inside its head."""


def product_of(trace: "Trace", op: str, args: tuple[Any, ...], made: Tensor, node: "Node") -> Projection | None:
    """The product with a parameter, if the operation is one."""
    bias = args[0] if op == "addmm" else None
    if op == "convolution":
        data, weight, bias, stride, _, _, is_transposed, _, groups = args[:9]
        if is_transposed or groups != 1 or set(weight.shape[2:]) != {1} or set(stride) != {1}:
            return None  # only with a window of one it is a product with a matrix, whose channel axis is second
        is_turned = True
    elif op in ("mm", "addmm", "bmm", "baddbmm"):
        a, b = args[-2:] if op in ("mm", "bmm") else args[1:3]
        is_turned = trace.is_parameter(a) and not trace.is_parameter(b)
        # Of two parameters, as learned queries times a weight, the weight is the second, as in `F.linear`.
        weight, data = (a, b) if is_turned else (b, a)
    else:
        return None
    if not trace.is_parameter(weight):
        return None  # both factors are data
    matrix = weight.flatten(1) if op == "convolution" else weight
    product = _product(trace, matrix, trace.node(data), node, is_turned=is_turned)
    if product is None:
        return None
    shadow, codes = trace.new_source(product) + product.rows.double(), trace.codes.get(data)
    if op == "convolution":
        shadow = shadow.reshape(-1, *[1] * (made.ndim - 2))
        product.codes_read = None if codes is None else codes.movedim(1, -1).flatten(0, -2)
    else:
        shadow = shadow[..., :, None] if is_turned else shadow[..., None, :]
        product.codes_read = codes.mT if codes is not None and is_turned else codes
    trace.codes[made] = shadow.expand(made.shape)
    if bias is not None and (bias_codes := trace.parameter_codes(bias)) is not None:
        product.add_bias(product.rows.double(), bias_codes)
    return product


def _product(
    trace: "Trace", weight: Tensor, read: "Node", made: "Node", *, is_turned: bool = False
) -> Projection | None:
    """The product with a weight `(in, out)`, or `(out, in)` where it is turned."""
    if min(weight.shape[-2:]) < 2:
        return None
    parameter = trace.parameters.of(weight)
    codes = weight if parameter is not None else trace.parameter_codes(weight)
    assert codes is not None, "the caller knows that it is a parameter"
    if weight.ndim == 3 and (len(weight) == 1 or weight.stride(0) == 0):
        codes = codes[0]
    codes = codes.mT if is_turned else codes
    parts = (codes[..., 0, :], codes[..., :, 0], codes[..., :2, :2])
    if parameter is not None:  # of a view only the places that are needed are computed
        first_in, first_out, corner = (trace.parameters.positions(part, parameter) for part in parts)
    else:
        source = trace.sources[int(codes.max() // SHIFT)]
        assert isinstance(source, Parameter), "`parameter_codes` gives codes of parameters"
        parameter = source
        if len((codes // SHIFT).unique()) > 1:
            return None  # several tensors side by side
        first_in, first_out, corner = ((part % SHIFT).long() for part in parts)
    corner = corner.reshape(-1, 2, 2)[0]
    in_step, out_step = int(corner[1, 0] - corner[0, 0]), int(corner[0, 1] - corner[0, 0])
    return Projection(parameter.name, read, made, first_in, first_out, in_step, out_step)


def mixing_of(
    trace: "Trace", op: str, args: tuple[Any, ...], made: Tensor, node: "Node"
) -> AttentionTimesValues | None:
    """The mixing that an operation is: probabilities times something that is no parameter."""
    if op not in ("bmm", "mm"):
        return None
    weights, values = args[:2]
    is_turned = trace.chances.get(weights) is None
    if is_turned:
        weights, values = values, weights
    chances = trace.chances.get(weights)
    if chances is None or trace.is_parameter(values):
        return None
    weights = weights.mT if is_turned else weights
    codes = trace.codes.get(values)
    if codes is not None:
        codes = codes.mT if is_turned else codes
        codes = codes[None] if codes.ndim == 2 else codes
    own = None if codes is None else _of_own_sequence(trace, codes, weights.shape[-2])
    value_codes, over_channels, varies = _one_code_per_channel(codes if own is None else own)
    mixing = AttentionTimesValues(
        module=node.module,
        chances=chances,
        values=trace.node(values),
        made=node,
        value_codes=value_codes,
        over_channels=over_channels,
        varies=varies,
        queries=weights.shape[-2],
        keys=weights.shape[-1],
        row_sums=_row_sums(weights),
        is_causal=_is_causal(weights if own is None else weights[..., : weights.shape[-2]]),
        is_merged=own is not None,
        value_factor=trace.factors.get(values, 1.0),
    )
    shape = made.mT.shape if is_turned else made.shape
    items = shape[0] if len(shape) == 3 else 1
    shadow = trace.new_source(mixing) + torch.arange(items * shape[-1], dtype=torch.float64).reshape(items, 1, -1)
    shadow = shadow.expand(items, shape[-2], shape[-1]).reshape(shape)
    trace.codes[made] = shadow.mT if is_turned else shadow
    return mixing


def _one_code_per_channel(
    codes: Float[Tensor, "item key channel"] | None,
) -> tuple[Float[Tensor, "item channel"] | None, bool, bool]:
    """The code that a channel has at every key; whether keys are channels; whether every key has codes of its own."""
    if codes is None or not codes.numel():
        return None, False, False
    value_codes = codes.amax(1)
    if bool(((codes == value_codes[:, None]) | (codes < 0)).all()):
        return (None if bool((value_codes < 0).any()) else value_codes), False, False
    over_channels = bool((codes == codes[..., :1]).all())
    return None, over_channels, not over_channels


def _of_own_sequence(
    trace: "Trace", codes: Float[Tensor, "item key channel"], queries: int
) -> Float[Tensor, "item key channel"] | None:
    """Codes of values that one weight made of several sequences, as if all were of the one with a key for every query.

    `None` where the values are of one sequence, or of different weights.
    """
    numbers = torch.div(codes, SHIFT, rounding_mode="floor")
    found = numbers.unique().long().tolist()
    sources = [trace.sources[number] for number in found if number >= 0]
    if len(found) < 2 or len(sources) != len(found) or len({getattr(one, "weight", one) for one in sources}) > 1:
        return None
    sizes = {number: int((numbers[0, :, 0] == number).sum()) for number in found}
    own = next((number for number in found if sizes[number] == queries), None)
    return None if own is None else own * SHIFT + codes % SHIFT


def _row_sums(weights: Float[Tensor, "*item query key"]) -> tuple[float, float]:
    """The smallest and the largest sum of a row; a query that sees nothing gets zeros and does not count."""
    sums = weights.sum(-1, dtype=torch.float64)
    sums = sums[sums != 0]
    return (float(sums.min()), float(sums.max())) if sums.numel() else (0.0, 0.0)


def _is_causal(weights: Float[Tensor, "*item query key"]) -> bool:
    """Whether no token sees a later one; queries of several heads may stand one after the other."""
    queries, keys = weights.shape[-2:]
    if keys < 2 or queries % keys:
        return False
    heads = queries // keys
    orders = (weights.unflatten(-2, (heads, keys)), weights.unflatten(-2, (keys, heads)).transpose(-2, -3))
    return any(not bool(order.triu(1).any()) for order in orders)


# --- chances: tensors that are attention probabilities ---


@dataclass(frozen=True, slots=True)
class AttentionProbabilities:
    """Attention probabilities, and what was done to them after the softmax."""

    module: str
    altered: tuple[tuple[str, str], ...] = ()
    """Operation and module of every change that was not only a move, a cast, a mask or a dropout."""


def follow_chances(trace: "Trace", op: str, given: list[Tensor], made: list[Tensor], module: str) -> None:
    """Marks what an operation made as probabilities if it is a softmax, or comes from one and still is attention."""
    if op in SOFTMAX or _is_softmax_by_hand(trace, op, given):
        trace.chances[made[0]] = AttentionProbabilities(module)
        return
    known = [chances for tensor in given if (chances := trace.chances.get(tensor)) is not None]
    is_unchanged = op in MOVES or op in KEEPS_VALUES or (op in ("mul", "div") and len(given) == 1)
    if not known or not (is_unchanged or _alters(trace, op, given, made[0])):
        return
    chances = known[0] if is_unchanged else AttentionProbabilities(known[0].module, (*known[0].altered, (op, module)))
    for tensor in made:
        trace.chances[tensor] = chances


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
    place, chances = next((place, one) for place, one in enumerate(given) if trace.chances.get(one) is not None)
    axis = 1 if op == "convolution" else -1 if place < len(given) - 1 else -2
    with paused():
        sums = chances.sum(axis)
        return bool(((sums - 1).abs() < 1e-3).all())


# --- recognising a normalization layer by what it does to numbers, whatever its class is called ---

KINDS: tuple[NormKind, ...] = ("layer", "rms", "layer+1", "rms+1")


@dataclass(frozen=True, slots=True)
class FoundNorm:
    """What a norm does, and the names of its tensors inside its module, if it has any."""

    kind: NormKind
    weight: str
    bias: str


@dataclass(frozen=True, eq=False, slots=True)
class NormCall:
    """A norm ran: what it read and what it made."""

    path: str
    facts: FoundNorm
    read: "Node"
    """What it reads, before it was moved."""
    made: "Node"
    shape: tuple[int, ...]
    """Of what it reads; smaller than `read` where it reads a part, such as one token."""
    codes: Tensor | None = None
    """Where each channel that it reads comes from, where that is one row of a weight."""


def classify(module: nn.Module, x: Tensor, y: Tensor) -> FoundNorm | None:
    """The kind of norm that turns x into y, found by trying all kinds; `None` if it is not a norm."""
    tensors = dict(module.named_parameters(recurse=False))
    has_own_parts = any(True for child in module.children() for _ in child.parameters())
    if x.shape != y.shape or x.ndim < 2 or not x.numel() or len(tensors) > 2 or has_own_parts:
        return None
    if not tensors and "norm" not in type(module).__name__.lower():
        return None
    names, (weight, bias, *_) = (*tensors, "", ""), (*tensors.values(), None, None)
    if weight is not None and x.ndim == 4 and weight.shape == x.shape[1:2] != x.shape[-1:]:
        x, y = x.movedim(1, -1), y.movedim(1, -1)  # an image with its channels first
    if any(tensor.shape != x.shape[-1:] for tensor in tensors.values()):
        return None
    epsilon = epsilon_of(module)
    tolerance = 1e-4 if y.dtype in (torch.float32, torch.float64) else 3e-2
    sample, wanted = (t.detach().reshape(-1, x.shape[-1])[:64].double() for t in (x, y))
    for kind in KINDS:
        made = _normed(kind, sample, weight, bias, epsilon)
        if (made - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-12):
            return FoundNorm(kind, names[0], names[1])
    return None


def _normed(kind: NormKind, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if norm_centres(kind) else x
    x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    if weight is not None:
        x = x * (weight.detach().double() + norm_offset(kind))
    return x if bias is None else x + bias.detach().double()


def fused_norm(trace: "Trace", args: tuple[Any, ...], made: "Node", module: str) -> NormCall:
    """A LayerNorm called as a function, with the parameters that it was given."""
    found = [trace.parameters.of(arg) for arg in args[2:4] if isinstance(arg, Tensor)]
    names = (*(one.name.removeprefix(f"{module}.") if one else "" for one in found), "", "")
    facts = FoundNorm("layer", names[0], names[1])
    return NormCall(module, facts, trace.node(args[0]).root, made, tuple(args[0].shape))
