"""Chooses the packing that a config names, and shows packed weights as ordinary tensors.

`quantization_config` in config.json says which packing it is; each packing has a module of its own here. Values are
computed in float32 as the packing's own library does, so that no digit of what is stored is lost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from oversmooth.errors import BrokenFile, PackedWeights
from oversmooth.models.stores.compressed_tensors import compressed_tensors
from oversmooth.models.stores.packed import (
    awq,
    bitsandbytes,
    float8,
    float8_per_row,
    float8_per_tensor,
    gptq,
    mxfp4,
    nvfp4,
)
from oversmooth.models.stores.packing import CHECK_CONFIG, PackedWeight, Packing, Settings
from oversmooth.models.stores.store import TensorStore
from oversmooth.results import FileFacts

# --- A store that shows packed weights as the matrices they stand for ---


class QuantisedStore:
    """Another store's tensors, with packed weights dequantised to float32 one at a time.

    `is_in_out` says that the model itself keeps weights as (in, out), as GPT-2 does; packings store them (out, in).
    """

    def __init__(self, store: TensorStore, packings: Sequence[Packing], where: str, *, is_in_out: bool = False):
        self._store = store
        self._where = where
        self._is_in_out = is_in_out
        self._packed: dict[str, tuple[Packing, str]] = {}
        for packing in packings:
            for name in store.names:
                if name.endswith(packing.marker):
                    path = name.removesuffix(packing.marker)
                    self._packed.setdefault(path + packing.weight, (packing, path))
        endings = tuple(ending for packing in packings for ending in (packing.marker, *packing.parts))
        plain = [name for name in store.names if not name.endswith(endings)]
        self.names = dict.fromkeys([*plain, *self._packed]).keys()

    def read(self, name: str) -> Tensor:
        if name in self._packed:
            packing, path = self._packed[name]
            found = packing.dequantise(PackedWeight(self._where, path, self._store.names, self._store.read))
            return found.T if self._is_in_out and found.ndim == 2 else found
        found = self._store.read(name)
        if found.dtype.itemsize == 1 and name.endswith("weight"):
            kind = str(found.dtype).removeprefix("torch.")
            where = f"{self._where}: the tensor {name!r}"
            raise BrokenFile(where, f"a scale beside a weight of {kind}", "none", CHECK_CONFIG)
        return found

    def stored_as(self, name: str) -> str | None:
        """How a weight is packed, in words; `None` if it is not."""
        return self._packed[name][0].words if name in self._packed else None

    def files(self) -> tuple[FileFacts, ...]:
        return self._store.files()


# --- from `quantization_config` to the packings of a checkpoint; what has no reader is refused by name ---

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
    """The store itself, or one that dequantises packed weights; raises if that cannot be exact."""
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
