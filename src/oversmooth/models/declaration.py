"""What a declaration of an architecture is.

A family is declared once, in `families.py`, as an `Arch`: *where* its tensors are (`Paths`) and *what* no name can tell
(layout, norm, residual form). `resolve` finds those tensors among names, `canonical` puts them in one form.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from oversmooth.models.config_fields import flag

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
    needs_config: bool = False
    """Whether bare tensor names never say that it is this family, because those of others contain them."""
    gain_is_optional: bool = False
    """Whether some models of the family have no branch gain."""
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
            if flag(config, condition.key) is condition.value:
                changes = dict(condition.change)
                paths = dataclasses.replace(arch.paths, **changes.pop("paths", {}))
                arch = dataclasses.replace(arch, paths=paths, **changes)
        return dataclasses.replace(arch, when=())
