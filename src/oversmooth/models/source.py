"""`Source` and `Stack`: an opened model, with its config, tensors by name and stacks of blocks.

folder, file, URL, hub id, timm name, nn.Module  ->  open_source  ->  Source.stacks()  ->  Stack.weights(i, read)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.environment.versions import versions
from oversmooth.errors import (
    AdapterMismatch,
    ConfigMismatch,
    NotDiscovered,
    PackedWeights,
    RefusedArchitecture,
    UnidentifiedWeights,
    UnknownArchitecture,
    some_of,
)
from oversmooth.models.canonical import AttentionWeights, assemble
from oversmooth.models.declaration import Arch, Discovery, StackSizes, gain, sizes_of, whole, word
from oversmooth.models.example_model import shipped_words
from oversmooth.models.families import REFUSED, REFUSED_NAMES, UNSAID_NAMES
from oversmooth.models.identify import (
    StackNames,
    candidates_by_name,
    declared_for,
    declared_for_gguf,
    gguf_form,
    known_model_types,
    resolve,
    without_extra,
)
from oversmooth.models.stores.module import ModuleStore, bare_attention, refuse_extra_tokens
from oversmooth.models.stores.quantised import is_packed_name
from oversmooth.models.stores.store import ReadLog, TensorStore
from oversmooth.results import Provenance

# --- an opened model: its config, its tensors by name, its stacks, the live module if it is one ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack of attention blocks of a source, ready to be read block by block."""

    label: str
    arch: Arch
    sizes: StackSizes
    names: StackNames
    branch_gain: float
    passes: tuple[tuple[int, ...], ...]
    """For each block, the depths at which it runs."""
    prefix_tokens: int = 0
    """Tokens in front that are not part of the sequence (CLS, registers)."""

    def weights(self, position: int, read: Callable[[str], Tensor]) -> AttentionWeights:
        """Canonical weights of the block at `position` (not its index, in hybrids), read now."""
        return assemble(self.arch, self.sizes, self.names.blocks[position], read, self.branch_gain)

    def heads(self, position: int) -> int | None:
        """Query heads of the block at `position`; `None` if their number is unknown."""
        own = self.arch.n_heads
        return own[position] if isinstance(own, tuple) else self.sizes.n_heads


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
    revision: str | None = None
    """The branch, tag or commit of a hub repository; `None` for its main branch."""
    gguf_file: str | None = None
    """The GGUF file in that place, if the model, its config and its tokenizer are in one."""
    dtype: torch.dtype | None = None
    """What the model is run in; `None` for the dtype that its weights are stored in."""
    device_map: str | None = None
    """How accelerate spreads the weights over devices; `None`: all on one."""
    offload: bool | None = None
    """Whether weights are read block by block while it runs; `None`: only if they do not fit in memory."""
    trust_remote_code: bool = False
    """Whether code from the model's repository may run."""
    archs: tuple[Arch, ...] = ()
    """Declarations that the user gave, in place of our own."""

    def origin(self) -> dict[str, Any]:
        """Keywords of `from_pretrained`, so that the model that is loaded is the one that was opened."""
        options: dict[str, Any] = {"local_files_only": Path(self.place or "").is_dir()}
        named = {"gguf_file": self.gguf_file, "revision": self.revision}
        return options | {name: value for name, value in named.items() if value}

    @property
    def is_timm(self) -> bool:
        """Whether timm builds the model."""
        return "architecture" in self.config or str(self.place or "").startswith("timm:")

    @property
    def model_type(self) -> str:
        names = (word(self.config, key) for key in ("model_type", "gguf_architecture", "class"))
        return next((name for name in names if name), "unknown")

    def stacks(self, *, bare: bool = True) -> tuple[Stack, ...]:
        """The stacks of this model, declared or found by running it; raises what is refused or contradicts itself.

        `bare`: of a module that could not be run, its `nn.MultiheadAttention` modules are read by themselves.
        """
        if self.archs:
            return _given_stacks(self)
        _refuse(self)
        try:
            shown = _discovery(self)
        except NotDiscovered:
            alone = bare_attention(self.module) if bare and self.module is not None else ()
            if not alone:
                raise
            return _given_stacks(replace(self, archs=alone))
        if shown is not None:
            return _given_stacks(replace(self, archs=shown.archs))
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
            few = sorted(self.store.names)[:3]
            if self.model_type == "unknown":
                raise UnidentifiedWeights(self.target, (), few)
            raise AdapterMismatch(self.model_type, "attention layers under its names", some_of(few) or "no tensor")
        return tuple(found.values())

    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Parts of the model that are not analysed, each with its reason."""
        if self.archs:
            return ()
        try:
            shown = _discovery(self)
        except NotDiscovered as error:
            where = "everything around nn.MultiheadAttention"
            return ((where, f"the model was not run: {error.found}"),)
        if shown is not None:
            return tuple((one.where, one.reason) for one in shown.left_out)
        undeclared = _undeclared(self.model_type, self.config, "")
        return tuple((name, f"no family is declared for model_type {part!r}") for name, part in undeclared)


Declaration = Arch | Sequence[Arch] | Discovery
"""What a user can say about a model: declarations, or what `discover` found."""


def archs_of(given: Declaration) -> tuple[Arch, ...]:
    if isinstance(given, Discovery):
        return given.archs
    return (given,) if isinstance(given, Arch) else tuple(given)


# --- which declarations fit a source; what is refused ---


def _refuse(source: Source) -> None:
    if source.module is not None:
        refuse_extra_tokens(source.module)
    for model_type in (source.model_type, *_part_types(source.config)):
        if model_type in REFUSED:
            raise RefusedArchitecture(f"{source.target} ({model_type})", REFUSED[model_type])
    for fragment, reason in {**REFUSED_NAMES, **(UNSAID_NAMES if _says_plain(source) else {})}.items():
        name = next((name for name in source.store.names if fragment in name), None)
        if name:
            raise RefusedArchitecture(f"{source.target} (tensor {name})", reason)
    packed = next((name for name in source.store.names if is_packed_name(name)), None)
    if packed:
        raise PackedWeights(source.target, f"tensor {packed!r}")


def _says_plain(source: Source) -> bool:
    """Whether a source is said to have plain attention, or nothing says what it has."""
    archs = [arch for arch, _, _ in _by_model_type(source.model_type, source.config, "")]
    if archs:
        return not any(arch.gains or arch.paths.latent or arch.paths.inner_norm for arch in archs)
    return source.module is None and not word(source.config, "model_type") and "gguf_architecture" not in source.config


def _is_declared(source: Source) -> bool:
    """Whether families are declared for the model and for all its parts."""
    return _has_declared(source) and not any(True for _ in _undeclared(source.model_type, source.config, ""))


def _has_declared(source: Source) -> bool:
    return any(True for _ in _by_model_type(source.model_type, source.config, ""))


def _discovery(source: Source) -> Discovery | None:
    """The discovery of the model, or of a skeleton of it; `None` if it is declared or cannot be built."""
    if source.module is not None:
        from oversmooth.models.discovery.watch import discovered, replacement

        if (known := replacement(source.module)) is not None:
            return known
    if _is_declared(source) or "gguf_architecture" in source.config:
        return None
    from oversmooth.models.discovery.skeleton import discovered_on_disk

    try:
        if source.module is not None and isinstance(source.store, ModuleStore):
            return discovered(source.module, source.config)
        found = discovered_on_disk(source.config)
        if found is not None:
            _given_stacks(replace(source, archs=found.archs))
        return found
    except (NotDiscovered, RefusedArchitecture, AdapterMismatch):
        if _has_declared(source):
            return None  # some parts are declared: they are read, and the others are named
        raise


def _given_stacks(source: Source) -> tuple[Stack, ...]:
    """Stacks of declarations that know their sizes: given by the user, or found by running the model."""
    found = []
    for arch in source.archs:
        settled = arch.for_config(source.config)
        prefixes = resolve(settled, source.store.names)
        if not prefixes:
            few = some_of(sorted(source.store.names)[:3])
            raise AdapterMismatch(arch.name, f"tensors at {arch.paths.block}", f"names such as {few}")
        whole_model = [names for names in prefixes if not names.prefix] or prefixes
        found += [_stack(source, arch.stack, settled, source.config, names) for names in whole_model]
    return tuple(found)


def _part_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Model types of the parts of a composite config, at any depth."""
    for _, model_type, part in _parts(config):
        yield model_type
        yield from _part_types(part)


