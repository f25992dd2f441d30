"""`edit`: changes the value maps of a checkpoint, tensor by tensor, into a new checkpoint.

The checkpoint is copied into a temporary folder beside its destination, the bytes of the changed tensors are overwritten
there block by block, it is read back by the plain library, and renamed at the end: whole or not at all. Everything else stays
as it was; `.bin` files become safetensors. `oversmooth.json`, README.md and the metadata of the weights say what was done.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.control.constrain import layer_control
from oversmooth.control.eigenbasis import Heads
from oversmooth.control.parametrizations import SIGNED_NORMS, flipped_norm
from oversmooth.control.projection import EigenvalueForm, kept_weights, with_constant_kept
from oversmooth.control.readback import ChangedStore, original_changed, require_read_back
from oversmooth.control.selection import Chosen, Layers, choose, require_matrices, require_plain
from oversmooth.environment.files import folder_whole, plain_text, require_free
from oversmooth.environment.versions import versions
from oversmooth.errors import (
    BadValue,
    BrokenFile,
    CannotControl,
    Conflict,
    HeadsUnknown,
    MissingValue,
    NotSupported,
    reason_of,
)
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.declaration import norm_offset
from oversmooth.models.example_model import example_named
from oversmooth.models.open import ADAPTER_CONFIG, EIGENBASIS, HUB_ID, OpenedModel, local_path, open_source
from oversmooth.models.source import Source, provenance_of
from oversmooth.models.stores.gguf import GGUFStore
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.remote import cached_hub_folder
from oversmooth.models.stores.safetensors import DTYPES, SafetensorsStore, read_header
from oversmooth.models.stores.store import SMALL_FILE_BYTES, LocalFolder, ReadLog, TensorStore
from oversmooth.models.stores.torch_pickle import PickleStore, load_tensors, plain_tensor
from oversmooth.results import Control, LayerControl, Progress, guarded, no_progress

# --- changes of a given strength: weights whose maps lie between the old ones and the new ---


@torch.no_grad()
def mixed_weights(old: AttentionWeights, new: AttentionWeights, strength: float) -> AttentionWeights:
    """The weights whose maps are nearest to `(1 - s) H_h + s H'_h`; `s` is the strength, 0 the old ones, 1 the new.

    The mix of two heads has twice the rank that one can hold. What is kept of it are its largest singular values: by
    Eckart and Young nothing of that rank is nearer, in the sum over heads of squared Frobenius norms, where heads that
    read the same values are taken together.
    """
    group = old.n_heads // old.n_kv
    value, output = [], []
    for w_v, w_o, share in ((old.w_v, old.w_o, 1 - strength), (new.w_v, new.w_o, strength)):
        value.append(w_v.double())
        # The output weights of all heads that read one value head, below each other.
        output.append(share * w_o.double().unflatten(1, (old.n_kv, group)).permute(1, 2, 0, 3).flatten(1, 2))
    left = torch.linalg.qr(torch.cat(output, 2))
    right = torch.linalg.qr(torch.cat(value, 1).mT)
    core = torch.linalg.svd(left.R @ right.R.mT, full_matrices=False)
    kept = slice(old.d_head)
    half = core.S[:, kept].sqrt()
    columns = (left.Q @ core.U[..., kept]) * half[:, None]
    rows = half[..., None] * (core.Vh[:, kept] @ right.Q.mT)
    by_head = _filled(columns, output[0]).unflatten(1, (group, old.d_model)).permute(2, 0, 1, 3).flatten(1, 2)
    return replace(old, w_v=_filled(rows, old.w_v), w_o=by_head.to(old.w_o.dtype))


def _filled(found: Tensor, like: Tensor) -> Tensor:
    """With zeros where a head is wider than the model, and its map has fewer singular values."""
    whole = torch.zeros(like.shape, dtype=found.dtype, device=found.device)
    whole[tuple(slice(size) for size in found.shape)] = found
    return whole.to(like.dtype)


# --- A local checkpoint, a copy of it as safetensors, tensors of that copy overwritten in place ---

WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|onnx|onnx_data|ot|tflite)(\.index\.json)?$")
"""Files that hold weights, or say where they are; all others that are small are copied."""
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
OTHER_FORMATS = ("onnx", "openvino", "coreml", "original")
"""Folders that hold the same weights for other programs: they would not be those of the edited model."""
PACKED_BLOCKS = (
    "a GGUF file holds packed blocks, which cannot take arbitrary numbers",
    "Edit the original checkpoint and convert it again.",
)
SIGNATURE = "oversmooth.json"
"""What was done to a checkpoint, in the checkpoint."""
METADATA = "oversmooth"
"""Key of the metadata of every safetensors file that says the same in a line."""
CHUNK = 2**24


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where the files of a checkpoint are."""

    target: str
    folder: Path


