"""`open_source`: opens a folder, file, URL, hub id, timm name or module without reading tensors."""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from oversmooth.environment.files import json_object
from oversmooth.errors import (
    AmbiguousFolder,
    BadConfig,
    BadValue,
    BrokenFile,
    Conflict,
    ForgottenBake,
    NoModelInFolder,
    NotSupported,
    RemoteUnavailable,
    TargetNotFound,
    UnknownArchitecture,
    UnknownName,
    first_line,
)
from oversmooth.models.declaration import check_kinds, check_timm_arguments, word
from oversmooth.models.example_model import example_named
from oversmooth.models.families import REFUSED
from oversmooth.models.identify import declared_for, known_model_types
from oversmooth.models.source import Declaration, Source, Stack, archs_of, provenance_of
from oversmooth.models.stores.adapters import AdaptedStore, Adapter, refuse_learned_prompts
from oversmooth.models.stores.gguf import GGUFStore, gguf_parts
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.quantised import QuantisedStore, unpacked
from oversmooth.models.stores.remote import cached_hub_folder, hub_folder, remote_folder
from oversmooth.models.stores.safetensors import SafetensorsStore, read_weight_map
from oversmooth.models.stores.store import (
    LARGEST_JSON,
    Folder,
    LocalFolder,
    ReadLog,
    StateDict,
    TensorStore,
    bytes_of,
    read_small,
)
from oversmooth.models.stores.torch_pickle import PickleStore
from oversmooth.models.wrappers import is_envoy, require_inside, unwrapped
from oversmooth.results import Provenance

# --- how a model is opened and run: the options of every function that takes a target ---

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
RUN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class SourceKeywords(TypedDict, total=False):
    """Keywords that say how weights are read; `LoadOptions` says what each means."""

    base: str | None
    revision: str | None
    arch: Declaration | None
    model_type: str | None
    n_heads: int | None
    n_kv: int | None


class LoadKeywords(SourceKeywords, total=False):
    """Keywords of every function that runs a model: how it is read, and how it is run."""

    device: str | None
    dtype: str | None
    device_map: str | None
    offload: bool | None
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a model is opened and run. Without any choice: as its own files say."""

    device: str | None = None
    """Where it runs; a module of your own is never moved."""
    dtype: str | None = None
    """What it runs in: stored, float32, bfloat16, float16 or float64."""
    device_map: str | None = None
    """How weights are spread over devices by accelerate: auto, balanced, balanced_low_0 or sequential."""
    offload: bool | None = None
    """Whether weights are read block by block while it runs; `None`: only if they do not fit in memory."""
    base: str | None = None
    """Base model of an adapter, if not the one in its config."""
    revision: str | None = None
    """Branch, tag or commit of a repository on the hub."""
    trust_remote_code: bool = False
    """Whether code from the model's repository may run."""
    arch: Declaration | None = None
    """Declarations, or what `discover` found, to use in place of our own."""
    model_type: str | None = None
    """Model type of a file without a config."""
    n_heads: int | None = None
    """Number of attention heads, if no config gives it."""
    n_kv: int | None = None
    """Number of key/value heads, if no config gives it."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, "stored", *RUN_DTYPES):
            raise UnknownName("dtype", self.dtype, ("stored", *RUN_DTYPES))
        if self.device_map not in (None, *DEVICE_MAPS):
            raise UnknownName("device_map", self.device_map, DEVICE_MAPS)
        places = {"device": self.device, "device_map": self.device_map, "offload": self.offload}
        if self.device_map and len(given := [name for name, value in places.items() if value]) > 1:
            raise Conflict(given)

    def config(self) -> dict[str, Any]:
        """Entries of the config that were given by hand."""
        named = {"model_type": self.model_type, "num_attention_heads": self.n_heads, "num_key_value_heads": self.n_kv}
        return {key: value for key, value in named.items() if value is not None}


# --- a model that is opened once and asked often ---

T = TypeVar("T")
Opened = TypeVar("Opened", bound="OpenedModel")
_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""One lock for each module of the user's own, whatever the number of handles on it."""


class WeightsHash:
    """The hash of a module's value path, computed again only when something in it has changed.

    Changes are seen by a checksum of every tensor, at a third of the cost: an edit through `.data` changes neither the
    tensor's version nor its place in memory.
    """

    def __init__(self) -> None:
        self._log: ReadLog | None = None
        self._sums: list[Any] = []

    def of(self, store: ModuleStore, stacks: Sequence[Stack]) -> ReadLog:
        """Every declared tensor read in the order of `inspect`, so that results about one model can be matched."""
        if self._log is None or self._sums != _checksums(stacks, store.read):
            self._log = ReadLog(store)
            self._sums = _checksums(stacks, self._log.read)
        return self._log


