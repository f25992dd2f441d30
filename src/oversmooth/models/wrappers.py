"""`unwrapped`: the model inside of what compiles, distributes, adapts or opens it up for a study."""

from typing import Any, cast

import torch
from torch import nn

from oversmooth.errors import NotSupported

PARALLEL = ("DistributedDataParallel", "DataParallel")
BRIDGED = "._original_component"
"""In the names of tensors that TransformerLens has put behind its hooks."""


def is_envoy(target: object) -> bool:
    """Whether it is a model of nnsight, which is no module itself."""
    return _is_of(target, "nnsight") and isinstance(getattr(target, "_module", None), nn.Module)


def unwrapped(target: Any) -> nn.Module:
    """The model itself. FSDP's weights in shards stay where they are: only all processes together can gather them."""
    model = _of_envoy(target) if is_envoy(target) else target
    while True:
        if type(model).__name__ in PARALLEL:
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile: hooks are seen inside
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = cast(Any, model).get_base_model()  # its layers are the adapted ones
        elif isinstance(encoder := _sentence_encoder(model), nn.Module):
            model = encoder
        elif _is_of(model, "transformer_lens") and hasattr(model, "original_model"):
            return _behind_bridge(model)
        else:
            return model


def require_inside(model: nn.Module, inside: nn.Module) -> None:
    """Raises where a change of what is inside would not change the model that the user holds."""
    if all(part is not inside for part in model.modules()):
        raise _not_plain(model, "its own modules keep weights of their own, and would not see the change")


def _of_envoy(envoy: Any) -> nn.Module:
    model: nn.Module = envoy._module
    if any(weight.is_meta for weight in model.parameters()):
        raise NotSupported(
            f"A {type(envoy).__name__}", "yet", "its weights are not loaded", "Make it with dispatch=True."
        )
    return model


def _is_of(target: object, library: str) -> bool:
    return any(kind.__module__.partition(".")[0] == library for kind in type(target).__mro__)


def _sentence_encoder(model: nn.Module) -> object:
    """The Transformer in sentence-transformers' own class, which is called with plain inputs."""
    return getattr(next(iter(model.children()), None), "auto_model", None)


# --- TransformerLens: a bridge replaces the modules of a model of transformers by its own, and calls those ---


def _behind_bridge(bridge: Any) -> nn.Module:
    """The plain model with the bridge's weights (no copies), which gives the same outputs: this is tried."""
    from accelerate import init_empty_weights

    from oversmooth.models.live import silenced

    opened_up = bridge.original_model
    if getattr(bridge, "_weights_processed", False):
        raise _not_plain(bridge, "enable_compatibility_mode() has folded and centred its weights")
    held = {name.replace(BRIDGED, ""): value for name, value in opened_up.state_dict(keep_vars=True).items()}
    with silenced(), init_empty_weights(include_buffers=False):
        plain: Any = type(opened_up)(opened_up.config)
    wanted = plain.state_dict()
    if missing := [name for name, like in wanted.items() if name not in held or held[name].shape != like.shape]:
        raise _not_plain(bridge, f"its {missing[0]} is not that of the {type(plain).__name__} inside of it")
    plain.load_state_dict({name: held[name] for name in wanted}, assign=True)
    plain.tie_weights()
    plain.train(bridge.training)
    _require_same_outputs(bridge, opened_up, plain)
    inside: nn.Module = plain
    return inside


def _require_same_outputs(bridge: Any, opened_up: nn.Module, plain: Any) -> None:
    from oversmooth.models.inputs import examples
    from oversmooth.models.live import call_model, quiet_eval

    inputs = next(examples(plain, plain.config.to_dict()))
    with quiet_eval(opened_up), quiet_eval(plain):
        given, own = call_model(opened_up, inputs)[0], call_model(plain, inputs)[0]
    if not torch.allclose(given, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())):
        raise _not_plain(bridge, "its outputs differ from those of its weights in the plain model")


def _not_plain(bridge: Any, reason: str) -> NotSupported:
    advice = "Give the checkpoint that it was made from, or the bridge as boot_transformers() returns it."
    return NotSupported(f"A {type(bridge).__name__}", "here", reason, advice)
