"""A GPU for machines that have none: tensors on the device `pretend` compute on the CPU, and show what a GPU would not do.

Such a tensor refuses to meet tensors of the CPU or of another `pretend` device, and says when the host has to wait for it.

>>> with pretend_gpu() as seen:
...     torch.ones(3, device="pretend:0").sum().item()
3.0
>>> seen.waits.total()
1
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import accelerate
import torch
from torch import Tensor, nn
from torch.utils import backend_registration
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from tests.command_line import ROOT

NAME = "pretend"
ALONE = "OVERSMOOTH_TEST_ALONE"
"""Set in the environment of a process that runs one test."""
aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
"""These take a tensor from one device to another."""
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
"""Indices in memory of the host are moved by torch; the indexed tensor is not."""
WAITS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
    aten._linalg_check_errors.default,
}
"""The host needs the numbers before it can go on; it also does where a mask is an index."""
MAKERS = (
    *(aten.eye.default, aten.eye.m, aten.arange.default, aten.arange.start, aten.arange.start_step),
    *(aten.linspace.default, aten.randperm.default),
)
"""torch makes these by changing the shape of an empty tensor, which a tensor that holds another cannot follow."""
LAPACK = ("eig", "svd", "qr", "inv", "lu", "solve", "lstsq", "cholesky", "slogdet")
DOUBLE = (torch.float64, torch.complex128)


@dataclass
class Seen:
    """What costs time on a GPU: how often each line of the library asked for it."""

    waits: Counter[str] = field(default_factory=Counter)
    """The host waited for the device: `.item()`, `bool()`, `.cpu()`, an index of booleans."""
    doubles: Counter[str] = field(default_factory=Counter)
    """Operations in float64."""
    lapack: Counter[str] = field(default_factory=Counter)
    """Eigenvalues, inverses and other factorisations."""


_seen = Seen()
_is_there = False


@contextmanager
def pretend_gpu() -> Iterator[Seen]:
    """The device exists and what is done on it is counted while the context lasts; other tests see no device."""
    global _seen, _is_there
    _register()
    _seen = Seen()
    with ExitStack() as patched:
        for name in ("tensor", "as_tensor", "asarray"):
            patched.enter_context(patch.object(torch, name, partial(_made_of_numbers, getattr(torch, name))))
        _is_there = True
        try:
            yield _seen
        finally:
            _is_there = False


def _made_of_numbers(function: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch makes such tensors in C++, past every backend; here the device gets them from the CPU."""
    made = function(*args, **kwargs)
    return made if device is None else made.to(device)


class PretendTensor(Tensor):
    """Says that it is on a `pretend` device, and holds a tensor in memory."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "PretendTensor":
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = Tensor._make_wrapper_subclass(cls, held.size(), device=device, **layout)
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"PretendTensor({self.held!r}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        return memo.setdefault(
            id(self), nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        )

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device} | kwargs)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func.decompose(*args, **(kwargs or {}))  # such as `to`, where autograd has not done so
        return _run(func, *args, **(kwargs or {})) if made is NotImplemented else made


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Every operation with tensors of the device ends here, and every one that makes them."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, PretendTensor)]
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else (args[0] if func in MOVES else ours[0]).device
    if func not in MOVES:
        _require_one_device(func, args, tensors)
    _count(func, args, ours, device)
    if asked is not None and device.type == NAME:
        kwargs["device"] = torch.device("cpu")
    held_args, held_kwargs = tree_map(lambda leaf: getattr(leaf, "held", leaf), (args, kwargs))
    found = func(*held_args, **held_kwargs)
    if torch.Tag.inplace_view in func.tags:  # such as `squeeze_` and `set_`: what is held has another shape now
        with no_dispatch():
            args[0].as_strided_(args[0].held.shape, args[0].held.stride(), args[0].held.storage_offset())
    if device.type != NAME:
        return found
    given = {id(tensor.held): tensor for tensor in ours}  # what was changed in place is the tensor that was given

    def on_device(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return given[id(leaf)] if id(leaf) in given else PretendTensor(leaf, torch.device(NAME, device.index or 0))

    return tree_map(on_device, found)


def _require_one_device(func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    if func in INDEXING and isinstance(args[0], PretendTensor):
        indices = {id(index) for index in args[1] if index is not None and index.device.type == "cpu"}
        tensors = [tensor for tensor in tensors if id(tensor) not in indices]
    devices = {str(tensor.device) for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} found {sorted(devices)}")


def _count(func: Any, args: tuple[Any, ...], ours: list[PretendTensor], to: torch.device) -> None:
    if not ours:
        return
    name = func.name().removeprefix("aten::")
    is_to_host = func in MOVES and (to.type == "cpu" or not isinstance(args[0], PretendTensor))
    has_mask = func in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
    if func in WAITS or is_to_host or has_mask:
        _seen.waits[f"{_line()} {name}"] += 1
    if func not in MOVES and any(tensor.dtype in DOUBLE for tensor in ours):
        _seen.doubles[f"{_line()} {name}"] += 1
    if "linalg_" in name and any(part in name for part in LAPACK):
        _seen.lapack[f"{_line()} {name}"] += 1


def _line() -> str:
    """The innermost line of the library that is running."""
    frame: Any = sys._getframe()
    while frame is not None and "/oversmooth/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.split('/oversmooth/')[-1]}:{frame.f_lineno}" if frame else "elsewhere"


class _Backend(backend_registration._DummyBackendModule):
    """What torch asks of the module of a device, `torch.cuda` of the other one."""

    def is_available(self) -> bool:
        return _is_there

    def device_count(self) -> int:
        return 2 if _is_there else 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()  # numbers are drawn on the CPU

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class _Hook(backend_registration._DummyPrivateUse1Hook):
    """The same for torch's C++."""

    def is_available(self) -> bool:
        return _is_there


_kept: list[Any] = []
"""The registration of the device lasts as long as this."""


@cache
def _register() -> None:
    """torch sends operations on its one device of others' making to `_run`."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend(), _Hook())
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    makers = torch.library.Library("aten", "IMPL")
    for maker in MAKERS:
        makers.impl(maker.name(), partial(_run, maker), "PrivateUse1")
    _kept.extend((library, makers))


def on_two_devices(model: nn.Module) -> nn.Module:
    """The model with its first blocks on `pretend:0` and its last ones on `pretend:1`, as `device_map="auto"` spreads it."""
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    rooms = {0: int(0.75 * size), 1: 2 * size}
    whole = getattr(model, "_no_split_modules", None)
    places = accelerate.infer_auto_device_map(model, rooms, no_split_module_classes=whole, verbose=False)
    return accelerate.dispatch_model(model, {path: f"{NAME}:{number}" for path, number in places.items()})


def ran_alone(test: str) -> bool:
    """Runs the test of this name in a process of its own; false inside of that one, where it has to be done.

    For whatever takes gradients on the device: torch counts devices at the first backward pass of a process.
    """
    if ALONE in os.environ:
        return False
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(words, env={**os.environ, ALONE: "1"}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return True
