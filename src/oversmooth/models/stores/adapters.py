"""Adapters (LoRA, rsLoRA, DoRA): a base model's tensors with the effective weights in their places, made when read.

    W' = W + s B A,                   s = alpha / r, or alpha / sqrt(r) for rsLoRA
    W' = m (W + s B A) / |W + s B A|  for DoRA, with one length for each row

Files are read without peft. Live models with adapters are read by merging a copy of one layer at a time, so every kind
that peft can merge is exact by construction.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import BrokenFile, NotSupported
from oversmooth.models.config_fields import finite, flag, whole
from oversmooth.models.stores.store import TensorStore
from oversmooth.results import FileFacts

A, B = ".lora_A.weight", ".lora_B.weight"
MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
PREFIX = "base_model.model."
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "eva")
"""Ways to begin (`init_lora_weights`) that also change the base weights, which the adapter's files do not hold."""
OTHER_FORMULAS = (
    *("use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config"),
    *("target_parameters", "trainable_token_indices", "layer_replication", "megatron_config", "lora_bias"),
)
"""Options of LoRA that change its formula or where it applies; with one of these set, the adapter is refused."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What adapter_config.json says of the formula."""

    where: str
    rank: int
    alpha: float
    alphas: Mapping[str, float]
    """Other values of alpha, by the end of a module's path."""
    is_rank_stabilized: bool
    is_transposed: bool
    """Base weights are (in, out), as GPT-2 stores them."""

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "Adapter":
        kind = config.get("peft_type")
        if kind != "LORA":
            raise _unreadable(f"An adapter of the kind {kind!r}", where)
        for option in OTHER_FORMULAS:
            if config.get(option):
                raise _unreadable(f"LoRA with {option}", where)
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(CHANGES_THE_BASE):
            raise _unreadable(f"LoRA with init_lora_weights={start!r}", where, "it changes the base weights too")
        patterns = config.get("alpha_pattern") or {}
        if not isinstance(patterns, Mapping) or not all(_is_plain(name) for name in patterns):
            raise _unreadable("LoRA with patterns in alpha_pattern", where)
        return cls(
            where=where,
            rank=whole(config, "r") or 8,
            alpha=finite(config, "lora_alpha", 8.0),
            alphas={name: finite(patterns, name, 8.0) for name in patterns},
            is_rank_stabilized=bool(flag(config, "use_rslora")),
            is_transposed=bool(flag(config, "fan_in_fan_out")),
        )

    def scaling(self, path: str, rank: int) -> float:
        ends = (alpha for name, alpha in self.alphas.items() if path == name or path.endswith(f".{name}"))
        alpha = next(ends, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _unreadable(what: str, where: str, reason: str = "") -> NotSupported:
    return NotSupported(what, f"in {where}", reason, "Merge it into its base model with peft, and point at the result.")


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and all(letter.isalnum() or letter in "._" for letter in name)


class AdaptedStore:
    """A base model's tensors, with what an adapter makes of them; adapted weights are float32."""

    def __init__(self, base: TensorStore, tensors: TensorStore, adapter: Adapter):
        self._base = base
        self._tensors = tensors
        self._adapter = adapter
        self.names = base.names
        self._pairs: dict[str, str] = {}
        """Name of a base weight to the adapter's path."""
        self._replaced: dict[str, str] = {}
        """Name of a base tensor to the adapter's own, where it was trained and saved as a whole."""
        for name in tensors.names:
            self._place(name)

    def _place(self, name: str) -> None:
        if name.endswith(A):
            path = name.removesuffix(A)
            if path + B not in self._tensors.names:
                raise self._broken(path + B, "the other factor of the pair", "none")
            self._pairs[self._in_base(path, ".weight")] = path
        elif not name.endswith((B, *MAGNITUDES)):
            if "lora_" in name:
                raise _unreadable(f"The adapter's tensor {name!r}", self._adapter.where)
            path, _, tensor = name.rpartition(".")
            self._replaced[self._in_base(path, f".{tensor}")] = name

    def _in_base(self, path: str, ending: str) -> str:
        """The base tensor that an adapter's path means: model and checkpoint may differ in what stands in front."""
        parts = path.removeprefix(PREFIX).split(".")
        for first in range(len(parts)):
            tail = ".".join(parts[first:]) + ending
            found = [name for name in self._base.names if name == tail or name.endswith(f".{tail}")]
            if tail in found or len(found) == 1:
                return tail if tail in found else found[0]
            if found or first == len(parts) - 2:
                break
        expected = "a tensor of the base model with that path"
        advice = "Give the model that it was trained on with --base."
        raise BrokenFile(f"{self._adapter.where}: {path}{ending}", expected, "none, or several", advice)

    def read(self, name: str) -> Tensor:
        if name in self._replaced:
            return self._tensors.read(self._replaced[name])
        found = self._base.read(name)
        return self._adapted(found.float(), self._pairs[name]) if name in self._pairs else found

    def _adapted(self, weight: Tensor, path: str) -> Tensor:
        first, second = self._tensors.read(path + A).float(), self._tensors.read(path + B).float()
        plain = weight.T if self._adapter.is_transposed else weight
        fits = first.ndim == second.ndim == 2 and (second.shape[0], first.shape[1]) == tuple(plain.shape)
        if not fits or second.shape[1] != first.shape[0]:
            shapes = f"{tuple(second.shape)} and {tuple(first.shape)}"
            raise self._broken(path, f"two factors of a weight of the shape {tuple(plain.shape)}", shapes)
        made = plain + self._adapter.scaling(path, first.shape[0]) * (second @ first)
        magnitude = next((path + ending for ending in MAGNITUDES if path + ending in self._tensors.names), None)
        if magnitude:
            lengths = self._tensors.read(magnitude).float().flatten()
            if len(lengths) != len(made):
                raise self._broken(magnitude, f"{len(made)} lengths", f"{len(lengths)}")
            made = (lengths / torch.linalg.vector_norm(made, dim=1))[:, None] * made
        return made.T if self._adapter.is_transposed else made

    def _broken(self, name: str, expected: str, found: str) -> BrokenFile:
        return BrokenFile(f"{self._adapter.where}: {name}", expected, found)

    def stored_as(self, name: str) -> str | None:
        """What was done to a weight, in words; `None` where nothing was."""
        inner = getattr(self._base, "stored_as", lambda _: None)(name)
        return f"{inner or 'the base'} with an adapter" if name in self._pairs else inner

    def files(self) -> tuple[FileFacts, ...]:
        return (*self._base.files(), *self._tensors.files())


# --- live models ----------------------------------------------------------------------------------------------------


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is one of peft's layers around a layer of the model: called like it, with other weights."""
    has_base = isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "merge")
    return has_base or is_replaced(module)


