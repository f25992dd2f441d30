"""The same architecture with fresh weights: what a model is compared with, to tell training from architecture."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from oversmooth.errors import first_line
from oversmooth.models.live import is_offloaded, silenced
from oversmooth.models.stores.module import device_of, is_quantised

LARGEST = 1_000_000_000
"""Parameters of a model that is built a second time at most."""
RESETS = ("reset_parameters", "_reset_parameters")
"""Names under which modules of torch give themselves fresh weights."""


CHANGING = ("training", "grad_checkpointing", "fused_attn")
"""What a program changes in a model that is made, and that no weight depends on."""


class NoFreshCopy(Exception):
    """Why there is none, in words."""


def fresh_copy(module: nn.Module, seed: int) -> nn.Module:
    """A module like this one with weights as they are before training; the random state of the program stays as it was.

    Models of transformers are built from their configs, those of timm by their names. Models of timm that were made with
    other arguments, which nothing keeps, draw their weights again as their constructor does; of other classes, every module
    that has parameters has to know how to reset them, as those of torch do. Raises `NoFreshCopy`.
    """
    _require_usual(module)
    # On the CPU alone: neither is the random state of any GPU touched, nor does torch warn that there are many.
    with torch.random.fork_rng(devices=()), torch.device("cpu"), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        found = _built(module)
    if (was := _shapes(module)) != (now := _shapes(found)):
        names = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        raise NoFreshCopy(f"a new one has other tensors ({names[0]}{' and others' if len(names) > 1 else ''})")
    first = next(module.parameters())
    return found.to(device_of(module), first.dtype).eval()


def recipe_of(module: nn.Module) -> dict[str, Any] | None:
    """What a fresh copy is built from, as plain data; `None` for classes whose code only they know."""
    if (config := _transformers_config(module)) is not None:
        return {"class": type(module).__name__, "config": config.to_dict()}
    if (name := _timm_name(module)) is not None:
        shapes = {name: list(shape) for name, shape in _shapes(module).items()}
        return {"class": type(module).__name__, "timm": name, "shapes": shapes, "facts": _facts(module)}
    return None


def _require_usual(module: nn.Module) -> None:
    if is_offloaded(module):
        raise NoFreshCopy("its weights do not fit into memory")
    count = sum(weight.numel() for weight in module.parameters())
    if count == 0:
        raise NoFreshCopy("it has no parameters")
    if count > LARGEST:
        raise NoFreshCopy(f"it has {count / 1e9:.1f} billion parameters, over {LARGEST / 1e9:.0f}")
    if any(is_quantised(weight) for weight in module.parameters()):
        raise NoFreshCopy("its weights are quantised")


def _built(module: nn.Module) -> nn.Module:
    try:
        if (config := _transformers_config(module)) is not None:
            with silenced():
                return type(module)(copy.deepcopy(config))
        if (name := _timm_name(module)) is not None:
            import timm

            found = timm.create_model(name, pretrained=False, num_classes=getattr(module, "num_classes", 0))
            is_same = _shapes(found) == _shapes(module) and _facts(found) == _facts(module)
            return found if is_same else _drawn_again(copy.deepcopy(module))
        return _reset(copy.deepcopy(module))
    except NoFreshCopy:
        raise
    except Exception as error:  # classes of other people raise whatever they like
        raise NoFreshCopy(f"building it anew fails: {first_line(error)}") from error


def _transformers_config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    is_whole = hasattr(type(module), "from_pretrained") and hasattr(config, "to_dict")
    return config if is_whole else None


def _timm_name(module: nn.Module) -> str | None:
    known = getattr(module, "pretrained_cfg", None) or {}
    name = known.get("architecture") if type(module).__module__.startswith("timm.models") else None
    return str(name) if name else None


def _reset(module: nn.Module) -> nn.Module:
    """The module itself, with the weights of every part reset, inner parts first."""
    resets: list[tuple[nn.Module, Callable[[], object] | None]] = [
        (part, next((getattr(part, name) for name in RESETS if hasattr(part, name)), None))
        for part in reversed(list(module.modules()))
    ]
    for part, reset in resets:
        if reset is not None:
            reset()
        elif any(True for _ in _own_parameters(part)):
            raise NoFreshCopy(f"{type(part).__name__} has parameters of its own and no reset_parameters()")
    return module


def _drawn_again(module: nn.Module) -> nn.Module:
    """A model of timm whose constructor's last steps are taken once more: parts reset themselves, then the model."""
    if any(is_parametrized(part) for part in module.modules()):
        raise NoFreshCopy("its weights were given another form")
    for weight in module.parameters():
        weight.fill_(torch.nan)
    for part in reversed(list(module.modules())):
        if (reset := next((getattr(part, name) for name in RESETS if hasattr(part, name)), None)) is not None:
            reset()
    if callable(start := getattr(module, "init_weights", None)):
        start()
    elif callable(start := getattr(module, "_init_weights", None)):
        module.apply(start)
    left = [name for name, weight in module.named_parameters() if bool(weight.isnan().any())]
    if left:
        others = " and others" if len(left) > 1 else ""
        raise NoFreshCopy(f"it was made with other arguments, and only its constructor draws {left[0]}{others}")
    return module


def _facts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Plain numbers and words that the parts of a module keep, such as how many heads they have."""
    return {
        name: {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, bool | int | float | str) and key not in CHANGING and not key.startswith("_")
        }
        for name, part in module.named_modules()
    }


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}
