"""GGUF files (llama.cpp, Ollama): metadata as a config, and tensors dequantised exactly, one at a time."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oversmooth.errors import BrokenFile, MissingDependency, PackedWeights, first_line
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


class GGUFStore:
    """The tensors of one GGUF file; `config` holds its architecture and sizes under transformers' names."""

    def __init__(self, path: Path):
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise MissingDependency("gguf", "gguf", "reading a GGUF file") from error
        self._path = path
        try:
            reader = GGUFReader(path)
        except Exception as error:  # the package raises whatever numpy raises on a broken file
            first = first_line(error)
            raise BrokenFile(str(path), "a GGUF file", first) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.names = self._tensors.keys()
        self.config = _config(path, reader)

    def read(self, name: str) -> Tensor:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise PackedWeights(str(self._path), f"{name!r} is {tensor.tensor_type.name}") from error
        # GGUF lists the fastest axis first; a copy, because the reader's map is read-only.
        shape = [int(size) for size in reversed(tensor.shape)]
        return torch.from_numpy(values.astype("float32", copy=True)).reshape(shape)

    def files(self) -> tuple[FileFacts, ...]:
        return (FileFacts(name=self._path.name, size_bytes=self._path.stat().st_size),)


def _config(path: Path, reader: Any) -> dict[str, Any]:
    field = reader.get_field("general.architecture")
    if field is None:
        raise BrokenFile(str(path), "metadata general.architecture", "none")
    architecture = field.contents()
    config: dict[str, Any] = {"gguf_architecture": architecture}
    for key, name in SIZE_KEYS.items():
        found = reader.get_field(f"{architecture}.{key}")
        if found is None:
            continue
        value = found.contents()
        if isinstance(value, list):  # per-layer sizes; hybrids store 0 where a block has no attention
            different = sorted(set(value) - {0})
            if len(different) > 1:
                raise PackedWeights(str(path), f"{key} differs between layers: {different}")
            value = different[0] if different else None
        config[name] = value
    return config
