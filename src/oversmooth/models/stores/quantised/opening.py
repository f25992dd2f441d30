"""From `quantization_config` to the packings of a checkpoint; what has no reader is refused by name."""

from collections.abc import Callable, Mapping
from typing import Any

from oversmooth.errors import PackedWeights
from oversmooth.models.stores.quantised.bitsandbytes import bitsandbytes
from oversmooth.models.stores.quantised.compressed_tensors import compressed_tensors
from oversmooth.models.stores.quantised.float8 import float8, float8_per_row, float8_per_tensor
from oversmooth.models.stores.quantised.gptq import awq, gptq
from oversmooth.models.stores.quantised.microscaling import mxfp4, nvfp4
from oversmooth.models.stores.quantised.packing import Packing, Settings
from oversmooth.models.stores.quantised.store import QuantisedStore
from oversmooth.models.stores.store import TensorStore

PACKED_NAMES = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".SCB": "bitsandbytes int8",
    ".absmax": "bitsandbytes 4-bit",
    ".weight_scale_inv": "block-scaled float8",
    ".weight_scale": "scaled integers or float8",
}
"""Endings of names that only packed weights have, and whose they are."""


def _modelopt(settings: Settings) -> Packing:
    algorithm = settings.word("quant_algo", ("fp8", "nvfp4"))
    return nvfp4(settings) if algorithm == "nvfp4" else float8_per_tensor(settings)


READERS: Mapping[str, Callable[[Settings], Packing | tuple[Packing, ...]]] = {
    "fp8": float8,
    "fbgemm_fp8": float8_per_row,
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "mxfp4": mxfp4,
    "modelopt": _modelopt,
}
"""`quant_method` and how it is read."""


def unpacked(store: TensorStore, config: Mapping[str, Any], where: str, *, is_in_out: bool = False) -> TensorStore:
    """The store itself where nothing is packed, or one that dequantises what is; raises where that cannot be exact."""
    found = quantisation_of(config)
    if found is None:
        name = next((name for name in store.names if is_packed_name(name)), None)
        if name:
            packing = next(words for ending, words in PACKED_NAMES.items() if ending in name)
            said = f"{packing}, tensor {name!r}, and no quantization_config in a config.json that says how"
            raise PackedWeights(where, said)
        return store
    method = str(found.get("quant_method", "bitsandbytes" if "load_in_4bit" in found else "unnamed"))
    if method not in READERS:
        raise PackedWeights(where, f"quantization_config: {method}; readable are {', '.join(sorted(READERS))}")
    packings = READERS[method](Settings(where, method, found))
    return QuantisedStore(store, packings if isinstance(packings, tuple) else (packings,), where, is_in_out=is_in_out)


def quantisation_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantisation that a config states, for the whole model or for one of its parts."""
    for place in (config, *(part for part in config.values() if isinstance(part, Mapping))):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if isinstance(found, Mapping):
                return found
    return None


def is_packed_name(name: str) -> bool:
    """Whether only a packed weight can have a tensor of that name."""
    return any(name.endswith(ending) or f"{ending}." in name for ending in PACKED_NAMES)
