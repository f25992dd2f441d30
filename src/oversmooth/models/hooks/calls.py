"""The features among what a module received and returned."""

from typing import Any

from torch import Tensor


def received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a module was called with: the first features, or those that have a usual name."""
    usual = [kwargs[name] for name in ("hidden_states", "query", "src", "x") if name in kwargs]
    tensors = [value for value in (*args, *usual, *kwargs.values()) if isinstance(value, Tensor)]
    features = [value for value in tensors if value.is_floating_point()]
    assert features, "a block receives its hidden states"
    return features[0]


def returned(output: Any) -> Tensor:
    """What a module returned, or the first of several."""
    found = output[0] if isinstance(output, tuple | list) else output
    assert isinstance(found, Tensor)
    return found
