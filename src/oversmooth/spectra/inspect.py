"""`inspect`: weights only, a few blocks in memory at a time -> spectra, norm signs and what chance gives, layer by layer."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

import torch

from oversmooth.errors import UnknownName
from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.models.open import SourceKeywords, Target, open_model
from oversmooth.models.source import Stack, provenance_of
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import (
    Inspection,
    LayerInspection,
    Missing,
    NormFacts,
    Progress,
    Spectrum,
    StackFacts,
    guarded,
    no_progress,
)
from oversmooth.spectra.null import null_of
from oversmooth.spectra.spectrum import DENSE_UP_TO, DENSE_WITHOUT_ASKING, head_spectra
from oversmooth.spectra.spectrum import spectrum as solved
from oversmooth.spectra.value_map import ValueMap, bias_norm, folded_map, plain_map, value_norm_and_asymmetry

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
PRECISIONS = ("auto", *DTYPES)
SPECTRA = ("auto", "extremes", "full")
SIDE_BY_SIDE_BYTES = 640 * 2**20
"""Memory that layers computed at the same time may take together; wider layers come one after the other."""
TIE = 1e-5
"""Of `log rho_dc`: what float32 cannot tell from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpectrumOptions:
    """How much of the spectra is wanted."""

    kind: str
    """auto, extremes or full."""
    heads: bool

    @property
    def extremes(self) -> bool:
        return self.kind == "extremes"

    @property
    def full(self) -> bool:
        return self.kind == "full"

    def spectrum(self, value_map: ValueMap) -> Spectrum:
        return solved(value_map, full=self.full, only_extremes=self.extremes)


ROUNDED = 1e-6
"""Share of the largest weight of a norm up to which a weight below zero is zero, rounded."""


def inspect(
    target: Target,
    *,
    spectrum: str = "auto",
    heads: bool | None = None,
    precision: str = "auto",
    progress: Progress = no_progress,
    **opening: Unpack[SourceKeywords],
) -> Inspection:
    """Eigenvalues of the value map of every layer and head, plain and with the norms folded in, from weights alone.

    Reads only value, output, norm and gain tensors, block by block, and forgets a block when its numbers are known.
    With `spectrum="full"` every eigenvalue of wide layers is computed too; with "extremes" only those on the rim of the
    spectrum, certified by residuals, and of heads nothing unless `heads` asks for them. `precision` is float64 (default
    up to a core of 2048), float32, or auto. `model_type`, `n_heads` and `n_kv` say what a bare file does not; `base`
    names the model that an adapter is for, `revision` a commit of the hub; `arch` is a declaration in place of our own.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> osm.inspect(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)).layers[0].plain.size
    32
    """
    if precision not in PRECISIONS:
        raise UnknownName("precision", precision, PRECISIONS)
    if spectrum not in SPECTRA:
        raise UnknownName("spectrum", spectrum, SPECTRA)
    asked = SpectrumOptions(kind=spectrum, heads=spectrum != "extremes" if heads is None else heads)
    source = open_model(target, **opening).source
    stacks = source.stacks()
    log = ReadLog(source.store)
    log.announce(name for stack in stacks for block in stack.names.blocks for name in block)
    total = sum(len(stack.names.blocks) for stack in stacks)
    layers: list[LayerInspection] = []
    facts: list[StackFacts] = []
    dtypes: set[str] = set()
    for stack in stacks:

        def read(position: int, stack: Stack = stack) -> AttentionWeights:
            weights = stack.weights(position, log.read)
            if position == 0:
                facts.append(_stack_facts(stack, weights))
            return weights

        def compute(position: int, weights: AttentionWeights, stack: Stack = stack) -> LayerInspection:
            dtype = _compute_dtype(weights, precision, asked)
            dtypes.add(str(dtype).removeprefix("torch."))
            return _inspect_layer(stack, position, weights, dtype, asked)

        for layer in in_order(len(stack.names.blocks), read, compute):
            layers.append(layer)
            guarded(progress)(len(layers), total)
    return Inspection(
        provenance=provenance_of(source, stacks, log, compute_dtype=", ".join(sorted(dtypes))),
        stacks=tuple(facts),
        layers=tuple(layers),
        missing=tuple(Missing(field=name, reason=reason) for name, reason in source.left_out()),
    )


