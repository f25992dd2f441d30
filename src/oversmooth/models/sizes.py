"""How wide and deep a stack is and how many heads it has, as its config says it: one table of the keys in use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oversmooth.models.config_fields import LARGEST_DEPTH, LARGEST_SIZE, whole
from oversmooth.models.declaration import Arch

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
    """Sizes from the config through one table of aliases; the stack's own keys come first.

    A declaration that was found by running the model knows its sizes and needs no config.
    """
    if arch.n_heads != "config":
        return Sizes(
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
    return Sizes(**found)
