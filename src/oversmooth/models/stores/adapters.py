"""Adapters (LoRA, rsLoRA, DoRA): a base model's tensors, with the effective weights computed when they are read.

    W' = W + s B A,                   s = alpha / r, or alpha / sqrt(r) for rsLoRA
    W' = m (W + s B A) / |W + s B A|  for DoRA, with one length for each row

Files are read without peft. Every tensor of an adapter must be used once, at the path that it names, with the rank and the
targets that its config states; other adapters are refused before anything is computed. Live models with adapters are read
by merging a copy of one layer at a time, so every kind that peft can merge is exact.
"""

import copy
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import BadConfig, BrokenFile, NotSupported, some_of
from oversmooth.models.declaration import finite, flag, whole, word
from oversmooth.models.stores.patterns import Unmatchable, matches
from oversmooth.models.stores.store import TensorStore
from oversmooth.results import FileFacts

A, B = ".lora_A.weight", ".lora_B.weight"
MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
PREFIX = "base_model.model."
STARTS = ("gaussian", "orthogonal")
"""Initialisations (`init_lora_weights`, besides true and false) that leave the base weights alone. Others change them, and
the files of the adapter do not hold the changes."""
FIELDS = frozenset(
    {
        *("peft_type", "task_type", "peft_version", "base_model_name_or_path", "revision", "auto_mapping"),
        *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "fan_in_fan_out", "bias"),
        *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
        *("rank_pattern", "alpha_pattern", "init_lora_weights", "megatron_core", "qalora_group_size"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
    }
)
"""Fields of a LoRA config that are read here, or do not matter to trained weights. Any other field that is set may change
the formula or where it applies, so the adapter is refused."""
BIASES = ("none", "all", "lora_only")
TASKS = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
LAYER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")
"""The first number in a path, as peft looks for the layer."""
WRAPPERS = ("model", "transformer", "backbone", "base_model", "roberta")
"""Prefixes that model classes put before the names of the Transformer inside them, besides the name of the family."""
PARTS = ("encoder", "decoder", "vision", "text", "audio", "speech", "language", "image", "video")
"""Words that name a part of a model; a path without one means something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The formula in adapter_config.json, and the modules it applies to."""

    where: str
    rank: int
    ranks: Mapping[str, int]
    """Other ranks, by a pattern for the end of a module's path."""
    alpha: float
    alphas: Mapping[str, float]
    """Other values of alpha, likewise."""
    is_rank_stabilized: bool
    has_magnitudes: bool
    is_transposed: bool
    """The config says that base weights are (in, out), as GPT-2 stores them."""
    bias: str
    chosen: str | tuple[str, ...]
    """Modules that have factors: a pattern, or ends of paths."""
    excluded: str | tuple[str, ...]
    saved: tuple[str, ...]
    """Modules that were trained and saved as a whole."""
    layers: tuple[int, ...]
    """The only layers that have factors; empty for all."""
    lists: tuple[str, ...]
    """Names of the lists in which those layers are counted."""

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "Adapter":
        kind = config.get("peft_type")
        if kind != "LORA":
            raise _unreadable(f"An adapter of the kind {kind!r}", where)
        other = next((name for name, value in config.items() if value and name not in FIELDS), None)
        if other is not None:
            raise _unreadable(f"LoRA with {other}", where)
        _require_kinds(config)
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start not in STARTS:
            raise _unreadable(f"LoRA with init_lora_weights={start!r}", where, "it changes the base weights too")
        bias = word(config, "bias")
        bias = "none" if bias is None else bias
        if bias not in BIASES:
            raise BadConfig("bias", f"one of {', '.join(BIASES)}", repr(bias))
        found = cls(
            where=where,
            rank=whole(config, "r") or 8,
            ranks={name: whole(part, name) or 8 for part in [_by_pattern(config, "rank_pattern")] for name in part},
            alpha=finite(config, "lora_alpha", 8.0),
            alphas={name: finite(part, name, 8.0) for part in [_by_pattern(config, "alpha_pattern")] for name in part},
            is_rank_stabilized=bool(flag(config, "use_rslora")),
            has_magnitudes=bool(flag(config, "use_dora")),
            is_transposed=bool(flag(config, "fan_in_fan_out")),
            bias=bias,
            chosen=_names(config, "target_modules"),
            excluded=_names(config, "exclude_modules"),
            saved=_saved(config),
            layers=_layers(config),
            lists=_listed(config, "layers_pattern"),
        )
        if not found.chosen:  # what peft asks of a config, too
            raise BadConfig("target_modules", "the modules that have factors", "none")
        if found.layers and isinstance(found.chosen, str):
            raise BadConfig("layers_to_transform", "absent where target_modules is a pattern", f"{found.layers}")
        if found.lists and not found.layers:
            raise BadConfig("layers_pattern", "absent without layers_to_transform", f"{found.lists}")
        return found

    @property
    def takes_all_linear(self) -> bool:
        return isinstance(self.chosen, str) and self.chosen.lower() == "all-linear"

    def targets(self, path: str) -> bool:
        """Whether the module at a path has factors, as peft decides it."""
        if isinstance(self.excluded, str) and self.excluded and _fits(self.excluded, path, "exclude_modules"):
            return False
        if not isinstance(self.excluded, str) and _ends_with(path, self.excluded):
            return False
        if any(f".{name}." in f".{path}." for name in self.saved):
            return False
        if isinstance(self.chosen, str):
            return self.takes_all_linear or _fits(self.chosen, path, "target_modules")
        return path in self.chosen or (_ends_with(path, self.chosen) and self._is_in_layers(path))

    def _is_in_layers(self, path: str) -> bool:
        if not self.layers:
            return True
        patterns = [re.compile(rf"(?:^|.*?\.){re.escape(name)}\.(?P<number>\d+)\.") for name in self.lists] or [LAYER]
        found = next((found for pattern in patterns if (found := pattern.match(path))), None)
        return found is not None and int(found["number"]) in self.layers

    def saves(self, path: str) -> bool:
        """Whether the module at a path, or one around it, was saved as a whole; ends of names count, as in peft."""
        parts = path.split(".")
        modules = (".".join(parts[: count + 1]) for count in range(len(parts)))
        return any(module.endswith(name) for module in modules for name in self.saved)

    def rank_of(self, path: str) -> int:
        return next((self.ranks[name] for name in self.ranks if _is_meant(name, path, "rank_pattern")), self.rank)

    def scaling(self, path: str) -> float:
        alpha = next((self.alphas[name] for name in self.alphas if _is_meant(name, path, "alpha_pattern")), self.alpha)
        return alpha / (math.sqrt(self.rank_of(path)) if self.is_rank_stabilized else self.rank_of(path))


