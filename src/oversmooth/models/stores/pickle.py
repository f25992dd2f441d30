"""`.bin`, `.pt` and `.pth` files, loaded with `weights_only=True` and memory-mapped: nothing in them is executed."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import BrokenFile, PackedWeights, UnsafePickle, first_line, reason_of
from oversmooth.models.stores.torch_files import WHAT, check_legacy, check_records
from oversmooth.results import FileFacts

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net")
"""Keys under which training scripts keep the state dict."""


class PickleStore:
    """Tensors of one pickle file, or of the shards that an index names; a shard is opened when it is needed."""

    def __init__(self, folder: Path, where: Mapping[str, str]):
        self._folder = folder
        self._where = dict(where)
        self._open: dict[str, Mapping[str, Tensor]] = {}
        self.names = self._where.keys()

    @classmethod
    def single(cls, path: Path) -> "PickleStore":
        store = cls(path.parent, {})
        store._where.update(dict.fromkeys(store._shard(path.name), path.name))
        return store

    def _shard(self, shard: str) -> Mapping[str, Tensor]:
        if shard not in self._open:
            self._open[shard] = load_tensors(self._folder / shard)
        return self._open[shard]

    def read(self, name: str) -> Tensor:
        shard = self._where[name]
        tensors = self._shard(shard)
        if name not in tensors:
            raise BrokenFile(shard, f"the tensor {name!r}, as the index says", "no such tensor")
        return plain_tensor(self._folder / shard, name, tensors[name])

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._where[name]

    def files(self) -> tuple[FileFacts, ...]:
        return tuple(FileFacts(name=n, size_bytes=(self._folder / n).stat().st_size) for n in sorted(self._open))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The state dict in a pickle file, mapped where the format allows it; refuses everything that is not tensors."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise BrokenFile(str(path), WHAT, reason_of(error), "Check the path and its permissions.") from error
    is_zip = start == b"PK\3\4"  # as torch itself decides
    if is_zip:
        check_records(path)
    elif start[:1] != pickle.PROTO:
        raise BrokenFile(str(path), WHAT, "neither a zip archive nor a pickle")
    else:
        check_legacy(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of pickle protocols that are refused next
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        reason = str(error).strip()
        if "Unsupported global" in reason or "Weights only" in reason or "weights_only" in reason.lower():
            raise UnsafePickle(str(path), _what_was_refused(reason)) from error
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    except (Exception, MemoryError) as error:  # torch raises whatever its parts raise on a broken file
        raise BrokenFile(str(path), WHAT, first_line(error)) from error
    return _state_dict(path, loaded)


def plain_tensor(path: Path, name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it is one of numbers in memory and no larger than its file (strides of 0 repeat a number)."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise PackedWeights(str(path), f"{name!r} is a {kind} {type(tensor).__name__}")
    if tensor.is_meta:
        raise BrokenFile(str(path), f"numbers in {name!r}", "a tensor on the meta device, which has none")
    if tensor.is_quantized:
        raise PackedWeights(str(path), f"{name!r} has dtype {tensor.dtype}")
    size = path.stat().st_size
    if tensor.numel() * tensor.itemsize > size:
        found = f"shape {tuple(tensor.shape)} with strides {tensor.stride()} in a file of {size} bytes"
        raise BrokenFile(str(path), f"a tensor {name!r} of its own numbers", found)
    return tensor.resolve_neg()


def _what_was_refused(message: str) -> str:
    for line in message.splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ")[:200]
    return message.splitlines()[0][:200]


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    for _ in range(3):  # wrappers nest: {"checkpoint": {"model": {...}}} is as deep as scripts go
        if not isinstance(loaded, Mapping):
            break
        inner = [loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)]
        if inner:  # before the tensors: a step or a scheduler's state may lie beside the model
            loaded = inner[0]
            continue
        tensors = {n: value for n, value in loaded.items() if isinstance(n, str) and isinstance(value, Tensor)}
        if tensors:
            return tensors
        break
    found = f"the keys {list(loaded)[:5]}" if isinstance(loaded, Mapping) else f"a {type(loaded).__name__}"
    raise BrokenFile(str(path), "a state dict of tensors", found, f"Known wrappers: {', '.join(WRAPPERS)}.")
