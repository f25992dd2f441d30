"""A store that shows packed weights as the matrices they stand for."""

from collections.abc import Sequence

from torch import Tensor

from oversmooth.errors import BrokenFile
from oversmooth.models.stores.quantised.packing import CHECK_CONFIG, PackedWeight, Packing
from oversmooth.models.stores.store import TensorStore
from oversmooth.results import FileFacts


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
        if name not in self._packed:
            return self._plain(name)
        packing, path = self._packed[name]
        found = packing.dequantise(PackedWeight(self._where, path, self._store.names, self._store.read))
        return found.T if self._is_in_out and found.ndim == 2 else found

    def _plain(self, name: str) -> Tensor:
        found = self._store.read(name)
        if found.dtype.itemsize == 1 and name.endswith("weight"):
            kind = str(found.dtype).removeprefix("torch.")
            where = f"{self._where}: the tensor {name!r}"
            raise BrokenFile(where, f"a scale beside a weight of {kind}", "none", CHECK_CONFIG)
        return found

    def stored_as(self, name: str) -> str | None:
        """How a weight is packed, in words; `None` where it is not."""
        return self._packed[name][0].words if name in self._packed else None

    def files(self) -> tuple[FileFacts, ...]:
        return self._store.files()
