"""A local checkpoint, a copy of it as safetensors, and tensors of that copy overwritten in place."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oversmooth.errors import CannotControl
from oversmooth.models.opening import HUB_ID
from oversmooth.models.stores.files import SMALL_FILE_BYTES, LocalFolder
from oversmooth.models.stores.gguf import GGUFStore
from oversmooth.models.stores.pickle import PickleStore, load_tensors, plain_tensor
from oversmooth.models.stores.remote import cached_hub_folder
from oversmooth.models.stores.safetensors import DTYPES, SafetensorsStore, read_header
from oversmooth.models.stores.store import TensorStore

WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data|ot|tflite)(\.index\.json)?$")
"""Files that hold weights, or say where they are; all others that are small are copied."""
OTHER_FORMATS = ("onnx", "openvino", "coreml", "original")
"""Folders that hold the same weights for other programs: they would not be those of the edited model."""
PACKED_BLOCKS = (
    "a GGUF file holds packed blocks, which cannot take arbitrary numbers",
    "Edit the original checkpoint and convert it again.",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the files of a checkpoint are."""

    target: str
    folder: Path


def local_checkpoint(target: str, verb: str = "edit") -> Checkpoint:
    """The folder behind a target: its own, that of a file, or that of a model in the hub cache."""
    path = Path(target).expanduser()
    if path.is_dir():
        return Checkpoint(str(path), path)
    if path.is_file():
        if path.suffix == ".gguf":
            raise CannotControl(verb, target, *PACKED_BLOCKS)
        return Checkpoint(str(path), path.parent)
    cached = cached_hub_folder(target) if HUB_ID.fullmatch(target) else None
    if cached is not None:
        return Checkpoint(str(cached.path), cached.path)
    advice = "Download it first, for example: hf download NAME --local-dir FOLDER"
    raise CannotControl(verb, target, "it is not a folder or file on this machine", advice)


class EditableCopy:
    """A copy of a checkpoint whose tensors can be overwritten, one after another, each by one of its own size."""

    def __init__(self, folder: Path, where: Mapping[str, str]):
        self._folder, self._where = folder, dict(where)

    def overwrite(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            file = self._where[name]
            entry = read_header(LocalFolder(self._folder).open(file))[name]
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert (len(data), DTYPES[entry.dtype]) == (entry.stop - entry.start, tensor.dtype), "same size and dtype"
            with (self._folder / file).open("r+b") as opened:
                opened.seek(entry.start)
                opened.write(data)


def copy_checkpoint(checkpoint: Checkpoint, store: TensorStore, to: Path) -> EditableCopy:
    """Copies weights, configs, tokenizers and whatever else is small and no weights, subfolders included."""
    if isinstance(store, GGUFStore):
        raise CannotControl("edit", checkpoint.target, *PACKED_BLOCKS)
    assert isinstance(store, SafetensorsStore | PickleStore), "a local checkpoint is one of these"
    where = {name: store.file_of(name) for name in store.names}
    files = dict.fromkeys(where.values())
    copy_small_files(checkpoint.folder, to)
    for file in files:
        if isinstance(store, SafetensorsStore):
            shutil.copyfile(checkpoint.folder / file, to / file)
        else:
            _convert(checkpoint.folder / file, to / as_safetensors(file))
    renamed = {name: as_safetensors(file) for name, file in where.items()}
    index = _index_of(checkpoint.folder, len(files) > 1)
    if index is not None:
        body = json.loads((checkpoint.folder / index).read_text())
        (to / as_safetensors(index)).write_text(json.dumps({**body, "weight_map": renamed}, indent=2) + "\n")
    for file in renamed.values():
        (to / file).chmod(0o644)  # a checkpoint that is read-only is still one whose copy can be edited
    return EditableCopy(to, renamed)


def _index_of(folder: Path, is_sharded: bool) -> str | None:
    if not is_sharded:
        return None
    names = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
    return next((name for name in names if (folder / name).is_file()), None)


def as_safetensors(file: str) -> str:
    """The name under which transformers looks for the same weights as safetensors."""
    return re.sub(r"^(pytorch_)?(.*)\.(bin|pt|pth|ckpt)(?=$|\.index\.json$)", r"\2.safetensors", file)


def _convert(file: Path, to: Path) -> None:
    from safetensors.torch import save_file

    # Tied tensors share memory in a pickle, which safetensors does not have: each gets a copy of its own.
    tensors = {
        name: plain_tensor(file, name, tensor).clone(memory_format=torch.contiguous_format)
        for name, tensor in load_tensors(file).items()
    }
    save_file(tensors, to, metadata={"format": "pt"})


def copy_small_files(folder: Path, to: Path) -> None:
    """All files beside the weights, and small parts of the model in folders of their own, such as a pooling layer."""
    for place, folders, files in os.walk(folder):
        skipped = [name for name in folders if name.startswith(".") or name in OTHER_FORMATS]
        folders[:] = [
            name for name in folders if name not in skipped and (Path(place) / name).resolve() != to.resolve()
        ]
        for name in files:
            file = Path(place) / name
            is_weights = Path(place) == folder and WEIGHTS.search(name)
            if is_weights or name.startswith(".") or file.stat().st_size > SMALL_FILE_BYTES:
                continue
            copy = to / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