def _checksums(stacks: Sequence[Stack], read: Callable[[str], Tensor]) -> list[Any]:
    """Reads every declared tensor: its name, its form and a checksum of its bytes."""
    found: list[Any] = []

    def noted(name: str) -> Tensor:
        tensor = read(name)
        found.append((name, tensor.dtype, tensor.shape, zlib.crc32(bytes_of(tensor))))
        return tensor

    for stack in stacks:
        for position in range(len(stack.names.blocks)):
            stack.weights(position, noted)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel:
    """A module that runs, and how it is read at this moment."""

    source: Source
    """What the user pointed at: target, files, and where the tokenizer is."""
    running: Source
    """The module itself as a source, by its own names."""
    model: nn.Module
    store: ModuleStore
    config: Mapping[str, Any]
    stacks: tuple[Stack, ...]
    weights_hash: WeightsHash

    def runs_in(self) -> str:
        """The dtype of the model, and whether its weights stay in their files, in words."""
        from oversmooth.models.live import is_offloaded

        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return f"{dtype} (weights read block by block)" if is_offloaded(self.model) else dtype

    def provenance(self, *, compute_dtype: str = "", seed: int | None = None) -> Provenance:
        """Where a result of running this model comes from."""
        log, precision = self.weights_hash.of(self.store, self.stacks), compute_dtype or f"model {self.runs_in()}"
        return provenance_of(self.source, self.stacks, log, compute_dtype=precision, seed=seed)


