"""A live `nn.Module` as a tensor store; weights on disk or quantised in memory are read through it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from oversmooth.errors import BrokenFile, PackedWeights, RefusedArchitecture
from oversmooth.models.declaration import Arch, Paths
from oversmooth.models.identify import TensorNames
from oversmooth.models.stores.adapters import effective, is_adapted, tensors_of_adapted
from oversmooth.models.stores.packed import OF_127
from oversmooth.results import FileFacts

# --- weights of a live model that are not in memory: read from where they are kept, one at a time ---

KEPT = "_oversmooth_kept"
"""Attribute of a module that does not hold its weights: name of a tensor to the function that reads it."""


def kept_elsewhere(owner: nn.Module, attribute: str) -> Tensor | None:
    """A tensor that the module does not hold: kept by us or by accelerate (`device_map`); `None` if neither has it."""
    read = owner.__dict__.get(KEPT, {}).get(attribute)
    if read is not None:
        return read()
    hook: Any = getattr(owner, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):  # accelerate puts several in a sequence
        weights = getattr(part, "weights_map", None)
        with suppress(KeyError):
            if weights is not None:
                return weights[attribute]
    return None


def device_of(model: nn.Module) -> torch.device:
    """Where inputs go: where the first weight in memory is, or the CPU where all of them are read when needed."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    devices = [str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()]
    usable = [device for device in devices if device not in ("disk", "meta")]
    return torch.device(usable[0] if usable else "cpu")


# --- weights of live models that are quantised in memory by torchao or bitsandbytes ---


def plain(owner: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The tensor itself; if its class quantises, the dequantised values in float32."""
    kind = type(tensor).__name__
    if kind == "Params4bit":
        return _four_bits(name, tensor)
    if kind == "Int8Params" and tensor.dtype == torch.int8:
        return _eight_bits(owner, name, tensor)
    return tensor.dequantize().float() if _has_own_floats(tensor) else tensor


def is_quantised(tensor: Tensor) -> bool:
    """Whether a live tensor holds quantised numbers."""
    return type(tensor).__name__ in ("Params4bit", "Int8Params") or _has_own_floats(tensor)


def _has_own_floats(tensor: Tensor) -> bool:
    plain_types = (Tensor, nn.Parameter, nn.parameter.UninitializedParameter)
    is_subclass = type(tensor) not in plain_types
    return is_subclass and type(tensor).dequantize is not Tensor.dequantize  # torch's own is for its old dtypes


def _four_bits(name: str, tensor: Any) -> Tensor:
    if tensor.quant_state is None:  # not quantised yet: that happens when it is moved to its device
        return tensor.data
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, tensor.quant_state).float()


def _eight_bits(owner: nn.Module, name: str, tensor: Any) -> Tensor:
    scales = tensor.SCB if tensor.SCB is not None else getattr(getattr(owner, "state", None), "SCB", None)
    if scales is None:
        raise PackedWeights("the module", f"{name!r} holds 8-bit integers of bitsandbytes without their scales")
    return tensor.data * scales.view(-1, 1) * OF_127


# --- a live module as a checkpoint: its tensors by name, and a config ---

TIMM_MODELS = ("VisionTransformer", "VisionTransformerDistilled")


class ModuleStore:
    """Tensors of a live module. Parametrized tensors appear under their own names, as the values they now have."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._where = tensors_of(module)
        self.config = describe(module)
        self.names = self._where.keys()

    def read(self, name: str) -> Tensor:
        owner, attribute = self._where[name]
        tensor = effective(owner, attribute) if is_adapted(owner) else getattr(owner, attribute)
        if tensor.is_meta:
            tensor = kept_elsewhere(owner, attribute)
        if tensor is None or tensor.is_meta:
            raise BrokenFile(f"the module's tensor {name!r}", "values", "a tensor on the meta device", "Load it first.")
        tensor = plain(owner, name, tensor)
        return tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach()  # MPS has no float64

    def module(self, path: str) -> nn.Module:
        """The submodule at a path."""
        return self._module.get_submodule(path)

    def owner(self, name: str) -> nn.Module:
        """The module that holds a tensor and is called with it."""
        return self._where[name][0]

    def norm(self, names: TensorNames) -> nn.Module:
        """The module of a norm, which may have no tensors."""
        return self.owner(names.weight) if names.weight else self.module(names.module)

    @contextmanager
    def in_use(self) -> Iterator[dict[str, Tensor]]:
        """Every tensor by name, as the model uses it inside; parametrized ones are computed once."""
        with parametrize.cached():
            yield {name: getattr(owner, attribute) for name, (owner, attribute) in self._where.items()}

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Other values in these tensors of the module while the context lasts; shapes and dtypes stay."""
        places = {name: getattr(*self._where[name]).data for name in tensors}
        before = {name: place.clone() for name, place in places.items()}
        try:
            for name, value in tensors.items():
                places[name].copy_(value)
            yield
        finally:
            for name, value in before.items():
                places[name].copy_(value)

    def files(self) -> tuple[FileFacts, ...]:
        return ()


def tensors_of(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Tensor name to the module and attribute that hold it."""
    found: dict[str, tuple[nn.Module, str]] = {}
    adapted: list[str] = []
    for path, owner in module.named_modules(remove_duplicate=False):
        if ".parametrizations" in f".{path}" or any(f"{path}.".startswith(f"{outer}.") for outer in adapted):
            continue
        if is_adapted(owner):
            adapted.append(path)
            found |= {f"{path}.{name}": (owner, name) for name in tensors_of_adapted(owner)}
            continue
        attributes = [name for name, value in owner.named_parameters(recurse=False) if value is not None]
        if parametrize.is_parametrized(owner):
            attributes += list(owner.parametrizations)
        for attribute in attributes:
            found[f"{path}.{attribute}" if path else attribute] = (owner, attribute)
    return found


def describe(module: nn.Module) -> dict[str, Any]:
    """What kind of model it is, as a config: from transformers' own config, or from the classes of timm and torch."""
    known: dict[str, dict[str, Any]] = {}
    for path, part in module.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in known):
            continue  # a part of what is known already
        config = getattr(part, "config", None)
        if config is not None and getattr(config, "model_type", None) and hasattr(config, "to_dict"):
            known[path] = dict(config.to_dict())
        elif type(part).__module__.startswith("timm.models"):
            known[path] = _describe_timm(part)
    if len(known) == 1:
        return next(iter(known.values()))
    if known:  # a module of the user's own around several models, such as two towers
        return {"model_type": type(module).__name__, **known}
    if any(isinstance(part, nn.TransformerDecoderLayer) for part in module.modules()):
        return {"class": type(module).__name__}  # three norms and cross-attention: found by running it
    layers = {path: part for path, part in module.named_modules() if isinstance(part, nn.TransformerEncoderLayer)}
    is_listed = all(path.rpartition(".")[2].isdigit() for path in layers)  # others are found by running them
    forms = {(layer.norm_first, layer.self_attn.batch_first) for layer in layers.values()}
    attention = {id(part) for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    if is_listed and len(forms) == 1 and attention == {id(layer.self_attn) for layer in layers.values()}:
        heads, [(norm_first, batch_first)] = next(iter(layers.values())).self_attn.num_heads, forms
        sizes = {"num_attention_heads": heads, "norm_first": norm_first, "batch_first": batch_first}
        return {"model_type": "torch_encoder", **sizes}
    return {"class": type(module).__name__}


def refuse_extra_tokens(module: nn.Module) -> None:
    """Raises for torch's attention that appends a token of its own."""
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention) and (part.bias_k is not None or part.add_zero_attn):
            reason = (
                "add_bias_kv or add_zero_attn appends a token that is no input, so rows over inputs do not sum to one"
            )
            raise RefusedArchitecture("This nn.MultiheadAttention", reason)


