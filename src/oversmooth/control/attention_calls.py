"""Changing attention from outside, whatever code computes it, without ever forming what the model itself does not form.

While an attention module runs, a torch function mode watches the three calls that all implementations come down to:

    scaled_dot_product_attention    the product A V in one fused kernel; queries, keys, values and mask are its arguments
    softmax                         the probabilities A themselves, of `eager` implementations
    multi_head_attention_forward    nn.MultiheadAttention, which calls no submodules; done here, in the same steps

The mask comes from the call itself, so padding, causality, windows and biases are those of the model.
"""

import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oversmooth.control.eigenbasis import Heads
from oversmooth.errors import CannotControl, is_ours, user_code

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
MASKED_BELOW = torch.finfo(torch.float16).min / 2
"""Scores below this are masked: the smallest numbers of all float types are, and no real score is."""


_repeating = ContextVar("repeating", default=False)
"""Whether one intervention repeats a product, which another one that is applied as well then changes in the same way."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Visible:
    """Which keys each query may look at."""

    queries: int
    keys: int
    is_causal: bool = False
    mask: Bool[Tensor, "#batch #head #query #key"] | None = None
    """True where a query may look; `None` where only causality limits it."""

    def mean(self, x: Float[Tensor, "batch head key d"]) -> Float[Tensor, "batch head #query d"]:
        """`J x`: what attention that looks at all visible keys equally would return; row by row, with its own length."""
        if self.mask is not None:
            looks = self.mask.to(x.dtype)
            return (looks / looks.sum(-1, keepdim=True).clamp(min=1)) @ x
        if not self.is_causal:
            return x.mean(-2, keepdim=True)
        count = torch.arange(1, self.keys + 1, device=x.device)[:, None]
        above = torch.float32 if x.dtype.itemsize < 4 else x.dtype
        return (x.cumsum(-2, dtype=above) / count).to(x.dtype)[..., : self.queries, :]

    def matrix(self, like: Float[Tensor, "batch head query key"]) -> Float[Tensor, "#batch #head #query key"]:
        """J itself, for implementations that have the probabilities in memory anyway."""
        assert self.mask is not None, "of probabilities the mask is known"
        looks = self.mask.to(like.dtype)
        return looks / looks.sum(-1, keepdim=True).clamp(min=1)

    def of_tokens(self) -> "Visible":
        """The same for features that have no heads; all heads of a layer look at the same keys."""
        if self.mask is None or self.mask.shape[1] == 1:
            return self
        return Visible(queries=self.queries, keys=self.keys, mask=self.mask[:, :1])


def visible_in(mask: Tensor | None, queries: int, keys: int, is_causal: bool) -> Visible:
    """From the mask of a fused call: boolean, additive, or none."""
    if mask is None:
        return Visible(queries=queries, keys=keys, is_causal=is_causal)
    looks = mask if mask.dtype == torch.bool else mask > MASKED_BELOW
    return Visible(queries=queries, keys=keys, mask=looks[(None,) * (4 - looks.ndim)])


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class AttentionProduct:
    """One product of attention and values: `output = A values`, and `again(x) = A x`."""

    output: Float[Tensor, "batch head query d_head"]
    values: Float[Tensor, "batch head key d_head"]
    visible: Visible
    again: Callable[[Tensor], Tensor]

    def own_values(self, intervention: str) -> Float[Tensor, "batch head query d_head"]:
        """The value of each query's own token; needs as many keys as queries."""
        require_whole_sequences(intervention, self.visible)
        return self.values


def require_whole_sequences(intervention: str, visible: Visible) -> None:
    if visible.queries != visible.keys:
        found = f"{visible.queries} queries look at {visible.keys} keys"
        reason = f"it needs every token of a sequence at once, and {found} (a cache, or attention to something else)"
        raise CannotControl(intervention, "this forward pass", reason, "Run whole sequences with use_cache=False.")


# --- what every intervention is: a small module per layer that changes one step of attention or of the block ---


class FirstValues:
    """The values of a stack's first layer in the pass that is running."""

    def __init__(self) -> None:
        self.v: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"v": None}


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What a rule may need to know of the layer it is for."""

    heads: Heads
    kind: str = "text"
    depth: int = 1
    """How many layers run in the stack."""
    number: int = 1
    """Which block of the stack it is, counted from one."""
    is_first: bool = False
    first: FirstValues = field(default_factory=FirstValues)
    first_heads: Heads | None = None
    """Sizes of the stack's first layer, for rules that use its values."""


STEPS = ("seen", "read", "values", "product", "probabilities", "mixed", "projected")
"""What a rule can override."""