def is_replaced(module: nn.Module) -> bool:
    """Whether a module stands for another that was trained as a whole (`modules_to_save`)."""
    return isinstance(getattr(module, "original_module", None), nn.Module) and hasattr(module, "modules_to_save")


def effective(module: nn.Module, attribute: str) -> Tensor:
    """The weight or bias that an adapted layer acts with, from a merged copy of it; the layer itself is not touched."""
    if is_replaced(module):
        active = getattr(module, "active_adapters", None) or [getattr(module, "active_adapter", None)]
        chosen = [module.modules_to_save[name] for name in active if name in module.modules_to_save]  # type: ignore
        disabled = bool(getattr(module, "disable_adapters", False))
        owner = module.original_module if disabled or not chosen else chosen[0]
        return getattr(owner, attribute)
    layer: Any = module
    if not getattr(layer, "merged", False) and not getattr(layer, "disable_adapters", False):
        layer = copy.deepcopy(layer)
        with torch.no_grad():
            layer.merge()
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.base_layer
    return getattr(base, attribute)


def tensors_of_adapted(module: nn.Module) -> Sequence[str]:
    """The names of the tensors that the layer underneath has."""
    base: Any = module.original_module if is_replaced(module) else module.base_layer
    return [name for name, value in base.named_parameters(recurse=False) if value is not None]


def refuse_learned_prompts(module: nn.Module) -> None:
    """Raises for live models whose adapter is a learned prompt: its tokens are no inputs, and no weight shows them."""
    config = getattr(module, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(config.peft_type, "value", config.peft_type)  # type: ignore[union-attr]
        raise NotSupported(f"A learned prompt ({kind})", "here", "it adds tokens, not weights", "Use its base model.")


@contextmanager
def acting_merged(module: nn.Module) -> Iterator[None]:
    """Inside, adapted layers act through one merged weight; afterwards everything is as it was, to the last bit."""
    originals: list[tuple[Any, Any, Tensor]] = []
    try:
        for layer in module.modules():
            if not is_adapted(layer) or is_replaced(layer):
                continue
            adapted: Any = layer
            if not getattr(adapted, "merged", False) and not getattr(adapted, "disable_adapters", False):
                base = adapted.get_base_layer() if hasattr(adapted, "get_base_layer") else adapted.base_layer
                originals.append((adapted, base, base.weight.data))
                base.weight.data = base.weight.data.clone()
                with torch.no_grad():
                    adapted.merge()
        yield
    finally:
        for adapted, base, weight in originals:
            base.weight.data = weight
            adapted.merged_adapters.clear()
