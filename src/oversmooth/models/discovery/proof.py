"""The equal-token identity, checked on the operations that a model runs.

Rows of softmax attention sum to one. When the value projection sees the same vector x at every position, the output
projection returns exactly `W_O (W_V x + b_V)`, whatever the mask, the positions, the queries and the keys. Gates, sinks and
differences of attentions multiply that by factors, which the same pass of the model shows. A dispatch mode gives equal
tokens to every value projection (to the projection to the latent, where values have one) and compares what the output
projections return.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from oversmooth.models.canonical import AttentionWeights, TokenGains, ValueChain, epsilon_of
from oversmooth.models.discovery.operations import MOVES, Parameters, plain_operations
from oversmooth.models.hooks.attention_maps import AttentionMaps, Layer, NextAttention, blocks_watched
from oversmooth.models.identify import BlockNames
from oversmooth.models.stores.module import ModuleStore

PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "convolution": (0, 1)}
"""Positions of the two factors among the arguments."""


@dataclass(eq=False, slots=True, kw_only=True)
class EqualTokenCheck:
    """One layer under test."""

    value: str
    output: str
    """Names of the weights that read the stream and write to it."""
    weights: AttentionWeights
    token: Float[Tensor, " d_model"]
    epsilon: Mapping[str, float] = field(default_factory=dict)
    """What its norms add under their square roots, by role."""
    gains: Callable[[], TokenGains | None] = lambda: None
    """What multiplied the tokens of the pass that is just under way."""
    error: float = 0.0
    tokens: int = 0

    def expected(self, *, has_bias: bool) -> Float[Tensor, "#token d_model"]:
        """What attention returns when every token is x: `W_O (W_V x + b_V) + b_O` with the model's own gains, in float64."""
        weights = self.weights if has_bias else replace(self.weights, b_o=None)
        chain = ValueChain(weights=weights, epsilon=self.epsilon, dtype=torch.float64)
        values, _ = chain.values(self.token.to(weights.w_v.device).double()[None])
        gains = self.gains()
        mixed = chain.repeated(values).flatten(-2)
        if gains is not None:
            mixed = mixed.expand(len(gains.before), -1)
        return chain.projected(chain.written(mixed, gains)[0])

    def compare(self, seen: Float[Tensor, "token d_model"], *, has_bias: bool) -> None:
        expected = self.expected(has_bias=has_bias)
        if len(expected) not in (1, len(seen)):
            self.error = math.inf
            return
        deviation = (seen.detach().double() - expected.to(seen.device)).abs().max().item()
        relative = deviation / max(expected.abs().max().item(), 1e-30)
        self.error = max(self.error, relative if math.isfinite(relative) else math.inf)  # max() would drop a NaN
        self.tokens = max(self.tokens, len(seen))


Layered = tuple[BlockNames, NextAttention, AttentionWeights]
"""A block by its names, how its attention is awaited, and its canonical weights."""


@contextmanager
def prepared(
    layers: Sequence[Layered], store: ModuleStore, generator: torch.Generator
) -> Iterator[list[EqualTokenCheck]]:
    """Checks of these layers, which see the gains of the pass that runs inside."""
    with blocks_watched([(block, one) for block, one, _ in layers if one.has_gains], store) as take:
        checks = []
        for block, one, weights in layers:
            reads = block.value if block.latent is None else block.latent
            check = EqualTokenCheck(
                value=reads.weight,
                output=block.output.weight,
                weights=weights,
                token=torch.randn(weights.d_read, generator=generator),
                epsilon={role: epsilon_of(store.norm(names)) for role, names in block.norms.items()},
            )
            if one.has_gains:
                check.gains = partial(_gains_of, take, one)
            checks.append(check)
        yield checks


def _gains_of(take: Callable[[Layer], AttentionMaps], one: NextAttention) -> TokenGains:
    return take(one.layer).all_gains()


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
        is_turned = op != "convolution" and bool(self._name(args[first])) and not self._name(args[second])
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
    with plain_operations(), _EqualTokens(Parameters(tensors), checks):
        yield