class OpenedModel:
    """A target opened once: what one function loads is there for the next.

    It keeps the source, the module (one per task head: each is a model in memory), tokenizer and processor, and the hash of
    the weights; never weights, spectra or results. Every function looks at a module of your own anew, and never moves it.
    Calls from several threads wait for each other.
    """

    def __init__(self, target: "Target", **load: Unpack[LoadKeywords]):
        self.load = LoadOptions(**load)
        self.source = _source(target, self.load)
        self._kept: dict[str, Any] = {}
        if self.source.module is not target and (tokenizer := getattr(target, "tokenizer", None)) is not None:
            self._kept["tokenizer"] = (
                tokenizer,
                "",
            )  # of a pipeline, a bridge of TransformerLens or a model of nnsight
        self.alone = RLock()
        """Held by a function while it runs the model: hooks of two runs on one module would see each other's passes."""
        if self.is_own:
            assert self.source.module is not None
            self.alone = _LOCKS.setdefault(self.source.module, self.alone)
        self._can_change = isinstance(target, nn.Module | HasModel | Envoy)
        self._modules: dict[str | None, nn.Module] = {}
        self._hashes: dict[str | None, WeightsHash] = {}

    @property
    def is_own(self) -> bool:
        """Whether it is a module of the user's own, which is neither loaded nor moved."""
        return isinstance(self.source.store, ModuleStore)

    def look_again(self) -> None:
        """Reads the names and the config of the user's own module anew: it may have changed since the last call."""
        if self._can_change and self.source.module is not None:
            opened = _open_module(self.source.module)
            self.source = replace(self.source, store=opened.store, config={**opened.config, **self.load.config()})

    def module(self, task: str | None = None, *, verb: str = "run") -> nn.Module:
        """The module in eval mode with the head of a task, loaded on first use."""
        from oversmooth.models.live import is_offloaded, load_model, load_with_head, move, require_on

        source, device = self.source, self.load.device
        if self.is_own and source.module is not None:
            if device is not None:
                require_on(source.module, device)
            return source.module
        head = self._head(task)
        with self.alone:
            if head not in self._modules:
                module = load_model(source, verb) if head is None else load_with_head(source, verb, task=head)
                if device is not None and not is_offloaded(module):
                    move(module, device)
                self._modules[head] = module
            return self._modules[head]

    def _head(self, task: str | None) -> str | None:
        """The task, if transformers loads another module for it than without one."""
        source = self.source
        is_loaded = source.module is None and source.place is not None and not source.is_timm
        return task if is_loaded and task != "similarity" else None

    def live(self, task: str | None = None, *, verb: str = "run") -> LiveModel:
        """The module as it is read at this moment; its stacks are found anew."""
        module = self.module(task, verb=verb)
        source = self.source
        if not self.is_own:
            opened = _open_module(module)
            source = replace(opened, config={**opened.config, **self.load.config()}, archs=source.archs)
        assert isinstance(source.store, ModuleStore)
        return LiveModel(
            source=self.source,
            running=source,
            model=module,
            store=source.store,
            config=source.config,
            stacks=source.stacks(),
            weights_hash=self._hashes.setdefault(self._head(task), WeightsHash()),
        )

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` gives, kept under a name: tokenizer and processor."""
        with self.alone:
            if name not in self._kept:
                self._kept[name] = make()
            found: T = self._kept[name]
            return found

    def close(self) -> None:
        """Forgets the loaded modules and everything else that was kept; they are loaded again on demand."""
        with self.alone:
            self._modules.clear()
            self._hashes.clear()
            self._kept.clear()

    def __enter__(self: Opened) -> Opened:  # beartype does not know Self in methods
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        loaded = ", ".join(str(head or "no head") for head in self._modules)
        return f"{type(self).__name__}({self.source.target!r}, loaded: {loaded or 'nothing'})"


@runtime_checkable
class Envoy(Protocol):
    """A model of nnsight: not a module, but around one."""

    _module: nn.Module


@runtime_checkable
class HasModel(Protocol):
    """A pipeline of transformers: a model, and the tokenizer or processor in front of it."""

    model: nn.Module


Target = str | Path | nn.Module | Mapping[str, Any] | HasModel | Envoy | Source | OpenedModel
"""What a user can point at; an opened model is one too."""


def open_model(target: Target, **load: Unpack[LoadKeywords]) -> OpenedModel:
    """The target opened; one that is opened already comes back as it is, and takes no options."""
    if not isinstance(target, OpenedModel):
        return OpenedModel(target, **load)
    if given := [name for name, value in load.items() if value is not None and value is not False]:
        raise Conflict([*given, "a model that is opened already"])
    target.look_again()
    return target


# --- from what a user points at to a source ---

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHTS = (".safetensors", ".gguf", *PICKLES)
EIGENBASIS = re.compile(r"(?P<owner>.*)\bparametrizations\.(?P<tensor>\w+)\.0\.eigenbasis\.")
"""Names under which a constrained model keeps what its value and output weights are made of."""
WHOLE_MODELS = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files under which transformers saves a model, in the order in which they are looked for."""
SHARD = re.compile(r"-\d+-of-\d+(?=\.(safetensors|bin)$)")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
HF_URL = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<rest>.+))?")


def open_source(target: Target, **load: Unpack[LoadKeywords]) -> Source:
    """Opens whatever the user points at, without reading tensors."""
    return _source(target, LoadOptions(**load))


def open_to_change(model: nn.Module, **load: Unpack[LoadKeywords]) -> tuple[Source, ModuleStore]:
    """Opens a module that is changed in place, and what its tensors are read through."""
    source = open_source(model, **load)
    assert source.module is not None
    assert isinstance(source.store, ModuleStore)
    require_inside(model, source.module)
    return source, source.store


def _source(target: Target, load: LoadOptions) -> Source:
    require_target(target)
    if isinstance(target, OpenedModel):
        target = target.source
    if load.revision is not None and not isinstance(target, str):
        raise _no_revision(load.revision, f"a {type(target).__name__}")
    if isinstance(target, Source):
        source = target
    elif isinstance(target, nn.Module):
        source = _open_module(target)
    elif isinstance(target, Mapping):
        source = Source(target="state dict", kind="state dict", config={}, store=StateDict(target))
    elif is_envoy(target):
        source = _open_module(unwrapped(target))
    elif isinstance(target, HasModel):
        source = _open_module(target.model)
    else:
        source = _open_path(str(target), load.base, load.revision)
    config = {**source.config, **load.config()}
    if load.model_type and load.model_type not in known_model_types() and load.model_type not in REFUSED:
        raise UnknownArchitecture(load.model_type, known_model_types())
    if source.module is None:
        _require_ordinary_weights(source)
        if not isinstance(source.store, QuantisedStore | AdaptedStore):
            store = unpacked(source.store, config, source.target, is_in_out=_is_in_out(config))
            source = replace(source, store=store)
    return replace(
        source,
        config=config,
        archs=source.archs if load.arch is None else archs_of(load.arch),
        dtype=source.dtype if load.dtype is None else RUN_DTYPES.get(load.dtype),
        device_map=source.device_map if load.device_map is None else load.device_map,
        offload=source.offload if load.offload is None else load.offload,
        trust_remote_code=source.trust_remote_code or load.trust_remote_code,
    )


def _require_ordinary_weights(source: Source) -> None:
    """Refuses an eigenbasis that was saved without the ordinary weight that follows from it."""
    for name in source.store.names:
        match = EIGENBASIS.match(name)
        if match and match["owner"] + match["tensor"] not in source.store.names:
            raise ForgottenBake(source.target, name)


def _no_revision(revision: str, target: str) -> NotSupported:
    reason = "only repositories of the hub have revisions"
    advice = "Give the name of a repository, OWNER/NAME, or hf://OWNER/NAME@REVISION."
    return NotSupported(f"revision={revision!r}", f"for {target}", reason, advice)


def require_target(target: object) -> None:
    """Raises for what is neither a place nor a model."""
    is_state_dict = isinstance(target, Mapping) and all(isinstance(value, Tensor) for value in target.values())
    is_model = isinstance(target, nn.Module | Source | OpenedModel) or is_envoy(target)
    is_model = is_model or isinstance(getattr(target, "model", None), nn.Module)
    if not (isinstance(target, str | Path) or is_model or is_state_dict):
        raise BadValue("target", target, "a path, a name, a URL, an nn.Module, a pipeline or a state dict")


def _is_in_out(config: Mapping[str, Any]) -> bool:
    """Whether the model keeps its weights transposed; packed ones never are."""
    return any(arch.stored == "in_out" for arch in declared_for(str(config.get("model_type"))))


def _open_module(module: nn.Module) -> Source:
    refuse_learned_prompts(module)
    module = unwrapped(module)
    store = ModuleStore(module)
    name = getattr(getattr(module, "config", None), "_name_or_path", "") or type(module).__name__
    return Source(target=str(name), kind="module", config=store.config, store=store, module=module)


def _open_path(target: str, base: str | None = None, revision: str | None = None) -> Source:
    path = local_path(target)
    is_here = path is not None and path.exists()
    if not is_here and (example := example_named(target)) is not None:
        return _open_path(example, base, revision)
    if revision is not None and (is_here or not HUB_ID.fullmatch(target) or _timm_hub_id(target)):
        raise _no_revision(revision, target)
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
    if HUB_ID.fullmatch(target) and not target.endswith(WEIGHTS):
        try:
            return _open_hub(target, revision, "", target)
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
    adapter = Adapter.of(config, folder.label)
    try:
        opened = open_source(_base_of(where, word(config, "revision") if base is None else None, target))
    except TargetNotFound as error:
        raise TargetNotFound(where, [*error.tried, f"as the base of {target}; give another with --base"]) from error
    is_declared = bool(declared_for(str(opened.config.get("model_type"))))
    store = AdaptedStore(
        opened.store,
        _open_store(folder, name),
        adapter,
        config=opened.config,
        is_in_out=_is_in_out(opened.config) if is_declared else None,
    )
    return replace(opened, target=target, kind="adapter", store=store)


def _base_of(where: str, revision: str | None, target: str) -> str:
    """The target that an adapter's base is opened by; a base that is an adapter itself is refused."""
    path = local_path(where)
    if path is not None and (path / ADAPTER_CONFIG).is_file():
        advice = (
            "Give the model that it was trained on with --base, or merge the first adapter into its base with peft."
        )
        raise NotSupported(f"The base {where!r}", f"for {target}", "it is an adapter itself", advice)
    is_on_hub = (path is None or not path.exists()) and "/" in where and HUB_ID.fullmatch(where) is not None
    return f"hf://{where}@{revision}" if revision not in (None, "main") and is_on_hub else where


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
    is_file = last.endswith((*WEIGHTS, ".json"))
    return (folder, last) if is_file else (path, "")


def _open_folder(folder: Folder, target: str, place: str | None) -> Source:
    config = _read_config(folder)
    listing = folder.listing()
    for name in WHOLE_MODELS:
        if folder.has(name):
            return Source(target=target, kind="folder", config=config, store=_open_store(folder, name), place=place)
    files = [name for name in listing or [] if name.endswith(WEIGHTS)]
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
    """The config beside the weights, or an empty one; sizes of timm's configs come from timm's registry."""
    if not folder.has("config.json"):
        return {}
    config = json_object(read_small(folder, "config.json", LARGEST_JSON), f"{folder.label}/config.json")
    check_kinds(config)
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
