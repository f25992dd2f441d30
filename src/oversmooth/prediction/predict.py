"""`predict`: what the theory says of every layer, beside what the layer does to given inputs.

At that moment its attention maps, the stream before and the stream after are there; the theory turns them into numbers,
and they are let go. The cost in memory is that of one layer's attention for one sequence, beside the forward pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.data.batches import keep_mask
from oversmooth.data.held import Data
from oversmooth.data.load import RunKeywords, opened
from oversmooth.environment.versions import one_thread
from oversmooth.errors import BadValue, UnknownName
from oversmooth.measurement.moments import measurable
from oversmooth.measurement.passes import Processed, Run, open_live, pass_through
from oversmooth.models.canonical import epsilon_of
from oversmooth.models.hooks.attention_maps import AttentionMaps, Layer, attention_watched, unwatched
from oversmooth.models.hooks.places import Place, on_stream
from oversmooth.models.live import is_offloaded
from oversmooth.models.open import LiveModel, Target
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import ModuleStore
from oversmooth.prediction.asymptotics import Depth, DepthGrowth
from oversmooth.prediction.ladder import LayerSample, WhatIfLayer, sample_layer
from oversmooth.prediction.operator import AttentionLayer
from oversmooth.prediction.summary import absent, guarantee, mean_and_error, summarise
from oversmooth.prediction.verdicts import agreements, layer_verdict, stack_verdict
from oversmooth.prediction.what_if import WhatIf, what_if
from oversmooth.results import Progress, no_progress
from oversmooth.results.prediction import DepthPrediction, LayerPrediction, Prediction

# --- what a prediction gathers while the model runs ---

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
    seen: Processed = field(default_factory=Processed)
    problems: dict[Key, str] = field(default_factory=dict)
    maps_of: Callable[[Layer], AttentionMaps] = field(init=False)
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _keep: dict[str, Bool[Tensor, "batch token"]] = field(default_factory=dict)
    _stream: dict[str, Float[Tensor, "batch token d_model"]] = field(default_factory=dict)
    _layers: dict[Layer, tuple[AttentionLayer, tuple[WhatIfLayer, ...]]] = field(default_factory=dict)
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
                self._sample(stack, position, place.depth, self._stream[place.stack].to(h.device), h)
        self._stream[place.stack] = h

    def _sample(self, stack: Stack, position: int, depth: int, before: Tensor, after: Tensor) -> None:
        if stack.label not in self._keep:
            self._keep[stack.label] = keep_mask(self.model, self._inputs, stack, after, 0)
        keep = self._keep[stack.label].to(after.device)
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

    def _layer(self, stack: Stack, position: int) -> tuple[AttentionLayer, tuple[WhatIfLayer, ...]]:
        key = (stack.label, position)
        if key in self._layers:
            return self._layers[key]
        block = stack.names.blocks[position]
        epsilon = {role: epsilon_of(self.store.norm(names)) for role, names in block.norms.items()}
        layer = AttentionLayer(weights=stack.weights(position, self.store.read), epsilon=epsilon, dtype=self.dtype)
        made = layer, tuple(WhatIfLayer.of(change, layer) for change in self.changes)
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
        tolerance = IDENTITY.get(next(self.model.parameters()).dtype, 0.1)
        for (label, position, depth), samples in self._samples.items():
            if not any(sample.acting for sample in samples):
                continue
            stack = self.stacks[label]
            layer, changes = self._layer(stack, position)
            place = (label, stack.names.blocks[position].index, depth)
            one = summarise(place, layer, samples, changes)
            regime = "undecided" if one.identity_error > tolerance else one.regime
            found.append(replace(one, regime=regime, verdict=layer_verdict(one, guarantee(layer, samples), tolerance)))
        return tuple(found)


# --- `predict`: run a live model on batches; what the theory says about every layer ---

DTYPES = {"auto": torch.float32, "float32": torch.float32, "float64": torch.float64}
SOLVED = 4
"""Sequences whose eigenvalue problems are solved unless asked otherwise: each costs about as much as fifty passes."""


def predict(
    target: Target,
    data: Data = None,
    *,
    what_ifs: Sequence[str] = (),
    solve_what_ifs: bool = True,
    simulate: int = 0,
    solve: int = SOLVED,
    heads: bool = True,
    precision: str = "auto",
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> Prediction:
    """Exponents, regimes and the ladder of explanation for every layer, beside what is measured there.

    Takes the same targets and data as `measure`; prefix tokens always count, because attention sees them. The
    eigenvalue problems are solved for the first `solve` sequences, the rest of the ladder for all. `what_ifs` are names
    such as `no_skip`, `no_biases`, `scale:0.5`, `interval:-1,0`, `attnscale:0.3`; without `solve_what_ifs`, those that
    are eigenvalue problems of their own have rungs 1 to 5 only. `simulate` iterates every layer so many times on the
    first sequence. `precision` is that of the theory, `dtype` what the model runs in. Ctrl-C returns what was found so
    far, marked partial.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> found = osm.predict(model, [torch.randn(2, 10, 32)])
    >>> [rung.name for rung in found.layers[0].rungs]
    ['asymptotic', 'typical', 'features', 'coupling', 'biases', 'token scale']
    """
    if precision not in DTYPES:
        raise UnknownName("precision", precision, tuple(DTYPES))
    for name, value, least in (("solve", solve, 1), ("simulate", simulate, 0)):
        if value < least:
            raise BadValue(name, value, f"at least {least}")
    changes = [what_if(text) for text in what_ifs]
    model, how = opened(target, options, data)

    @contextmanager
    def watch(live: LiveModel) -> Iterator[PredictionObserver]:
        observer = PredictionObserver(
            model=live.model,
            store=live.store,
            stacks={stack.label: stack for stack in live.stacks},
            changes=changes,
            solve=solve,
            simulate=simulate,
            with_heads=heads,
            solve_changes=solve_what_ifs,
            dtype=DTYPES[precision],
        )
        with attention_watched(live.stacks, live.store) as observer.maps_of:
            yield observer

    with model.alone:
        run = pass_through(*open_live(model, data, "predict", how), watch, how.max_samples, progress)
        return _result(run, seed=how.seed)


def _result(run: Run[PredictionObserver], *, seed: int) -> Prediction:
    live, observer = run.live, run.observer
    dtype = str(observer.dtype).removeprefix("torch.")
    precision = f"model {live.runs_in()}, theory {dtype}, eigenvalues float64"
    layers = observer.layers()
    depths = {label: _depth(label, found) for label, found in observer.growth.items()}
    by_stack = {stack.label: [layer for layer in layers if layer.stack == stack.label] for stack in live.stacks}
    found = {label: agreements(label, members) for label, members in by_stack.items() if members}
    return Prediction(
        provenance=live.provenance(compute_dtype=precision, seed=seed),
        data=observer.seen.facts(run.data),
        is_partial=run.is_partial,
        stream=run.stream,
        solved=min(observer.solve, observer.seen.sequences),
        layers=layers,
        agreements=tuple(item for items in found.values() for item in items),
        depths=tuple(depths.values()),
        verdict=tuple(
            statement
            for label, items in found.items()
            for statement in stack_verdict(label, by_stack[label], items, depths.get(label))
        ),
        problems=tuple(observer.problems.values()),
    )


def _depth(label: str, found: Sequence[DepthGrowth | None]) -> DepthPrediction:
    known = [growth for growth in found if growth is not None]
    exponent, error, count = mean_and_error(growth.exponent for growth in known)
    log_dc, _, _ = mean_and_error(growth.log_dc for growth in known)
    log_ac, _, _ = mean_and_error(growth.log_ac for growth in known)
    leading, _, _ = mean_and_error((growth.leading_ac - growth.leading_dc) / growth.layers for growth in known)
    growths = "exponent log_growth_dc log_growth_ac leading_exponent"
    return DepthPrediction(
        stack=label,
        layers=known[0].layers if known else 0,
        sequences=count,
        exponent=exponent,
        standard_error=error,
        log_growth_dc=log_dc,
        log_growth_ac=log_ac,
        leading_exponent=leading,
        missing=absent(
            (not known, growths, "nothing is left of a part of the features"),
            (error is None, "standard_error", "fewer than two sequences were solved"),
        ),
    )
