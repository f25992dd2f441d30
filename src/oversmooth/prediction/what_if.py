"""What would happen with another skip connection, norm, bias, H or attention: the same ladder on a changed layer.

A what-if is written as a name and its numbers, `scale:0.5`. It changes the layer, the attention, or both, by the very
formulas that `constrain`, `edit` and `apply` use; the input features stay those of the real model, so each row answers
for one layer, not for a model trained that way.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oversmooth.control import interventions as formulas
from oversmooth.control.interventions import Attention
from oversmooth.control.parametrizations import SIGNED_NORMS, flipped_norm
from oversmooth.control.projection import EigenvalueForm, kept_weights
from oversmooth.errors import BadValue, NotSupported, UnknownName
from oversmooth.prediction.operator import AttentionLayer, LayerOperator

# --- changed attention ----------------------------------------------------------------------------------------------


def attn_scale(attention: Attention, w: float) -> Attention:
    return formulas.attnscale(attention, formulas.uniform_attention(attention), attention.new_tensor(w))


def centred_attention(attention: Attention) -> Attention:
    return formulas.centered(attention, formulas.uniform_attention(attention))


def gfsa(attention: Attention, w0: float, w1: float, w_k: float, k: float = 4) -> Attention:
    eye = torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device)
    weights = (attention.new_tensor(w0), attention.new_tensor(w1), attention.new_tensor(w_k))
    return formulas.gfsa(eye, attention, attention @ attention, *weights, order=k)


def feat_scale(attention: Attention, t1: float, t2: float) -> Attention:
    """FeatScale with one number per part, written as a change of attention: `LC Y = J Y = (J A) V`."""
    common = formulas.uniform_attention(attention) @ attention
    return formulas.featscale(attention, common, attention.new_tensor(t1), attention.new_tensor(t2))


def differential(attention: Attention, share: float) -> Attention:
    return formulas.differential(attention, formulas.partners(attention, 0), attention.new_tensor(share))


# --- changed weights ------------------------------------------------------------------------------------------------


def _with_norms(
    layer: AttentionLayer, change: Callable[[Tensor], Tensor], roles: Sequence[str] = SIGNED_NORMS
) -> AttentionLayer:
    norms = {
        role: replace(norm, weight=change(norm.weight)) if role in roles else norm
        for role, norm in layer.weights.norms.items()
    }
    return _with_weights(layer, norms=norms)


def _with_weights(layer: AttentionLayer, **changes: Any) -> AttentionLayer:
    return replace(layer, weights=replace(layer.weights, **changes))


def _scaled(layer: AttentionLayer, factor: float) -> AttentionLayer:
    gain = layer.weights.gain
    ones = torch.ones(layer.weights.d_model, dtype=layer.dtype, device=layer.weights.w_o.device)
    return _with_weights(layer, gain=factor * (ones if gain is None else gain.to(ones)))


# --- by name --------------------------------------------------------------------------------------------------------


def _same(value):  # type: ignore[no-untyped-def]  # a layer or an attention, returned as it is
    return value


def _applies(layer: AttentionLayer) -> str | None:
    return None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class WhatIf:
    """One change, ready to be made."""

    name: str
    """As it was asked for."""
    layer: Callable[[AttentionLayer], AttentionLayer] = _same
    attention: Callable[[Attention], Attention] = _same
    operator: Callable[[AttentionLayer, LayerOperator], LayerOperator | None] = lambda layer, operator: None
    """What the change makes of the layer's operator where it only shifts or scales it, so that its eigenvalues can be
    read where those of the layer as it is are found; `None` elsewhere."""
    why_not: Callable[[AttentionLayer], str | None] = _applies
    """Why the change means nothing for a layer; `None` where it does."""


def _no_norm_on_branch(layer: AttentionLayer) -> str | None:
    if layer.norm_before is None and layer.norm_on_branch is None:
        return "no norm acts on the branch; after the sum, a change of all signs changes no modulus"
    return None


def _no_guarantee(layer: AttentionLayer) -> str | None:
    if layer.weights.beyond_plain is not None:
        return f"{layer.weights.beyond_plain}, which the guarantee of an interval does not cover"
    if layer.plain.channels > layer.weights.d_model:
        return "there are more value channels than features, so that they have no orthonormal basis"
    return None


def _no_pairs(layer: AttentionLayer) -> str | None:
    group = layer.weights.n_heads // layer.weights.n_kv
    return None if group % 2 == 0 else f"each value head is read by {group} heads, which do not go in pairs"


Builder = Callable[..., WhatIf]


def _attention_only(
    function: Callable[..., Attention], why_not: Callable[[AttentionLayer], str | None] = _applies
) -> Builder:
    return lambda name, *numbers: WhatIf(name=name, attention=lambda a: function(a, *numbers), why_not=why_not)


def _layer_only(
    change: Callable[..., AttentionLayer],
    operator: Callable[..., LayerOperator | None] = lambda layer, operator, *numbers: None,
    why_not: Callable[[AttentionLayer], str | None] = _applies,
) -> Builder:
    def build(name: str, *numbers: float) -> WhatIf:
        return WhatIf(
            name=name,
            layer=lambda layer: change(layer, *numbers),
            operator=lambda layer, found: operator(layer, found, *numbers),
            why_not=why_not,
        )

    return build


def _times(operator: LayerOperator, factor: float) -> LayerOperator | None:
    return replace(operator, scale=operator.scale / factor) if factor else None


def _feat_scale(name: str, t1: float, t2: float) -> WhatIf:
    def change(layer: AttentionLayer) -> AttentionLayer:
        bias = layer.weights.b_o  # a part of Y that all tokens share, so that it is scaled with LC
        return layer if bias is None else _with_weights(layer, b_o=(1 + t1) * bias)

    def why_not(layer: AttentionLayer) -> str | None:
        return "a norm on the branch undoes it in part" if layer.norm_on_branch is not None else None

    return WhatIf(name=name, layer=change, attention=lambda a: feat_scale(a, t1, t2), why_not=why_not)


def _layernorm_scaling(name: str, number: float) -> WhatIf:
    """Values, queries and keys are all made from what the norm gives, so that scores are divided by `sqrt(l)` twice.

    Exact where queries and keys are linear in it: biases, norms and positions of their own are taken for small.
    """

    def change(layer: AttentionLayer) -> AttentionLayer:
        norm = layer.weights.norms["attn_norm"]
        bias = None if norm.bias is None else formulas.layernorm_scaling(norm.bias, number)
        scaled = replace(norm, weight=formulas.layernorm_scaling(norm.weight, number), bias=bias)
        return _with_weights(layer, norms={**layer.weights.norms, "attn_norm": scaled})

    def why_not(layer: AttentionLayer) -> str | None:
        return "no norm stands before its attention" if layer.norm_before is None else None

    return WhatIf(name=name, layer=change, attention=lambda a: formulas.tempered(a, number), why_not=why_not)


def _interval(name: str, low: float, high: float) -> WhatIf:
    """What `edit` with this interval would write, and `constrain` would start from."""
    form = EigenvalueForm(low=low, high=high)

    def change(layer: AttentionLayer) -> AttentionLayer:
        return replace(layer, weights=kept_weights(layer.weights, form))

    return WhatIf(name=name, layer=change, why_not=_no_guarantee)


WHAT_IFS: dict[str, tuple[str, Builder]] = {
    "no_skip": (
        "",
        _layer_only(lambda layer: replace(layer, skip=0.0), lambda layer, operator: replace(operator, skip=0.0)),
    ),
    "flip_norms": (
        "",
        _layer_only(
            lambda layer: _with_norms(layer, torch.neg, (flipped_norm(layer.weights.norms),)),
            lambda layer, operator: _times(operator, -1.0),
            _no_norm_on_branch,
        ),
    ),
    "positive_norms": ("", _layer_only(lambda layer: _with_norms(layer, torch.abs), why_not=_no_norm_on_branch)),
    "no_biases": ("", _layer_only(lambda layer: replace(layer, has_biases=False), lambda layer, operator: operator)),
    "scale": (
        "FACTOR",
        _layer_only(
            lambda layer, factor: _with_weights(layer, w_v=layer.weights.w_v.to(layer.dtype) * factor),
            # A norm on the branch would divide the factor out again.
            lambda layer, operator, factor: None if layer.norm_on_branch is not None else _times(operator, factor),
        ),
    ),
    "interval": ("LOW,HIGH", _interval),
    "layerscale": ("GAIN", _layer_only(_scaled, lambda layer, operator, gain: _times(operator, gain))),
    "residual_scaling": (
        "LAYERS",
        _layer_only(
            lambda layer, count: _scaled(layer, count**-0.5),
            lambda layer, operator, count: _times(operator, count**-0.5),
        ),
    ),
    "attnscale": ("W", _attention_only(attn_scale)),
    "featscale": ("T1,T2", _feat_scale),
    "centered": ("", _attention_only(centred_attention)),
    "gfsa": ("W0,W1,WK[,K]", _attention_only(gfsa)),
    "layernorm_scaling": ("LAYER", _layernorm_scaling),
    "tempscale": ("T", _attention_only(formulas.tempered)),
    "differential": ("SHARE", _attention_only(differential, _no_pairs)),
    "gate": ("GAIN", _attention_only(formulas.gate)),
}
"""Name to the numbers that follow it, those in brackets optional, and how it is built."""

RANGES: dict[str, tuple[Callable[..., bool], str]] = {
    "residual_scaling": (lambda layers: layers >= 1, "LAYERS with at least one layer"),
    "layernorm_scaling": (lambda layer: layer >= 1, "LAYER, counted from 1"),
    "tempscale": (lambda t: t > 0, "T with a temperature above 0"),
    "differential": (lambda share: 0 <= share <= 1, "SHARE with a number from 0 to 1"),
    "interval": (lambda low, high: low < high, "LOW,HIGH with LOW < HIGH"),
}
"""Which numbers a what-if takes, and how that is said."""

OUTSIDE = {
    "neutreno": "it adds a source term from layer 0",
    "value_residual": "it adds a source term from layer 0",
    "contranorm": "its mixing depends on the features at every step",
    "exclusive": "what it takes off depends on the values of every token",
}
"""Interventions that are outside the eigenvalue picture: they can only be measured."""


def counts(form: str) -> tuple[int, int]:
    """How few and how many numbers follow a what-if.

    >>> counts(""), counts("LOW,HIGH"), counts("W0,W1,WK[,K]")
    ((0, 0), (2, 2), (3, 4))
    """
    needed, _, optional = form.partition("[")
    fewest = len(needed.split(",")) if needed else 0
    return fewest, fewest + optional.count(",")


def what_if(text: str) -> WhatIf:
    """The change that `name` or `name:numbers` asks for; raises on an unknown name and on wrong numbers."""
    name, _, rest = text.strip().partition(":")
    name = name.lower().replace("-", "_")
    if name in OUTSIDE:
        advice = f"Apply it and measure: osm.apply(model, {name!r}), then osm.measure(model)."
        raise NotSupported(name, "as a what-if", f"{OUTSIDE[name]}, so its spectrum is not known", advice)
    if name not in WHAT_IFS:
        raise UnknownName("what-if", name, tuple(WHAT_IFS))
    form, build = WHAT_IFS[name]
    fewest, most = counts(form)
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
    except ValueError as error:
        raise BadValue("what_if", text, f"{name}:{form}, with numbers") from error
    if not fewest <= len(numbers) <= most or not all(map(math.isfinite, numbers)):
        raise BadValue("what_if", text, f"{name}:{form}" if form else f"{name} alone")
    if name in RANGES and not RANGES[name][0](*numbers):
        raise BadValue("what_if", text, f"{name}:{RANGES[name][1]}")
    return build(text.strip(), *numbers)
