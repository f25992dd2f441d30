"""`open_source`: from what a user points at (folder, file, URL, hub id, timm name, module) to a `Source`."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oversmooth.errors import (
    AmbiguousFolder,
    BadConfig,
    BrokenFile,
    NoModelInFolder,
    RemoteUnavailable,
    TargetNotFound,
    UnknownArchitecture,
    UnknownName,
    first_line,
)
from oversmooth.models.config_fields import check_timm_arguments, word
from oversmooth.models.families import REFUSED
from oversmooth.models.forgotten_bake import require_ordinary_weights
from oversmooth.models.identify import declared_for, known_model_types
from oversmooth.models.source import Declaration, Source, Target, archs_of
from oversmooth.models.stores.adapters import AdaptedStore, Adapter, refuse_learned_prompts
from oversmooth.models.stores.files import LARGEST_JSON, Folder, LocalFolder, read_small
from oversmooth.models.stores.gguf import GGUFStore, gguf_parts
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.pickle import PickleStore
from oversmooth.models.stores.quantised import QuantisedStore, unpacked
from oversmooth.models.stores.remote import cached_hub_folder, hub_folder, remote_folder
from oversmooth.models.stores.safetensors import SafetensorsStore, read_weight_map
from oversmooth.models.stores.store import TensorStore
from oversmooth.results.json_text import json_object

RUN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SHARD = re.compile(r"-\d+-of-\d+(?=\.(safetensors|bin)$)")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HF_URL = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<rest>.+))?")


def open_source(
    target: Target,
    *,
    model_type: str | None = None,
    n_heads: int | None = None,
    n_kv: int | None = None,
    arch: Declaration | None = None,
    base: str | None = None,
    dtype: str | None = None,
    offload: bool | None = None,
) -> Source:
    """Opens whatever the user points at, without reading tensors; keywords fill in what a bare file does not say.

    `arch` is a declaration (or several, or a `Discovery`) to use in place of our own. `base` is the model that an adapter's
    folder was trained on, where its own config does not lead there. `dtype` is what the model is run in (`stored`, float32,
    bfloat16, float16) and `offload` whether its weights are read block by block while it runs; without a word, weights
    that do not fit into memory are.
    """
    if dtype not in (None, "stored", *RUN_DTYPES):
        raise UnknownName("dtype", dtype, ("stored", *RUN_DTYPES))
    if isinstance(target, Source):
        source = target
    else:
        source = _open_module(target) if isinstance(target, nn.Module) else _open_path(str(target), base)
    given = {"model_type": model_type, "num_attention_heads": n_heads, "num_key_value_heads": n_kv}
    config = {**source.config, **{key: value for key, value in given.items() if value is not None}}
    if model_type and model_type not in known_model_types() and model_type not in REFUSED:
        raise UnknownArchitecture(model_type, known_model_types())
    if source.module is None:
        require_ordinary_weights(source.store.names, source.target)
    if source.module is None and not isinstance(source.store, QuantisedStore | AdaptedStore):
        source = replace(source, store=unpacked(source.store, config, source.target, is_in_out=_is_in_out(config)))
    return replace(
        source,
        config=config,
        archs=source.archs if arch is None else archs_of(arch),
        dtype=source.dtype if dtype is None else RUN_DTYPES.get(dtype),
        offload=source.offload if offload is None else offload,
    )


def _is_in_out(config: Mapping[str, Any]) -> bool:
    """Whether the model keeps its weights transposed; packed ones never are."""
    return any(arch.stored == "in_out" for arch in declared_for(str(config.get("model_type"))))


def _open_module(module: nn.Module) -> Source:
    module = getattr(module, "_orig_mod", module)  # what was compiled: hooks are seen there
    refuse_learned_prompts(module)
    module = _inside_of_wrappers(module)
    store = ModuleStore(module)
    name = getattr(getattr(module, "config", None), "_name_or_path", "") or type(module).__name__
    return Source(target=str(name), kind="module", config=store.config, store=store, module=module)


def _inside_of_wrappers(module: nn.Module) -> nn.Module:
    """The Transformer inside of peft's or sentence-transformers' own classes, which is called with plain inputs."""
    inside: Any = getattr(module, "get_base_model", None)
    if inside is not None and hasattr(module, "peft_config"):
        return inside()  # its layers are the adapted ones
    first = next(iter(module.children()), None)
    encoder = getattr(first, "auto_model", None)
    return encoder if isinstance(encoder, nn.Module) else module


def _open_path(target: str, base: str | None = None) -> Source:
    path = local_path(target)
    if path is not None and (path / ADAPTER_CONFIG).is_file():
        return _open_adapter(LocalFolder(path), target, base)
    if path is not None and path.is_dir():
        return _open_folder(LocalFolder(path), target, place=str(path))
    if path is not None and path.is_file():
        return _open_file(LocalFolder(path.parent), path.name, target)
    if match := HF_URL.fullmatch(target):
        return _open_hub(match["repo"], match["revision"], match["rest"] or "", target)
    if "://" in target:
        return _open_url(target)
    if _timm_hub_id(target):
        source = _open_hub(str(_timm_hub_id(target)), None, "", target)
        return Source(target=target, kind="timm", config=source.config, store=source.store, place=f"timm:{target}")
    tried, advice, cause = ["a local file or folder"], "", None
    if HUB_ID.fullmatch(target) and not target.endswith((".safetensors", ".gguf", *PICKLES)):
        try:
            return _open_hub(target, None, "", target)
        except RemoteUnavailable as error:
            tried.append(f"the hub ({error.problem.rstrip('.')})")
            advice, cause = error.next_step, error
    raise TargetNotFound(target, tried, advice) from cause


def local_path(target: str) -> Path | None:
    """The path that a target would be on this machine; `None` where no file can have that name."""
    try:
        path = Path(target).expanduser()
        path.stat()
    except FileNotFoundError:
        return path
    except (OSError, ValueError, RuntimeError):  # too long, a loop of links, a null byte, a home of nobody
        return None
    return path


def _open_adapter(folder: LocalFolder, target: str, base: str | None) -> Source:
    """The base model with an adapter's weights in it; nothing of either has been read yet."""
    config = json_object(read_small(folder, ADAPTER_CONFIG, LARGEST_JSON), f"{folder.label}/{ADAPTER_CONFIG}")
    where = base or config.get("base_model_name_or_path")
    if not isinstance(where, str) or not where:
        raise TargetNotFound(target, [f"the base model in {ADAPTER_CONFIG}, which names none; give it with --base"])
    name = next((name for name in ADAPTER_FILES if folder.has(name)), None)
    if name is None:
        raise NoModelInFolder(folder.label, folder.listing(), [])
    try:
        opened = open_source(where)
    except TargetNotFound as error:
        raise TargetNotFound(where, [*error.tried, f"as the base of {target}; give another with --base"]) from error
    store = AdaptedStore(opened.store, _open_store(folder, name), Adapter.of(config, folder.label))
    return replace(opened, target=target, kind="adapter", store=store)


