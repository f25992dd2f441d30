"""A small random model of a transformers config: a few blocks, few experts, few tokens, on the CPU.

Two sizes. `layout` keeps every width, because widths, heads and their sizes make the layout of a checkpoint; it shrinks
depth, vocabulary, experts and the feed-forward. `tiny` shrinks widths too, for checks of a family as such.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from oversmooth.models.discovery.small_sizes import (
    CLASSES,
    DEPTH,
    FEW,
    FIXED,
    HEADS,
    LARGEST,
    LAYOUT,
    LENGTHS,
    MEANINGS,
    OPEN,
    PLACES_OF_ATTENTION,
    TINY,
    VALUE_HEADS,
    WHOLE,
    WIDTHS,
    WORKING,
)


def shrunk(config: Any, table: Mapping[str, Any]) -> Any:
    """The config with every known field, at any depth, set to the table's value; lists keep their length where it is one
    entry per layer."""
    has_own_values = _heads(config, VALUE_HEADS) in (0, _heads(config, HEADS))
    for name, part in list(vars(config).items()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            shrunk(part, table)
        elif isinstance(part, dict) and "model_type" in part:
            continue
        elif name in table and part is not None:
            _set(config, name, table[name], part)
        elif name in PLACES_OF_ATTENTION and part is not None:
            place = PLACES_OF_ATTENTION[name]
            setattr(config, name, list(place) if isinstance(place, tuple) else place)
        elif name.endswith(MEANINGS) and isinstance(part, int) and part >= 256:
            setattr(config, name, 255 - sum(map(ord, name)) % 40)
    if has_own_values and _heads(config, VALUE_HEADS):
        for name in VALUE_HEADS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, _heads(config, HEADS))
    _per_layer(config)
    _rotary_sections(config)
    return config


def _heads(config: Any, names: Sequence[str]) -> int:
    """How many heads a config says, under any of these names; 0 where it says none."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def constructed(config: Any, table: Mapping[str, Any]) -> Any:
    """A new config of the same class from the table's values, so that what it derives from its fields fits them."""
    given = {}
    for name, part in vars(config).items():
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            given[name] = constructed(part, table)
        elif name in table and isinstance(part, int) and not isinstance(part, bool):
            given[name] = min(table[name], part)
    new = type(config)(**given, **_lists_of_layers(config, given.get("num_hidden_layers", DEPTH)))
    _rotary_sections(new)
    return new