def _parts(config: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Name, model type and config of each part that a composite config is made of."""
    return [
        (key.removesuffix("_config"), model_type, part)
        for key, part in config.items()
        if isinstance(part, Mapping) and (model_type := word(part, "model_type"))
    ]


def _declarations(source: Source) -> Iterator[tuple[Arch, Mapping[str, Any], str]]:
    """Declarations to try, each with the config that holds its sizes and a word its prefix should contain."""
    config = source.config
    if architecture := config.get("gguf_architecture"):
        said = declared_for(source.model_type) if config.get("model_type") else []
        yield gguf_form(said[0]) if said else declared_for_gguf(architecture), config, ""
    elif model_type := word(config, "model_type"):
        found = list(_by_model_type(model_type, config, ""))
        if not found:
            raise UnknownArchitecture(model_type, known_model_types())
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


def _without_repeats(names: StackNames, store: ModuleStore) -> StackNames:
    """Blocks under their first names: a list of modules may hold one of them several times."""
    owners = {id(store.owner(block.output.weight)): block for block in reversed(names.blocks)}
    if len(owners) == len(names.blocks):
        return names
    kept = tuple(block for block in names.blocks if owners[id(store.owner(block.output.weight))] is block)
    return replace(names, blocks=kept, blocks_in_model=len(kept))


def _first_passes(names: StackNames, passes: tuple[tuple[int, ...], ...], target: str) -> StackNames:
    """Of a file that names shared blocks once per pass, as state dicts do, those of the first pass of each."""
    in_all = sum(map(len, passes))
    if len(names.blocks) == len(passes):
        return names
    if len(names.blocks) != in_all:
        raise ConfigMismatch("the number of blocks", f"{len(passes)} in {in_all} passes", len(names.blocks), target)
    return replace(names, blocks=tuple(names.blocks[first] for first, *_ in passes), blocks_in_model=len(passes))


def _stack(source: Source, label: str, arch: Arch, config: Mapping[str, Any], names: StackNames) -> Stack:
    sizes = sizes_of(config, arch)
    names = without_extra(names, sizes.n_layers, whole(config, "num_nextn_predict_layers", smallest=0))
    if isinstance(source.store, ModuleStore):
        names = _without_repeats(names, source.store)
    elif arch.passes:
        names = _first_passes(names, arch.passes, source.target)
    blocks = len(names.blocks)
    passes: list[tuple[int, ...]] = [(block.index,) for block in names.blocks]
    if arch.passes:
        passes = list(arch.passes)
    elif arch.shared_layers:
        depth = sizes.n_layers or blocks
        passes = [tuple(p for p in range(depth) if p * blocks // depth == block) for block in range(blocks)]
    elif source.module is None and sizes.n_layers not in (None, names.blocks_in_model):
        raise ConfigMismatch("the number of layers", sizes.n_layers, names.blocks_in_model, source.target)
    branch_gain = gain(config, arch.residual_gain) if arch.residual_gain else arch.branch_gain
    more_prefix = whole(config, arch.prefix_tokens_key, smallest=0) if arch.prefix_tokens_key else 0
    return Stack(
        label=label,
        arch=arch,
        sizes=sizes,
        names=names,
        branch_gain=branch_gain,
        passes=tuple(passes),
        prefix_tokens=arch.prefix_tokens + (more_prefix or 0),
    )


# --- where a result comes from, collected while it is made ---


def provenance_of(
    source: Source, stacks: Sequence[Stack], log: ReadLog, *, compute_dtype: str, seed: int | None = None
) -> Provenance:
    hybrids = [stack for stack in stacks if len(stack.names.blocks) != stack.names.blocks_in_model]
    return Provenance(
        target=source.target,
        source=source.kind,
        model_type=source.model_type,
        families=tuple(stack.arch.name for stack in stacks),
        files=source.store.files(),
        weights_sha256=log.sha256,
        bytes_read=log.bytes_read,
        weight_dtypes=tuple(sorted(log.dtypes)),
        compute_dtype=compute_dtype,
        versions=versions(),
        seed=seed,
        hybrids=tuple(
            f"{stack.label}: ".removeprefix(": ") + f"{len(stack.names.blocks)} of {stack.names.blocks_in_model} blocks"
            for stack in hybrids
        ),
        discovery_error=max((stack.arch.proof for stack in stacks if stack.arch.proof is not None), default=None),
        note=shipped_words(source.target),
    )
