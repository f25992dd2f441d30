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

    config = transformers.AutoConfig.from_pretrained(
        source.place, trust_remote_code=trust_remote_code, **source.origin()
    )
    _forget_quantisation(config)
    return config


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
