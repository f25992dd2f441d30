"""One model trained by several processes: which of them measures, and how the others learn of it."""

from typing import Any

import torch
from torch import distributed, nn


def is_first() -> bool:
    """Whether this process measures: the first of several, or the only one."""
    return not _several() or distributed.get_rank() == 0


def first_says(answer: bool) -> bool:
    """The answer of the first process, in every process; all of them have to ask."""
    if not _several():
        return answer
    device = (
        "cpu" if distributed.get_backend() == "gloo" else torch.device(torch.accelerator.current_accelerator() or "cpu")
    )
    said = torch.tensor([int(answer)], device=device)
    distributed.broadcast(said, 0)
    return bool(said.item())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, without what distributes or compiles it; weights in shards stay where they are (`sharded`)."""
    inner: Any = model
    while True:
        if type(inner).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        else:
            return inner


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