def local_checkpoint(given: str | Path | nn.Module | OpenedModel, verb: str = "edit") -> Checkpoint:
    """The folder behind a target: its own, that of a file, or that of a model in the hub cache."""
    if isinstance(given, OpenedModel):
        given = given.source.target if given.source.module is None else given.source.module
    if isinstance(given, nn.Module):
        advice = "Save it first and point at the folder, or change it in place: osm.constrain(model)."
        raise CannotControl(verb, f"a live {type(given).__name__}", "it copies files of a checkpoint", advice)
    target, path = str(given), local_path(str(given))
    if (path is None or not path.exists()) and (example := example_named(target)) is not None:
        target, path = example, local_path(example)
    if path is not None and (path.is_dir() or path.is_file()):
        if (path / ADAPTER_CONFIG).is_file():
            advice = "Merge it into its base model with peft (merge_and_unload), save that, and point at the result."
            raise CannotControl(verb, target, "it is an adapter, which holds changes of weights and no weights", advice)
        if path.is_file() and path.suffix == ".gguf":
            raise CannotControl(verb, target, *PACKED_BLOCKS)
        return Checkpoint(str(path), path if path.is_dir() else path.parent)
    cached = cached_hub_folder(target) if HUB_ID.fullmatch(target) else None
    if cached is not None:
        return Checkpoint(str(cached.path), cached.path)
    advice = "Download it first, for example: hf download NAME --local-dir FOLDER"
    raise CannotControl(verb, target, "it is not a folder or file on this machine", advice)


class EditableCopy:
    """A copy of a checkpoint whose tensors can be overwritten, one after another, each by one of its own size."""

    def __init__(self, folder: Path, where: Mapping[str, str], left_out: tuple[str, ...]):
        self._folder, self._where = folder, dict(where)
        self.left_out = left_out
        """Links that lead out of the folder or nowhere, and were not copied."""
        self.changed: set[str] = set()
        """Tensors that have been overwritten."""

    def read(self, name: str) -> Tensor:
        """A tensor as the file holds it now."""
        return SafetensorsStore.single(LocalFolder(self._folder), self._where[name]).read(name)

    def overwrite(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            file = self._where[name]
            entry = read_header(LocalFolder(self._folder).open(file))[name]
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert (len(data), DTYPES[entry.dtype]) == (entry.stop - entry.start, tensor.dtype), "same size and dtype"
            with (self._folder / file).open("r+b") as opened:
                opened.seek(entry.start)
                opened.write(data)
            self.changed.add(name)


def copy_checkpoint(checkpoint: Checkpoint, store: TensorStore, to: Path, done: str) -> EditableCopy:
    """Copies weights, configs, tokenizers and whatever else is small and no weights, subfolders included.

    `done` says in a line what is going to be done to the copy; it goes into the metadata of its files.
    """
    if isinstance(store, GGUFStore):
        raise CannotControl("edit", checkpoint.target, *PACKED_BLOCKS)
    assert isinstance(store, SafetensorsStore | PickleStore), "a local checkpoint is one of these"
    where = {name: store.file_of(name) for name in store.names}
    files = dict.fromkeys(where.values())
    left_out = copy_small_files(checkpoint.folder, to)
    for file in files:
        if isinstance(store, SafetensorsStore):
            _copy_with_metadata(checkpoint.folder / file, to / file, done)
        else:
            _convert(checkpoint.folder / file, to / as_safetensors(file), done)
    renamed = {name: as_safetensors(file) for name, file in where.items()}
    for index in INDEX_FILES if len(files) > 1 else ():
        if (checkpoint.folder / index).is_file():
            body = json.loads((checkpoint.folder / index).read_text())
            (to / as_safetensors(index)).write_text(json.dumps({**body, "weight_map": renamed}, indent=2) + "\n")
            break
    for file in renamed.values():
        (to / file).chmod(0o644)  # a checkpoint that is read-only is still one whose copy can be edited
    return EditableCopy(to, renamed, left_out)


def _copy_with_metadata(file: Path, to: Path, done: str) -> None:
    """The same tensors behind a header that says what was done."""
    with _opened(file) as source, to.open("wb") as copy:
        length = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(length))  # its order is that of the tensors, and stays
        header = {"__metadata__": {"format": "pt", **header.pop("__metadata__", {}), METADATA: done}, **header}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
        copy.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, copy, CHUNK)


