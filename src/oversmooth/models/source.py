"""From what a user points at to a `Source`: its config, its tensors by name, its stacks, the live module if it is one.

    folder, file, URL, hub id, timm name, nn.Module  ->  open_source  ->  Source.stacks()  ->  Stack.weights(i, read)

This module, with `live.py`, is the only one below the recipes that imports transformers or timm, inside functions.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from oversmooth.errors import (
    AmbiguousFolder,
    BrokenFile,
    ConfigMismatch,
    NoModelInFolder,
    PackedWeights,
    RefusedArchitecture,
    RemoteUnavailable,
    TargetNotFound,
    UnidentifiedWeights,
    UnknownArchitecture,
)
from oversmooth.models.declaration import Arch, AttentionWeights, Sizes, StackNames, assemble, resolve, sizes_of
from oversmooth.models.families import REFUSED, REFUSED_NAMES
from oversmooth.models.identify import (
    candidates_by_name,
    declared_for,
    declared_for_gguf,
    gguf_form,
    known_gguf_architectures,
    known_model_types,
)
from oversmooth.models.stores.files import LARGEST_JSON, Folder, LocalFolder, read_small
from oversmooth.models.stores.gguf import GGUFStore
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.pickle import PickleStore
from oversmooth.models.stores.remote import cached_hub_folder, hub_folder, remote_folder
from oversmooth.models.stores.safetensors import SafetensorsStore, read_weight_map
from oversmooth.models.stores.store import TensorStore
from oversmooth.results.json_text import json_object

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SHARD = re.compile(r"-\d+-of-\d+(?=\.(safetensors|bin)$)")
GGUF_PART = re.compile(r"-\d{5}-of-(?P<count>\d{5})\.gguf$")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HF_URL = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<rest>.+))?")
PACKED_NAMES = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors",
    ".SCB": "bitsandbytes int8",
    ".absmax": "bitsandbytes 4-bit",
    ".weight_scale": "scaled integers or float8",
    ".weight_scale_inv": "block-scaled float8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack of attention blocks of a source, ready to be read block by block."""

    label: str
    arch: Arch
    sizes: Sizes
    names: StackNames
    branch_gain: float
    passes: tuple[tuple[int, ...], ...]
    """For each block, the depths at which it runs."""
    prefix_tokens: int = 0
    """Tokens in front that are not part of the sequence (CLS, registers)."""

    def weights(self, position: int, read: Callable[[str], Tensor]) -> AttentionWeights:
        """Canonical weights of the block at `position` (not its index, in hybrids), read now."""
        return assemble(self.arch, self.sizes, self.names.blocks[position], read, self.branch_gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An opened target. Nothing but headers and configs has been read."""

    target: str
    kind: str
    config: Mapping[str, Any]
    store: TensorStore
    module: nn.Module | None = None
    place: str | None = None
    """Where transformers or timm can load the live model from: a local folder, a hub id or a timm name."""

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type") or self.config.get("gguf_architecture") or "unknown")

    def stacks(self) -> tuple[Stack, ...]:
        """The declared stacks of this model; raises what is refused, unknown, or contradicts itself."""
        _refuse(self)
        found: dict[str, Stack] = {}
        for arch, config, hint in _declarations(self):
            settled = arch.for_config(config)
            prefixes = resolve(settled, self.store.names)
            under = [names for names in prefixes if hint and names.prefix.startswith(f"{hint}.")]
            chosen = under or [names for names in prefixes if hint and hint in names.prefix] or prefixes
            for names in chosen:
                label = arch.stack or hint if len(chosen) == 1 else (names.prefix + arch.stack).rstrip(".")
                if names.blocks[0].path not in found:
                    found[names.blocks[0].path] = _stack(self, label, settled, config, names)
        if not found:
            raise UnidentifiedWeights(self.target, (), sorted(self.store.names)[:3])
        return tuple(found.values())

    def undeclared_parts(self) -> tuple[tuple[str, str], ...]:
        """Name and model type of the parts of a composite model that no family is declared for."""
        return tuple(_undeclared(self.model_type, self.config, ""))


Target = str | Path | nn.Module | Source
"""What a user can point at; an opened source is one too."""


# --- identity -------------------------------------------------------------------------------------------------------


def _refuse(source: Source) -> None:
    for model_type in (source.model_type, *_part_types(source.config)):
        if model_type in REFUSED:
            raise RefusedArchitecture(f"{source.target} ({model_type})", REFUSED[model_type])
    for fragment, reason in REFUSED_NAMES.items():
        name = next((name for name in source.store.names if fragment in name), None)
        if name:
            raise RefusedArchitecture(f"{source.target} (tensor {name})", reason)
    quantization = source.config.get("quantization_config")
    if isinstance(quantization, Mapping):
        raise PackedWeights(source.target, f"quantization_config: {quantization.get('quant_method', 'unnamed')}")
    for name in source.store.names:
        for ending, packing in PACKED_NAMES.items():
            if name.endswith(ending) or f"{ending}." in name:
                raise PackedWeights(source.target, f"{packing}, tensor {name!r}")


def _part_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Model types of the parts of a composite config, at any depth."""
    for _, model_type, part in _parts(config):
        yield model_type
        yield from _part_types(part)


def _parts(config: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Name, model type and config of each part that a composite config is made of."""
    return [
        (key.removesuffix("_config"), str(part["model_type"]), part)
        for key, part in config.items()
        if isinstance(part, Mapping) and part.get("model_type")
    ]


def _declarations(source: Source) -> Iterator[tuple[Arch, Mapping[str, Any], str]]:
    """Declarations to try, each with the config that holds its sizes and a word its prefix should contain."""
    config = source.config
    if architecture := config.get("gguf_architecture"):
        said = declared_for(str(config["model_type"])) if config.get("model_type") else []
        arch = gguf_form(said[0]) if said else declared_for_gguf(architecture)
        if arch is None:
            raise UnknownArchitecture(architecture, known_gguf_architectures())
        yield arch, config, ""
    elif model_type := config.get("model_type"):
        found = list(_by_model_type(str(model_type), config, ""))
        if not found:
            raise UnknownArchitecture(str(model_type), known_model_types())
        yield from found
    else:
        fits = candidates_by_name(source.store.names)
        if len(fits) != 1:
            raise UnidentifiedWeights(source.target, list(fits), sorted(source.store.names)[:3])
        for arch in next(iter(fits.values())):
            yield arch, config, ""


def _by_model_type(
    model_type: str, config: Mapping[str, Any], hint: str
) -> Iterator[tuple[Arch, Mapping[str, Any], str]]:
    """Declarations of the model type itself, or of the parts that a composite config is made of."""
    declared = declared_for(model_type)
    for arch in declared:
        yield arch, config, hint
    if declared:
        return
    # A saved config is sorted by name, and data flows through an encoder first.
    for name, part_type, part in sorted(_parts(config), key=lambda part: part[0].startswith("decoder")):
        yield from _by_model_type(part_type, part, name)


def _undeclared(model_type: str, config: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    if declared_for(model_type):
        return
    parts = _parts(config)
    for part_name, part_type, part in parts:
        yield from _undeclared(part_type, part, part_name)
    if name and not parts:
        yield name, model_type


def _stack(source: Source, label: str, arch: Arch, config: Mapping[str, Any], names: StackNames) -> Stack:
    sizes = sizes_of(config, arch)
    blocks = len(names.blocks)
    passes: list[tuple[int, ...]] = [(block.index,) for block in names.blocks]
    if arch.shared_layers:
        depth = sizes.n_layers or blocks
        passes = [tuple(p for p in range(depth) if p * blocks // depth == block) for block in range(blocks)]
    elif source.module is None and sizes.n_layers not in (None, names.blocks_in_model):
        raise ConfigMismatch("the number of layers", sizes.n_layers, names.blocks_in_model, source.target)
    gain = config.get(arch.residual_gain, 1.0) if arch.residual_gain else 1.0
    more_prefix = config.get(arch.prefix_tokens_key, 0) if arch.prefix_tokens_key else 0
    return Stack(
        label=label,
        arch=arch,
        sizes=sizes,
        names=names,
        branch_gain=float(gain),
        passes=tuple(passes),
        prefix_tokens=arch.prefix_tokens + int(more_prefix or 0),
    )


# --- opening --------------------------------------------------------------------------------------------------------


def open_source(
    target: Target, *, model_type: str | None = None, n_heads: int | None = None, n_kv: int | None = None
) -> Source:
    """Opens whatever the user points at, without reading tensors; keywords fill in what a bare file does not say."""
    if isinstance(target, Source):
        source = target
    else:
        source = _open_module(target) if isinstance(target, nn.Module) else _open_path(str(target))
    given = {"model_type": model_type, "num_attention_heads": n_heads, "num_key_value_heads": n_kv}
    config = {**source.config, **{key: value for key, value in given.items() if value is not None}}
    if model_type and model_type not in known_model_types() and model_type not in REFUSED:
        raise UnknownArchitecture(model_type, known_model_types())
    return replace(source, config=config)


def _open_module(module: nn.Module) -> Source:
    store = ModuleStore(module)
    name = getattr(getattr(module, "config", None), "_name_or_path", "") or type(module).__name__
    return Source(target=str(name), kind="module", config=store.config, store=store, module=module)


def _open_path(target: str) -> Source:
    path = Path(target).expanduser()
    if path.is_dir():
        return _open_folder(LocalFolder(path), target, place=str(path))
    if path.is_file():
        return _open_file(LocalFolder(path.parent), path.name, target)
    if match := HF_URL.fullmatch(target):
        return _open_hub(match["repo"], match["revision"], match["rest"] or "", target)
    if "://" in target:
        return _open_url(target)
    if _timm_hub_id(target):
        source = _open_hub(str(_timm_hub_id(target)), None, "", target)
        return Source(target=target, kind="timm", config=source.config, store=source.store, place=f"timm:{target}")
    tried = ["a local file or folder"]
    if HUB_ID.fullmatch(target) and not target.endswith((".safetensors", ".gguf", *PICKLES)):
        try:
            return _open_hub(target, None, "", target)
        except RemoteUnavailable as error:
            tried.append(f"the hub ({error.problem.rstrip('.')})")
    raise TargetNotFound(target, tried)


def _open_hub(repo: str, revision: str | None, rest: str, target: str) -> Source:
    cached = cached_hub_folder(repo, revision) if not rest else None
    if cached:
        return _open_folder(cached, target, place=repo)
    subfolder, file = _split_file(rest)
    folder = hub_folder(repo, revision, subfolder)
    source = _open_file(folder, file, target) if file else _open_folder(folder, target, place=repo)
    return Source(target=target, kind="hub", config=source.config, store=source.store, place=repo)


def _open_url(target: str) -> Source:
    address, _, query = target.partition("?")
    base, file = _split_file(address)
    folder = remote_folder(base, query=f"?{query}" if query else "")
    source = _open_file(folder, file, target) if file else _open_folder(folder, target, place=None)
    return Source(target=target, kind="url", config=source.config, store=source.store)


def _split_file(path: str) -> tuple[str, str]:
    """`(folder, file)`; the file is empty where the path names a folder."""
    folder, _, last = path.rpartition("/")
    is_file = last.endswith((".safetensors", ".gguf", ".json", *PICKLES))
    return (folder, last) if is_file else (path, "")


def _open_folder(folder: Folder, target: str, place: str | None) -> Source:
    config = _read_config(folder)
    listing = folder.listing()
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        if folder.has(name):
            return Source(target=target, kind="folder", config=config, store=_open_store(folder, name), place=place)
    files = [name for name in listing or [] if name.endswith((".safetensors", ".gguf", *PICKLES))]
    if any(name.endswith(".safetensors") for name in files):
        files = [name for name in files if not name.endswith(PICKLES)]
    files = [name for name in files if name not in ("training_args.bin", "optimizer.pt", "scheduler.pt")]
    if len(files) == 1:
        return _open_file(folder, files[0], target, config)
    if files and all(SHARD.search(name) for name in files):
        missing = f"no {SHARD.sub('', files[0])}.index.json"
        raise BrokenFile(folder.label, "an index beside the shards", missing, "Download the index too.")
    if files:
        raise AmbiguousFolder(folder.label, files)
    if listing is None:
        raise RemoteUnavailable(folder.label, "it holds neither model.safetensors nor an index of shards")
    nested = []
    if isinstance(folder, LocalFolder):
        nested = sorted(entry.parent.name for entry in folder.path.glob("*/config.json"))
    raise NoModelInFolder(folder.label, listing, nested)


def _open_file(folder: Folder, name: str, target: str, config: Mapping[str, Any] | None = None) -> Source:
    store = _open_store(folder, name)
    if isinstance(store, GGUFStore):
        return Source(target=target, kind="gguf", config=store.config, store=store)
    kind = "pickle" if isinstance(store, PickleStore) else "safetensors"
    config = _read_config(folder) if config is None else config
    is_whole_folder = isinstance(folder, LocalFolder) and config and name in ("model.safetensors", "pytorch_model.bin")
    place = folder.label if is_whole_folder else None
    return Source(target=target, kind=kind, config=config, store=store, place=place)


def _open_store(folder: Folder, name: str) -> TensorStore:
    if name.endswith(".safetensors"):
        return SafetensorsStore.single(folder, name)
    if name.endswith(".safetensors.index.json"):
        return SafetensorsStore.sharded(folder, name)
    if not isinstance(folder, LocalFolder):
        advice = "Only safetensors can be read by byte ranges; download this one and inspect the local copy."
        raise RemoteUnavailable(f"{folder.label}/{name}", "this format cannot be streamed", advice)
    if name.endswith(".gguf"):
        if (part := GGUF_PART.search(name)) and int(part["count"]) > 1:
            found = f"one of {int(part['count'])} parts, which holds some of the layers"
            advice = "Join the parts first: llama-gguf-split --merge FIRST_PART WHOLE.gguf"
            raise BrokenFile(f"{folder.label}/{name}", "a whole GGUF file", found, advice)
        return GGUFStore(folder.path / name)
    if name.endswith(".bin.index.json"):
        return PickleStore(folder.path, read_weight_map(folder, name))
    if name.endswith(PICKLES):
        return PickleStore.single(folder.path / name)
    raise BrokenFile(
        f"{folder.label}/{name}",
        "a .safetensors, .bin, .pt, .pth, .ckpt or .gguf file",
        f"the ending {Path(name).suffix!r}",
        "Point at the weights or at their folder.",
    )


def _read_config(folder: Folder) -> dict[str, Any]:
    """The config beside the weights, or an empty one; timm's own config is completed from timm's registry."""
    if not folder.has("config.json"):
        return {}
    config = json_object(read_small(folder, "config.json", LARGEST_JSON), f"{folder.label}/config.json")
    if "architecture" in config and "model_type" not in config:
        config |= _timm_config(str(config["architecture"]), config.get("model_args") or {})
    return config


def _timm_hub_id(name: str) -> str | None:
    """The hub repository of a timm model's pretrained weights; `None` where the name is not timm's."""
    if "/" in name:
        return None
    timm = _import_timm()
    if timm is None or not timm.is_model(name):
        return None
    hub_id = timm.get_pretrained_cfg(name).hf_hub_id
    if not hub_id:
        raise TargetNotFound(name, ["timm, which has the architecture but no pretrained weights for it"])
    return str(hub_id)


def _timm_config(architecture: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a timm architecture, from a copy on the meta device: no memory, no download."""
    import torch

    timm = _import_timm()
    if timm is None or not timm.is_model(architecture.split(".")[0]):
        return {}
    with torch.device("meta"):
        return ModuleStore(timm.create_model(architecture.split(".")[0], **arguments)).config


def _import_timm() -> Any | None:
    try:
        import timm
    except ImportError:
        return None
    return timm