def _open_hub(repo: str, revision: str | None, rest: str, target: str) -> Source:
    cached = cached_hub_folder(repo, revision) if not rest else None
    if cached:
        return replace(_open_folder(cached, target, place=repo), revision=revision)
    subfolder, file = _split_file(rest)
    folder = hub_folder(repo, revision, subfolder)
    source = _open_file(folder, file, target) if file else _open_folder(folder, target, place=repo)
    return replace(source, kind="hub", place=None if rest else repo, revision=revision)


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
        return Source(target=target, kind="gguf", config=store.config, store=store, place=folder.label, gguf_file=name)
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
        parts = gguf_parts(folder.path / name)
        return GGUFStore(parts[0] if parts else folder.path / name, parts)
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
        config |= _timm_config(word(config, "architecture") or "", config.get("model_args") or {})
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

    check_timm_arguments(arguments)
    timm = _import_timm()
    if timm is None or not timm.is_model(architecture.split(".")[0]):
        return {}
    try:
        with torch.device("meta"):
            model = timm.create_model(architecture.split(".")[0], **arguments)
    except Exception as error:  # timm raises whatever its modules raise on arguments that make no sense
        raise BadConfig("model_args", f"arguments of timm's {architecture}", first_line(error)) from error
    return ModuleStore(model).config


def _import_timm() -> Any | None:
    try:
        import timm
    except ImportError:
        return None
    return timm
