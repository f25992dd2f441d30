"""Recognising a normalization layer by what it does to numbers, whatever its class is called."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from oversmooth.models.declaration import NormKind, norm_centres, norm_offset
from oversmooth.models.norms import epsilon_of

if TYPE_CHECKING:
    from oversmooth.models.discovery.graph import Node
    from oversmooth.models.discovery.trace import Trace


KINDS: tuple[NormKind, ...] = ("layer", "rms", "layer+1", "rms+1")


@dataclass(frozen=True, slots=True)
class NormFacts:
    """What a norm does, and the names of its tensors inside its module; empty where it has none."""

    kind: NormKind
    weight: str
    bias: str
    epsilon: float


@dataclass(frozen=True, eq=False, slots=True)
class NormCall:
    """A norm ran: what it read and what it made."""

    path: str
    facts: NormFacts
    read: "Node"
    """What it reads, before it was moved."""
    made: "Node"
    shape: tuple[int, ...]
    """Of what it reads; smaller than `read` where it reads a part, such as one token."""
    codes: Tensor | None = None
    """Where each channel that it reads comes from, where that is one row of a weight."""


def classify(module: nn.Module, x: Tensor, y: Tensor) -> NormFacts | None:
    """The kind of norm that turns x into y, found by computing all of them; `None` where it is none."""
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    has_own_parts = any(True for child in module.children() for _ in child.parameters())
    if x.shape != y.shape or x.ndim < 2 or not x.numel() or len(parameters) > 2 or has_own_parts:
        return None
    if not parameters and "norm" not in type(module).__name__.lower():
        return None
    tensors = [getattr(module, name) for name in parameters]
    if tensors and x.ndim == 4 and tensors[0].shape == x.shape[1:2] != x.shape[-1:]:
        x, y = x.movedim(1, -1), y.movedim(1, -1)  # an image with its channels first
    if any(tensor.shape != x.shape[-1:] for tensor in tensors):
        return None
    weight = tensors[0] if tensors else None
    bias = tensors[1] if len(tensors) > 1 else None
    epsilon = epsilon_of(module)
    tolerance = 1e-4 if y.dtype in (torch.float32, torch.float64) else 3e-2
    sample, wanted = (t.detach().reshape(-1, x.shape[-1])[:64].double() for t in (x, y))
    for kind in KINDS:
        made = _normed(kind, sample, weight, bias, epsilon)
        if (made - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-12):
            names = [*parameters, "", ""]
            return NormFacts(kind, names[0], names[1], epsilon)
    return None


def _normed(kind: NormKind, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if norm_centres(kind) else x
    x = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    if weight is not None:
        x = x * (weight.detach().double() + norm_offset(kind))
    return x if bias is None else x + bias.detach().double()


def fused_norm(trace: "Trace", args: tuple[Any, ...], made: "Node", module: str) -> NormCall:
    """A LayerNorm called as a function, with the parameters that it was given."""
    names = [
        found.name.removeprefix(f"{module}.") if (found := trace.parameters.of(arg)) else ""
        for arg in (args[2], args[3])
        if isinstance(arg, Tensor)
    ]
    names = [*names, "", ""]
    facts = NormFacts("layer", names[0], names[1], float(args[4]))
    return NormCall(module, facts, trace.node(args[0]).root, made, tuple(args[0].shape))