def _require_kinds(config: Mapping[str, Any]) -> None:
    """What peft asks of fields that do not matter to trained weights: another kind of value means a damaged config."""
    task = word(config, "task_type")
    if task is not None and task not in TASKS:
        raise BadConfig("task_type", f"one of {', '.join(TASKS)}", repr(task))
    if (dropout := finite(config, "lora_dropout", 0.0)) > 1:
        raise BadConfig("lora_dropout", "a probability", f"{dropout!r:.60}")
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | str):
        raise BadConfig("init_lora_weights", "true, false or a name", f"{start!r:.60}")
    if (indices := config.get("trainable_token_indices")) is not None:
        raise BadConfig("trainable_token_indices", "null", f"{indices!r:.60}")
    for name, value in config.items():
        if (name.endswith("_config") or name == "use_bdlora") and not isinstance(value, Mapping | None):
            raise BadConfig(name, "an object or null", f"{value!r:.60}")


def _unreadable(what: str, where: str, reason: str = "") -> NotSupported:
    return NotSupported(what, f"in {where}", reason, "Merge it into its base model with peft, and point at the result.")


def _by_pattern(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    given = config.get(key, {})
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise BadConfig(key, "an object of numbers by pattern", repr(given)[:100])
    return given


def _names(config: Mapping[str, Any], key: str) -> str | tuple[str, ...]:
    given = config.get(key)
    return given if isinstance(given, str) else _listed(config, key)


def _listed(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    given = config.get(key) or []
    given = [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(name, str) and name for name in given):
        raise BadConfig(key, "a list of names", repr(given)[:100])
    return tuple(given)


def _saved(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Modules that were saved as a whole; of a string, peft would take every letter for a name."""
    given = config.get("modules_to_save")
    if isinstance(given, str):
        raise BadConfig("modules_to_save", "a list of names", repr(given)[:100])
    return _listed(config, "modules_to_save")


def _layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    given = config.get("layers_to_transform")
    given = [] if given is None else [given] if type(given) is int else given
    if not isinstance(given, list) or not all(type(number) is int for number in given):
        raise BadConfig("layers_to_transform", "a list of whole numbers", repr(given)[:100])
    return tuple(given)


def _ends_with(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _is_meant(pattern: str, path: str, key: str) -> bool:
    return _fits(rf"(.*\.)?({pattern})", path, key)


def _fits(pattern: str, path: str, key: str) -> bool:
    """Whether a pattern of the config's field `key` matches the whole path."""
    try:
        return matches(pattern, path, whole=True)
    except Unmatchable as error:
        raise BadConfig(key, "a regular expression that can be read", f"{pattern[:80]!r}: {error}") from error


# --- where an adapter's tensors belong -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shift:
    """How names of the model that was trained differ from those of the checkpoint: by one word in front, or not at all."""

    dropped: str = ""
    """What the checkpoint lacks, with its dot."""
    added: str = ""
    """What only the checkpoint has."""

    def to_base(self, name: str) -> str:
        return self.added + name.removeprefix(self.dropped)

    def from_base(self, name: str) -> str:
        return self.dropped + name.removeprefix(self.added)


def _shift_of(names: Collection[str], in_base: Collection[str], model_type: str, where: str) -> Shift:
    """The one shift under which the base has every named tensor; raises if there is none or more than one."""
    if all(name in in_base for name in names):
        return Shift()
    words = {name.partition(".")[0] for name in (*names, *in_base) if "." in name}
    fronts = ["", *(f"{front}." for front in sorted(words) if _is_wrapper(front, model_type))]
    shifts = [Shift(dropped, added) for dropped in fronts for added in fronts if dropped != added]
    fitting = [
        shift
        for shift in shifts
        if all(name.startswith(shift.dropped) and shift.to_base(name) in in_base for name in names)
    ]
    if len(fitting) == 1:
        return fitting[0]
    nearest = max(
        fitting or [Shift(), *shifts], key=lambda shift: sum(shift.to_base(name) in in_base for name in names)
    )
    absent = sorted(name for name in names if fitting or nearest.to_base(name) not in in_base)
    found = "several places where it could belong" if fitting else "none"
    raise BrokenFile(
        f"{where}: {absent[0]}",
        "a tensor of the base model with that path",
        found,
        "Give the model that it was trained on with --base.",
    )


def _is_wrapper(front: str, model_type: str) -> bool:
    """Whether a word is the prefix of a whole model; parts of a model keep their own names."""
    if front in WRAPPERS:
        return True
    family = model_type.replace("-", "_")
    is_part = any(part in front for part in PARTS)
    return not is_part and bool(front) and (family.startswith(front) or family.endswith(f"_{front}"))


Factors = Mapping[str, Mapping[str, str]]
"""Path of a module to the names of its `A`, `B` and `m`, under the paths of the model that was trained."""


def _contents(names: Iterable[str], where: str) -> tuple[Factors, dict[str, str]]:
    """The tensors of an adapter: its factors, and by the name of a base tensor those that were saved as a whole."""
    factors: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    for name in sorted(names):
        if not name.startswith(PREFIX):
            raise BrokenFile(f"{where}: {name}", f"a name that begins with {PREFIX}", "another")
        ending = next((ending for ending in (A, B, *MAGNITUDES) if name.endswith(ending)), None)
        if ending is None and "lora_" in name:
            what = "LoRA on an embedding" if "lora_embedding_" in name else "The tensor"
            raise _unreadable(f"{what} ({name})", where)
        path = name.removeprefix(PREFIX).removesuffix(ending or "")
        place = factors.setdefault(path, {}) if ending else replaced
        slot = {A: "A", B: "B"}.get(ending, "m") if ending else path.replace(".base_layer.", ".")
        if slot in place:
            raise BrokenFile(f"{where}: {name}", "one tensor for each place", f"{place[slot]} too")
        place[slot] = name
    if not factors and not replaced:
        raise BrokenFile(where, "tensors named lora_A and lora_B", "none")
    return factors, replaced


class AdaptedStore:
    """A base model's tensors, with what an adapter makes of them; adapted weights are float32.

    `config` is that of the base model, `is_in_out` whether its family stores weights as (in, out); `None` where no family
    is declared.
    """

    def __init__(
        self,
        base: TensorStore,
        tensors: TensorStore,
        adapter: Adapter,
        *,
        config: Mapping[str, Any],
        is_in_out: bool | None,
    ):
        self._base = base
        self._tensors = tensors
        self._adapter = adapter
        self._is_in_out = is_in_out
        factors, replaced = _contents(tensors.names, adapter.where)
        for path, parts in factors.items():
            self._require_sound(path, parts)
        heads = {name for name in replaced if self._is_new_head(name)}
        named = [f"{path}.weight" for path in factors] + [name for name in replaced if name not in heads]
        shift = _shift_of(named, base.names, word(config, "model_type") or "", adapter.where)
        self._pairs = {shift.to_base(f"{path}.weight"): (path, parts) for path, parts in factors.items()}
        """Name of a base weight to the adapter's path, and the names of its factors."""
        self._replaced = {name if name in heads else shift.to_base(name): own for name, own in replaced.items()}
        """Name of a base tensor to the adapter's own, where it was trained and saved as a whole."""
        for name, own in replaced.items():
            self._require_stated(name, own, factors)
        in_trained = {
            shift.from_base(name): name for name in base.names if shift.to_base(shift.from_base(name)) == name
        }
        absent = _untrained(adapter, factors, replaced, in_trained, whole(config, "num_hidden_layers"))
        if absent:
            expected = "a tensor for everything that its config says was trained"
            raise BrokenFile(adapter.where, expected, f"none for {some_of(absent)}", "Copy the adapter again.")
        self.names = [*base.names, *sorted(heads - set(base.names))]

    def _require_sound(self, path: str, parts: Mapping[str, str]) -> None:
        """Raises unless the factors of a module are complete and agree with the config."""
        adapter = self._adapter
        for part, ending in (("A", A), ("B", B)):
            if part not in parts:
                raise self._broken(path + ending, "the other factor of the pair", "none")
        if adapter.has_magnitudes != ("m" in parts):
            found = "none" if adapter.has_magnitudes else "one"
            raise self._broken(path + MAGNITUDES[0], f"use_dora to say whether there is one ({not found})", found)
        if not adapter.targets(path):
            stated = "layers_to_transform" if adapter.layers and _ends_with(path, adapter.chosen) else "target_modules"
            raise self._broken(path, f"a module that {stated} of its config names", "another one")
        first, second = self._shape(parts["A"]), self._shape(parts["B"])
        if len(first) > 2 or len(second) > 2:
            raise _unreadable(f"LoRA on a convolution ({path})", adapter.where)
        rank = adapter.rank_of(path)
        if len(first) != 2 or len(second) != 2 or first[0] != rank or second[1] != rank:
            expected = f"factors of rank {rank}, as r and rank_pattern of its config say"
            raise self._broken(path, expected, f"shapes {first} and {second}")
        if "m" in parts and self._shape(parts["m"]) != second[:1]:
            raise self._broken(parts["m"], f"{second[0]} lengths", f"the shape {self._shape(parts['m'])}")

    def _is_new_head(self, name: str) -> bool:
        """Whether a whole saved tensor belongs to no part of the base: a head that was trained with the adapter."""
        is_counted = any(part.isdigit() for part in name.split("."))
        top, _, inside = name.partition(".")
        has_place = any(
            known in (name, inside) or known.endswith(f".{name}") or f".{top}." in f".{known}"
            for known in self._base.names
        )
        return self._adapter.saves(name.rpartition(".")[0]) and not is_counted and not has_place

    def _require_stated(self, name: str, own: str, factors: Collection[str]) -> None:
        """Raises for a whole saved tensor that the config does not mention, or that also has factors."""
        path, _, tensor = name.rpartition(".")
        if tensor == "weight" and path in factors:
            raise self._broken(own, "either factors of this weight or the whole of it", "both")
        adapter, last = self._adapter, path.rpartition(".")[2]
        is_bias = tensor == "bias" and (adapter.bias == "all" or (adapter.bias == "lora_only" and path in factors))
        is_embedding = tensor == "weight" and ("embed" in last or last in ("lm_head", "wte"))
        if not (is_bias or is_embedding or adapter.saves(path)):
            raise self._broken(own, "a tensor that modules_to_save or bias of its config speaks of", "another one")

    def _shape(self, name: str) -> tuple[int, ...]:
        known = getattr(self._tensors, "shape_of", None)
        return known(name) if known is not None else tuple(self._tensors.read(name).shape)

    def read(self, name: str) -> Tensor:
        if name not in self._replaced:
            found = self._base.read(name)
            return self._adapted(name, found.float()) if name in self._pairs else found
        own = self._tensors.read(self._replaced[name])
        if name in self._base.names and (shape := tuple(self._base.read(name).shape)) != tuple(own.shape):
            raise self._broken(self._replaced[name], f"the shape {shape} of the base's", f"{tuple(own.shape)}")
        return own

    def _adapted(self, name: str, weight: Tensor) -> Tensor:
        path, parts = self._pairs[name]
        first, second = self._tensors.read(parts["A"]).float(), self._tensors.read(parts["B"]).float()
        is_transposed = self._is_transposed(path, weight, (second.shape[0], first.shape[1]))
        made = (weight.T if is_transposed else weight) + self._adapter.scaling(path) * (second @ first)
        if "m" in parts:
            lengths = self._tensors.read(parts["m"]).float()
            made = (lengths / torch.linalg.vector_norm(made, dim=1))[:, None] * made
        return made.T if is_transposed else made

    def _is_transposed(self, path: str, weight: Tensor, shape: tuple[int, int]) -> bool:
        """Whether the base weight is (in, out): by its shape or, if it is square, by its family, as in peft."""
        stored = tuple(weight.shape)
        if stored not in (shape, shape[::-1]):
            raise self._broken(path, f"two factors of a weight of the shape {stored}", f"factors of {shape}")
        if shape[0] != shape[1]:
            is_transposed = stored != shape
            if is_transposed and not (self._is_in_out or self._adapter.is_transposed):
                raise self._broken(path, f"two factors of a weight of the shape {stored}", f"factors of {shape}")
            return is_transposed
        if self._is_in_out is None and self._adapter.is_transposed:
            reason = "no family is declared that says whether its square weights are transposed"
            raise _unreadable(f"fan_in_fan_out for {path}", self._adapter.where, reason)
        return bool(self._is_in_out) and any(part.isdigit() for part in path.split("."))  # heads are ordinary there

    def _broken(self, name: str, expected: str, found: str) -> BrokenFile:
        advice = "Copy the adapter again, with the config that it was saved with."
        return BrokenFile(f"{self._adapter.where}: {name}", expected, found, advice)

    def stored_as(self, name: str) -> str | None:
        """How a weight was changed, in words; `None` if it was not."""
        inner = getattr(self._base, "stored_as", lambda _: None)(name)
        return f"{inner or 'the base'} with an adapter" if name in self._pairs else inner

    def files(self) -> tuple[FileFacts, ...]:
        return (*self._base.files(), *self._tensors.files())


def _untrained(
    adapter: Adapter, factors: Factors, replaced: Collection[str], in_base: Mapping[str, str], depth: int | None
) -> list[str]:
    """Base tensors that the config says were trained and the adapter does not hold, in the stacks that it touches.

    `in_base`: names of the trained model to those of the base. The base may hold parts that the trained model did not have
    (heads, a decoder, layers behind the last); those are not asked for.
    """
    modules = [*factors, *(name.rpartition(".")[0] for name in replaced)]
    layers = {_layer_of(path) for path in modules}
    stacks = {stack for stack, _ in layers if stack}
    kinds = {_kind_of(path) for path in modules}

    def is_missing(name: str) -> bool:
        path, _, tensor = name.rpartition(".")
        stack, number = _layer_of(path)
        if name in replaced or adapter.saves(path):
            return name not in replaced
        if stack not in stacks or (depth is not None and number >= depth and (stack, number) not in layers):
            return False
        if tensor == "weight" and path not in factors:
            return (_kind_of(path) in kinds or not adapter.takes_all_linear) and adapter.targets(path)
        if tensor != "bias" or f"{path}.weight" not in in_base:
            return False
        return adapter.bias == "all" or (adapter.bias == "lora_only" and path in factors)

    return sorted(in_base[name] for name in in_base if is_missing(name))


def _kind_of(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _layer_of(path: str) -> tuple[str, int]:
    """The list of layers that a path leads through first, and the number in it; an empty name outside of lists."""
    parts = path.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ("", -1) if first is None else (".".join(parts[:first]) or ".", int(parts[first]))


# --- live models ----------------------------------------------------------------------------------------------------


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is one of peft's layers around a layer of the model: called like it, with other weights."""
    has_base = isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "merge")
    return has_base or is_replaced(module)


def is_replaced(module: nn.Module) -> bool:
    """Whether a module replaces another that was trained as a whole (`modules_to_save`)."""
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
    return getattr(_base_layer(layer), attribute)


def _base_layer(layer: Any) -> Any:
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.base_layer


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
                base = _base_layer(adapted)
                originals.append((adapted, base, base.weight.data))
                base.weight.data = base.weight.data.clone()
                with torch.no_grad():
                    adapted.merge()
        yield
    finally:
        for adapted, base, weight in originals:
            base.weight.data = weight
            adapted.merged_adapters.clear()