def _opened(file: Path) -> Any:
    """A file of the original, open; what stands in the way is not blamed on the copy."""
    try:
        return file.open("rb")
    except OSError as error:
        raise BrokenFile(str(file), "a file that can be read", reason_of(error)) from error


def as_safetensors(file: str) -> str:
    """The name under which transformers looks for the same weights as safetensors."""
    return re.sub(r"^(pytorch_)?(.*)\.(bin|pt|pth|ckpt)(?=$|\.index\.json$)", r"\2.safetensors", file)


def _convert(file: Path, to: Path, done: str) -> None:
    # Tied tensors share memory in a pickle, which safetensors does not have: each gets a copy of its own.
    tensors = {
        name: plain_tensor(file, name, tensor).clone(memory_format=torch.contiguous_format)
        for name, tensor in load_tensors(file).items()
    }
    save_signed(tensors, to, done)


def save_signed(tensors: Mapping[str, torch.Tensor], to: Path, done: str) -> None:
    """A safetensors file whose metadata says what was done; equal tensors and words give equal bytes."""
    from safetensors.torch import save_file

    save_file(dict(tensors), to, metadata={"format": "pt", METADATA: done})
    with to.open("r+b") as file:  # save_file writes the keys of the metadata in random order
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length))


def copy_small_files(folder: Path, to: Path) -> tuple[str, ...]:
    """All files beside the weights, and small parts of the model in folders of their own, such as a pooling layer.

    Returns the links that lead out of the folder, or nowhere, and are not copied: a downloaded folder may point at
    anything on this machine. Those of the hub cache lead to its own blobs.
    """
    left_out: list[str] = []
    inside = folder.resolve()
    allowed = inside.parent.parent if inside.parent.name == "snapshots" else inside
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in OTHER_FORMATS and (Path(place) / name).resolve() != to.resolve()
        ]
        for name in sorted(name for name in folders if (Path(place) / name).is_symlink()):
            left_out.append((Path(place) / name).relative_to(folder).as_posix())  # linked folders are not gone into
        for name in files:
            file = Path(place) / name
            is_weights = Path(place) == folder and WEIGHTS.search(name)
            if is_weights or name.startswith("."):
                continue
            if file.is_symlink() and not (file.exists() and file.resolve().is_relative_to(allowed)):
                left_out.append(file.relative_to(folder).as_posix())
                continue
            if not file.is_file() or file.stat().st_size > SMALL_FILE_BYTES:
                continue
            copy = to / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with _opened(file) as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target)
    if "config.json" in left_out:
        advice = "Copy the file itself into the folder."
        raise CannotControl("A copy", str(folder), "its config.json is a link that leads out of the folder", advice)
    return tuple(left_out)


