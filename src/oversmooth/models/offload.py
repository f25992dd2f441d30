"""Models larger than memory: weights stay in their files, and each block is read when the pass reaches it.

The model is built without weights. A block reads its own before it runs and forgets them afterwards, through the same
stores that `inspect` reads, so quantised and adapted weights are made block by block too. All sequences go through in few
large batches, because every batch reads the whole file once.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import NotSupported
from oversmooth.models.completeness import require_complete
from oversmooth.models.from_store import config_of
from oversmooth.models.source import Source
from oversmooth.models.stores.elsewhere import KEPT, keep_elsewhere

SEQUENCES_AT_ONCE = 64
"""Sequences per pass of an offloaded model, where fewer were asked for."""
WEIGHT_FILE = re.compile(r"\.safetensors$|^pytorch_model.*\.bin$")
SHARE_OF_MEMORY = 0.8
"""Of the free memory that weights may fill; the rest is for activations and for what is computed from them."""


def is_offloaded(model: nn.Module) -> bool:
    """Whether the weights of a model are read block by block."""
    return any(KEPT in module.__dict__ for module in model.modules())


def must_offload(source: Source, dtype: torch.dtype | None) -> bool:
    """Whether the weights would not fit into the memory that is free now; `dtype` as for `load_offloaded`."""
    folder, free = Path(source.place or ""), _free_memory()
    if free is None or source.gguf_file or not source.place or not folder.is_dir():
        return False
    stored = sum(file.stat().st_size for file in folder.iterdir() if WEIGHT_FILE.search(file.name))
    wider = dtype.itemsize / 2 if dtype is not None else 1  # most checkpoints of that size have two bytes per number
    return stored * max(wider, 1) > SHARE_OF_MEMORY * free


def _free_memory() -> int | None:
    """Bytes that programs can have without swapping; `None` where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def load_offloaded(source: Source, dtype: torch.dtype | None, *, trust_remote_code: bool = False) -> nn.Module:
    """The model without weights in memory, in eval mode; what the files lack is said before anything runs."""
    import accelerate
    import transformers

    if source.gguf_file:
        raise NotSupported("--offload", "for GGUF files", "transformers dequantises them as a whole", "Leave it out.")
    config = config_of(source, trust_remote_code=trust_remote_code)
    with accelerate.init_empty_weights(include_buffers=False):
        kind = dtype or _stored_dtype(source, config)
        model = transformers.AutoModel.from_config(config, dtype=kind, trust_remote_code=trust_remote_code)
    model.config.name_or_path = source.place
    model.eval()
    names = _names_in_files(model, source)
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = names[f"{path}.{attribute}" if path else attribute]
            keep_elsewhere(module, attribute, _reader(source, name, parameter))
    for unit, members in _units(model):
        unit.register_forward_pre_hook(partial(_load, members))
        unit.register_forward_hook(partial(_forget, members), always_call=True)
    return model


def _stored_dtype(source: Source, config: Any) -> torch.dtype:
    found = getattr(config, "dtype", None)
    if isinstance(found, torch.dtype):
        return found
    name = next((name for name in source.store.names if name.endswith("weight")), None)
    return source.store.read(name).dtype if name else torch.float32


def _names_in_files(model: Any, source: Source) -> Mapping[str, str]:
    """Name in the model to name in the files, by the renaming that transformers does when it loads.

    Weights behind the features that the files do not hold map to an empty name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    wanted = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    found: dict[str, str] = {}
    for name in source.store.names:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if converted is not None and renamed in wanted:
            reason = f"transformers joins or cuts {name!r} when it loads it"
            raise NotSupported("Offloading", f"for {source.target}", reason, "Run it with --no-offload.")
        found[renamed] = name
    for name, same in model.all_tied_weights_keys.items():  # stored once, as T5's embeddings are
        if name not in found and same in found:
            found[name] = found[same]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    missing = [name for name in parameters if name not in found]
    require_complete(source.target, missing, (), [found[name] for name in found if name not in wanted])
    return found | dict.fromkeys(missing, "")


def _reader(source: Source, name: str, like: Tensor) -> Callable[[], Tensor]:
    shape, dtype = tuple(like.shape), like.dtype

    def read() -> Tensor:
        if not name:  # behind the features that are measured: the check has let it pass
            return torch.zeros(shape, dtype=dtype)
        tensor = source.store.read(name)
        if tuple(tensor.shape) != shape:
            require_complete(source.target, (), [(name, tuple(tensor.shape), shape)], ())
        return tensor.to(dtype).reshape(shape)

    return read


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """What is read at once, with its members: each block of a list as a whole, every other module by itself."""
    blocks: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{block}.") for block in blocks):
            continue
        parent = path.rpartition(".")[0]
        if parent and isinstance(model.get_submodule(parent), nn.ModuleList):
            blocks.append(path)
            yield module, list(module.modules())
        elif KEPT in module.__dict__:
            yield module, [module]


def _load(members: Sequence[nn.Module], unit: nn.Module, args: object) -> None:
    for module in members:
        for attribute, read in module.__dict__.get(KEPT, {}).items():
            module._parameters[attribute] = nn.Parameter(read(), requires_grad=False)


def _forget(members: Sequence[nn.Module], unit: nn.Module, args: object, output: object) -> None:
    for module in members:
        for attribute in module.__dict__.get(KEPT, {}):
            held = module._parameters[attribute]
            if held is not None:
                module._parameters[attribute] = nn.Parameter(torch.empty_like(held, device="meta"), requires_grad=False)
