"""Whether attention is healthy: how many tokens each head looks at, whether it looks at one only, and of what rank it is.

`A` is the attention of one head, (query, key); rows sum to one. Numbers of a layer are means over its heads.

    attention_entropy   mean over queries of -sum a log a / log(keys that the query sees): 0 looks at one, 1 at all alike
    effective_tokens    mean over queries of exp(-sum a log a): how many tokens a query sees
    sink_rate           share of heads that give more than 0.3 of all their attention to one position
    attention_rank      (sum s^2)^2 / sum s^4, s the singular values of A: 1 if all rows are equal, n for the identity

Where a model has a learned sink beside the tokens, rows sum to one with it: it counts as one more key in the first two, is
no position in the third, and A in the fourth is what is left for tokens.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from oversmooth.errors import NoAttentionMaps
from oversmooth.measurement.metrics import MetricValues
from oversmooth.models.hooks.attention_maps import AttentionMaps, Layer, unwatched
from oversmooth.models.hooks.places import Place
from oversmooth.models.source import Stack
from oversmooth.results import HeadAttention

ATTENTION = "attention"
"""The place of numbers about attention maps."""
SINK = 0.3
"""A head that gives more than this share of its attention to one position has a sink there."""
LEAST_TOKENS = 10
"""Below so many tokens uniform causal attention itself gives more than 0.3 to the first."""
ATTENTION_METRICS = {
    "attention_entropy": "mean over heads and queries of -sum a log a / log(number of keys seen)",
    "effective_tokens": "mean over heads and queries of exp(-sum a log a)",
    "sink_rate": f"share of heads with max over keys of the mean over queries of a above {SINK}",
    "attention_rank": "mean over heads of (sum s^2)^2 / sum s^4, s the singular values of A",
}

PerHead = Float[Tensor, " head"]


@dataclass(frozen=True, eq=False, slots=True)
class HeadNumbers:
    """One sequence, one layer: a number for each head."""

    attention_entropy: PerHead
    effective_tokens: PerHead
    sink: PerHead
    """Largest share of all attention that goes to one position."""
    sink_position: Tensor
    attention_rank: PerHead
    tokens: int
    learned_sink: PerHead | None = None
    """Share of all attention that goes to a learned sink beside the tokens; `None` where there is none."""

    def of_layer(self) -> dict[str, float]:
        """Means over heads; the rate of sinks only where there are tokens enough."""
        has_sink = (self.sink > SINK).to(self.sink.dtype)
        parts = (self.attention_entropy, self.effective_tokens, has_sink, self.attention_rank)
        found = dict(zip(ATTENTION_METRICS, torch.stack(parts).mean(1).tolist(), strict=True))
        if self.tokens < LEAST_TOKENS:
            del found["sink_rate"]
        return found


def head_numbers(
    attention: Float[Tensor, "head query key"], beside: Float[Tensor, "head query"] | None = None
) -> HeadNumbers:
    """All numbers of every head, from maps whose rows sum to one; with what goes to a sink `beside` them, if there is one."""
    # Entries of exactly zero contribute nothing: the smallest number keeps their logarithm finite. Twice as fast as `entr`.
    logarithms = attention.clamp(min=torch.finfo(attention.dtype).tiny).log_()
    entropy = -logarithms.mul_(attention).sum(-1).clamp(max=0)
    seen = attention.sign().sum(-1)  # as `count_nonzero`, in a third of its time
    if beside is not None:
        entropy, seen = entropy + torch.special.entr(beside), seen + beside.sign()
    sees_several = seen > 1
    relative = torch.where(sees_several, entropy / seen.clamp(min=2).log(), 0.0)
    received = attention.mean(1)
    sink = received.max(-1)
    squares = torch.linalg.matrix_norm(attention).square()
    fourth = torch.linalg.matrix_norm(attention.mT @ attention).square()
    return HeadNumbers(
        attention_entropy=(relative.sum(-1) / sees_several.sum(-1).clamp(min=1)).clamp(max=1),
        effective_tokens=entropy.exp().mean(-1),
        sink=sink.values,
        sink_position=sink.indices,
        attention_rank=squares.square() / fourth,
        tokens=attention.shape[-1],
        learned_sink=None if beside is None else beside.mean(-1),
    )


@dataclass
class _Layer:
    """Sums over sequences of what every head of a layer did."""

    sums: Float[Tensor, "number head"]
    positions: list[Counter[int]]
    sequences: int = 0
    has_learned_sink: bool = False

    def add(self, numbers: HeadNumbers) -> None:
        self.has_learned_sink = numbers.learned_sink is not None
        learned = torch.zeros_like(numbers.sink) if numbers.learned_sink is None else numbers.learned_sink
        parts = (numbers.attention_entropy, numbers.effective_tokens, numbers.sink, numbers.attention_rank, learned)
        self.sums += torch.stack(parts).double().cpu()
        for counter, position in zip(self.positions, numbers.sink_position.tolist(), strict=True):
            counter[position] += 1
        self.sequences += 1


@dataclass
class AttentionGatherer:
    """Attention of every layer, taken when its branch has been added; a stack whose maps cannot be seen says why."""

    chosen: tuple[str, ...]
    note: Callable[[Sequence[Place], str, MetricValues], None]
    maps_of: Callable[[Layer], AttentionMaps] = field(init=False)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a stack has no numbers."""
    _pending: list[tuple[Place, HeadNumbers]] = field(default_factory=list)
    _layers: dict[Place, _Layer] = field(default_factory=dict)

    def begin(self) -> None:
        self._pending.clear()

    def see(self, stack: Stack, depth: int, keep: Bool[Tensor, "batch token"]) -> None:
        """The attention branch of a layer was added."""
        if stack.label in self.reasons:
            return
        position = next(i for i, passes in enumerate(stack.passes) if depth - 1 in passes)
        place = Place(stack.label, depth, ATTENTION)
        with unwatched():
            try:
                maps = self.maps_of((stack.label, position))
                found = [head_numbers(*maps.with_sink(i, keep[i])) for i in (keep.sum(1) >= 2).nonzero()[:, 0].tolist()]
            except NoAttentionMaps as error:
                self.reasons[stack.label] = error.problem
                return
        of_layer = [numbers.of_layer() for numbers in found]
        for name in self.chosen:
            values = [numbers[name] for numbers in of_layer if name in numbers]
            found_values = torch.tensor(values, dtype=torch.float64)
            self.note((place,), name, MetricValues(found_values, torch.ones_like(found_values, dtype=torch.bool)))
        self._pending += [(place, numbers) for numbers in found]

    def finish(self) -> None:
        for place, numbers in self._pending:
            if place not in self._layers:
                heads = len(numbers.sink)
                self._layers[place] = _Layer(
                    torch.zeros(5, heads, dtype=torch.float64), [Counter() for _ in range(heads)]
                )
            self._layers[place].add(numbers)

    def results(self) -> tuple[HeadAttention, ...]:
        return tuple(
            HeadAttention(
                stack=place.stack,
                depth=place.depth,
                head=head,
                entropy=entropy,
                effective_tokens=tokens,
                sink=sink,
                sink_position=layer.positions[head].most_common(1)[0][0],
                rank=rank,
                learned_sink=learned if layer.has_learned_sink else None,
            )
            for place, layer in self._layers.items()
            for head, (entropy, tokens, sink, rank, learned) in enumerate((layer.sums / layer.sequences).T.tolist())
        )
