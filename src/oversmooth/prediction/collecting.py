"""What a prediction gathers while the model runs: every layer is sampled when its attention branch has been added.

At that moment its attention maps, the stream before and the stream after are there; the theory turns them into numbers,
and they are let go. The cost in memory is that of one layer's attention for one sequence, beside the forward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import keep_mask
from oversmooth.environment.threads import one_thread
from oversmooth.measurement.moments import measurable
from oversmooth.measurement.passes import Seen
from oversmooth.models.hooks.attention_maps import AttentionMaps, Layer, unwatched
from oversmooth.models.hooks.places import Place, on_stream
from oversmooth.models.norms import epsilon_of
from oversmooth.models.offload import is_offloaded
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore
from oversmooth.prediction.guarantee import Guarantee, guarantee
from oversmooth.prediction.summary import summarise
from oversmooth.prediction.theory.depth import Depth, DepthGrowth
from oversmooth.prediction.theory.layer import AttentionLayer
from oversmooth.prediction.theory.sample import Changed, LayerSample, sample_layer
from oversmooth.prediction.theory.what_if import WhatIf
from oversmooth.prediction.verdicts import layer_verdict
from oversmooth.results.layer_prediction import LayerPrediction

IDENTITY = {torch.float64: 1e-3, torch.float32: 1e-3}
"""How far the last rung may be from the measurement; in half precision, whose branches carry three digits, 0.1."""
SMALL = 2**16
"""Features (tokens x width) of one sequence up to which its many small products are faster without threads."""
KEPT_WEIGHTS = 2e8
"""Numbers in the value paths of all layers up to which they are kept between batches."""

Key = tuple[str, int, int]
"""Label of the stack, position of the block and depth of the pass."""


@dataclass
class PredictionObserver:
    """Everything one prediction accumulates; only plain numbers outlive a batch."""

    model: nn.Module
    store: ModuleStore
    stacks: Mapping[str, Stack]
    changes: Sequence[WhatIf]
    solve: int
    simulate: int
    with_heads: bool
    solve_changes: bool
    dtype: torch.dtype
    seen: Seen = field(default_factory=Seen)
    problems: dict[Key, str] = field(default_factory=dict)
    maps_of: Callable[[Layer], AttentionMaps] = field(init=False)
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _keep: dict[str, Bool[Tensor, "batch token"]] = field(default_factory=dict)
    _stream: dict[str, Float[Tensor, "batch token d_model"]] = field(default_factory=dict)
    _layers: dict[Layer, tuple[AttentionLayer, tuple[Changed, ...]]] = field(default_factory=dict)
    _pending: dict[Key, list[LayerSample]] = field(default_factory=dict)
    _samples: dict[Key, list[LayerSample]] = field(default_factory=dict)
    _following: dict[tuple[str, int], Depth] = field(default_factory=dict)
    growth: dict[str, list[DepthGrowth | None]] = field(default_factory=dict)

    def wants(self, name: str, stack: Stack) -> bool:
        return on_stream(name, stack.arch.residual)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        for kept in (self._keep, self._stream, self._pending, self._following):
            kept.clear()

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        """The stream has reached a place; after an attention branch, the layer is sampled."""
        stack = self.stacks[place.stack]
        if place.name == "attn_sum":
            position = next(i for i, passes in enumerate(stack.passes) if place.depth - 1 in passes)
            with unwatched():
                self._sample(stack, position, place.depth, self._stream[place.stack], h)
        self._stream[place.stack] = h

    def _sample(self, stack: Stack, position: int, depth: int, before: Tensor, after: Tensor) -> None:
        if stack.label not in self._keep:
            self._keep[stack.label] = keep_mask(self.model, self._inputs, stack, after, 0)
        keep = self._keep[stack.label]
        maps = self.maps_of((stack.label, position))
        layer, changes = self._layer(stack, position)
        key = (stack.label, position, depth)
        usable = measurable(keep).nonzero()[:, 0].tolist()
        for order, sequence in enumerate(usable):
            kept = keep[sequence]
            x, y = (h[sequence, kept].to(self.dtype) for h in (before, after))
            if not bool(torch.isfinite(x).all() & torch.isfinite(y).all()):
                self._broken(key)
                continue
            is_solved = self.seen.sequences + order < self.solve
            with one_thread(x.numel() <= SMALL):
                attention, gains = maps.seen(sequence, kept, self.dtype)
                sample, operator = sample_layer(
                    layer,
                    attention,
                    x,
                    y,
                    gains=gains,
                    solve=is_solved,
                    with_heads=self.with_heads,
                    changes=changes,
                    solve_changes=self.solve_changes,
                    simulate_steps=self.simulate if self.seen.sequences + order == 0 else 0,
                )
                self._pending.setdefault(key, []).append(sample)
                if is_solved:
                    if (stack.label, sequence) not in self._following:
                        self._following[stack.label, sequence] = Depth(x.shape[0], x.shape[1], x)
                    self._following[stack.label, sequence].pass_through(operator)

    def _broken(self, key: Key) -> None:
        where = f"{key[0] + ', ' if key[0] else ''}depth {key[2]}"
        self.problems.setdefault(key, f"NaN or infinity in the stream of a sequence at {where}; it was left out there")

    def _layer(self, stack: Stack, position: int) -> tuple[AttentionLayer, tuple[Changed, ...]]:
        key = (stack.label, position)
        if key in self._layers:
            return self._layers[key]
        block = stack.names.blocks[position]
        epsilon = {role: epsilon_of(self.store.norm(names)) for role, names in block.norms.items()}
        layer = AttentionLayer(weights=stack.weights(position, self.store.read), epsilon=epsilon, dtype=self.dtype)
        made = layer, tuple(Changed.of(change, layer) for change in self.changes)
        is_kept = not is_offloaded(self.model)
        if is_kept and layer.weights.w_v.numel() * len(stack.names.blocks) * (1 + len(self.changes)) <= KEPT_WEIGHTS:
            self._layers[key] = made
        return made

    def finish(self) -> Bool[Tensor, "batch token"]:
        for key, samples in self._pending.items():
            self._samples.setdefault(key, []).extend(samples)
        for (label, _), follow in self._following.items():
            self.growth.setdefault(label, []).append(follow.growth())
        return next(iter(self._keep.values()))

    # --- results ---

    def layers(self) -> tuple[LayerPrediction, ...]:
        found = []
        for (label, position, depth), samples in self._samples.items():
            if not any(sample.acting for sample in samples):
                continue
            stack = self.stacks[label]
            layer, changes = self._layer(stack, position)
            place = (label, stack.names.blocks[position].index, depth)
            summary = summarise(place, layer, samples, changes)
            found.append(self._with_verdict(summary, guarantee(layer, samples)))
        return tuple(found)

    def _with_verdict(self, found: LayerPrediction, guaranteed: Guarantee | None) -> LayerPrediction:
        tolerance = IDENTITY.get(next(self.model.parameters()).dtype, 0.1)
        regime = "undecided" if found.identity_error > tolerance else found.regime
        return replace(found, regime=regime, verdict=layer_verdict(found, guaranteed, tolerance))
