"""The two kinds of matrix products that matter: with a parameter (a projection), and of attention with values."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oversmooth.models.discovery.weights import SHIFT

if TYPE_CHECKING:
    from oversmooth.models.discovery.chances import Chances
    from oversmooth.models.discovery.graph import Node
    from oversmooth.models.discovery.trace import Trace

ROW_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}


@dataclass(eq=False, slots=True)
class Product:
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
    reading: "Reading | None" = None
    biases: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Pairs of rows and the codes of the biases that were added to them."""

    def add_bias(self, rows: Tensor, codes: Tensor) -> None:
        self.biases.append((rows, codes.expand(rows.shape)))


@dataclass(eq=False, slots=True)
class Mixing:
    """Attention probabilities times values."""

    module: str
    chances: "Chances"
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

    @property
    def is_stochastic(self) -> bool:
        return all(abs(total - 1) < 2e-3 for total in self.row_sums)

    @property
    def has_sink(self) -> bool:
        """Whether rows sum to less than one: something else took the rest."""
        low, high = self.row_sums
        return low > 0 and high < 1 + 2e-3 and not self.is_stochastic


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """A projection that reads attention: for each of its input channels, the value channel that was mixed into it."""

    mixings: tuple[Mixing, ...]
    value_codes: Float[Tensor, " in"]
    channels: Int[Tensor, " in"]
    """Number of the channel inside its head."""


def product_of(trace: "Trace", op: str, args: tuple[Any, ...], made: Tensor, node: "Node") -> Product | None:
    """The product with a parameter that an operation is; `None` where it is something else."""
    if op == "convolution":
        return _pointwise(trace, args, made, node)
    if op not in ("mm", "addmm", "bmm", "baddbmm"):
        return None
    a, b = args[-2:] if op in ("mm", "bmm") else args[1:3]
    is_turned = trace.is_parameter(a) and not trace.is_parameter(b)
    if not is_turned and not trace.is_parameter(b):
        return None
    # Of two parameters, as learned queries times a weight, the weight is the second, as in `F.linear`.
    weight, data = (a, b) if is_turned else (b, a)
    product = _product(trace, weight, trace.node(data), node, is_turned=is_turned)
    if product is None:
        return None
    shadow = trace.new_source(product) + product.rows.double()
    trace.set_codes(made, (shadow[..., :, None] if is_turned else shadow[..., None, :]).expand(made.shape))
    codes = trace.codes(data)
    product.codes_read = codes.mT if codes is not None and is_turned else codes
    if op == "addmm":
        bias = trace.parameter_codes(args[0])
        if bias is not None:
            product.add_bias(product.rows.double(), bias)
    return product


def _product(trace: "Trace", weight: Tensor, read: "Node", made: "Node", *, is_turned: bool = False) -> Product | None:
    """The product with a weight `(in, out)`, or `(out, in)` where it is turned."""
    is_one = weight.ndim == 3 and (len(weight) == 1 or weight.stride(0) == 0)
    if min(weight.shape[-2:]) < 2:
        return None
    parameter = trace.parameters.of(weight)
    codes = None if parameter is not None else trace.parameter_codes(weight)
    if is_one:
        weight, codes = weight[0], None if codes is None else codes[0]
    if is_turned:
        weight, codes = weight.mT, None if codes is None else codes.mT
    if parameter is not None:
        name = parameter.name
        first_in, first_out, corner = (
            trace.parameters.positions(part, parameter)
            for part in (weight[..., 0, :], weight[..., :, 0], weight[..., :2, :2])
        )
    else:
        assert codes is not None, "the caller knows that it is a parameter"
        source = trace.sources[int(codes.max() // SHIFT)]
        name = source.name  # type: ignore[union-attr]
        if len((codes // SHIFT).unique()) > 1:
            return None  # several tensors side by side
        positions = (codes % SHIFT).long()
        first_in, first_out, corner = positions[..., 0, :], positions[..., :, 0], positions[..., :2, :2]
    corner = corner.reshape(-1, 2, 2)[0]
    in_step, out_step = int(corner[1, 0] - corner[0, 0]), int(corner[0, 1] - corner[0, 0])
    return Product(name, read, made, first_in, first_out, in_step, out_step)


def _pointwise(trace: "Trace", args: tuple[Any, ...], made: Tensor, node: "Node") -> Product | None:
    """A convolution with a window of one is a product with a matrix, channel axis second."""
    data, weight, bias, stride, _, _, is_transposed, _, groups = args[:9]
    if is_transposed or groups != 1 or set(weight.shape[2:]) != {1} or set(stride) != {1}:
        return None
    if not trace.is_parameter(weight):
        return None
    product = _product(trace, weight.flatten(1), trace.node(data), node, is_turned=True)
    if product is None:
        return None
    shadow = trace.new_source(product) + product.rows.double()
    trace.set_codes(made, shadow.reshape(-1, *[1] * (made.ndim - 2)).expand(made.shape))
    codes = trace.codes(data)
    product.codes_read = None if codes is None else codes.movedim(1, -1).flatten(0, -2)
    if bias is not None and (bias_codes := trace.parameter_codes(bias)) is not None:
        product.add_bias(product.rows.double(), bias_codes)
    return product


def mixing_of(trace: "Trace", op: str, args: tuple[Any, ...], made: Tensor, node: "Node") -> Mixing | None:
    """The mixing that an operation is: probabilities times something that is no parameter."""
    if op not in ("bmm", "mm"):
        return None
    a, b = args[:2]
    chances, is_turned = (trace.chances(a), False) if trace.chances(a) else (trace.chances(b), True)
    if chances is None:
        return None
    mixed, weights = (a.mT, b.mT) if is_turned else (b, a)
    if trace.is_parameter(a if is_turned else b):
        return None
    codes = trace.codes(a if is_turned else b)
    if codes is not None:
        codes = codes.mT if is_turned else codes
        codes = codes[None] if codes.ndim == 2 else codes
    own = None if codes is None else _of_own_sequence(trace, codes, weights.shape[-2])
    value_codes, over_channels, varies = _one_code_per_channel(codes if own is None else own)
    mixing = Mixing(
        module=node.module,
        chances=chances,
        values=trace.node(a if is_turned else b),
        made=node,
        value_codes=value_codes,
        over_channels=over_channels,
        varies=varies,
        queries=weights.shape[-2],
        keys=mixed.shape[-2],
        row_sums=_row_sums(weights),
        is_causal=_is_causal(weights if own is None else weights[..., : weights.shape[-2]]),
        is_merged=own is not None,
        value_factor=trace.factor(a if is_turned else b),
    )
    shape = made.mT.shape if is_turned else made.shape
    items = shape[0] if len(shape) == 3 else 1
    shadow = trace.new_source(mixing) + torch.arange(items * shape[-1], dtype=torch.float64).reshape(items, 1, -1)
    shadow = shadow.expand(items, shape[-2], shape[-1]).reshape(shape)
    trace.set_codes(made, shadow.mT if is_turned else shadow)
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
