"""What a declaration of an architecture is.

A family is declared once, in `families.py`, as an `Arch`: *where* its tensors are (`Paths`) and *what* no name can tell
(layout, norm, residual form). `resolve` finds those tensors among names, `canonical` puts them in one form.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oversmooth.models.config_fields import flag

Fused = Literal["stacked", "grouped", "key_value"]
Residual = Literal["pre", "post", "sandwich", "parallel"]
NormKind = Literal["layer", "rms", "layer+1", "rms+1"]
"""`+1`: the weight is stored as an offset from one."""


def norm_offset(kind: NormKind) -> float:
    """What is added to the stored weight of a norm."""
    return 1.0 if kind.endswith("+1") else 0.0


def norm_centres(kind: NormKind) -> bool:
    """Whether a norm subtracts the mean."""
    return kind.startswith("layer")


NORM_ROLES = (
    *("attn_norm", "latent_norm", "inner_norm", "attn_branch_norm"),
    *("cross_norm", "ffn_norm", "ffn_branch_norm"),
)
Gain = Literal["gate", "sink", "differential"]
"""What multiplies the token that attention writes, beside an `inner_norm`: a gate that the token computes, what a sink
leaves of the row sum, or one attention subtracted from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Where the tensors of block `{i}` are. `a|b` are alternates (live and on-disk names); the first that exists wins.

    A path names a module, whose tensors are `path.weight` and `path.bias`; one that contains `*` names the tensors
    themselves, with `*` standing for weight or bias, and `norm.[a_2,b_2]` names them one by one. Gains are plain tensor
    names. Blocks without a number of their own are listed: `first,second`. What is not inside the block begins with `^`.
    """

    block: str
    o: str
    v: str = ""
    qkv: str = ""
    v_bias: str = ""
    """The bias of the values where it is a tensor of its own, with one entry per value channel."""
    latent: str = ""
    """The projection to a latent from which the values are made, where values do not read the stream themselves."""
    latent_norm: str = ""
    """A norm on that latent."""
    inner_norm: str = ""
    """A norm between the mixed heads and the output projection."""
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
    before: str = ""
    """A module that receives the residual stream before attention, where the block is no module that is called."""
    after: str = ""
    """A module that receives the stream after attention was added, where no norm does."""
    end: str = ""
    """A module that receives the stream after the last block, relative to what the block's path is relative to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where the values are among the rows of a fused weight: `first + head * per_head + channel * per_channel`.

    Heads of differential attention are made of two: their second half stands `second_half` rows below the first.
    """

    first: int
    per_head: int
    per_channel: int = 1
    second_half: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """Facts that depend on the config: where `key` has `value`, these fields of the `Arch` change."""

    key: str
    value: bool
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
    fused: Fused | Rows = "stacked"
    """Order of rows in a fused weight: all q, all k, all v; per value head its queries, key, value; per value head a key of
    any size and its value last; or by number."""
    stored: Literal["out_in", "in_out"] = "out_in"
    value_axes: str = ""
    """Axes of a value weight that is no matrix of `stored`, such as `head in channel`."""
    output_axes: str = ""
    """The same for the output weight, such as `head channel out`; `out channel head` where heads alternate."""
    latent_first: int = 0
    """The first row of the latent in its projection; what is beside it makes keys."""
    gains: tuple[Gain, ...] = ()
    """What multiplies the token that is written, in some block at least; it is seen only while the model runs."""
    inner_norm_per_head: bool = False
    """Whether the inner norm takes every head by itself instead of all heads together."""
    value_gain: float = 1.0
    """A number that multiplies the values."""
    n_heads: int | tuple[int, ...] | Literal["config"] = "config"
    """Heads of every block, or of each block in turn, where no config says so."""
    d_head: int | Literal["config", "shape"] = "config"
    """Size of the value heads; `shape` takes it from the columns of the output weight."""
    n_kv: int | Literal["config", "heads", "shape"] = "config"
    """Value heads; `shape` takes them from the rows of the value weight."""
    prefix_tokens: int = 0
    """Tokens in front that are not part of the sequence (CLS, distillation token)."""
    prefix_tokens_key: str = ""
    """Config key that counts further ones (registers)."""
    token_axis: int = 1
    shared_layers: bool = False
    is_windowed: bool = False
    """Whether tokens attend inside windows only."""
    needs_config: bool = False
    """Whether bare tensor names never say that it is this family, because those of others contain them."""
    gain_is_optional: bool = False
    """Whether some models of the family have no branch gain."""
    is_hybrid: bool = False
    """Whether only some blocks have softmax attention; the others are left out and counted."""
    residual_gain: str = ""
    """Config key of a number that multiplies every residual branch."""
    branch_gain: float = 1.0
    """The number itself, where no config says it."""
    norms_without_weight: tuple[str, ...] = ()
    """Roles of norms that have no tensors; their paths name modules."""
    passes: tuple[tuple[int, ...], ...] = ()
    """For each block the depths at which it runs, where blocks run more than once or out of order."""
    proof: float | None = None
    """Largest deviation from the equal-token identity of a declaration that was found by running the model."""
    when: tuple[When, ...] = ()
    gguf: tuple[str, ...] = ()
    """The family's names in GGUF files, where it has any."""

    def for_config(self, config: Mapping[str, Any]) -> "Arch":
        """The declaration with everything that depends on the config settled."""
        arch = self
        for condition in self.when:
            if flag(config, condition.key) is condition.value:
                changes = dict(condition.change)
                paths = dataclasses.replace(arch.paths, **changes.pop("paths", {}))
                arch = dataclasses.replace(arch, paths=paths, **changes)
        return dataclasses.replace(arch, when=())
