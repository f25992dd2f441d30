"""What a declaration of an architecture is, and how it meets a set of tensor names.

A family is declared once, in `families.py`, as an `Arch`: *where* its tensors are (`Paths`) and *what* no name can tell
(layout, norm, residual form). A safetensors header and `named_parameters()` are both sets of names, so one `resolve`
serves files and live models alike; prefixes such as `model.` or `bert.` are found, never declared.

Shapes of the canonical form (`AttentionWeights`), whatever the storage:

    w_v (n_kv, d_head, d_model)     w_o (d_model, n_heads, d_head)     acting from the left on column vectors
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from oversmooth.errors import AdapterMismatch, ConfigMismatch, HeadsUnknown

Fused = Literal["stacked", "grouped"]
Residual = Literal["pre", "post", "sandwich", "parallel"]
NormKind = Literal["layer", "rms", "rms+1"]

NORM_ROLES = ("attn_norm", "attn_branch_norm", "cross_norm", "ffn_norm", "ffn_branch_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the tensors of block `{i}` are. `a|b` are alternates (live and on-disk names); the first that exists wins.

    A path names a module, whose tensors are `path.weight` and `path.bias`; one that contains `*` names the tensors
    themselves, with `*` standing for weight or bias. Gains are plain tensor names.
    """

    block: str
    o: str
    v: str = ""
    qkv: str = ""
    attn_norm: str = ""
    """The norm of the attention sub-block: before it (pre, parallel) or after the sum (post)."""
    attn_branch_norm: str = ""
    """A norm on the branch itself, before it is added (sandwich)."""
    cross_norm: str = ""
    """The norm of a decoder's cross-attention, in the same position as `attn_norm`."""
    ffn_norm: str = ""
    ffn_branch_norm: str = ""
    final_norm: str = ""
    """The norm after the last block, relative to what the block's path is relative to."""
    attn_gain: str = ""
    """LayerScale: multiplies the attention branch per channel."""
    ffn_gain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """Facts that depend on the config: where `key` has `value`, these fields of the `Arch` change."""

    key: str
    value: Any
    change: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """The declaration of one family (or of one stack of it)."""

    name: str
    model_types: tuple[str, ...]
    paths: Paths
    kind: Literal["text", "image", "audio"] = "text"
    stack: str = ""
    """Name of the stack in encoder-decoder models; also the prefix of its sizes in the config."""
    norm: NormKind = "layer"
    residual: Residual = "pre"
    is_causal: bool = False
    fused: Fused = "stacked"
    """Order of rows in a fused weight: all q, all k, all v; or per value head its queries, key, value."""
    stored: Literal["out_in", "in_out"] = "out_in"
    n_kv: int | Literal["config", "heads"] = "config"
    prefix_tokens: int = 0
    """Tokens in front that are not part of the sequence (CLS, distillation token)."""
    prefix_tokens_key: str = ""
    """Config key that counts further ones (registers)."""
    token_axis: int = 1
    shared_layers: bool = False
    is_hybrid: bool = False
    """Whether only some blocks have softmax attention; the others are left out and counted."""
    residual_gain: str = ""
    """Config key of a number that multiplies every residual branch."""
    when: tuple[When, ...] = ()
    gguf: tuple[str, ...] = ()
    """The family's names in GGUF files, where it has any."""

    def for_config(self, config: Mapping[str, Any]) -> "Arch":
        """The declaration with everything that depends on the config settled."""
        arch = self
        for condition in self.when:
            if config.get(condition.key) == condition.value:
                changes = dict(condition.change)
                paths = dataclasses.replace(arch.paths, **changes.pop("paths", {}))
                arch = dataclasses.replace(arch, paths=paths, **changes)
        return dataclasses.replace(arch, when=())


# --- names ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Weight and (where it exists) bias of one module."""

    weight: str
    bias: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """The concrete tensor names of one block."""

    index: int
    path: str
    value: TensorNames
    is_fused: bool
    output: TensorNames
    norms: Mapping[str, TensorNames]
    gain: str | None

    def __iter__(self) -> Iterator[str]:
        """Every tensor that an analysis of this block reads."""
        for pair in (self.value, self.output, *self.norms.values()):
            yield pair.weight
            if pair.bias:
                yield pair.bias
        if self.gain:
            yield self.gain


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNames:
    """One stack of blocks found among the names."""

    prefix: str
    blocks: tuple[BlockNames, ...]
    blocks_in_model: int
    final_norm: TensorNames | None = None


