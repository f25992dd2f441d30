"""What every kind of checkpoint offers: the names of its tensors, and one tensor at a time."""

import hashlib
from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from oversmooth.errors import PackedWeights
from oversmooth.results import FileFacts


@runtime_checkable
class TensorStore(Protocol):
    """A checkpoint opened without reading its tensors."""

    @property
    def names(self) -> Collection[str]:
        """The names of its tensors."""

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU unless it belongs to a live module, in the dtype in which it is stored."""

    def files(self) -> tuple[FileFacts, ...]:
        """The files opened so far."""


class ReadLog:
    """Reads through a store and remembers what was read: the hash, the bytes and the dtypes of a `Provenance`."""

    def __init__(self, store: TensorStore):
        self._store = store
        self._hash = hashlib.sha256()
        self.bytes_read = 0
        self.dtypes: set[str] = set()

    def announce(self, names: Iterable[str]) -> None:
        """Tells a store that can merge reads what is going to be read."""
        getattr(self._store, "announce", lambda names: None)(names)

    def read(self, name: str) -> Tensor:
        tensor = self._store.read(name)
        if not tensor.is_floating_point():
            raise PackedWeights("the model", f"{name!r} has dtype {tensor.dtype}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._hash.update(f"{name} {dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        self._hash.update(plain.view(torch.uint8).numpy().data)
        self.bytes_read += plain.nbytes
        stored_as = getattr(self._store, "stored_as", lambda name: None)(name)
        self.dtypes.add(f"{dtype} from {stored_as}" if stored_as else dtype)
        return tensor.detach()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()
