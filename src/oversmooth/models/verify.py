"""`verify`: checks a declaration against the live model; `discover`: finds one.

Rows of softmax attention sum to one. When the value projection sees the same vector x at every position, attention
returns exactly `W_O W_V x` plus biases, whatever the mask, the positions, the queries and the keys. One forward pass
checks the canonical weights of every block against the model itself (`discovery/proof.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Unpack

import torch
from torch import Tensor, nn

from oversmooth.errors import RUN_ERRORS, NotDiscovered, NotLive, RefusedArchitecture, first_line
from oversmooth.models.declaration import Discovery
from oversmooth.models.discovery.proof import EqualTokenCheck, Layered, equal_tokens, prepared
from oversmooth.models.discovery.skeleton import discovered_on_disk
from oversmooth.models.discovery.watch import discovered, known_inputs, placed, rediscovered, shapes_of
from oversmooth.models.families import REFUSED
from oversmooth.models.hooks.attention_maps import awaited
from oversmooth.models.hooks.chain import Chain
from oversmooth.models.hooks.taps import observed
from oversmooth.models.inputs import examples
from oversmooth.models.live import call_model, is_offloaded, quiet_eval
from oversmooth.models.open import LiveModel, LoadKeywords, OpenedModel, Target, open_model
from oversmooth.models.source import Stack, provenance_of
from oversmooth.models.stores.adapters import acting_merged
from oversmooth.models.stores.module import ModuleStore, describe
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import LayerCheck, StreamCheck, Verification

# --- `verify`: whether a declaration fits a live model ---

TOLERANCE = 1e-4
"""Largest relative deviation that float32 models show; a wrong layout is off by about 1."""
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""What rounding alone explains in models that run in half precision."""


def verify(
    target: Target,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    **load: Unpack[LoadKeywords],
) -> Verification:
    """Checks how a live model is read: its weights by the equal-token identity, its stream by the chain identity.

    Every value projection is fed one vector at all positions, so attention must return `W_O (W_V x + b_V) + b_O`, whatever
    its mask, queries and keys; with the factors that gates, sinks and norms on heads show in that pass. In the same pass,
    what every block gives must be what the next one reads (`result.stream`). `inputs` are those of one forward pass, made
    up where they are not given. A declaration that does not fit is a result here, not an error: `passed` says so.
    """
    model = open_model(target, **load)
    with model.alone:
        return _verified(model, inputs, tolerance, seed)


def _verified(
    opened: OpenedModel, inputs: Mapping[str, Tensor] | None, tolerance: float | None, seed: int
) -> Verification:
    source = opened.source
    for stack in source.stacks() if source.module is None else ():
        stack.weights(0, source.store.read)  # what is refused or contradicts itself is said before anything is loaded
    live = _live(opened, inputs)
    model, stacks, log = live.model, live.stacks, ReadLog(live.store)
    if inputs is None:
        inputs = known_inputs(model) or next(examples(model, live.config, seed))
    batch = placed(model, inputs)
    under_test = list(_layers(stacks, log))
    try:
        checks, stream = _run(model, live.store, stacks, under_test, batch, torch.Generator().manual_seed(seed))
    except RUN_ERRORS as error:
        reason = f"it does not run on {shapes_of(batch)}: {first_line(error)}"
        advice = "Give inputs that it accepts: osm.verify(model, inputs={name: tensor})."
        raise NotLive(source.target, "verify", reason, advice) from error
    if stream.broken and not source.archs and not any(stack.arch.proof is not None for stack in stacks):
        with suppress(NotDiscovered, RefusedArchitecture):
            rediscovered(model, batch)  # the declaration reads another stream than the model's own
            return _verified(opened, inputs, tolerance, seed)
    layers = tuple(
        LayerCheck(stack=one.layer[0], layer=block.index, error=check.error, tokens=check.tokens)
        for (block, one, _), check in zip(under_test, checks, strict=True)
        if check.tokens
    )
    if broken := [layer for layer in layers if not math.isfinite(layer.error)]:
        what = " ".join(["layer", str(broken[0].layer), *([f"of {broken[0].stack}"] if broken[0].stack else [])])
        raise NotLive(source.target, "verify", f"{what} returns values that are NaN or infinite")
    if not layers:
        raise NotLive(source.target, "verify", "its forward pass on example inputs reached no declared attention block")
    return Verification(
        provenance=provenance_of(source, stacks, log, compute_dtype="float64", seed=seed),
        tolerance=TOLERANCES.get(next(model.parameters()).dtype, TOLERANCE) if tolerance is None else tolerance,
        layers=layers,
        stream=stream,
    )