def _alternates(path: str) -> list[str]:
    return [alternate for alternate in path.split("|") if alternate]


def _tensor(path: str, what: str) -> str:
    return path.replace("*", what) if "*" in path else f"{path}.{what}"


def _find(block: str, paths: str, names: Collection[str]) -> TensorNames | None:
    for path in _alternates(paths):
        weight, bias = (f"{block}.{_tensor(path, what)}".lstrip(".") for what in ("weight", "bias"))
        if weight in names:
            return TensorNames(weight, bias if bias in names else None)
    return None


def _block_pattern(block: str) -> str:
    return r"(?P<prefix>(?:.*\.)?)(?P<block>" + re.escape(block).replace(r"\{i\}", r"(?P<i>\d+)") + ")"


def resolve(arch: Arch, names: Collection[str]) -> tuple[StackNames, ...]:
    """The stacks of this family among the names, one per prefix; empty when there is none.

    A block is found by its output projection; its value projection must be there too. Blocks must be numbered from 0
    without gaps unless the family is a hybrid: a gap means a shard is missing.
    """
    for block in _alternates(arch.paths.block):
        found: dict[str, dict[int, str]] = {}
        outputs = "|".join(re.escape(_tensor(path, "weight")) for path in _alternates(arch.paths.o))
        pattern = re.compile(_block_pattern(block) + rf"\.(?:{outputs})")
        for name in names:
            if match := pattern.fullmatch(name):
                path = match["prefix"] + match["block"]
                found.setdefault(match["prefix"], {})[int(match["i"])] = path
        stacks = []
        for prefix, blocks in found.items():
            resolved = [_resolve_block(arch, i, path, names) for i, path in sorted(blocks.items())]
            kept = [block for block in resolved if block is not None]
            if len(kept) == len(resolved) or (arch.is_hybrid and kept):
                stacks.append(
                    StackNames(
                        prefix=prefix,
                        blocks=tuple(kept),
                        blocks_in_model=_count(block, prefix, names),
                        final_norm=_find(prefix.removesuffix("."), arch.paths.final_norm, names),
                    )
                )
        for stack in stacks:
            indices = [block.index for block in stack.blocks]
            if not arch.is_hybrid and indices != list(range(stack.blocks_in_model)):
                absent = sorted(set(range(stack.blocks_in_model)) - set(indices))
                raise AdapterMismatch(
                    arch.name,
                    f"attention weights in all {stack.blocks_in_model} blocks",
                    f"none in blocks {', '.join(map(str, absent[:8]))} (a missing shard, or a hybrid model)",
                )
        if stacks:
            return tuple(stacks)
    return ()


def _count(block: str, prefix: str, names: Collection[str]) -> int:
    pattern = re.compile(_block_pattern(block) + r"\..*")
    matches = (pattern.fullmatch(name) for name in names if name.startswith(prefix))
    return 1 + max(int(match["i"]) for match in matches if match and match["prefix"] == prefix)


def _resolve_block(arch: Arch, index: int, path: str, names: Collection[str]) -> BlockNames | None:
    paths = arch.paths
    separate, fused = _find(path, paths.v, names), _find(path, paths.qkv, names)
    output = _find(path, paths.o, names)
    value = separate or fused
    if value is None or output is None:
        return None
    norms = {role: found for role in NORM_ROLES if (found := _find(path, getattr(paths, role), names))}
    gains = [f"{path}.{gain}" for gain in _alternates(paths.attn_gain) if f"{path}.{gain}" in names]
    return BlockNames(
        index=index,
        path=path,
        value=value,
        is_fused=separate is None,
        output=output,
        norms=norms,
        gain=gains[0] if gains else None,
    )


# --- sizes ----------------------------------------------------------------------------------------------------------