def bare_attention(module: nn.Module) -> tuple[Arch, ...]:
    """Declarations of torch's self-attention modules by themselves, for a model that could not be run to find more.

    Their weights are read as PyTorch lays them out; nothing is known of the modules around them. Cross-attention of torch's
    decoder layers is left out.
    """
    crossing = {id(part.multihead_attn) for part in module.modules() if isinstance(part, nn.TransformerDecoderLayer)}
    alike: dict[tuple[int, int, bool], list[str]] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention) and id(part) not in crossing:
            alike.setdefault((part.embed_dim, part.num_heads, part.batch_first), []).append(path)
    return tuple(
        Arch(
            name="torch_attention",
            model_types=(),
            stack=f"width {width}, {heads} heads" if len(alike) > 1 else "",
            paths=Paths(block=",".join(paths), qkv="in_proj_*", v="v_proj_*", o="out_proj"),
            n_heads=heads,
            n_kv=heads,
            d_head=width // heads,
            token_axis=int(batch_first),
        )
        for (width, heads, batch_first), paths in alike.items()
    )


def _describe_timm(model: nn.Module) -> dict[str, Any]:
    name, blocks = type(model).__name__, getattr(model, "blocks", None)
    is_list = isinstance(blocks, nn.ModuleList | nn.Sequential)
    kinds = {type(block).__name__ for block in blocks} if blocks is not None and is_list else set()
    if name not in TIMM_MODELS or blocks is None or kinds != {"Block"}:
        return {"class": name}  # found by running it
    return {
        "model_type": "timm_vit",
        "num_attention_heads": blocks[0].attn.num_heads,
        "hidden_size": model.embed_dim,
        "num_prefix_tokens": model.num_prefix_tokens,
        "depth": len(blocks),
    }
