"""`Arch` and `Paths`: the declaration of a family; the sizes of a stack; checked fields of a config."""

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

from oversmooth.errors import BadConfig

# --- fields of a config, each checked by name, kind and range when it is read ---

LARGEST_SIZE = 2**31 - 1
LARGEST_DEPTH = 10_000
"""Layers; the deepest Transformer that was ever trained has a thousand."""


def whole(config: Mapping[str, Any], key: str, *, smallest: int = 1, largest: int = LARGEST_SIZE) -> int | None:
    """A whole number; `None` where the config is silent.

    >>> whole({"n_head": 12}, "n_head")
    12
    """
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not smallest <= value <= largest:
        raise BadConfig(key, f"a whole number from {smallest} to {largest}", _shown(value))
    return value


def flag(config: Mapping[str, Any], key: str) -> bool | None:
    """True or false; `None` where the config does not have the key."""
    if key not in config:
        return None
    if not isinstance(config[key], bool):
        raise BadConfig(key, "true or false", _shown(config[key]))
    return bool(config[key])


def finite(config: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number."""
    value = config.get(key, default)
    with suppress(OverflowError):  # a whole number beyond every float
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise BadConfig(key, "a finite number", _shown(value))


LARGEST_GAIN = 1e6
"""Multipliers of trained models are below 100; with numbers near the overflow of floats LAPACK's eigenvalues never end."""


def gain(config: Mapping[str, Any], key: str) -> float:
    """The factor by which a model multiplies its branches; 1 where the config is silent."""
    found = finite(config, key, 1.0)
    if abs(found) > LARGEST_GAIN:
        raise BadConfig(key, f"at most {LARGEST_GAIN:g} in size", _shown(found))
    return found


def word(config: Mapping[Any, Any], key: str) -> str | None:
    """A word; `None` if the config does not have the key."""
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise BadConfig(key, "a name", _shown(value))
    return value


PARTS = ("text_config", "vision_config", "audio_config")
"""Configs inside of a composite config."""


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raises unless the fields that decide which class is built are of the kind that every library expects."""
    for key in PARTS:
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            raise BadConfig(key, "an object", _shown(config[key]))
    word(config, "architecture")
    classes = config.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise BadConfig("architectures", "a list of names", _shown(classes))


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}..."


TIMM_FORBIDDEN = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir", "strict")
"""Arguments of `timm.create_model` that read other files or the network."""
LARGEST_TIMM_SIZE = 100_000


def check_timm_arguments(arguments: object) -> None:
    """Raises unless they are plain sizes and switches under words, none so large that building would not end."""
    if not isinstance(arguments, Mapping):
        raise BadConfig("model_args", "an object of arguments by name", _shown(arguments))
    for key, value in arguments.items():
        sizes = value if isinstance(value, list) else [value]
        too_large = any(isinstance(size, int | float) and not abs(size) <= LARGEST_TIMM_SIZE for size in sizes)
        too_deep = key == "depth" and isinstance(value, int) and value > 1000
        if key in TIMM_FORBIDDEN or too_large or too_deep or isinstance(value, Mapping):
            raise BadConfig(f"model_args.{key}", "a size or a switch of a model", _shown(value))


# --- what a declaration of an architecture is ---

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
    *("cross_norm", "cross_branch_norm", "ffn_norm", "ffn_branch_norm"),
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
    """The bias of the values, if it is a separate tensor with one entry per value channel."""
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
    cross_branch_norm: str = ""
    ffn_norm: str = ""
    ffn_branch_norm: str = ""
    final_norm: str = ""
    """The norm after the last block, relative to what the block's path is relative to."""
    attn_gain: str = ""
    """LayerScale: multiplies the attention branch per channel."""
    before: str = ""
    """A module that receives the residual stream before attention, where the block is no module that is called."""
    after: str = ""
    """A module that receives the stream after attention was added, where no norm does."""
    end: str = ""
    """A module that receives the stream after the last block, relative to what the block's path is relative to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedRows:
    """Where the values are among the rows of a fused weight: `first + head * per_head + channel * per_channel`.

    Heads of differential attention are made of two: their second half is `second_half` rows below the first.
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
    fused: Fused | FusedRows = "stacked"
    """Order of rows in a fused weight: all q, all k, all v; per value head its queries, key, value; per value head a key of
    any size and its value last; or by number."""
    stored: Literal["out_in", "in_out"] = "out_in"
    value_axes: str = ""
    """Axes of a value weight that is no matrix of `stored`, such as `head in channel`."""
    output_axes: str = ""
    """The same for the output weight, such as `head channel out`; `out channel head` where heads alternate."""
    latent_first: int = 0
    """The first row of the latent in its projection; the other rows make keys."""
    gains: tuple[Gain, ...] = ()
    """What multiplies the token that is written, in some block at least; it is seen only while the model runs."""
    inner_norm_per_head: bool = False
    """Whether the inner norm acts on each head separately instead of all heads together."""
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
    """The family's names in GGUF files, if it has any."""

    def for_config(self, config: Mapping[str, Any]) -> "Arch":
        """The declaration with everything that depends on the config settled."""
        arch = self
        for condition in self.when:
            if flag(config, condition.key) is condition.value:
                changes = dict(condition.change)
                paths = dataclasses.replace(arch.paths, **changes.pop("paths", {}))
                arch = dataclasses.replace(arch, paths=paths, **changes)
        return dataclasses.replace(arch, when=())


# --- how wide and deep a stack is and how many heads it has, as its config says it ---

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
class StackSizes:
    """Sizes of one stack as its config states them; `None` if it does not."""

    d_model: int | None = None
    n_heads: int | None = None
    n_kv: int | None = None
    d_head: int | None = None
    n_layers: int | None = None


def sizes_of(config: Mapping[str, Any], arch: Arch) -> StackSizes:
    """Sizes from the config through one table of aliases; the stack's own keys come first.

    A declaration that was found by running the model knows its sizes and needs no config.
    """
    if arch.n_heads != "config":
        return StackSizes(
            n_heads=arch.n_heads if isinstance(arch.n_heads, int) else None,
            n_kv=arch.n_kv if isinstance(arch.n_kv, int) else None,
            d_head=arch.d_head if isinstance(arch.d_head, int) else None,
        )
    found: dict[str, int] = {}
    for size, aliases in SIZE_ALIASES.items():
        own = tuple(alias.format(stack=arch.stack) for alias in STACK_ALIASES.get(size, ()) if arch.stack)
        for alias in (*own, *aliases):
            value = whole(config, alias, largest=LARGEST_DEPTH if size == "n_layers" else LARGEST_SIZE)
            if value is not None:
                found[size] = value
                break
    if arch.d_head == "shape":
        found.pop("d_head", None)
    if arch.n_kv == "heads":
        found.pop("n_kv", None)
    elif isinstance(arch.n_kv, int):
        found["n_kv"] = arch.n_kv
    return StackSizes(**found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """An attention that is not analysed, and why."""

    where: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Discovery:
    """What running a model showed: a declaration per stack, each proved by the equal-token identity."""

    target: str
    archs: tuple[Arch, ...]
    left_out: tuple[LeftOut, ...]
    """Cross-attention, pooling, and attention that the theory does not cover."""
    largest_error: float
    """Of the equal-token identity, over all layers."""
    forward_passes: int
    reached: frozenset[str] = frozenset()
    """Paths of the modules that ran."""

    def code(self) -> str:
        """The declarations as Python that could stand in `families.py`."""
        return "\n".join(declaration_code(arch) for arch in self.archs)

    def __repr__(self) -> str:
        stacks = ", ".join(f"{arch.stack or 'blocks'} at {arch.paths.block}" for arch in self.archs)
        left = f", {len(self.left_out)} attentions left out" if self.left_out else ""
        return f"<Discovery of {self.target}: {stacks}{left}, found by running it, error {self.largest_error:.1e}>"


def declaration_code(arch: Arch) -> str:
    """One declaration as Python, without what is as usual."""

    def settings(value: Any, skip: tuple[str, ...] = ()) -> list[str]:
        return [
            f"{field.name}={getattr(value, field.name)!r}"
            for field in fields(value)
            if field.name not in skip and getattr(value, field.name) not in (field.default, "", ())
        ]

    named = [f"name={arch.name!r}", f"model_types={arch.model_types!r}"]
    own = settings(arch, skip=("paths", "proof", "name", "model_types"))
    paths = "paths=Paths(\n        " + ",\n        ".join(settings(arch.paths)) + ",\n    )"
    lines = [*named, *own, paths]
    return "Arch(\n    " + ",\n    ".join(lines) + ",\n)"
