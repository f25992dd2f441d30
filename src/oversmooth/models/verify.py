"""`verify`: the equal-token identity, which a wrong layout, transposition, head order or bias cannot pass.

Rows of softmax attention sum to one. When the value projection sees the same vector x at every position, attention
returns exactly `W_O W_V x` plus biases, whatever the mask, the positions, the queries and the keys. Two hooks on an
ordinary forward pass check the canonical weights of every block against the model itself.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.errors import AdapterMismatch, NotLive
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.inputs import example_inputs
from oversmooth.models.live import load_model, quiet_eval, run
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Stack, Target
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
    model_type: str | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Verification:
    """Checks the declaration of a family against a live model by the equal-token identity; `passed` says whether it fits.

    Every value projection is fed one vector at all positions, so attention must return `W_O (W_V x + b_V) + b_O`, whatever
    its mask, queries and keys. `inputs` are those of one forward pass, made up where they are not given. A declaration
    that does not fit is a result here, not an error.
    """
    source = open_source(target, model_type=model_type)
    for stack in source.stacks() if source.module is None else ():
        stack.weights(0, source.store.read)  # what is refused or contradicts itself is said before anything is loaded
    model = load_model(source, "verify", trust_remote_code=trust_remote_code)
    live = open_source(model, model_type=model_type)
    assert isinstance(live.store, ModuleStore)
    generator = torch.Generator().manual_seed(seed)
    batch = dict(inputs) if inputs is not None else example_inputs(model, live.config, generator)
    device = next(model.parameters()).device
    batch = {name: value.to(device) for name, value in batch.items()}
    stacks, log = live.stacks(), ReadLog(live.store)
    checks = [check for stack in stacks for check in _prepare(stack, live.store, log, generator)]
    with quiet_eval(model), _hooked(checks):
        run(model, batch)
    if broken := [check for check in checks if not math.isfinite(check.error)]:
        what = " ".join(["layer", str(broken[0].index), *([f"of {broken[0].label}"] if broken[0].label else [])])
        raise NotLive(source.target, "verify", f"{what} returns values that are NaN or infinite")
    layers = tuple(check.result() for check in checks if check.tokens)
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


def value_map(weights: AttentionWeights, x: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
    """What attention returns when every token is x: `W_O (W_V x + b_V) + b_O`, in float64."""
    value = weights.w_v.double() @ x.double()
    if weights.b_v is not None:
        value = value + weights.b_v.double()
    output = torch.einsum(
        "dhk,hk->d", weights.w_o.double(), value.repeat_interleave(weights.n_heads // weights.n_kv, 0)
    )
    return output if weights.b_o is None else output + weights.b_o.double()


class _Check:
    """One block under test: gives its value projection equal tokens and compares what its output projection returns."""

    def __init__(self, stack: Stack, position: int, weights: AttentionWeights, store: ModuleStore, token: Tensor):
        block = stack.names.blocks[position]
        self.label, self.index = stack.label, block.index
        self.entry = store.owner(block.value.weight)
        is_torch_attention = isinstance(self.entry, nn.MultiheadAttention)  # it calls no submodule of its own
        self.exit = self.entry if is_torch_attention else store.owner(block.output.weight)
        self.token = token
        self.expected = value_map(weights, token.to(weights.w_v.device)).cpu()
        self.error, self.tokens = 0.0, 0

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(self._equal(arg) for arg in args), {
            name: self._equal(arg) if name in ("query", "key", "value", "hidden_states", "input") else arg
            for name, arg in kwargs.items()
        }

    def _equal(self, arg: Any) -> Any:
        is_features = isinstance(arg, Tensor) and arg.is_floating_point() and arg.shape[-1:] == self.token.shape
        return self.token.to(arg).expand_as(arg) if is_features else arg

    def after(self, module: nn.Module, args: object, output: Any) -> None:
        seen = (output[0] if isinstance(output, tuple) else output).detach().reshape(-1, len(self.expected))
        deviation = (seen.double().cpu() - self.expected).abs().max().item()
        relative = deviation / max(self.expected.abs().max().item(), 1e-30)
        self.error = max(self.error, relative if math.isfinite(relative) else math.inf)  # max() would drop a NaN
        self.tokens = max(self.tokens, len(seen))

    def result(self) -> LayerCheck:
        return LayerCheck(stack=self.label, layer=self.index, error=self.error, tokens=self.tokens)


def _prepare(stack: Stack, store: ModuleStore, log: ReadLog, generator: torch.Generator) -> Iterator[_Check]:
    for position in range(len(stack.names.blocks)):
        weights = stack.weights(position, log.read)
        yield _Check(stack, position, weights, store, torch.randn(weights.d_model, generator=generator))


@contextmanager
def _hooked(checks: list[_Check]) -> Iterator[None]:
    handles = []
    try:
        for check in checks:
            handles.append(check.entry.register_forward_pre_hook(check.before, with_kwargs=True))
            handles.append(check.exit.register_forward_hook(check.after))
        yield
    finally:
        for handle in handles:
            handle.remove()
