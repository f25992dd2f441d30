"""Weights of a live model that are not in memory: read from where they are kept, one at a time."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

KEPT = "_oversmooth_kept"
"""Attribute of a module whose weights are read block by block: name of the tensor to what reads it."""


def keep_elsewhere(owner: nn.Module, attribute: str, read: Callable[[], Tensor]) -> None:
    """Remembers how a tensor of a module is read, while the module itself holds none."""
    owner.__dict__.setdefault(KEPT, {})[attribute] = read


def kept_elsewhere(owner: nn.Module, attribute: str) -> Tensor | None:
    """A tensor that the module does not hold: kept by us, or by accelerate (`device_map`); `None` where nobody has it."""
    read = owner.__dict__.get(KEPT, {}).get(attribute)
    if read is not None:
        return read()
    hook: Any = getattr(owner, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):  # accelerate puts several in a sequence
        weights = getattr(part, "weights_map", None)
        with suppress(KeyError):
            if weights is not None:
                return weights[attribute]
    return None


def device_of(model: nn.Module) -> torch.device:
    """Where inputs go: where the first weight in memory is, or the CPU where all of them are read when needed."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    devices = [str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()]
    usable = [device for device in devices if device not in ("disk", "meta")]
    return torch.device(usable[0] if usable else "cpu")