def in_order(
    count: int, read: Callable[[int], AttentionWeights], compute: Callable[[int, AttentionWeights], T]
) -> Iterator[T]:
    """What `compute` makes of each of `count` layers, in order; layers are read one by one and computed side by side.

    Eigenvalue routines gain little from a second thread and stall where its core is busy, so each layer has one thread
    to itself. Layers so wide that only one fits into `SIDE_BY_SIDE_BYTES` have all threads instead.
    """
    threads = torch.get_num_threads()
    first = read(0)
    at_once = min(count, threads, SIDE_BY_SIDE_BYTES // _working_bytes(first))
    if at_once < 2:
        yield compute(0, first)
        del first
        for position in range(1, count):
            yield compute(position, read(position))
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(at_once, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            pending = deque([pool.submit(compute, 0, first)])
            del first
            for position in range(1, count):
                if len(pending) == at_once:
                    yield pending.popleft().result()
                pending.append(pool.submit(compute, position, read(position)))
            while pending:
                yield pending.popleft().result()
    finally:
        torch.set_num_threads(threads)


def _working_bytes(weights: AttentionWeights) -> int:
    """About what one layer takes while it is computed in float64: two pairs of factors and a dozen square matrices."""
    channels = weights.core_width
    core = weights.d_model if weights.residual == "post" else min(weights.d_model, channels)
    return 8 * (4 * weights.d_model * channels + 12 * core * core)


def _compute_dtype(weights: AttentionWeights, wanted: str, asked: SpectrumOptions) -> torch.dtype:
    """float64 where all eigenvalues are computed; float32 is enough for extremes whose residuals are known."""
    if wanted in DTYPES:
        return DTYPES[wanted]
    core = min(weights.d_model, weights.core_width)
    is_dense = core <= (DENSE_WITHOUT_ASKING if asked.extremes else DENSE_UP_TO)
    return torch.float64 if is_dense or asked.full else torch.float32


def _inspect_layer(
    stack: Stack, position: int, weights: AttentionWeights, dtype: torch.dtype, asked: SpectrumOptions
) -> LayerInspection:
    block = stack.names.blocks[position]
    place: dict[str, Any] = {"stack": stack.label, "layer": block.index, "passes": stack.passes[position]}
    broken = _beyond_computing(stack, position, weights, dtype)
    if broken:
        return LayerInspection(**place, unreadable=broken, folding="")
    value_map = plain_map(weights, dtype)
    plain = asked.spectrum(value_map)
    norm, asymmetry = (None, None) if asked.extremes else value_norm_and_asymmetry(value_map)
    null = null_of(value_map, plain, norm, seed=block.index)
    found = folded_map(weights, dtype, value_map)
    del value_map  # the largest thing in memory
    folded, folding = None, "no norm is known for this layer"
    if found:
        folded, folding = asked.spectrum(found[0]), found[1]
        del found
    rho = (folded or plain).rho_dc
    missing = []
    if rho == 0.0:
        missing.append(Missing(field="tendency", reason="rho_dc is 0: the layer removes what all tokens share"))
    if asked.extremes:
        why = "only the extremes were asked for, and this costs more than they do"
        missing += [Missing(field=name, reason=why) for name in ("asymmetry", "value_norm")]
    elif asymmetry is None:
        missing.append(Missing(field="asymmetry", reason="H is zero"))
    if not weights.heads_known:
        missing.append(Missing(field="heads", reason="no config says how many heads there are; give --n-heads"))
    return LayerInspection(
        **place,
        plain=plain,
        folded=folded,
        folding=folding,
        tendency=_tendency(rho),
        null=null,
        asymmetry=asymmetry,
        value_norm=norm,
        bias_norm=bias_norm(weights, dtype),
        heads=head_spectra(weights, dtype) if asked.heads and weights.heads_known else (),
        norms=tuple(_norm_facts(role, norm_) for role, norm_ in weights.norms.items()),
        missing=tuple(missing),
    )


def _beyond_computing(stack: Stack, position: int, weights: AttentionWeights, dtype: torch.dtype) -> str | None:
    """Which tensor of the block holds NaN, infinity, or numbers whose fourth power overflows, in words."""
    largest = torch.finfo(dtype).max ** 0.25  # norms square what a product of two weights holds
    block = stack.names.blocks[position]
    tensors = {block.value.weight: weights.w_v, block.output.weight: weights.w_o}
    if block.latent is not None and weights.latent is not None:
        tensors |= {block.latent.weight: weights.latent.w}
    tensors |= {names.weight: weights.norms[role].weight for role, names in block.norms.items()}
    optional = {block.value.bias: weights.b_v, block.output.bias: weights.b_o, block.gain: weights.gain}
    tensors |= {name: tensor for name, tensor in optional.items() if name and tensor is not None}
    for name, tensor in tensors.items():
        known = tensor if tensor.dtype.itemsize > 1 else tensor.float()  # float8 has no order of its own
        bound = min(largest, torch.finfo(known.dtype).max)
        if not bool((torch.stack(torch.aminmax(known)).abs() <= bound).all()):  # both are NaN where one number is
            broken = known[~(known.abs() <= bound)]
            if bad := int((~torch.isfinite(broken)).sum()):
                return f"{name} holds {bad} values that are NaN or infinite"
            return f"{name} holds {len(broken)} values beyond {largest:.0e}, whose products overflow"
    return None


def _tendency(rho_dc: float) -> float | None:
    """`log rho_dc`; exactly 0 where only rounding keeps it from there, as wherever an eigenvalue of 0 dominates."""
    if rho_dc == 0.0:
        return None
    found = math.log(rho_dc)
    return found if abs(found) > TIE else 0.0


def _norm_facts(role: str, norm: Norm) -> NormFacts:
    weight = norm.weight.double()
    return NormFacts(
        role=role,
        kind=norm.kind,
        negative_share=(weight < -ROUNDED * weight.abs().max()).double().mean().item(),
        smallest=weight.min().item(),
        largest=weight.max().item(),
    )


def _stack_facts(stack: Stack, weights: AttentionWeights) -> StackFacts:
    known = weights.heads_known
    return StackFacts(
        name=stack.label,
        family=stack.arch.name,
        d_model=weights.d_model,
        n_heads=weights.n_heads if known else None,
        n_kv=weights.n_kv if known else None,
        d_head=weights.d_head if known else None,
        residual=stack.arch.residual,
        norm=stack.arch.norm,
        blocks=len(stack.names.blocks),
        blocks_in_model=stack.names.blocks_in_model,
        is_causal=stack.arch.is_causal,
        form=_form(weights),
    )


def _form(weights: AttentionWeights) -> str:
    """What is beyond plain attention, in words, and that weights alone do not show the gains of a token."""
    said = [] if weights.latent is None else [f"values from a latent of {weights.latent.w.shape[0]} channels"]
    words = {"gate": "gates", "sink": "sinks", "differential": "differences of attention"}
    at_one = [words[gain] for gain in weights.gains]
    if "inner_norm" in weights.norms:
        at_one.append("the scale of the norm on the mixed heads")
    if at_one:
        said.append(f"{' and '.join(at_one)} at gain one: only a running model shows them")
    return "; ".join(said)
