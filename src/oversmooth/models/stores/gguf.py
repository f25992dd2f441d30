"""GGUF files (llama.cpp, Ollama): metadata as a config, and tensors dequantised exactly, one at a time."""

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


class GGUFStore:
    """The tensors of one GGUF file; `config` holds its architecture and sizes under transformers' names."""

    def __init__(self, path: Path):
        try:
            import gguf  # noqa: F401 - sizes and meaning of its blocks
        except ImportError as error:
            raise MissingDependency("gguf", "gguf", "reading a GGUF file") from error
        self._path = path
        self._file = LocalFolder(path.parent).open(path.name)
        header = read_gguf_header(path)
        self._tensors = header.tensors
        self.names = self._tensors.keys()
        self.config = _config(path, header.metadata)

    def read(self, name: str) -> Tensor:
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        tensor = self._tensors[name]
        kind = GGMLQuantizationType(tensor.kind)
        raw = np.frombuffer(self._file.read(tensor.start, tensor.stop), PLAIN.get(kind.name, "u1"))
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
        return (FileFacts(name=self._path.name, size_bytes=self._file.size),)


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