def _live(opened: OpenedModel, inputs: Mapping[str, Tensor] | None) -> LiveModel:
    """The model in memory; if no inputs can be made up for it, it is discovered on the given ones."""
    model = opened.module(verb="verify")
    if is_offloaded(model):
        raise NotLive(opened.source.target, "verify", "its weights are read block by block; give --no-offload")
    try:
        return opened.live(verb="verify")
    except NotDiscovered:
        if inputs is None:
            raise
    discovered(model, describe(model), inputs=inputs)
    return opened.live(verb="verify")


def _run(
    model: nn.Module,
    store: ModuleStore,
    stacks: Sequence[Stack],
    under_test: Sequence[Layered],
    batch: Mapping[str, Tensor],
    generator: torch.Generator,
) -> tuple[list[EqualTokenCheck], StreamCheck]:
    """One pass in which both identities are checked: equal tokens for the weights, the chain for the stream."""
    chain = Chain(model, stacks)
    with (
        quiet_eval(model),
        acting_merged(model),
        store.in_use() as tensors,
        prepared(under_test, store, generator) as checks,
        observed(stacks, store, lambda place, h: None, lambda name, stack: False) as restart,
        equal_tokens(tensors, checks),
        chain.watching(),
    ):
        restart(chain)
        chain.returned(call_model(model, batch))
    return checks, chain.found()


def _layers(stacks: Sequence[Stack], log: ReadLog) -> Iterator[Layered]:
    for stack in stacks:
        for position, block in enumerate(stack.names.blocks):
            one = awaited(stack.label, position, block, stack.heads(position), stack.arch)
            yield block, one, stack.weights(position, log.read)


# --- `discover`: the declaration of any model that runs ---


def discover(model: Target, inputs: Tensor | Mapping[str, Tensor] | None = None) -> Discovery:
    """Finds the value path of every attention in a model by running it, and proves it by running it again.

    `inputs` are one tensor, or tensors by the names of `forward`; made up from the config or the first layer where they
    are not given. What was found stays with the module, so that `inspect`, `measure` and the others use it; `archs` can be
    kept, edited and given to them as `arch=`. Of a checkpoint, a small model with the widths of its config is run. Raises
    `RefusedArchitecture`, naming the module in the way, if the theory covers none of the attention, and
    `NotDiscovered` if nothing was proved.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> found = osm.discover(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    >>> found.archs[0].paths.qkv, found.archs[0].residual
    ('self_attn.in_proj_*', 'post')
    """
    if isinstance(model, OpenedModel) and model.source.module is not None:
        model = model.source.module
    if isinstance(model, nn.Module):
        given = {"": inputs} if isinstance(inputs, Tensor) else inputs
        return discovered(model, describe(model), inputs=given)
    source = open_model(model).source
    config = source.config
    if (model_type := str(config.get("model_type"))) in REFUSED:
        raise RefusedArchitecture(f"{source.target} ({model_type})", REFUSED[model_type])
    found = discovered_on_disk(config)
    if found is None:
        words = "its config names no model that transformers or timm can build"
        raise NotDiscovered(source.target, words, "Build the model yourself and give it to osm.discover.")
    return found
