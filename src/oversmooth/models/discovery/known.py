"""What running a model has shown, kept with the model: a module is watched once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from oversmooth.models.discovery.discovery import Discovery, discover_module
from oversmooth.models.discovery.towers import kind_of, placed, watch
from oversmooth.models.stores.module import tensors_of


@dataclass(frozen=True, eq=False, slots=True)
class _Known:
    names: tuple[str, ...]
    discovery: Discovery
    inputs: Mapping[str, Tensor]


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def discovered(model: nn.Module, config: Mapping[str, Any], *, inputs: Mapping[str, Tensor] | None = None) -> Discovery:
    """The declaration of a live module, from memory where it was watched before and has not changed its tensors."""
    names = tuple(tensors_of(model))  # the same before and after a weight is parametrized
    known = _KNOWN.get(model)
    if inputs is None and known is not None and known.names == names:
        return known.discovery
    if inputs is None:
        found, fed = watch(model, config)
    else:
        fed = placed(model, inputs)
        found = discover_module(model, fed, target=type(model).__name__, kind=kind_of(fed))
    _KNOWN[model] = _Known(names, found, fed)
    return found


def known_inputs(model: nn.Module) -> Mapping[str, Tensor] | None:
    """The inputs that a model was watched on."""
    known = _KNOWN.get(model)
    return None if known is None else known.inputs