# --- what says so -------------------------------------------------------------------------------------------------------


def hashes(folder: Path, store: TensorStore) -> dict[str, str]:
    """SHA-256 of every file with weights of a local checkpoint."""
    assert isinstance(store, SafetensorsStore | PickleStore), "a local checkpoint is one of these"
    found = {}
    for name in sorted({store.file_of(name) for name in store.names}):
        with _opened(folder / name) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def sign(folder: Path, verb: str, done: str, source: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Writes what was done into `oversmooth.json`, and a paragraph behind the model's own README, if it has one.

    `source` is the original: its name and the hashes of its weights; `facts` are numbers about what was done.
    """
    made_with = dict(versions())
    body = {"verb": verb, "done": done, "source": source, "versions": made_with, **facts}
    (folder / SIGNATURE).write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    readme = folder / "README.md"
    before = readme.read_bytes().rstrip() + b"\n\n" if readme.is_file() else b""
    if before.count(b"\n```") % 2:
        before += b"```\n\n"  # a block of code that its author left open would swallow what follows
    with_version = f"oversmooth {made_with.get('oversmooth', '')}".strip()
    paragraph = (
        f"## Changed with oversmooth\n\n"
        f"This checkpoint was made from {plain_text(str(source['name']))} by `{verb}` of {with_version}: {plain_text(done)}. "
        f"[{SIGNATURE}]({SIGNATURE}) holds the numbers, the versions, and the hashes of the original weights.\n"
    )
    readme.write_bytes(before + paragraph.encode())


# --- `edit`: pretrained surgery on a checkpoint, tensor by tensor ---

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is done to every chosen block."""

    form: EigenvalueForm | None = None
    scale: float | None = None
    flips_norms: bool = False
    strength: float = 1.0
    """0 would change nothing, 1 changes all the way; between them H is the best approximation of the mix."""

    def __post_init__(self) -> None:
        if not 0 < self.strength <= 1:
            raise BadValue("strength", self.strength, "above 0 and at most 1")
        if self.flips_norms and self.strength < 1:
            raise NotSupported("strength", "with flip_norm_signs", "a sign is flipped or it is not")
        if self.scale is not None and not math.isfinite(self.scale):
            raise BadValue("scale_h", self.scale, "a finite number")
        if self.form is not None and self.scale is not None:
            raise Conflict(["interval", "scale_h"])
        if self.form is None and self.scale is None and not self.flips_norms:
            raise MissingValue("interval, scale_h or flip_norm_signs")

    @property
    def words(self) -> str:
        said = []
        if self.form is not None:
            said.append(f"eigenvalues of H in [{self.form.low:g}, {self.form.high:g}], {self.form.basis} basis")
        if self.scale is not None:
            said.append(f"H times {self.scale:g}")
        if self.flips_norms:
            said.append("signs of the norm before or after attention flipped")
        return ", ".join(said) + (f", at strength {self.strength:g}" if self.strength < 1 else "")


def edit(
    target: str | Path | OpenedModel,
    out: str | Path,
    *,
    interval: tuple[float, float] | None = None,
    scale_h: float | None = None,
    flip_norm_signs: bool = False,
    strength: float = 1.0,
    basis: str = "orthogonal",
    max_condition: float | None = None,
    layers: Layers = None,
    stack: str | None = None,
    model_type: str | None = None,
    n_heads: int | None = None,
    n_kv: int | None = None,
    progress: Progress = no_progress,
) -> Control:
    """Writes a copy of a local checkpoint with the value maps of the chosen layers changed, and says what moved.

    `interval` (-1, 0) sharpens, (0, 1) smooths: H becomes the map near it that `constrain` would start from.
    `scale_h` multiplies H. `flip_norm_signs` negates the weights of the attention's own norm. With a `strength` below 1
    the change is made in part: H becomes the best approximation of the mix of old and new that fits the ranks of the
    heads; its eigenvalues then need not lie in the interval. The vector that value biases
    add to every token is kept wherever biases allow it. `out` must not exist or be empty. The other options are those of
    `constrain` and `inspect`.
    """
    form = form_of(interval, basis, max_condition)
    change = Change(form=form, scale=scale_h, flips_norms=flip_norm_signs, strength=strength)
    require_free(Path(out))
    checkpoint = local_checkpoint(target)
    source = open_source(checkpoint.target, model_type=model_type, n_heads=n_heads, n_kv=n_kv)
    stacks, log = source.stacks(), ReadLog(source.store)
    chosen = choose(stacks, layers, stack)
    if any(EIGENBASIS.match(name) for name in source.store.names):
        reason = "it also holds the eigenbasis of a constrained model, to which the edited weights would not belong"
        raise CannotControl("edit", checkpoint.target, reason, "Load it as an ordinary model, save that, and edit it.")
    require_possible(chosen, source.store.read, change)
    done: list[LayerControl] = []
    words = f"{change.words}, in {len(chosen)} layers"
    with folder_whole(Path(out)) as beside:
        copied = copy_checkpoint(checkpoint, source.store, beside, words)
        for each in chosen:
            old = each.stack.weights(each.position, log.read)
            _require_finite(each, old, "it holds NaN or infinity", "Start from a complete checkpoint.")
            tensors = changed_tensors(each, old, changed_weights(old, change), log.read, change)
            copied.overwrite(tensors)
            written = each.stack.weights(each.position, copied.read)  # what is stated is what the file holds
            too_large = f"the new weights are too large for {str(old.w_o.dtype).removeprefix('torch.')}"
            _require_finite(each, written, too_large, "Choose a smaller change, or convert it to float32 first.")
            done.append(layer_control(each, old, written, _signs_changed(old, written)))
            guarded(progress)(len(done), len(chosen))
        edited = ChangedStore(source.store, copied.changed, copied.read)
        reference = original_changed(source, partial(_changed_live, chosen, copied.read, change), edited)
        result = Control(
            provenance=provenance_of(source, stacks, log, compute_dtype="float64"),
            change=change.words,
            low=form.low if form and strength == 1 else None,
            high=form.high if form and strength == 1 else None,
            layers=tuple(done),
            out=str(out),
            read_back=require_read_back(beside, reference, "edit", str(out)),
            left_out=copied.left_out,
        )
        _sign(beside, checkpoint, source, result, words)
    return result


def _sign(folder: Path, checkpoint: Checkpoint, source: Source, result: Control, words: str) -> None:
    names = ("stack", "layer", "moved", "norm_signs_changed")
    moves = [{name: getattr(layer, name) for name in names} for layer in result.layers]
    assert result.read_back is not None, "an edit is read back before it is signed"
    original = {"name": Path(checkpoint.target).name, "sha256": hashes(checkpoint.folder, source.store)}
    facts = {"layers": moves, "read_back": asdict(result.read_back), "left_out": list(result.left_out)}
    sign(folder, "edit", words, original, facts)


def _changed_live(chosen: Sequence[Chosen], read: Read, change: Change, live: Source) -> AbstractContextManager[None]:
    """The live model with the new weights in it, which `read` gives, while the context lasts."""
    assert isinstance(live.store, ModuleStore)
    stacks = {stack.label: stack for stack in live.stacks()}
    store = live.store
    tensors: dict[str, Tensor] = {}
    for each in chosen:
        twin = Chosen(stacks[each.stack.label], each.position)
        old = twin.stack.weights(each.position, store.read)
        new = each.stack.weights(each.position, read)
        tensors |= changed_tensors(twin, old, new, store.read, change)
    return store.holding(tensors)


def form_of(interval: tuple[float, float] | None, basis: str, max_condition: float | None) -> EigenvalueForm | None:
    """The form that an interval asks for; `None` without one."""
    if interval is None:
        return None
    return EigenvalueForm(low=float(interval[0]), high=float(interval[1]), basis=basis, max_condition=max_condition)


def _require_finite(each: Chosen, weights: AttentionWeights, reason: str, advice: str) -> None:
    if not (torch.isfinite(weights.w_v).all() and torch.isfinite(weights.w_o).all()):
        raise CannotControl("edit", each.words, reason, advice)


def require_possible(chosen: list[Chosen], read: Read, change: Change) -> None:
    """Raises what cannot be done before anything is written, from the first chosen block of every stack."""
    require_matrices(chosen, read)
    for each in {id(each.stack): each for each in reversed(chosen)}.values():
        weights = each.stack.weights(each.position, read)
        if change.form is not None:
            require_plain("An interval of eigenvalues", each, weights)
            if not weights.heads_known:
                raise HeadsUnknown(each.words, "each head owns a part of the eigenbasis")
            Heads.of(weights).require_one_basis()
        if change.flips_norms and "gate" in weights.gains:
            reason = "its gates read the same norm, and would change with it"
            raise CannotControl("flip_norm_signs", each.words, reason, "Choose other layers.")
        if change.flips_norms and not any(role in each.block.norms for role in SIGNED_NORMS):
            raise NotSupported("flip_norm_signs", f"for {each.words}", "its attention has no norm of its own")


@torch.no_grad()
def changed_weights(old: AttentionWeights, change: Change) -> AttentionWeights:
    """One layer after the change, in canonical form; the very same object where its weights do not change."""
    if change.form is not None:
        return partly(old, kept_weights(old, change.form), change.strength)
    if change.scale is not None:
        factor = 1 + change.strength * (change.scale - 1)
        return with_constant_kept(old, replace(old, w_v=old.w_v.float(), w_o=factor * old.w_o.float()))
    return old


def partly(old: AttentionWeights, new: AttentionWeights, strength: float) -> AttentionWeights:
    """A change made in part, with the vector that biases add kept."""
    return new if strength == 1 else with_constant_kept(old, mixed_weights(old, new, strength))


def changed_tensors(
    each: Chosen, old: AttentionWeights, new: AttentionWeights, read: Read, change: Change
) -> Mapping[str, Tensor]:
    """The changed tensors by name, in the shape, layout and dtype in which they are stored."""
    found: dict[str, Tensor] = {}
    is_transposed = each.stack.arch.stored == "in_out"
    rows = slice(None) if old.value_rows is None else old.value_rows
    if new is not old:
        value, stored = read(each.block.value.weight).clone(), read(each.block.output.weight)
        value_rows, output = value.T if is_transposed else value, new.w_o.flatten(1)
        value_rows[rows] = (new.w_v.flatten(0, 1) / each.stack.arch.value_gain).to(value.dtype)
        found[each.block.value.weight] = value
        found[each.block.output.weight] = (output.T if is_transposed else output).to(stored.dtype)
        if each.block.value.bias and new.b_v is not None:
            bias = read(each.block.value.bias).clone()
            is_fused = bias.numel() == len(value_rows)  # otherwise it has one entry per value channel
            bias[rows if is_fused else slice(None)] = new.b_v.flatten().to(bias.dtype)
            found[each.block.value.bias] = bias
        if each.block.output.bias and new.b_o is not None:
            found[each.block.output.bias] = new.b_o.to(read(each.block.output.bias).dtype)
    if change.flips_norms:
        name = each.block.norms[flipped_norm(each.block.norms)].weight
        offset = 2 * norm_offset(each.stack.arch.norm)
        found[name] = -read(name) - offset
    return found


def _signs_changed(old: AttentionWeights, new: AttentionWeights) -> int:
    pairs = [(old.norms[role].weight, new.norms[role].weight) for role in SIGNED_NORMS if role in old.norms]
    return sum(int((before.float().sign() * after.float().sign() < 0).sum()) for before, after in pairs)
