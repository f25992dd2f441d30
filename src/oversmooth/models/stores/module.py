"""A live `nn.Module` as a checkpoint: its tensors by name, and a config that says what it is."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from oversmooth.errors import BrokenFile, RefusedArchitecture
from oversmooth.models.resolve import TensorNames
from oversmooth.models.stores.adapters import effective, is_adapted, tensors_of_adapted
from oversmooth.models.stores.elsewhere import kept_elsewhere
from oversmooth.models.stores.live_quantised import plain
from oversmooth.results import FileFacts

TIMM_MODELS = ("VisionTransformer", "VisionTransformerDistilled")
TIMM_BLOCKS = ("Block",)


class ModuleStore:
    """Tensors of a live module. Parametrized tensors appear under their own names, as the values they now have."""

    def __init__(self, module: nn.Module, *, keeps_names: bool = False):
        """`keeps_names`: also in stacks of bare attention modules, which are numbered otherwise."""
        self._module = module
        self._where = tensors_of(module)
        self.config = describe(module)
        if self.config.get("model_type") == "torch_attention" and not keeps_names:
            # Stacks of bare attention modules have names of the user's own: number them.
            layers = attention_modules(module)
            self._where = {
                f"{i}.{n}": owner for i, layer in enumerate(layers) for n, owner in tensors_of(layer).items()
            }
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
    encoder = [part for part in module.modules() if isinstance(part, nn.TransformerEncoderLayer)]
    if encoder:
        first = encoder[0]
        return {
            "model_type": "torch_encoder",
            "num_attention_heads": first.self_attn.num_heads,
            "norm_first": first.norm_first,
            "batch_first": first.self_attn.batch_first,
        }
    attention = attention_modules(module)
    if attention:
        first_attention = attention[0]
        return {
            "model_type": "torch_attention",
            "num_attention_heads": first_attention.num_heads,
            "batch_first": first_attention.batch_first,
        }
    return {"class": type(module).__name__}


def attention_modules(module: nn.Module) -> list[nn.MultiheadAttention]:
    """torch's self-attention modules in order; cross-attention of torch's decoder layers is left out."""
    crossing = {id(part.multihead_attn) for part in module.modules() if isinstance(part, nn.TransformerDecoderLayer)}
    found = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention) and id(part) not in crossing]
    for part in found:
        if part.bias_k is not None or part.add_zero_attn:
            extra = (
                "add_bias_kv or add_zero_attn appends a token that is no input, so rows over inputs do not sum to one"
            )
            raise RefusedArchitecture("This nn.MultiheadAttention", extra)
    return found


def _describe_timm(model: nn.Module) -> dict[str, Any]:
    name = type(model).__name__
    blocks = getattr(model, "blocks", None)
    kinds = (
        sorted({type(block).__name__ for block in blocks}) if isinstance(blocks, nn.ModuleList | nn.Sequential) else []
    )
    if name not in TIMM_MODELS or any(kind not in TIMM_BLOCKS for kind in kinds) or not kinds:
        return {"class": name}  # found by running it
    assert blocks is not None
    return {
        "model_type": "timm_vit",
        "num_attention_heads": blocks[0].attn.num_heads,
        "hidden_size": model.embed_dim,
        "num_prefix_tokens": model.num_prefix_tokens,
        "depth": len(blocks),
    }
