"""`edit`: pretrained surgery on a checkpoint, tensor by tensor; the model is never built and may be larger than memory.

The checkpoint is copied into a temporary folder beside its destination, the bytes of the changed tensors are overwritten
there block by block, and the folder is renamed at the end: whole or not at all. Everything else stays as it was, byte for
byte; `.bin` files become safetensors. Nothing in the result says that we were here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from oversmooth.control.checkpoint import copy_checkpoint, local_checkpoint
from oversmooth.control.constrain import layer_control
from oversmooth.control.mixing import mixed_weights
from oversmooth.control.norms import SIGNED_NORMS, flipped_norm
from oversmooth.control.projection import Form, kept_weights, with_constant_kept
from oversmooth.control.selection import Chosen, Layers, choose, heads_of, require_matrices, require_plain
from oversmooth.errors import BadValue, CannotControl, Conflict, HeadsUnknown, NothingChosen, NotSupported
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.declaration import norm_offset
from oversmooth.models.forgotten_bake import holds_an_eigenbasis
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.stores.store import ReadLog
from oversmooth.output.whole_files import folder_whole, require_free
from oversmooth.results import Control, LayerControl, Progress, no_progress

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is done to every chosen block."""

    form: Form | None = None
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
            raise NothingChosen(["interval", "scale_h", "flip_norm_signs"])

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
    target: str | Path,
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
    checkpoint = local_checkpoint(str(target))
    source = open_source(checkpoint.target, model_type=model_type, n_heads=n_heads, n_kv=n_kv)
    stacks, log = source.stacks(), ReadLog(source.store)
    chosen = choose(stacks, layers, stack)
    if holds_an_eigenbasis(source.store.names):
        reason = "it also holds the eigenbasis of a constrained model, to which the edited weights would not belong"
        raise CannotControl("edit", checkpoint.target, reason, "Load it as an ordinary model, save that, and edit it.")
    require_possible(chosen, source.store.read, change)
    done: list[LayerControl] = []
    with folder_whole(Path(out)) as beside:
        copy = copy_checkpoint(checkpoint, source.store, beside)
        for each in chosen:
            old = each.stack.weights(each.position, log.read)
            _require_finite(each, old, "it holds NaN or infinity", "Start from a complete checkpoint.")
            new = changed_weights(old, change)
            tensors = changed_tensors(each, old, new, log.read, change)
            copy.overwrite(tensors)
            written = each.stack.weights(each.position, partial(_read_changed, tensors, log.read))
            too_large = f"the new weights are too large for {str(old.w_o.dtype).removeprefix('torch.')}"
            _require_finite(each, written, too_large, "Choose a smaller change, or convert it to float32 first.")
            done.append(layer_control(each, old, written, _signs_changed(old, written)))
            progress(len(done), len(chosen))
    return Control(
        provenance=provenance_of(source, stacks, log, compute_dtype="float64"),
        change=change.words,
        low=form.low if form and strength == 1 else None,
        high=form.high if form and strength == 1 else None,
        layers=tuple(done),
        out=str(out),
    )


def form_of(interval: tuple[float, float] | None, basis: str, max_condition: float | None) -> Form | None:
    """The form that an interval asks for; `None` without one."""
    if interval is None:
        return None
    return Form(low=float(interval[0]), high=float(interval[1]), basis=basis, max_condition=max_condition)


def _read_changed(changed: Mapping[str, Tensor], read: Read, name: str) -> Tensor:
    return changed[name] if name in changed else read(name)


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
        if change.flips_norms and "gate" in weights.gains:
            reason = "its gates read the same norm, and would change with it"
            raise CannotControl("flip_norm_signs", each.words, reason, "Choose other layers.")
        if change.form is not None and not weights.heads_known:
            raise HeadsUnknown(each.words, "each head owns a part of the eigenbasis")
        if change.form is not None:
            heads_of(weights).require_one_basis()
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
        value = read(each.block.value.weight).clone()
        (value.T if is_transposed else value)[rows] = (new.w_v.flatten(0, 1) / each.stack.arch.value_gain).to(
            value.dtype
        )
        output = new.w_o.flatten(1)
        stored = read(each.block.output.weight)
        found[each.block.value.weight] = value
        found[each.block.output.weight] = (output.T if is_transposed else output).to(stored.dtype)
        if each.block.value.bias and new.b_v is not None:
            bias = read(each.block.value.bias).clone()
            bias[rows if bias.numel() == len(value.T if is_transposed else value) else slice(None)] = (
                new.b_v.flatten().to(bias.dtype)
            )
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
