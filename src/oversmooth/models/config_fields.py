"""Fields of a config, each checked by name, kind and range when it is read: nothing is made of a wrong one."""

import math
from collections.abc import Mapping
from typing import Any

from oversmooth.errors import BadConfig

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
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise BadConfig(key, "a finite number", _shown(value))
    return float(value)


def word(config: Mapping[Any, Any], key: str) -> str | None:
    """A word; `None` where the config is silent."""
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise BadConfig(key, "a name", _shown(value))
    return value


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


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