def _named(rule: str, step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def run(*given: Any, **named: Any) -> Any:
        with user_code(f"The intervention {rule!r}", step):
            return step(*given, **named)

    return run


class Rule(nn.Module):
    """An intervention on one layer. Steps that it does not override are not even looked at."""

    title: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    """What can be set."""
    passing: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold something of the pass that is running, which copies of the rule do not get."""

    def __init__(self, facts: LayerFacts):
        super().__init__()

    def __init_subclass__(cls, **more: Any) -> None:
        """Errors in the steps of a rule that is not ours name the rule."""
        super().__init_subclass__(**more)
        for name in STEPS if not is_ours(cls) else ():
            if name in vars(cls):
                setattr(cls, name, _named(cls.__name__, vars(cls)[name]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self.passing)}

    def taken(self, name: str) -> Any:
        """What the pass left in one of these attributes, which is empty afterwards."""
        value = getattr(self, name)
        setattr(self, name, None)
        assert value is not None, f"an earlier step of the pass sets {name}"
        return value

    @classmethod
    def refusal(cls, facts: LayerFacts) -> str | None:
        """Why the rule means nothing for a layer of such sizes; `None` where it does."""
        return None

    def seen(self, visible: Visible) -> None:
        """Which tokens see which, in the attention call that is running."""

    @property
    def temperature(self) -> float:
        """What the scores of attention are divided by."""
        return 1.0

    def read(self, x: Float[Tensor, "batch token d_model"]) -> None:
        """What the values are made from."""

    def values(self, v: Float[Tensor, "batch token kv d_head"]) -> Float[Tensor, "batch token kv d_head"]:
        return v

    def product(self, product: AttentionProduct) -> Float[Tensor, "batch head query d_head"]:
        return product.output

    def probabilities(
        self, attention: Float[Tensor, "batch head query key"], visible: Visible
    ) -> Float[Tensor, "batch head query key"]:
        return attention

    def mixed(self, o: Float[Tensor, "batch token head d_head"]) -> Float[Tensor, "batch token head d_head"]:
        return o

    def projected(self, y: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch token d_model"]:
        return y


# --- the calls ---


class Interception(TorchFunctionMode):
    """Hands the attention call of one attention module to an intervention; other functions pass."""

    def __init__(self, rule: Rule):
        super().__init__()
        self.rule = rule
        self.calls = 0
        self.is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.calls += not _repeating.get()
            return fused(self.rule, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            self.calls += 1
            return multi_head(self.rule, *args, **kwargs)
        found = func(*args, **kwargs)
        if func in SOFTMAX and args and args[0].ndim >= 3:
            self.calls += 1
            return eager(self.rule, args[0], found)
        return found


def fused(
    rule: Rule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fused attention, and what the intervention makes of it."""
    visible = visible_in(attn_mask, query.shape[-2], key.shape[-2], is_causal)
    rule.seen(visible)
    if rule.temperature != 1:
        query, attn_mask = query / rule.temperature, _tempered_mask(attn_mask, rule.temperature)
    heads = query.shape[1] if query.ndim == 4 else 1
    attend = partial(
        F.scaled_dot_product_attention,
        query,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )
    product = AttentionProduct(
        output=attend(key, value, enable_gqa=enable_gqa),
        values=_per_head(value, heads),
        visible=visible,
        again=partial(_again, attend, key, heads),
    )
    return rule.product(product)


def _tempered_mask(mask: Tensor | None, temperature: float) -> Tensor | None:
    """A bias of the scores is divided as they are; what masks stays what it is, so that no row becomes empty."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return torch.where(mask > MASKED_BELOW, mask / temperature, mask)


def _again(attend: Callable[..., Tensor], key: Tensor, heads: int, x: Tensor) -> Tensor:
    token = _repeating.set(True)
    try:
        return attend(_per_head(key, heads), x)
    finally:
        _repeating.reset(token)


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values once for every query head that reads them."""
    return x if x.ndim < 4 or x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def eager(rule: Rule, scores: Tensor, attention: Tensor) -> Tensor:
    """Probabilities that the model computed, and what the intervention makes of them."""
    shape = scores.shape
    flat = scores.reshape(-1, *shape[-3:]) if scores.ndim != 4 else scores
    visible = Visible(queries=shape[-2], keys=shape[-1], mask=flat > MASKED_BELOW)
    rule.seen(visible)
    return rule.probabilities(attention.reshape(flat.shape), visible).reshape(shape)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


def multi_head(rule: Rule, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` step by step, with the intervention between the steps."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    inputs = [call[name] for name in ("query", "key", "value")]
    is_batched = inputs[0].ndim == 3
    if not is_batched:
        inputs = [x[:, None] for x in inputs]
    heads = call["num_heads"]
    q, k, v = (
        (F.linear(x, weight, bias)).unflatten(-1, (heads, -1)).transpose(0, 1)  # (batch, token, head, d_head)
        for x, weight, bias in zip(inputs, *_projections(call), strict=True)
    )
    rule.read(inputs[2].transpose(0, 1))
    v = rule.values(v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = _additive_mask(call, q, k)
    attention = None
    dropout = call["dropout_p"] if call["training"] else 0.0
    if call["need_weights"]:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores if mask is None else scores + mask
        attention = eager(rule, scores, scores.softmax(-1))
        output = F.dropout(attention, dropout) @ v
    else:
        output = fused(rule, q, k, v, mask, dropout)
    y = F.linear(rule.mixed(output.transpose(1, 2)).flatten(2), call["out_proj_weight"], call["out_proj_bias"])
    y = rule.projected(y).transpose(0, 1)
    if attention is not None and call["average_attn_weights"]:
        attention = attention.mean(1)
    return (y, attention) if is_batched else (y[:, 0], None if attention is None else attention[0])


def _projections(call: dict[str, Any]) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    if call["use_separate_proj_weight"]:
        weights = (call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"])
    else:
        weights = call["in_proj_weight"].chunk(3)
    bias = call["in_proj_bias"]
    return weights, (None, None, None) if bias is None else bias.chunk(3)


def _additive_mask(call: dict[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
    """The masks of `nn.MultiheadAttention` as one, (batch, head, query, key) or broadcast to it."""
    found: Tensor | None = None
    for name in ("attn_mask", "key_padding_mask"):
        mask = call[name]
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
        if name == "key_padding_mask":
            mask = mask.reshape(-1, 1, 1, k.shape[-2])
        else:
            mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (q.shape[0], q.shape[1]))
        found = mask if found is None else found + mask
    return None if found is None else found.to(q.dtype)