def filled(config: Any) -> Any:
    """The config with numbers where its defaults leave open what a model cannot be built without."""
    for part in list(vars(config).values()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            filled(part)
    for name, value in OPEN.items():
        if getattr(config, name, ...) is None:
            setattr(config, name, value)
    rotary, kinds = getattr(config, "rope_parameters", None), getattr(config, "layer_types", None)
    if isinstance(rotary, dict) and "rope_type" in rotary and kinds:
        config.rope_parameters = {**rotary, **{kind: dict(rotary) for kind in kinds}}
    return config


def _rotary_sections(config: Any) -> None:
    """Positions in time, height and width share the channels of a head."""
    named = getattr(config, "rope_parameters", None)
    if not isinstance(named, dict):
        return
    for rotary in (named, *(part for part in named.values() if isinstance(part, dict))):
        if "mrope_section" not in (*rotary, *getattr(config, "ignore_keys_at_rope_validation", ())):
            continue
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(width * (rotary.get("partial_rotary_factor") or 1)) // 2
        if sum(rotary.get("mrope_section") or ()) != half:
            rotary["mrope_section"] = [half // 3, half // 3, half - 2 * (half // 3)]


def _set(config: Any, name: str, value: Any, old: Any) -> None:
    if isinstance(old, list | tuple) and name in LENGTHS and all(isinstance(side, int) for side in old):
        setattr(config, name, type(old)(min(value, side) for side in old))
        return
    if isinstance(old, bool | str | list | tuple | dict):
        return  # one entry per stage: such models are small
    if isinstance(old, int):
        value = min(value, old)
    setattr(config, name, value)


def _per_layer(config: Any) -> None:
    """Lists with an entry per layer end with the layers."""
    depth = getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int):
        for name, value in _lists_of_layers(config, depth).items():
            setattr(config, name, value)


def _lists_of_layers(config: Any, depth: int) -> dict[str, list[Any]]:
    """The lists with an entry per layer, cut to a depth so that the last kinds of layer remain."""
    found = {}
    for name, value in vars(config).items():
        is_per_layer = "layer" in name or name.endswith(("_types", "_pattern", "_window"))
        if is_per_layer and isinstance(value, list) and len(value) > depth and not name.startswith(("out_", "_")):
            kinds = list(dict.fromkeys(map(str, value)))
            chosen = [next(part for part in value if str(part) == kind) for kind in kinds][-depth:]
            found[name] = (chosen * depth)[:depth]
    return found


def scaled(config: Any) -> Any:
    """Fewer heads of the same size: what has to fit the size of a head still does."""
    for part in list(vars(config).values()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            scaled(part)
    heads = [name for name in HEADS if isinstance(getattr(config, name, None), int)]
    if not heads:
        return config
    most = max(getattr(config, name) for name in heads)
    factor = next((most // few for few in (4, 3, 2, 1) if most % few == 0), 1)
    widths = [name for name in WIDTHS if name not in FIXED and isinstance(getattr(config, name, None), int)]
    if any(getattr(config, name) % factor for name in widths):
        return config
    for name in widths:
        setattr(config, name, max(1, getattr(config, name) // factor))
    return config


def small_skeletons(model_type: str) -> Iterator[Callable[[], nn.Module]]:
    """Ways to build a small random model of a type of transformers from its default config, to try in turn."""
    from transformers import CONFIG_MAPPING

    def config() -> Any:
        return CONFIG_MAPPING[model_type](**WORKING.get(model_type, {}))

    if model_type in WHOLE:
        yield lambda: built(CONFIG_MAPPING[model_type](**WHOLE[model_type]))
    yield lambda: built(shrunk(config(), TINY))
    yield lambda: built(constructed(config(), TINY))
    yield lambda: built(shrunk(filled(config()), TINY))
    yield lambda: built(_that_fits(scaled(shrunk(config(), FEW))))
    yield lambda: built(_that_fits(shrunk(config(), FEW)))


def _that_fits(config: Any) -> Any:
    """A config whose model, counted without memory for it, is small."""
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in _model_of(config).parameters())
    if parameters > LARGEST:
        raise ValueError(f"its smallest model has {parameters / 1e6:.0f} million parameters")
    return config


def layout_skeleton(config: Mapping[str, Any]) -> nn.Module:
    """A model with the widths of a config, a few blocks deep, as the class that the checkpoint was saved from."""
    import transformers

    settled = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
    return built(shrunk(settled, LAYOUT), named[0] if named else None)


def built(config: Any, model_class: Any = None) -> nn.Module:
    """The model of a config with random weights, every one of them different from every other."""
    torch.manual_seed(0)
    model: nn.Module = _model_of(config) if model_class is None else model_class(config)
    randomise(model)
    return model.eval()


def _model_of(config: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(config) if type(config) in AutoModel._model_mapping else _class_of(config)(config)


def _class_of(config: Any) -> Any:
    """The model class of a part of a composite model, which no auto class knows."""
    from transformers import PreTrainedModel

    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError as error:
        raise NoModelClass(f"transformers has no model of its own for a {type(config).__name__}") from error
    found: list[Any] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and _takes(value, type(config))
    ]
    found = [value for value in found if not value.__name__.endswith("PreTrainedModel")]
    if config.model_type in CLASSES:
        return getattr(module, CLASSES[config.model_type])
    if not found:
        raise NoModelClass(f"no model class takes a {type(config).__name__}: it is a part of other models")
    return min(found, key=lambda value: ("For" in value.__name__, len(value.__name__)))


class NoModelClass(ValueError):
    """A config without a model of its own."""


def _takes(model_class: Any, config_class: type) -> bool:
    """Whether a model is built from a config of a class, by its own word or by the annotation of its `__init__`."""
    annotated = inspect.signature(model_class.__init__).parameters.get("config")
    said = "" if annotated is None else annotated.annotation
    return getattr(model_class, "config_class", None) is config_class or said in (config_class, config_class.__name__)


def randomise(model: nn.Module) -> None:
    """Moves every norm, gain and bias away from one and zero, and gives matrices the size of trained ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter)
            if parameter.ndim >= 2:
                parameter.copy_(noise / max(parameter[0].numel(), 1) ** 0.5)
            else:
                parameter.add_(0.1 * noise)
