"""What would happen with another skip connection, norm, bias, H or attention: the same ladder on a changed layer.

A what-if is written as a name and its numbers, `scale:0.5`. It changes the layer, the attention, or both; the input
features stay those of the real model, so each row answers for one layer, not for a model trained that way.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.errors import BadValue, NotSupported, UnknownName
from oversmooth.models.canonical import AttentionWeights, Norm
from oversmooth.prediction.theory.layer import AttentionLayer

Attention = Float[Tensor, "head token token"]


# --- changed attention ----------------------------------------------------------------------------------------------


def uniform(attention: Attention) -> Attention:
    """J: every token looks equally at all tokens it may see."""
    ones = torch.ones_like(attention)
    if attention.shape[-1] > 1 and not bool(torch.triu(attention, diagonal=1).any()):
        ones = ones.tril()
    return ones / ones.sum(-1, keepdim=True)


def attn_scale(attention: Attention, w: float) -> Attention:
    """AttnScale, `J + (1 + w)(A - J)`: eigenvalues 1 and `(1 + w) l`."""
    j = uniform(attention)
    return j + (1 + w) * (attention - j)


def centred_attention(attention: Attention) -> Attention:
    """Centered attention, `A - J`: eigenvalues 0 and `l`."""
    return attention - uniform(attention)


def gfsa(attention: Attention, w0: float, w1: float, w_k: float, k: float = 4) -> Attention:
    """GFSA, `w0 I + w1 A + wK (A + (K - 1)(A^2 - A))`: the same polynomial of every eigenvalue."""
    eye = torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device)
    return w0 * eye + w1 * attention + w_k * (attention + (k - 1) * (attention @ attention - attention))


def feat_scale(attention: Attention, t1: float, t2: float) -> Attention:
    """FeatScale with one number per part, `(1 + t1) LC Y + (1 + t2) HC Y`, written as a change of attention.

    LC and HC are over all tokens of the sequence, later ones too.
    """
    shared = attention.mean(1, keepdim=True).expand_as(attention)
    return (1 + t1) * shared + (1 + t2) * (attention - shared)


# --- changed weights ------------------------------------------------------------------------------------------------


def with_interval(weights: AttentionWeights, low: float, high: float) -> AttentionWeights:
    """H replaced by `V diag(clip(psi, low, high)) V^T`: V from the value weights, psi the diagonal of H in it.

    Heads take slices of the basis, so that they decouple; heads that share values share the eigenvalue equally. The
    value bias keeps its effect on what all tokens share.
    """
    n_kv, d_head, group = weights.n_kv, weights.d_head, weights.n_heads // weights.n_kv
    values = weights.w_v.double().flatten(0, 1)
    shared = weights.w_o_shared.double().flatten(1)
    basis = torch.linalg.qr(values.T).Q
    psi = ((basis.T @ shared) * (values @ basis).T).sum(1).clamp(low, high)
    output = (basis * psi / group).unflatten(1, (n_kv, d_head))
    bias = weights.b_o
    if weights.b_v is not None:
        fed = shared @ weights.b_v.double().flatten()
        bias = fed if bias is None else bias.double() + fed
    return dataclasses.replace(
        weights,
        w_v=basis.T.unflatten(0, (n_kv, d_head)).contiguous(),
        w_o=output.repeat_interleave(group, 1),
        b_v=None,
        b_o=bias,
    )


def _with_norms(layer: AttentionLayer, change: Callable[[Tensor], Tensor]) -> AttentionLayer:
    norms = {
        role: Norm(kind=norm.kind, weight=change(norm.weight), bias=norm.bias)
        for role, norm in layer.weights.norms.items()
    }
    return dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, norms=norms))


def _scaled(layer: AttentionLayer, factor: float) -> AttentionLayer:
    gain = layer.weights.gain
    ones = torch.ones(layer.weights.d_model, dtype=layer.dtype, device=layer.weights.w_o.device)
    weights = dataclasses.replace(layer.weights, gain=factor * (ones if gain is None else gain.to(ones)))
    return dataclasses.replace(layer, weights=weights)


def _scaled_map(layer: AttentionLayer, factor: float) -> AttentionLayer:
    weights = layer.weights
    return dataclasses.replace(layer, weights=dataclasses.replace(weights, w_v=weights.w_v.to(layer.dtype) * factor))


# --- by name --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WhatIf:
    """One change, ready to be made."""

    name: str
    """As it was asked for."""
    layer: Callable[[AttentionLayer], AttentionLayer]
    attention: Callable[[Attention], Attention]
    keeps_operator: bool = False
    """Whether rungs 0 to 3 stay as they are."""
    why_not: Callable[[AttentionLayer], str | None] = lambda layer: None
    """Why the change means nothing for a layer; `None` where it does."""


def _same(value):  # type: ignore[no-untyped-def]  # a layer or an attention, returned as it is
    return value


def _no_norm_on_branch(layer: AttentionLayer) -> str | None:
    if layer.norm_before is None and layer.norm_on_branch is None:
        return "no norm acts on the branch; after the sum, a change of all signs changes no modulus"
    return None


def _too_many_channels(layer: AttentionLayer) -> str | None:
    if layer.plain.channels > layer.weights.d_model:
        return "there are more value channels than features, so that they have no orthonormal basis"
    return None


Builder = Callable[..., WhatIf]


def _attention_only(function: Callable[..., Attention]) -> Builder:
    return lambda name, *numbers: WhatIf(name=name, layer=_same, attention=lambda a: function(a, *numbers))


def _layer_only(
    change: Callable[..., AttentionLayer], why_not: Callable[[AttentionLayer], str | None] | None
) -> Builder:
    def build(name: str, *numbers: float) -> WhatIf:
        reason = why_not if why_not is not None else (lambda layer: None)
        return WhatIf(name=name, layer=lambda layer: change(layer, *numbers), attention=_same, why_not=reason)

    return build


def _feat_scale(name: str, t1: float, t2: float) -> WhatIf:
    def change(layer: AttentionLayer) -> AttentionLayer:
        bias = layer.weights.b_o  # a part of Y that all tokens share, so that it is scaled with LC
        if bias is None:
            return layer
        return dataclasses.replace(layer, weights=dataclasses.replace(layer.weights, b_o=(1 + t1) * bias))

    def why_not(layer: AttentionLayer) -> str | None:
        return "a norm on the branch undoes it in part" if layer.norm_on_branch is not None else None

    return WhatIf(name=name, layer=change, attention=lambda a: feat_scale(a, t1, t2), why_not=why_not)


def _no_biases(name: str) -> WhatIf:
    return WhatIf(
        name=name,
        layer=lambda layer: dataclasses.replace(layer, has_biases=False),
        attention=_same,
        keeps_operator=True,
    )


def _interval(layer: AttentionLayer, low: float, high: float) -> AttentionLayer:
    return dataclasses.replace(layer, weights=with_interval(layer.weights, low, high))


WHAT_IFS: dict[str, tuple[str, Builder, int, int]] = {
    "no_skip": ("", _layer_only(lambda layer: dataclasses.replace(layer, skip=0.0), None), 0, 0),
    "flip_norms": ("", _layer_only(lambda layer: _with_norms(layer, torch.neg), _no_norm_on_branch), 0, 0),
    "positive_norms": ("", _layer_only(lambda layer: _with_norms(layer, torch.abs), _no_norm_on_branch), 0, 0),
    "no_biases": ("", _no_biases, 0, 0),
    "scale": ("FACTOR", _layer_only(_scaled_map, None), 1, 1),
    "interval": ("LOW,HIGH", _layer_only(_interval, _too_many_channels), 2, 2),
    "layerscale": ("GAIN", _layer_only(_scaled, None), 1, 1),
    "residual_scaling": ("LAYERS", _layer_only(lambda layer, count: _scaled(layer, count**-0.5), None), 1, 1),
    "attnscale": ("W", _attention_only(attn_scale), 1, 1),
    "featscale": ("T1,T2", _feat_scale, 2, 2),
    "centered": ("", _attention_only(centred_attention), 0, 0),
    "gfsa": ("W0,W1,WK[,K]", _attention_only(gfsa), 3, 4),
}
"""Name to what follows it, how it is built, and how few and how many numbers it takes."""

OUTSIDE = {
    "neutreno": "it adds a source term from layer 0",
    "value_residual": "it adds a source term from layer 0",
    "contranorm": "its mixing depends on the features at every step",
}
"""Interventions that are outside the eigenvalue picture: they can only be measured."""


def what_if(text: str) -> WhatIf:
    """The change that `name` or `name:numbers` asks for; raises on an unknown name and on wrong numbers."""
    name, _, rest = text.strip().partition(":")
    name = name.lower().replace("-", "_")
    if name in OUTSIDE:
        advice = f"Apply it and measure: osm.apply(model, {name!r}), then osm.measure(model)."
        raise NotSupported(name, "as a what-if", f"{OUTSIDE[name]}, so its spectrum is not known", advice)
    if name not in WHAT_IFS:
        raise UnknownName("what-if", name, tuple(WHAT_IFS))
    form, build, fewest, most = WHAT_IFS[name]
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError as error:
        raise BadValue("what_if", text, f"{name}:{form}, with numbers") from error
    if not fewest <= len(numbers) <= most or not all(map(math.isfinite, numbers)):
        raise BadValue("what_if", text, f"{name}:{form}" if form else f"{name} alone")
    if name == "residual_scaling" and numbers[0] < 1:
        raise BadValue("what_if", text, "residual_scaling:LAYERS with at least one layer")
    if name == "interval" and numbers[0] > numbers[1]:
        raise BadValue("what_if", text, "interval:LOW,HIGH with LOW <= HIGH")
    return build(text.strip(), *numbers)
