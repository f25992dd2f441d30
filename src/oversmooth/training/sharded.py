"""Models whose weights lie in shards on several processes (FSDP): an ordinary copy of them, where one process measures.

Gathering the weights is something that all processes do together; running the copy is not. So the first process alone
measures, as it does elsewhere, at the price of one whole model in its memory while it does.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, distributed, nn

from oversmooth.control.selection import RULE_PREFIX
from oversmooth.errors import NotSupported

HOOKS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict))
"""Where a module keeps its hooks: those that gather shards must not run in a copy that has none."""
INSIDE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Under which name a wrapper keeps the module that it wraps."""


def is_sharded(model: nn.Module) -> bool:
    """Whether some part of the model was given to FSDP, in either of its forms."""
    return any(_wraps(part) or _is_sharding(type(part)) for part in model.modules())


def whole_copy(model: nn.Module, is_kept: bool) -> nn.Module | None:
    """An ordinary model with the whole weights, where it is kept; every process has to ask for it at the same time."""
    if any(RULE_PREFIX in name for name, _ in model.named_modules()):
        reason = "its hooks belong to the modules in shards, and a whole copy would run without it"
        raise NotSupported("Watching an intervention", "under FSDP", reason, "Use DDP, or measure its checkpoints.")
    if any(_wraps(part) for part in model.modules()):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True):
            return _ordinary(model, lambda weight: weight.detach().clone(), {}) if is_kept else None
    whole: dict[int, Tensor] = {}
    for weight in model.parameters():
        gathered = _gathered(weight.detach())
        if is_kept:
            whole[id(weight)] = gathered
    return _ordinary(model, lambda weight: whole[id(weight)], {}) if is_kept else None


def _gathered(weight: Tensor) -> Tensor:
    full: Callable[[], Tensor] | None = getattr(weight, "full_tensor", None)  # of a DTensor
    return weight if full is None else full()


def _wraps(module: nn.Module) -> bool:
    return hasattr(module, "_fsdp_wrapped_module")


def _is_sharding(kind: type) -> bool:
    """Whether `fully_shard` has put its own class in front of a module's."""
    if not distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return issubclass(kind, FSDPModule)


def _ordinary(module: nn.Module, whole: Callable[[Tensor], Tensor], made: dict[int, nn.Module]) -> nn.Module:
    """The same modules without wrappers and hooks, each once, around tensors of their own."""
    inner: Any = module
    while (name := next((name for name in INSIDE if name in inner._modules), None)) is not None:
        inner = inner._modules[name]
    if id(inner) in made:
        return made[id(inner)]
    kind: Any = type(inner)
    kind = kind.__bases__[1] if _is_sharding(kind) else kind  # the module's own class stands behind that of FSDP
    copy: nn.Module = kind.__new__(kind)
    made[id(inner)] = copy
    copy.__dict__.update(inner.__dict__)
    copy.__dict__.update({name: OrderedDict() for name in HOOKS})
    copy._parameters = {
        name: None if weight is None else nn.Parameter(whole(weight), weight.requires_grad)
        for name, weight in inner._parameters.items()
    }
    copy._buffers = dict(inner._buffers)
    copy._modules = {
        name: None if child is None else _ordinary(child, whole, made) for name, child in inner._modules.items()
    }
    return copy
