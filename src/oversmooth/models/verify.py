"""`verify`: the equal-token identity, which a wrong layout, transposition, head order or bias cannot pass.

Rows of softmax attention sum to one. When the value projection sees the same vector x at every position, attention
returns exactly `W_O W_V x` plus biases, whatever the mask, the positions, the queries and the keys. One forward pass
checks the canonical weights of every block against the model itself (`discovery/proof.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from oversmooth.errors import AdapterMismatch, NotLive
from oversmooth.models.discovery.known import known_inputs
from oversmooth.models.discovery.proof import Layered, equal_tokens, prepared
from oversmooth.models.examples import examples
from oversmooth.models.hooks.attention_maps import awaited
from oversmooth.models.live import call_model, load_model, quiet_eval
from oversmooth.models.offload import is_offloaded
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Declaration, Stack, Target
from oversmooth.models.stores.adapters import acting_merged
from oversmooth.models.stores.elsewhere import device_of
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import LayerCheck, Verification

TOLERANCE = 1e-4
"""Largest relative deviation that float32 models show; a wrong layout is off by about 1."""
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""What rounding alone explains in models that run in half precision."""


def verify(
    target: Target,
    *,
    inputs: Mapping[str, Tensor] | None = None,
    base: str | None = None,
    model_type: str | None = None,
    arch: Declaration | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Verification:
    """Checks the declaration of a family against a live model by the equal-token identity; `passed` says whether it fits.

    Every value projection is fed one vector at all positions, so attention must return `W_O (W_V x + b_V) + b_O`, whatever
    its mask, queries and keys; with the factors that gates, sinks and norms on heads show in that pass. `inputs` are those
    of one forward pass, made up where they are not given. A declaration that does not fit is a result here, not an error.
    """
    source = open_source(target, model_type=model_type, arch=arch, base=base)
    for stack in source.stacks() if source.module is None else ():
        stack.weights(0, source.store.read)  # what is refused or contradicts itself is said before anything is loaded
    model = load_model(source, "verify", trust_remote_code=trust_remote_code)
    if is_offloaded(model):
        raise NotLive(source.target, "verify", "its weights are read block by block; give --no-offload")
    live = open_source(model, model_type=model_type, arch=arch)
    assert isinstance(live.store, ModuleStore)
    generator = torch.Generator().manual_seed(seed)
    stacks, log = live.stacks(), ReadLog(live.store)
    if inputs is None:
        inputs = known_inputs(model) or next(examples(model, live.config, seed))
    device = device_of(model)
    batch = {name: value.to(device) for name, value in inputs.items()}
    under_test = list(_layers(stacks, log))
    with (
        quiet_eval(model),
        acting_merged(model),
        live.store.in_use() as tensors,
        prepared(under_test, live.store, generator) as checks,
        equal_tokens(tensors, checks),
    ):
        call_model(model, batch)
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
    )


def require_fit(verification: Verification) -> None:
    """Raises `AdapterMismatch` when the equal-token identity fails anywhere."""
    if not verification.passed:
        worst = max(verification.layers, key=lambda layer: layer.error)
        raise AdapterMismatch(
            ", ".join(verification.provenance.families),
            f"the equal-token identity to {verification.tolerance:g}",
            f"a deviation of {worst.error:.3g} in layer {worst.layer}",
        )


def _layers(stacks: Sequence[Stack], log: ReadLog) -> Iterator[Layered]:
    for stack in stacks:
        for position, block in enumerate(stack.names.blocks):
            one = awaited(stack.label, position, block, stack.heads(position), stack.arch)
            yield block, one, stack.weights(position, log.read)
