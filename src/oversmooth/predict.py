"""`predict`: run a live model on batches and say what the theory says about every layer, beside what is measured there.

The forward pass is followed layer by layer. When the stream has received a layer's attention branch, its attention maps,
the stream before and the stream after are there; the theory turns them into numbers, and they are let go. So the cost in
memory is that of one layer's attention for one sequence, on top of the forward pass.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.batches import Batch, keep_mask, prepare, run_checked
from oversmooth.data import load_data
from oversmooth.errors import NoData, OutOfRange
from oversmooth.metrics import measurable
from oversmooth.models.attention_maps import AttentionMaps, Layer, attention_watched
from oversmooth.models.live import load_model, move, quiet_eval
from oversmooth.models.module_store import ModuleStore
from oversmooth.models.places import Place, observed, on_stream
from oversmooth.models.source import Stack, Target, open_source
from oversmooth.models.store import ReadLog
from oversmooth.prediction_summary import guarantee, mean_and_error, summarise
from oversmooth.provenance import provenance_of
from oversmooth.results import DataFacts, Missing, Progress, no_progress
from oversmooth.results.prediction import DepthPrediction, LayerPrediction, Prediction
from oversmooth.theory.depth import Depth, DepthGrowth
from oversmooth.theory.layer import AttentionLayer
from oversmooth.theory.sample import Changed, LayerSample, sample_layer
from oversmooth.theory.what_if import WhatIf, what_if
from oversmooth.verdicts import agreements, layer_verdict, stack_verdict

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SOLVED = 4
"""Sequences whose eigenvalue problems are solved unless asked otherwise: each costs about as much as fifty passes."""
IDENTITY = {torch.float64: 1e-3, torch.float32: 1e-3}
"""How far rung 5 may be from the measurement; in half precision, whose branches carry three digits, 0.1."""
KEPT_WEIGHTS = 2e8
"""Numbers in the value paths of all layers up to which they are kept between batches."""


def predict(
    target: Target,
    batches: Iterable[Batch] | str | None = None,
    *,
    what_ifs: Sequence[str] = (),
    simulate: int = 0,
    solve: int = SOLVED,
    heads: bool = True,
    max_samples: int | None = None,
    batch_size: int = 8,
    max_tokens: int = 128,
    dtype: str = "float32",
    seed: int = 0,
    device: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress = no_progress,
) -> Prediction:
    """Exponents, regimes and the ladder of explanation for every layer, beside what is measured there.

    Takes the same targets and batches as `measure`; prefix tokens always count, because attention sees them. The
    eigenvalue problems are solved for the first `solve` sequences, the rest of the ladder for all. `what_ifs` are names
    such as `no_skip`, `no_biases`, `scale:0.5`, `interval:-1,0`, `attnscale:0.3`; `simulate` iterates every layer so
    many times on the first sequence. Ctrl-C returns what was found so far, marked partial.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> found = osm.predict(model, [torch.randn(2, 10, 32)])
    >>> [rung.name for rung in found.layers[0].rungs]
    ['asymptotic', 'typical', 'features', 'coupling', 'biases', 'token scale']
    """
    if dtype not in DTYPES:
        raise OutOfRange("dtype", dtype, " or ".join(DTYPES))
    for name, value, least in (("solve", solve, 1), ("simulate", simulate, 0)):
        if value < least:
            raise OutOfRange(name, value, f"at least {least}")
    changes = [what_if(text) for text in what_ifs]
    source = open_source(target)
    model = load_model(source, "predict", trust_remote_code=trust_remote_code)
    if device is not None:
        move(model, device)
    live = open_source(model)
    assert isinstance(live.store, ModuleStore)
    stacks = live.stacks()
    description = "batches given by the caller"
    if batches is None or isinstance(batches, str):
        loaded = load_data(
            batches,
            model,
            source,
            live.config,
            batch_size=batch_size,
            max_tokens=max_tokens,
            max_samples=max_samples,
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
        batches, description = loaded.batches, loaded.description
    run = _Run(
        model=model,
        store=live.store,
        stacks={stack.label: stack for stack in stacks},
        changes=changes,
        solve=solve,
        simulate=simulate,
        with_heads=heads,
        dtype=DTYPES[dtype],
    )
    is_partial = _follow(run, live.config, batches, max_samples, progress)
    if not run.seen:
        raise NoData(description, run.skipped)
    log = ReadLog(live.store)
    for stack in stacks:
        for position in range(len(stack.names.blocks)):
            stack.weights(position, log.read)  # hashed in the order of `inspect`, so that the results can be matched
    model_dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    facts = DataFacts(
        description=description,
        sha256=run.hash.hexdigest(),
        sequences=run.seen,
        tokens=run.tokens,
        skipped=run.skipped,
    )
    layers, depths = run.layers(), run.depths()
    by_stack = {label: [layer for layer in layers if layer.stack == label] for label in run.stacks}
    found = {label: agreements(label, members) for label, members in by_stack.items() if members}
    return Prediction(
        provenance=provenance_of(
            source, stacks, log, compute_dtype=f"model {model_dtype}, theory {dtype}, eigenvalues float64", seed=seed
        ),
        data=facts,
        is_partial=is_partial,
        solved=min(solve, run.seen),
        layers=layers,
        agreements=tuple(item for items in found.values() for item in items),
        depths=depths,
        verdict=tuple(
            statement
            for label, items in found.items()
            for statement in stack_verdict(
                label, by_stack[label], items, next((depth for depth in depths if depth.stack == label), None)
            )
        ),
        problems=tuple(run.problems.values()),
    )


def _follow(
    run: "_Run", config: Mapping[str, Any], batches: Iterable[Batch], max_samples: int | None, progress: Progress
) -> bool:
    """Runs the model on the batches; whether it was interrupted."""
    stacks = tuple(run.stacks.values())
    with (
        quiet_eval(run.model),
        attention_watched(stacks, run.store) as run.maps_of,
        observed(stacks, run.store, run.observe, lambda name, stack: on_stream(name, stack.arch.residual)) as restart,
    ):
        try:
            for batch in batches:
                remaining = None if max_samples is None else max_samples - run.seen
                if remaining == 0:
                    break
                inputs = prepare(run.model, config, batch, remaining)
                run.begin(inputs)
                restart()
                run_checked(run.model, inputs)
                run.finish()
                progress(run.seen, max_samples or 0)
        except KeyboardInterrupt:
            return True
    return False


Key = tuple[str, int, int]
"""Label of the stack, position of the block and depth of the pass."""


@dataclass
class _Run:
    """Everything one prediction accumulates; only plain numbers outlive a batch."""

    model: nn.Module
    store: ModuleStore
    stacks: Mapping[str, Stack]
    changes: Sequence[WhatIf]
    solve: int
    simulate: int
    with_heads: bool
    dtype: torch.dtype
    seen: int = 0
    tokens: int = 0
    skipped: int = 0
    hash: Any = field(default_factory=hashlib.sha256)
    problems: dict[Key, str] = field(default_factory=dict)
    maps_of: Callable[[Layer], AttentionMaps] = field(init=False)
    _inputs: Mapping[str, Tensor] = field(default_factory=dict)
    _keep: dict[str, Bool[Tensor, "batch token"]] = field(default_factory=dict)
    _stream: dict[str, Float[Tensor, "batch token d_model"]] = field(default_factory=dict)
    _layers: dict[Layer, tuple[AttentionLayer, tuple[Changed, ...]]] = field(default_factory=dict)
    _pending: dict[Key, list[LayerSample]] = field(default_factory=dict)
    _samples: dict[Key, list[LayerSample]] = field(default_factory=dict)
    _following: dict[tuple[str, int], Depth] = field(default_factory=dict)
    _growth: dict[str, list[DepthGrowth | None]] = field(default_factory=dict)

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        for name, value in sorted(inputs.items()):
            self.hash.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            self.hash.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self._inputs = inputs
        for kept in (self._keep, self._stream, self._pending, self._following):
            kept.clear()

    def observe(self, place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        """The stream has reached a place; after an attention branch, the layer is sampled."""
        stack = self.stacks[place.stack]
        if place.name == "attn_sum":
            position = next(i for i, passes in enumerate(stack.passes) if place.depth - 1 in passes)
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
            is_solved = self.seen + order < self.solve
            sample, operator = sample_layer(
                layer,
                maps.of(sequence, kept, self.dtype),
                x,
                y,
                solve=is_solved,
                with_heads=self.with_heads,
                changes=changes,
                simulate_steps=self.simulate if self.seen + order == 0 else 0,
            )
            self._pending.setdefault(key, []).append(sample)
            if is_solved:
                follow = self._following.setdefault((stack.label, sequence), Depth(*x.shape, like=x))
                follow.pass_through(operator)

    def _broken(self, key: Key) -> None:
        where = f"{key[0] + ', ' if key[0] else ''}depth {key[2]}"
        self.problems.setdefault(key, f"NaN or infinity in the stream of a sequence at {where}; it was left out there")

    def _layer(self, stack: Stack, position: int) -> tuple[AttentionLayer, tuple[Changed, ...]]:
        key = (stack.label, position)
        if key in self._layers:
            return self._layers[key]
        block = stack.names.blocks[position]
        epsilon = {role: _epsilon(self.store.owner(names.weight)) for role, names in block.norms.items()}
        layer = AttentionLayer(weights=stack.weights(position, self.store.read), epsilon=epsilon, dtype=self.dtype)
        made = layer, tuple(Changed.of(change, layer) for change in self.changes)
        if layer.weights.w_v.numel() * len(stack.names.blocks) * (1 + len(self.changes)) <= KEPT_WEIGHTS:
            self._layers[key] = made
        return made

    def finish(self) -> None:
        """Takes over what the batch gave, now that it is complete."""
        keep = next(iter(self._keep.values()))
        has_two = measurable(keep)
        self.seen += int(has_two.sum())
        self.skipped += int((~has_two).sum())
        self.tokens += int(keep[has_two].sum())
        for key, samples in self._pending.items():
            self._samples.setdefault(key, []).extend(samples)
        for (label, _), follow in self._following.items():
            self._growth.setdefault(label, []).append(follow.growth())

    # --- results ---

    def layers(self) -> tuple[LayerPrediction, ...]:
        found = []
        for (label, position, depth), samples in self._samples.items():
            if not any(sample.acting for sample in samples):
                continue
            stack = self.stacks[label]
            layer, changes = self._layer(stack, position)
            place = (label, stack.names.blocks[position].index, depth)
            found.append(self._with_verdict(summarise(place, layer, samples, changes), layer))
        return tuple(found)

    def _with_verdict(self, found: LayerPrediction, layer: AttentionLayer) -> LayerPrediction:
        from dataclasses import replace

        tolerance = IDENTITY.get(next(self.model.parameters()).dtype, 0.1)
        guaranteed = guarantee(layer, found.scale)
        regime = "undecided" if found.identity_error > tolerance else found.regime
        return replace(found, regime=regime, verdict=layer_verdict(found, guaranteed, tolerance))

    def depths(self) -> tuple[DepthPrediction, ...]:
        return tuple(_depth(label, found) for label, found in self._growth.items())


def _epsilon(norm: nn.Module) -> float:
    """What a norm adds under its square root, under the names that libraries use for it."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(norm, name, None)
        if isinstance(value, float):
            return value
    return 0.0


def _depth(label: str, found: Sequence[DepthGrowth | None]) -> DepthPrediction:
    known = [growth for growth in found if growth is not None]
    exponent, error, count = mean_and_error(growth.exponent for growth in known)
    log_dc, _, _ = mean_and_error(growth.log_dc for growth in known)
    log_ac, _, _ = mean_and_error(growth.log_ac for growth in known)
    leading, _, _ = mean_and_error((growth.leading_ac - growth.leading_dc) / growth.layers for growth in known)
    names = ("exponent", "log_growth_dc", "log_growth_ac", "leading_exponent") if not known else ()
    missing = [Missing(field=name, reason="nothing is left of a part of the features") for name in names]
    if error is None:
        missing.append(Missing(field="standard_error", reason="fewer than two sequences were solved"))
    return DepthPrediction(
        stack=label,
        layers=known[0].layers if known else 0,
        sequences=count,
        exponent=exponent,
        standard_error=error,
        log_growth_dc=log_dc,
        log_growth_ac=log_ac,
        leading_exponent=leading,
        missing=tuple(missing),
    )
