"""Quantised checkpoints as ordinary ones: packed weights appear under their own names and are dequantised when read.

`quantization_config` in config.json says which packing it is; each packing has a module of its own here. Values are
computed in float32 as the packing's own library does, so that no digit of what is stored is lost.
"""

from oversmooth.models.stores.quantised.opening import is_packed_name, unpacked
from oversmooth.models.stores.quantised.store import QuantisedStore

__all__ = ["QuantisedStore", "is_packed_name", "unpacked"]