SIZE_ALIASES: Mapping[str, tuple[str, ...]] = {
    "d_model": ("hidden_size", "d_model", "n_embd", "dim", "embed_dim"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "n_kv": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "d_head": ("head_dim", "d_kv", "attention_head_dim"),
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"),
}
STACK_ALIASES: Mapping[str, tuple[str, ...]] = {
    "n_heads": ("{stack}_attention_heads",),
    "n_layers": ("{stack}_layers", "num_{stack}_layers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of one stack as its config states them; `None` where it is silent."""

    d_model: int | None = None
    n_heads: int | None = None
    n_kv: int | None = None
    d_head: int | None = None
    n_layers: int | None = None


def sizes_of(config: Mapping[str, Any], arch: Arch) -> Sizes:
    """Sizes from the config through one table of aliases; the stack's own keys come first."""
    found: dict[str, int] = {}
    for size, aliases in SIZE_ALIASES.items():
        own = tuple(alias.format(stack=arch.stack) for alias in STACK_ALIASES.get(size, ()) if arch.stack)
        for alias in (*own, *aliases):
            value = config.get(alias)
            if value is not None:
                if not isinstance(value, int) or value < 1:
                    raise ConfigMismatch(alias, repr(value), "a positive whole number", "every Transformer")
                found[size] = value
                break
    if arch.n_kv == "heads":
        found.pop("n_kv", None)
    elif isinstance(arch.n_kv, int):
        found["n_kv"] = arch.n_kv
    return Sizes(**found)


# --- canonical form -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A normalization layer: subtract the feature mean (`layer` only), divide by the scale, multiply by `weight`."""

    kind: Literal["layer", "rms"]
    weight: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionWeights:
    """The value path of one attention layer in canonical form, with the norms around it."""

    w_v: Float[Tensor, "kv d_head d_model"]
    w_o: Float[Tensor, "d_model head d_head"]
    b_v: Float[Tensor, "kv d_head"] | None = None
    b_o: Float[Tensor, " d_model"] | None = None
    residual: Residual = "pre"
    norms: Mapping[str, Norm] = field(default_factory=dict)
    gain: Float[Tensor, " d_model"] | None = None
    """Multiplies the attention branch, per channel."""
    heads_known: bool = True
    """False where no config gave the number of heads: the layer is one head then, exact for the layer as a whole."""
    value_rows: Int[Tensor, " rows"] | None = None
    """Rows of the values inside the fused weight, for writing back; `None` where values have a weight of their own."""

    @property
    def d_model(self) -> int:
        return self.w_o.shape[0]

    @property
    def n_heads(self) -> int:
        return self.w_o.shape[1]

    @property
    def n_kv(self) -> int:
        return self.w_v.shape[0]

    @property
    def d_head(self) -> int:
        return self.w_v.shape[1]

    @cached_property
    def w_o_shared(self) -> Float[Tensor, "d_model kv d_head"]:
        """Output weights summed over the query heads that read the same value head.

        The sum is taken one precision above the stored one: in half precision it would lose the last digits of all.
        """
        if self.n_heads == self.n_kv:
            return self.w_o
        above = torch.float32 if self.w_o.dtype.itemsize < 4 else torch.float64
        return self.w_o.unflatten(1, (self.n_kv, self.n_heads // self.n_kv)).sum(2, dtype=above)


def value_rows(fused: Fused, n_heads: int, n_kv: int, d_head: int) -> Int[Tensor, " rows"]:
    """Rows of the values inside a fused query-key-value weight, in the order (value head, channel).

    >>> value_rows("stacked", n_heads=2, n_kv=1, d_head=2)
    tensor([6, 7])
    >>> value_rows("grouped", n_heads=2, n_kv=2, d_head=1)
    tensor([2, 5])
    """
    if fused == "stacked":
        return torch.arange((n_heads + n_kv) * d_head, (n_heads + 2 * n_kv) * d_head)
    per_group = n_heads // n_kv + 2
    group = torch.arange(n_kv)[:, None] * per_group * d_head
    return (group + (per_group - 1) * d_head + torch.arange(d_head)).flatten()


def assemble(
    arch: Arch, sizes: Sizes, block: BlockNames, read: Callable[[str], Tensor], branch_gain: float = 1.0
) -> AttentionWeights:
    """Reads one block's tensors and brings them into canonical form, in the dtype in which they are stored."""
    transpose = arch.stored == "in_out"
    value, output = read(block.value.weight), read(block.output.weight)
    if transpose:
        value, output = value.T, output.T
    d_model, inner = _matrix_shape(output, block.output.weight)
    if sizes.d_model not in (None, d_model):
        raise ConfigMismatch("the width", sizes.d_model, d_model, block.output.weight)
    n_heads, n_kv, d_head = _head_sizes(arch, sizes, block, value, inner)
    rows = None
    b_v = read(block.value.bias) if block.value.bias else None
    if block.is_fused:
        expected = (n_heads + 2 * n_kv) * d_head
        if value.shape[0] != expected:
            says = f"{n_heads} heads and {n_kv} value heads of size {d_head}, so {expected} rows"
            raise ConfigMismatch("the heads", says, f"{value.shape[0]} rows", block.value.weight)
        rows = value_rows(arch.fused, n_heads, n_kv, d_head)
        value = value[rows]
        b_v = b_v[rows] if b_v is not None else None
    if tuple(value.shape) != (n_kv * d_head, d_model):
        says = f"{n_kv} value heads of size {d_head} at width {d_model}"
        raise ConfigMismatch("the value heads", says, f"shape {tuple(value.shape)}", block.value.weight)
    gain = read(block.gain) if block.gain else None
    if branch_gain != 1.0:
        gain = branch_gain * (gain if gain is not None else torch.ones(d_model))
    return AttentionWeights(
        w_v=value.reshape(n_kv, d_head, d_model),
        w_o=output.reshape(d_model, n_heads, d_head),
        b_v=b_v.reshape(n_kv, d_head) if b_v is not None else None,
        b_o=read(block.output.bias) if block.output.bias else None,
        residual=arch.residual,
        norms={role: _norm(arch, names, read) for role, names in block.norms.items()},
        gain=gain,
        heads_known=sizes.n_heads is not None,
        value_rows=rows,
    )


def _matrix_shape(weight: Tensor, name: str) -> tuple[int, int]:
    if weight.ndim != 2:
        raise AdapterMismatch(name, "a matrix", f"shape {tuple(weight.shape)}")
    return weight.shape[0], weight.shape[1]


def _head_sizes(arch: Arch, sizes: Sizes, block: BlockNames, value: Tensor, inner: int) -> tuple[int, int, int]:
    """`(n_heads, n_kv, d_head)`, checked against the output projection's `inner` columns."""
    if sizes.n_heads is None:
        value_rows_are_heads = not block.is_fused and value.shape[0] == inner
        stacked_thirds = block.is_fused and arch.fused == "stacked" and value.shape[0] == 3 * inner
        if value_rows_are_heads or stacked_thirds:
            return 1, 1, inner  # one wide head: H of the layer is the same however its columns are cut into heads
        raise HeadsUnknown(block.value.weight, "its value heads are shared or fused in an order that needs that number")
    n_heads = sizes.n_heads
    d_head = sizes.d_head or inner // n_heads
    if n_heads * d_head != inner:
        says = f"{n_heads} heads" + (f" of size {sizes.d_head}" if sizes.d_head else "")
        raise ConfigMismatch("the heads", says, f"{inner} columns", block.output.weight)
    n_kv = sizes.n_kv or n_heads
    if n_heads % n_kv:
        raise ConfigMismatch("the value heads", f"{n_kv} for {n_heads} heads", "a divisor", "grouped attention")
    return n_heads, n_kv, d_head


def _norm(arch: Arch, names: TensorNames, read: Callable[[str], Tensor]) -> Norm:
    weight = read(names.weight)
    if arch.norm == "rms+1":
        weight = weight.float() + 1.0  # stored as an offset from one; float32 because bfloat16 cannot hold 1 + small
    bias = read(names.bias) if names.bias else None
    return Norm(kind="layer" if arch.norm == "layer" else "rms", weight=weight, bias=bias)
