"""Attention probabilities of a running model, one layer and sequence at a time.

While the model runs, a torch function mode watches three functions:

    scaled_dot_product_attention    transformers' `sdpa`, timm's fused attention, torch
    softmax                         every `eager` implementation
    multi_head_attention_forward    nn.MultiheadAttention

It takes only the next call after a declared block's value projection has run, so cross-attention and routers are never
mistaken for self-attention. The model computes what it always computes. Of the fused kernel, queries and keys are kept, and
the probabilities of one sequence are computed from them on demand.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from oversmooth.errors import NoAttentionMaps
from oversmooth.models.canonical import TokenGains
from oversmooth.models.declaration import Arch
from oversmooth.models.hooks.places import hooked
from oversmooth.models.identify import BlockNames
from oversmooth.models.stores.module import ModuleStore

if TYPE_CHECKING:
    from oversmooth.models.source import Stack


# --- the functions that compute attention, called as always ---

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)

Watched = tuple[Any, Callable[[int], Tensor] | None]


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None) -> Watched:
    """Softmax over the keys of scores (batch, head, query, key); anything else is not attention."""
    output = func(*args, **kwargs)
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    is_over_keys = dim in (-1, scores.ndim - 1) and min(scores.shape[-2:]) > 0
    return output, maps_of(output, heads) if is_over_keys else None


def maps_of(probabilities: Tensor, heads: int | None) -> Callable[[int], Tensor] | None:
    """Probabilities of (batch, head, query, key), or of (batch x head, query, key) with a known number of heads."""
    if probabilities.ndim == 3 and heads and len(probabilities) % heads == 0:
        probabilities = probabilities.unflatten(0, (-1, heads))
    return (lambda sequence: probabilities[sequence].detach()) if probabilities.ndim == 4 else None


def _fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None) -> Watched:
    """The fused kernel: keeps queries, keys and mask; the kernel itself runs as always."""
    output = func(*args, **kwargs)
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("dropout_p"):
        return output, lambda sequence: torch.full((1, 1, 1), math.nan)
    query, key, mask = given["query"], given["key"], given.get("attn_mask")
    if query.ndim == 3:  # one sequence without a batch, or heads merged into it
        if heads is None or len(query) % heads:
            return output, None
        query, key = (part.unflatten(0, (-1, heads)) for part in (query, key))
        mask = mask.unflatten(0, (-1, heads)) if mask is not None and len(mask) == len(output) else mask

    def of_sequence(sequence: int) -> Tensor:
        return _probabilities(
            query[sequence],
            key[sequence],
            mask=None if mask is None else mask.expand(len(query), *mask.shape[-3:])[sequence],
            is_causal=bool(given.get("is_causal")),
            scale=given.get("scale"),
        )

    return output, of_sequence if query.ndim == 4 else None


def _probabilities(
    q: Float[Tensor, "head query d_head"],
    k: Float[Tensor, "kv key d_head"],
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Float[Tensor, "head query key"]:
    """`softmax(q k^T scale + mask)` in float32 or better; a mask of booleans says what is seen."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k = q.detach().to(dtype), k.detach().to(dtype)
    if len(q) > len(k):
        k = k.repeat_interleave(len(q) // len(k), 0)
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.to(scores)
    return scores.softmax(-1)


def _multi_head(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], heads: int | None) -> Watched:
    """nn.MultiheadAttention: requests the weights of every head, and returns what the caller requested."""
    call = inspect.signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    wanted, averaged = call.arguments["need_weights"], call.arguments["average_attn_weights"]
    is_batched = call.arguments["query"].ndim == 3
    call.arguments |= {"need_weights": True, "average_attn_weights": False}
    output, weights = func(*call.args, **call.kwargs)
    by_sequence = weights if is_batched else weights[None]
    shown = (weights.mean(-3) if averaged else weights) if wanted else None
    return (output, shown), lambda sequence: by_sequence[sequence].detach()


WATCHED: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any], int | None], Watched]] = {
    F.scaled_dot_product_attention: _fused,
    F.multi_head_attention_forward: _multi_head,
    **dict.fromkeys(SOFTMAX, _softmax),
}


# --- the attention that a layer showed while the model ran, one sequence at a time ---

