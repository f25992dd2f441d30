"""From the mixed heads to the output projection: what a running model multiplies them by on the way.

Beside every tensor that holds mixed heads stands a shadow of the same shape, all ones at first. What moves the heads moves
the shadow; what multiplies the heads multiplies it. At the output projection the shadow is the gains of every token and
channel, whatever the model's code looks like.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


SAME = _names("contiguous clone to float double half bfloat16 type type_as dropout detach __get__ view_as")
"""The result holds the same numbers in the same order, perhaps in another precision."""
VIEWS = _names("view reshape flatten unflatten squeeze unsqueeze expand")
MOVES = _names("transpose permute movedim swapaxes chunk split __getitem__ narrow unbind select t")
PRODUCTS = _names("matmul bmm einsum __matmul__")
FACTORS: Mapping[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": torch.mul,
    "mul_": torch.mul,
    "multiply": torch.mul,
    "div": torch.div,
    "div_": torch.div,
}


class Following:
    """The shadows of one layer's mixed heads."""

    def __init__(self) -> None:
        self._shadows = WeakTensorKeyDictionary()
        self._chances = WeakTensorKeyDictionary()
        self.subtracted: Tensor | None = None
        """Of differential attention: what the second attention was multiplied by, relative to the first."""

    def begin(self, mixed: Tensor) -> None:
        """These are mixed heads, as attention made them."""
        self._shadows[mixed] = torch.ones((), dtype=mixed.dtype, device=mixed.device).expand(mixed.shape)

    def expect(self, probabilities: Tensor) -> None:
        """What these are multiplied with becomes mixed heads."""
        self._chances[probabilities] = True

    def continue_as(self, tensor: Tensor, shadow: Tensor) -> None:
        self._shadows[tensor] = shadow.reshape(tensor.shape)

    def shadow(self, tensor: Any) -> Tensor | None:
        return self._shadows.get(tensor) if isinstance(tensor, Tensor) else None

    def is_probabilities(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor in self._chances

    def step(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """The model called a function."""
        name = getattr(func, "__name__", "")
        if name == "einsum":
            args = args[1:]
        if not args:
            return
        if self.is_probabilities(args[0]) and isinstance(output, Tensor):
            if name in PRODUCTS:
                self.begin(output)
            elif name in SAME | VIEWS | MOVES:
                self._chances[output] = True
            return
        if name in ("cat", "concat"):
            self._join(func, args, kwargs, output)
        elif (shadow := self.shadow(args[0])) is not None:
            self._carry(name, func, shadow, args, kwargs, output)
        elif len(args) > 1 and name in ("mul", "multiply") and (shadow := self.shadow(args[1])) is not None:
            self._carry(name, func, shadow, args[1::-1], kwargs, output)

    def _carry(
        self, name: str, func: Any, shadow: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        other = self.shadow(args[1]) if len(args) > 1 else None
        if name == "sub" and other is not None:
            self.subtracted = other / shadow
            self._set(output, shadow)
        elif other is not None:
            return  # a product of mixed heads with mixed heads is none of ours
        elif name in FACTORS:
            self._set(output, FACTORS[name](shadow, args[1]).expand(output.shape))
        elif name in SAME and isinstance(output, Tensor) and output.shape == shadow.shape:
            self._set(output, shadow)
        elif name in VIEWS:
            self._set(output, shadow.reshape(output.shape) if name != "expand" else shadow.expand(output.shape))
        elif name in MOVES or (name == "__get__" and isinstance(output, Tensor)):
            self._set(output, func(shadow, *args[1:], **kwargs))

    def _join(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        parts = args[0] if isinstance(args[0], Sequence) else ()
        shadows = [self.shadow(part) for part in parts]
        if parts and all(shadow is not None for shadow in shadows):
            self._set(output, func(shadows, *args[1:], **kwargs))

    def _set(self, output: Any, shadow: Any) -> None:
        if isinstance(output, Tensor):
            self._shadows[output] = shadow
            return
        for tensor, part in zip(output, shadow, strict=True):
            self._shadows[tensor] = part
