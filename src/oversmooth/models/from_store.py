"""A live model whose weights come out of one of our stores: dequantised, or changed by an adapter.

transformers builds the model from its config and renames what it always renames; only where the numbers come from differs.
So a GPTQ or AWQ checkpoint runs without the library that packed it, and without a GPU.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.models.source import Source
from oversmooth.models.stores.adapters import AdaptedStore
from oversmooth.models.stores.quantised import QuantisedStore


def is_made_by_us(source: Source) -> bool:
    """Whether reading the files as they are would not give the weights of this source."""
    return isinstance(source.store, QuantisedStore | AdaptedStore)


def load_from_store(
    source: Source, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model and transformers' report of what was missing or did not fit."""
    import transformers

    config = config_of(source, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        kind = type(transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code))
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=_state(source, dtype),
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    model.config.name_or_path = source.place  # where its tokenizer is
    return model, report


def config_of(source: Source, *, trust_remote_code: bool = False) -> Any:
    """The config that transformers builds the model from, without what it says of packed weights."""
    import transformers

    model_type = unnamed_type(source)
    if model_type:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(source.config))
    else:
        config = transformers.AutoConfig.from_pretrained(
            source.place, trust_remote_code=trust_remote_code, **source.origin()
        )
    _forget_quantisation(config)
    return config


def unnamed_type(source: Source) -> str | None:
    """The model type of a checkpoint whose config does not name one: as its user, its class or its tensors say.

    `None` where the config does, or where nothing settles it. Sizes are not guessed: a config that does not state the
    heads is not run.
    """
    import transformers

    if source.gguf_file or source.kind == "gguf":
        return None
    written, _ = transformers.PretrainedConfig.get_config_dict(source.place, **source.origin())
    if "model_type" in written:
        return None
    classes = [getattr(transformers, name, None) for name in written.get("architectures") or ()]
    named = [model_class.config_class.model_type for model_class in classes if model_class is not None]
    stacks = source.stacks()
    types = [source.config.get("model_type"), *named, *(kind for stack in stacks for kind in stack.arch.model_types)]
    found = next((kind for kind in types if kind in transformers.CONFIG_MAPPING), None)
    return found if all(stack.sizes.n_heads for stack in stacks) else None


def _state(source: Source, dtype: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for name in source.store.names:
        tensor = source.store.read(name)
        found[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return found


def _forget_quantisation(config: Any) -> None:
    """The weights are ordinary numbers now, also those of the parts of a composite model."""
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "model_type"))]
    for part in parts:
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
