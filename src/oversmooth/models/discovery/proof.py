"""The equal-token identity, checked on the operations themselves.

Rows of softmax attention sum to one. When the value projection sees the same vector x at every position, the output
projection returns exactly `W_O (W_V x + b_V)`, whatever the mask, the positions, the queries and the keys. A dispatch
mode gives every value projection equal tokens while the model runs, and compares what the output projections return.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.discovery.operations import MOVES
from oversmooth.models.discovery.weights import Parameters

PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "convolution": (0, 1)}
"""Positions of the two factors among the arguments."""


def value_map(
    weights: AttentionWeights, x: Float[Tensor, " d_model"], *, has_bias: bool = True
) -> Float[Tensor, " d_model"]:
    """What attention returns when every token is x: `W_O (W_V x + b_V) + b_O`, in float64."""
    value = weights.w_v.double() @ x.double()
    if weights.b_v is not None:
        value = value + weights.b_v.double()
    output = torch.einsum(
        "dhk,hk->d", weights.w_o.double(), value.repeat_interleave(weights.n_heads // weights.n_kv, 0)
    )
    return output + weights.b_o.double() if has_bias and weights.b_o is not None else output


@dataclass(eq=False, slots=True, kw_only=True)
class EqualTokenCheck:
    """One layer under test."""

    value: str
    output: str
    """Names of its two weights."""
    weights: AttentionWeights
    token: Float[Tensor, " d_model"]
    error: float = 0.0
    tokens: int = 0

    def compare(self, seen: Float[Tensor, "token d_model"], *, has_bias: bool) -> None:
        expected = value_map(self.weights, self.token.to(self.weights.w_v.device), has_bias=has_bias)
        deviation = (seen.detach().double() - expected.to(seen.device)).abs().max().item()
        relative = deviation / max(expected.abs().max().item(), 1e-30)
        self.error = max(self.error, relative if math.isfinite(relative) else math.inf)  # max() would drop a NaN
        self.tokens = max(self.tokens, len(seen))


class _EqualTokens(TorchDispatchMode):
    """Feeds equal tokens to value projections, and looks at what output projections return."""

    def __init__(self, parameters: Parameters, checks: Sequence[EqualTokenCheck]):
        super().__init__()
        self._parameters = parameters
        self._entries: dict[str, EqualTokenCheck] = {}
        for check in checks:
            self._entries.setdefault(check.value, check)
        self._exits = {check.output: check for check in checks}
        for check in checks:  # layers that share a value weight share its token
            check.token = self._entries[check.value].token
        self._copies = WeakTensorKeyDictionary()

    def _name(self, tensor: Any) -> str:
        if not isinstance(tensor, Tensor):
            return ""
        parameter = self._parameters.of(tensor)
        return parameter.name if parameter is not None else self._copies.get(tensor, "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        op = func._schema.name.removeprefix("aten::")
        if op not in PRODUCTS:
            output = func(*args, **(kwargs or {}))
            if op in MOVES and args and isinstance(output, Tensor) and (name := self._name(args[0])):
                self._copies[output] = name
            return output
        first, second = PRODUCTS[op]
        is_turned = op != "convolution" and bool(self._name(args[first]))
        weight, data = (first, second) if is_turned else (second, first)
        name = self._name(args[weight])
        if (entry := self._entries.get(name)) is not None:
            args = (*args[:data], _equal(args[data], entry.token, op, is_turned), *args[data + 1 :])
        output = func(*args, **(kwargs or {}))
        if (check := self._exits.get(name)) is not None:
            has_bias = op == "addmm" or (op == "convolution" and args[2] is not None)
            check.compare(_rows(output, op, is_turned), has_bias=has_bias)
        return output


def _equal(x: Tensor, token: Tensor, op: str, is_turned: bool) -> Tensor:
    token = token.to(x)
    if op == "convolution":
        return token.reshape(-1, *[1] * (x.ndim - 2)).expand_as(x).contiguous()
    return (token[:, None] if is_turned else token).expand_as(x)


def _rows(y: Tensor, op: str, is_turned: bool) -> Float[Tensor, "token d_model"]:
    if op == "convolution":
        y = y.movedim(1, -1)
    elif is_turned:
        y = y.mT
    return y.reshape(-1, y.shape[-1])


@contextmanager
def equal_tokens(tensors: Mapping[str, Tensor], checks: Sequence[EqualTokenCheck]) -> Iterator[None]:
    """While the model runs inside, every check gets its error and the number of tokens that were compared."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _EqualTokens(Parameters(tensors), checks):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
