"""Which parameter a tensor is a view of, and which of its entries it shows.

A weight reaches a matrix product as a view of a parameter (`weight.t()`), so its storage and strides say which entry
stands where, without reading a single number. Positions count the entries of the parameter's own memory.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

SHIFT = 2.0**32
"""A code is the number of its source times this, plus a position; float64 holds such numbers exactly."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One named tensor of the model and where it lies in its storage."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    end: int

    def axes_of(self, position: int) -> tuple[int, ...]:
        """The index, axis by axis, of the entry at a position."""
        index = [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis]):
            index[axis], position = divmod(position, self.strides[axis]) if self.strides[axis] else (0, position)
        return tuple(index)


class Parameters:
    """The parameters of a model by the memory they lie in."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._by_storage: dict[int, list[Parameter]] = {}
        for name, tensor in tensors.items():
            reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            begin = int(tensor.storage_offset())
            found = Parameter(name, tuple(tensor.shape), tensor.stride(), begin, begin + int(reach))
            self._by_storage.setdefault(_storage(tensor), []).append(found)
        for members in self._by_storage.values():
            members.sort(key=lambda member: member.begin)
        self.by_name = {member.name: member for members in self._by_storage.values() for member in members}

    def of(self, view: Tensor) -> Parameter | None:
        """The parameter that a tensor is a view of; `None` where it is data."""
        members = self._by_storage.get(_storage(view))
        if not members or not view.numel():
            return None
        at = bisect_right([member.begin for member in members], view.storage_offset()) - 1
        # Of tied parameters, which lie in the same place, the first name counts.
        while at > 0 and members[at - 1].begin == members[at].begin:
            at -= 1
        return members[at] if at >= 0 and view.storage_offset() < members[at].end else None

    def positions(self, view: Tensor, parameter: Parameter) -> Int[Tensor, "*shape"]:
        """For every entry of a view, its position in the parameter."""
        found = torch.tensor(view.storage_offset() - parameter.begin)
        for axis, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            steps = torch.arange(size) * stride
            found = found + steps.reshape(-1, *[1] * (view.ndim - axis - 1))
        return found


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
