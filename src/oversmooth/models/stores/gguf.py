"""GGUF files (llama.cpp, Ollama): metadata as a config, and tensors dequantised exactly, one at a time."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oversmooth.errors import BrokenFile, MissingDependency, PackedWeights
from oversmooth.models.stores.files import LocalFolder
from oversmooth.models.stores.gguf_header import read_gguf_header
from oversmooth.results import FileFacts

SIZE_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.value_length": "head_dim",
    "use_parallel_residual": "use_parallel_residual",
    "residual_scale": "residual_multiplier",
}
"""GGUF metadata under the architecture's name, and the config key that says the same."""
PLAIN = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
"""Types stored as numbers; all others are bytes of blocks."""
PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
MOST_PARTS = 1000


class GGUFStore:
    """The tensors of one GGUF file; `config` holds its architecture and sizes under transformers' names.

    A model that was split has `parts`, in order and with `path` as the first: metadata lie there, tensors in all of them.
    """

    def __init__(self, path: Path, parts: Sequence[Path] = ()):
        try:
            import gguf  # noqa: F401 - sizes and meaning of its blocks
        except ImportError as error:
            raise MissingDependency("gguf", "gguf", "reading a GGUF file") from error
        self._path = path
        paths = tuple(parts) or (path,)
        self._files = [LocalFolder(part.parent).open(part.name) for part in paths]
        headers = [read_gguf_header(part) for part in paths]
        self._tensors = {
            name: (file, tensor)
            for file, header in zip(self._files, headers, strict=True)
            for name, tensor in header.tensors.items()
        }
        self.names = self._tensors.keys()
        self.config = _config(path, headers[0].metadata)
        if parts:
            _require_whole(paths, [header.metadata for header in headers], len(self._tensors))

    def read(self, name: str) -> Tensor:
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        file, tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.kind)
        raw = np.frombuffer(file.read(tensor.start, tensor.stop), PLAIN.get(kind.name, "u1"))
        if not raw.size:
            return torch.empty(tensor.shape)
        stored = tensor.shape if kind.name in PLAIN else quant_shape_to_byte_shape(tensor.shape, kind)
        try:
            with np.errstate(all="ignore"):  # scales of a broken block may be infinite; that is for the caller to see
                values = dequantize(raw.reshape(stored), kind)
        except NotImplementedError as error:
            raise PackedWeights(str(self._path), f"{name!r} is {kind.name}") from error
        return torch.from_numpy(values.astype("float32", copy=True)).reshape(tensor.shape)

    def files(self) -> tuple[FileFacts, ...]:
        return tuple(FileFacts(name=Path(file.label).name, size_bytes=file.size) for file in self._files)


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """All parts of a split model of which `path` is one, in order; empty for a whole file.

    Raises `BrokenFile` where one of them is not there.
    """
    part = PART.search(path.name)
    if part is None or int(part["count"]) < 2:
        return ()
    base, count = path.name[: part.start()], int(part["count"])
    if count > MOST_PARTS:
        raise BrokenFile(str(path), f"at most {MOST_PARTS} parts", f"a name that says {count}")
    parts = tuple(path.with_name(f"{base}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))
    absent = [item.name for item in parts if not item.is_file()]
    if absent:
        raise BrokenFile(str(path), f"all {count} parts beside it", f"no {absent[0]}", "Download the missing parts.")
    return parts


def _require_whole(paths: Sequence[Path], metadata: Sequence[dict[str, Any]], found: int) -> None:
    """What each part says of the split must fit the others: its number, their count, and how many tensors there are."""
    for number, (path, said) in enumerate(zip(paths, metadata, strict=True)):
        for key, expected in (("split.no", number), ("split.count", len(paths)), ("split.tensors.count", found)):
            if said.get(key) != expected:
                told = f"{said.get(key)!r}"
                raise BrokenFile(str(path), f"metadata {key} = {expected}", told, "Download the parts again.")


def _config(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise BrokenFile(str(path), "the name of a model in metadata general.architecture", repr(architecture))
    config: dict[str, Any] = {"gguf_architecture": architecture}
    for key, name in SIZE_KEYS.items():
        if f"{architecture}.{key}" not in metadata:
            continue
        value = metadata[f"{architecture}.{key}"]
        if isinstance(value, list):  # per-layer sizes; hybrids store 0 where a block has no attention
            different = sorted(set(value) - {0})
            if len(different) > 1:
                raise PackedWeights(str(path), f"{key} differs between layers: {different[:8]}")
            value = different[0] if different else None
        config[name] = value
    return config