ROW_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far the sum of a row may be from one; half precision rounds each entry, so there it is 1e-2."""


@dataclass(frozen=True, eq=False, slots=True)
class Written:
    """What multiplied the mixed heads of one layer, for one batch."""

    before: Float[Tensor, "batch token inner"]
    after: Float[Tensor, "batch token inner"] | None = None
    """Behind a norm on the mixed heads."""
    subtracted: Tensor | None = None
    """Of differential attention: the factor of the attention that is subtracted."""

    def of(self, sequence: int, heads: int) -> TokenGains:
        after = None if self.after is None else self.after[sequence].unflatten(-1, (heads, -1))
        return TokenGains(self.before[sequence].unflatten(-1, (heads, -1)), after)


@dataclass(frozen=True, eq=False, slots=True)
class AttentionMaps:
    """The attention of one layer for one batch, computed for one sequence at a time."""

    layer: str
    """Which layer it is, in words."""
    of_sequence: Callable[[int], Float[Tensor, "head token key"]]
    written: Written | None = None
    """The gains of the tokens that are written, where the family has any."""
    has_sink: bool = False
    """Whether the family has a learned sink, which takes a part of every row."""

    def seen(
        self, sequence: int, keep: Bool[Tensor, " token"], dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "head kept kept"], TokenGains | None]:
        """Attention between the kept tokens, every head's rows with one sum, and the gains of what each token writes.

        What a sink leaves of a row is such a gain. Heads of differential attention have the sum `1 - lambda`.
        """
        if self.written is None:
            return self.of(sequence, keep, dtype), None
        if self.written.subtracted is not None:
            both = self.of(sequence, keep, dtype)
            attention, sums = _difference(self.layer, both, self.written.subtracted), None
        else:
            kept, tolerance = self._kept(sequence, keep, dtype)
            sums = kept.sum(-1)
            if not bool(((sums > 0) & (sums <= 1 + tolerance)).all()):
                raise NoAttentionMaps(self.layer, "rows that sum to nothing or to more than one", "Check the mask.")
            attention = kept / sums[..., None]
        gains = self.written.of(sequence, len(attention)).of(keep, dtype)
        return attention, gains if sums is None else gains.times(sums)

    def all_gains(self) -> TokenGains:
        """The gains of every token, one sequence after the other, with what the rows of its attention sum to."""
        assert self.written is not None
        found = []
        for sequence in range(len(self.written.before)):
            attention = self.of_sequence(sequence).double()
            if self.written.subtracted is not None:
                attention = _difference(self.layer, attention, self.written.subtracted)
            keep = torch.ones(attention.shape[1], dtype=torch.bool)
            gains = self.written.of(sequence, len(attention)).of(keep, torch.float64)
            found.append(gains.times(attention.sum(-1)))
        after = [part.after for part in found if part.after is not None]
        return TokenGains(torch.cat([part.before for part in found]), torch.cat(after) if after else None)

    def of(
        self, sequence: int, keep: Bool[Tensor, " token"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "head kept kept"]:
        """Probabilities between the kept tokens of one sequence; raises `NoAttentionMaps` unless rows sum to one."""
        kept, tolerance = self._kept(sequence, keep, dtype)
        sums = kept.sum(-1, keepdim=True)
        worst = (sums - 1).abs().max().item()
        if not worst <= tolerance:  # also where it is NaN
            reason = f"rows that do not sum to one over the tokens that count (off by {worst:.2g})"
            raise NoAttentionMaps(
                self.layer, reason, "Sinks, dropout and padding that is not masked break the theory: it needs row sums."
            )
        return kept / sums

    def with_sink(
        self, sequence: int, keep: Bool[Tensor, " token"]
    ) -> tuple[Float[Tensor, "head kept kept"], Float[Tensor, "head kept"] | None]:
        """Probabilities between the kept tokens, and what each row leaves to a learned sink, if the family has one."""
        if not self.has_sink:
            return self.of(sequence, keep), None
        kept, tolerance = self._kept(sequence, keep, torch.float32)
        dropped = self.of_sequence(sequence)[:, keep][:, :, ~keep].float().sum(-1)
        sums = kept.sum(-1)
        if not bool(((sums >= 0) & (sums <= 1 + tolerance) & (dropped <= tolerance)).all()):  # also where it is NaN
            reason = "rows that sum to more than one, or that look at tokens that do not count"
            raise NoAttentionMaps(self.layer, reason, "Check the mask; keep prefix tokens.")
        beside = 1 - sums
        return kept, beside.masked_fill(beside <= tolerance, 0)  # some layers have no sink: rounding is none

    def _kept(
        self, sequence: int, keep: Bool[Tensor, " token"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "head kept kept"], float]:
        """Attention between the kept tokens, and how far its rows may be from their sum by rounding."""
        found = self.of_sequence(sequence)
        if found.shape[1:] != (len(keep), len(keep)):
            shape = f"attention of {found.shape[1]} queries to {found.shape[2]} keys for {len(keep)} tokens"
            advice = (
                "Give whole sequences, without a cache. Windowed attention is inspected and measured, not predicted."
            )
            raise NoAttentionMaps(self.layer, f"{shape} (windows, a sink or a cache)", advice)
        kept = (found if bool(keep.all()) else found[:, keep][:, :, keep]).to(dtype)
        return kept, ROW_TOLERANCE.get(found.dtype, 1e-2)


def _difference(
    layer: str, attention: Float[Tensor, "both token token"], factor: Tensor
) -> Float[Tensor, "head token token"]:
    """`A_1 - lambda A_2` of differential attention, whose second maps are the second half of the heads."""
    number = factor.flatten()[0]
    if not torch.allclose(factor, number.expand(factor.shape), rtol=1e-4):
        raise NoAttentionMaps(layer, "a difference of attentions whose factor is not one number", "Measure it instead.")
    first, second = attention.chunk(2)
    return first - number.to(attention) * second


# --- from the mixed heads to the output projection: what a running model multiplies them by on the way ---


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


SAME = _names("contiguous clone to float double half bfloat16 type type_as dropout detach __get__ view_as")
"""The result holds the same numbers in the same order, perhaps in another precision."""
VIEWS = _names("view reshape flatten unflatten squeeze unsqueeze expand")
MOVES = _names("transpose permute movedim swapaxes chunk split __getitem__ narrow unbind select t")
PRODUCTS = ("matmul", "bmm", "einsum", "__matmul__")
FACTORS: Mapping[str, Callable[[Tensor, Any], Tensor]] = {
    **dict.fromkeys(("mul", "mul_", "multiply"), torch.mul),
    **dict.fromkeys(("div", "div_"), torch.div),
}


class HeadGainTrace:
    """A shadow beside every tensor of one layer's mixed heads: of the same shape, all ones at first.

    What moves the heads moves the shadow; what multiplies the heads multiplies it. At the output projection the shadow is
    the gain of every token and channel, whatever the model's code looks like.
    """

    def __init__(self) -> None:
        self._shadows = WeakTensorKeyDictionary()
        self.expected = WeakTensorKeyDictionary()
        """Probabilities; what these are multiplied with becomes mixed heads."""
        self.subtracted: Tensor | None = None
        """Of differential attention: what the second attention was multiplied by, relative to the first."""

    def begin(self, mixed: Tensor) -> None:
        """These are mixed heads, as attention made them."""
        self._shadows[mixed] = torch.ones((), dtype=mixed.dtype, device=mixed.device).expand(mixed.shape)

    def shadow(self, tensor: Any) -> Tensor | None:
        return self._shadows.get(tensor) if isinstance(tensor, Tensor) else None

    def step(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """The model called a function."""
        name = getattr(func, "__name__", "")
        if name == "einsum":
            args = args[1:]
        if not args:
            return
        if isinstance(args[0], Tensor) and args[0] in self.expected and isinstance(output, Tensor):
            if name in PRODUCTS:
                self.begin(output)
            elif name in SAME | VIEWS | MOVES:
                self.expected[output] = True
            return
        if name in ("cat", "concat"):
            shadows = [self.shadow(part) for part in args[0]] if isinstance(args[0], Sequence) else []
            if shadows and all(shadow is not None for shadow in shadows):
                self._set(output, func(shadows, *args[1:], **kwargs))
        elif (shadow := self.shadow(args[0])) is not None:
            self._carry(name, func, shadow, args, kwargs, output)
        elif len(args) > 1 and name in ("mul", "multiply") and (shadow := self.shadow(args[1])) is not None:
            self._carry(name, func, shadow, args[1::-1], kwargs, output)

    def _carry(
        self, name: str, func: Any, shadow: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        other = self.shadow(args[1]) if len(args) > 1 else None
        if name == "sub" and other is not None:
            self.subtracted = other / shadow
            self._set(output, shadow)
        elif other is not None:
            return  # a product of two mixed heads is not a gain
        elif name in FACTORS:
            self._set(output, FACTORS[name](shadow, args[1]).expand(output.shape))
        elif name in SAME and isinstance(output, Tensor) and output.shape == shadow.shape:
            self._set(output, shadow)
        elif name in VIEWS:
            self._set(output, shadow.reshape(output.shape) if name != "expand" else shadow.expand(output.shape))
        elif name in MOVES or (name == "__get__" and isinstance(output, Tensor)):
            self._set(output, func(shadow, *args[1:], **kwargs))

    def _set(self, output: Any, shadow: Any) -> None:
        if isinstance(output, Tensor):
            self._shadows[output] = shadow
            return
        for tensor, part in zip(output, shadow, strict=True):
            self._shadows[tensor] = part


# --- attention probabilities of a live model, layer by layer and sequence by sequence, never all at once ---

EXPONENTIALS = (torch.exp, Tensor.exp)
QUOTIENTS = (torch.div, Tensor.div, Tensor.__truediv__)

Layer = tuple[str, int]
"""Label of the stack and position of the block in it."""


@dataclass(frozen=True, slots=True)
class NextAttention:
    """The layer whose attention comes next."""

    layer: Layer
    words: str
    heads: int | None
    has_gains: bool = False
    has_sink: bool = False


def awaited(label: str, position: int, block: BlockNames, heads: int | None, arch: Arch) -> NextAttention:
    words = f"layer {block.index}" + (f" of {label}" if label else "")
    return NextAttention((label, position), words, heads, bool(arch.gains), "sink" in arch.gains)


def attention_watched(
    stacks: Sequence["Stack"], store: ModuleStore
) -> AbstractContextManager[Callable[[Layer], AttentionMaps]]:
    """While the model runs, yields what gives the maps of the layer that has just run; each can be taken once."""
    blocks = [
        (block, awaited(stack.label, position, block, stack.heads(position), stack.arch))
        for stack in stacks
        for position, block in enumerate(stack.names.blocks)
    ]
    return blocks_watched(blocks, store)


@contextmanager
def blocks_watched(
    blocks: Sequence[tuple[BlockNames, NextAttention]], store: ModuleStore
) -> Iterator[Callable[[Layer], AttentionMaps]]:
    """The same for blocks by their names."""
    mode = _Watch()

    def hooks(block: BlockNames, armed: NextAttention) -> Iterator[Any]:
        owner = store.owner(block.value.weight)
        mode.watch_for(owner, block.value.weight.rpartition(".")[2], armed)
        yield owner.register_forward_pre_hook(lambda module, args: mode.arm(armed))
        if armed.has_gains:
            output = store.owner(block.output.weight)
            yield output.register_forward_pre_hook(lambda module, args: mode.arrive(armed, args[0]))
        if armed.has_gains and "inner_norm" in block.norms:
            norm = store.norm(block.norms["inner_norm"])
            yield norm.register_forward_hook(lambda module, args, out: mode.normed(args[0], out))

    with hooked(handle for block, armed in blocks for handle in hooks(block, armed)), mode:
        yield mode.take


def unwatched() -> AbstractContextManager[None]:
    """While our own code runs between two layers: nothing is watched, so operations are faster."""
    return torch._C.DisableTorchFunction()


class _Watch(TorchFunctionMode):
    """Takes the first attention that is computed after it was armed."""

    def __init__(self) -> None:
        super().__init__()
        self._armed: NextAttention | None = None
        self._taken: dict[Layer, AttentionMaps] = {}
        self._values: dict[int, NextAttention] = {}
        self._gained: set[Layer] = set()
        self._held: list[Tensor] = []
        self._exponentials = WeakTensorKeyDictionary()
        self._following: HeadGainTrace | None = None
        self._before_norm: Tensor | None = None
        self._whole: tuple[Layer, Tensor] | None = None
        """The layer whose softmax ran last, and its result, from which a sink may be cut off."""

    def watch_for(self, owner: nn.Module, attribute: str, armed: NextAttention) -> None:
        """Arms also where a value weight is used by a function while the module that holds it is never called."""
        if armed.has_gains:
            self._gained.add(armed.layer)
        weight = owner._parameters.get(attribute)
        if weight is not None:
            self._values[id(weight)] = armed
            self._held.append(weight)  # where weights come and go, no other tensor may get its id

    def arm(self, awaited: NextAttention) -> None:
        self._taken.pop(awaited.layer, None)
        self._armed = awaited
        self._following = HeadGainTrace() if awaited.has_gains else None
        self._before_norm = self._whole = None

    def normed(self, read: Tensor, made: Tensor) -> None:
        """The norm on the mixed heads ran: what multiplied them before it is kept apart."""
        shadow = None if self._following is None else self._following.shadow(read)
        if self._following is not None and shadow is not None:
            self._before_norm = shadow
            self._following.begin(made)

    def arrive(self, awaited: NextAttention, read: Tensor) -> None:
        """The mixed heads have reached the output projection."""
        following, self._following = self._following, None
        shadow = None if following is None else following.shadow(read)
        if following is None or shadow is None or awaited.layer not in self._taken:
            return
        last = shadow.reshape(-1, *shadow.shape[-2:]) if shadow.ndim > 2 else shadow[None]
        written = Written(last, None, following.subtracted)
        if self._before_norm is not None:
            written = Written(self._before_norm.reshape(last.shape), last, following.subtracted)
        self._taken[awaited.layer] = replace(self._taken[awaited.layer], written=written)

    def take(self, layer: Layer) -> AttentionMaps:
        if layer not in self._taken:
            is_awaited = self._armed is not None and self._armed.layer == layer
            words = self._armed.words if is_awaited and self._armed else f"layer {layer[1]} {layer[0]}".strip()
            reason = "none behind its value projection: a kernel that cannot be watched, or computed before the values"
            advice = (
                'Load the model with attn_implementation="sdpa" or "eager": other kernels show no probabilities. In a '
                "class of your own, project the values before the softmax."
            )
            raise NoAttentionMaps(words, reason, advice)
        found = self._taken.pop(layer)
        if layer in self._gained and found.written is None:
            reason = "mixed heads that could not be followed to the output projection"
            advice = "Something between attention and its output projection is unknown: measure the model instead."
            raise NoAttentionMaps(found.layer, reason, advice)
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        for arg in args:
            if id(arg) in self._values:
                self.arm(self._values[id(arg)])
        if func not in WATCHED or (self._armed is None and self._following is None):
            return self._other(func, args, kwargs)
        output, of_sequence = WATCHED[func](func, args, kwargs, self._armed.heads if self._armed else None)
        if self._following is not None and func in SOFTMAX:
            self._following.expected[output] = True
            self._whole = (self._armed.layer, output) if self._armed is not None else self._whole
        elif self._following is not None:
            self._following.begin(output)
        self._take(of_sequence)
        return output

    def _take(self, of_sequence: Callable[[int], Tensor] | None) -> None:
        if of_sequence is not None and self._armed is not None:
            maps = AttentionMaps(self._armed.words, of_sequence, has_sink=self._armed.has_sink)
            self._taken[self._armed.layer], self._armed = maps, None

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Anything else; a softmax written out as exponentials over their sum is attention too."""
        output = func(*args, **kwargs)
        if self._following is not None:
            self._following.step(func, args, kwargs, output)
            self._cut(func, args, output)
        if self._armed is not None and func in EXPONENTIALS:
            self._exponentials[output] = True
        elif self._armed is not None and func in QUOTIENTS and args[0] in self._exponentials:
            self._take(maps_of(output, self._armed.heads))
        return output

    def _cut(self, func: Any, args: tuple[Any, ...], output: Any) -> None:
        """A part of the probabilities is taken: the column of a sink is left behind."""
        if self._whole is None or func is not Tensor.__getitem__ or args[0] is not self._whole[1]:
            return
        layer, of_sequence = self._whole[0], maps_of(output, None)
        if layer in self._taken and of_sequence is not None:
            self._taken[layer] = replace(self._taken[layer], of_sequence=of_sequence)
