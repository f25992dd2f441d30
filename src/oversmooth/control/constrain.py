"""`sharpen`, `smooth`, `constrain` and `bake`: the eigenbasis form on the blocks of a live model, and back again."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from oversmooth.control.eigenbasis import SCALES, Eigenbasis, Heads
from oversmooth.control.parametrizations import (
    OutputWeight,
    ValueWeight,
    follow_scale,
    keep_norms_positive,
    ours,
    parametrized,
    put_on,
    require_followed_norms,
    take_off,
    unfollow,
)
from oversmooth.control.projection import (
    EigenvalueForm,
    constant,
    fresh_eigenbasis,
    kept_eigenbasis,
    moved,
    weights_of,
    with_constant_kept,
)
from oversmooth.control.selection import (
    RULE_PREFIX,
    Chosen,
    Layers,
    choose,
    require_matrices,
    require_ordinary,
    require_plain,
)
from oversmooth.errors import CannotControl, UnknownName
from oversmooth.models.canonical import AttentionWeights
from oversmooth.models.open import open_to_change
from oversmooth.models.source import Declaration, provenance_of
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.store import ReadLog
from oversmooth.results import Control, HeadMove, LayerControl, Spectrum
from oversmooth.spectra.spectrum import DENSE_UP_TO, spectrum
from oversmooth.spectra.value_map import plain_map

INITS = ("keep", "fresh")


def sharpen(
    model: nn.Module,
    *,
    basis: str = "orthogonal",
    layers: Layers = None,
    stack: str | None = None,
    positive_norms: bool = False,
    scale: str = "plain",
    init: str = "keep",
    max_condition: float | None = None,
    generator: torch.Generator | None = None,
    arch: Declaration | None = None,
) -> Control:
    """Every eigenvalue of H in [-1, 0]: no attention can make tokens alike. As `constrain`, in place."""
    return constrain(
        model,
        low=-1.0,
        high=0.0,
        basis=basis,
        layers=layers,
        stack=stack,
        positive_norms=positive_norms,
        scale=scale,
        init=init,
        max_condition=max_condition,
        generator=generator,
        arch=arch,
    )


def smooth(
    model: nn.Module,
    *,
    basis: str = "orthogonal",
    layers: Layers = None,
    stack: str | None = None,
    positive_norms: bool = False,
    scale: str = "plain",
    init: str = "keep",
    max_condition: float | None = None,
    generator: torch.Generator | None = None,
    arch: Declaration | None = None,
) -> Control:
    """Every eigenvalue of H in [0, 1]: every attention makes tokens more alike. As `constrain`, in place."""
    return constrain(
        model,
        low=0.0,
        high=1.0,
        basis=basis,
        layers=layers,
        stack=stack,
        positive_norms=positive_norms,
        scale=scale,
        init=init,
        max_condition=max_condition,
        generator=generator,
        arch=arch,
    )


def constrain(
    model: nn.Module,
    *,
    low: float = -1.0,
    high: float = 0.0,
    basis: str = "orthogonal",
    layers: Layers = None,
    stack: str | None = None,
    positive_norms: bool = False,
    scale: str = "plain",
    init: str = "keep",
    max_condition: float | None = None,
    generator: torch.Generator | None = None,
    arch: Declaration | None = None,
) -> Control:
    """Puts `H = V diag(clip(psi, low, high)) V^-1` in place of the value and output weights, in place, for training.

    `basis`: orthogonal (H symmetric) or general, whose condition number `max_condition` keeps bounded. `init`: keep starts
    near the given weights (`norm(H - H')^2 + sum_h norm(H_h - H'_h)^2` is made small; where the interval holds zero, H never
    moves farther than setting it to zero would) and says how far that is, fresh draws V and psi with `generator`.
    `layers` is None, a number, several, or words such as "6-11". `positive_norms` also keeps the weights of the
    attention's own norms above zero, where each starts at its absolute value: then the signs of the eigenvalues survive
    the norm too. `scale`: plain takes the interval as it is, the paper's form; measured takes it for the map that acts in
    a pre-norm layer, eigenvalues over the token scale, which is followed while the model trains and kept by `bake`.
    Build the optimizer afterwards: value and output weights are no parameters any more. Biases are free.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> result = osm.constrain(model, low=-1, high=0)
    >>> max(layer.after.max_real for layer in result.layers) < 1e-5
    True
    """
    form = EigenvalueForm(low=float(low), high=float(high), basis=basis, max_condition=max_condition)
    if init not in INITS:
        raise UnknownName("init", init, INITS)
    if scale not in SCALES:
        raise UnknownName("scale", scale, SCALES)
    source, store = open_to_change(model, arch=arch)
    log = ReadLog(store)
    stacks = source.stacks()
    chosen = choose(stacks, layers, stack)
    require_ordinary("An interval of eigenvalues", chosen, store)
    require_matrices(chosen, store.read)
    plan = [(each, each.stack.weights(each.position, log.read)) for each in chosen]
    for each, weights in plan:
        require_plain("An interval of eigenvalues", each, weights)
    _refuse(model, store, plan)
    if scale == "measured":
        require_followed_norms(plan)
    done: list[LayerControl] = []
    seen: dict[int, LayerControl] = {}
    for each, weights in plan:
        key = id(store.owner(each.block.value.weight))
        if key not in seen:  # one module may stand at several depths: it has one basis
            eigenbasis = _eigenbasis(weights, form, init, generator)
            new = weights_of(eigenbasis, weights)
            new = with_constant_kept(weights, new) if init == "keep" else new
            seen[key] = layer_control(each, weights, new)  # now: the old weights are views of what is changed next
            follow_scale(each, weights, eigenbasis, store, is_measured=scale == "measured", is_kept=init == "keep")
            _install(each, new, eigenbasis, store)
            if positive_norms:
                seen[key] = replace(seen[key], norm_signs_changed=keep_norms_positive(each, store))
        done.append(replace(seen[key], layer=each.block.index, passes=each.stack.passes[each.position]))
    return Control(
        provenance=provenance_of(source, stacks, log, compute_dtype=_words(done)),
        change=f"eigenvalues of H{' over the token scale' * (scale == 'measured')} in [{form.low:g}, {form.high:g}], "
        f"{basis} basis, {init} start",
        low=form.low,
        high=form.high,
        layers=tuple(done),
    )


def bake(model: nn.Module) -> nn.Module:
    """Turns every parametrized weight into an ordinary one with the same outputs, in place; returns the model.

    The result is what transformers or timm built, with other numbers in it: save it with their own functions.
    """
    applied = [name for name, _ in model.named_modules() if name.rpartition(".")[2].startswith(RULE_PREFIX)]
    if applied:
        what = applied[0].rpartition(".")[2].removeprefix(RULE_PREFIX)
        reason = f"{what} changes attention itself, which no ordinary weights can express ({applied[0]})"
        raise CannotControl("bake", "this model", reason, f"Remove it first: osm.unapply(model, {what!r}).")
    for module, tensor in parametrized(model):
        take_off(module, tensor)
    for module in model.modules():
        unfollow(module)
    return model


# --- before anything is touched -------------------------------------------------------------------------------------


def _refuse(model: nn.Module, store: ModuleStore, plan: list[tuple[Chosen, AttentionWeights]]) -> None:
    """Raises what cannot be done, while the model is still as it was."""
    slots: dict[int, set[tuple[int, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            slots.setdefault(id(parameter), set()).add((id(module), name))
    for each, weights in plan:
        Heads.of(weights).require_one_basis()
        if not (torch.isfinite(weights.w_v).all() and torch.isfinite(weights.w_o).all()):
            reason = "its value or output weights hold NaN or infinity"
            raise CannotControl("The eigenbasis", each.words, reason, "Load a complete checkpoint.")
        for name in (each.block.value.weight, each.block.output.weight):
            owner, tensor = store.owner(name), name.rpartition(".")[2]
            if parametrize.is_parametrized(owner, tensor):
                if not ours(owner, tensor):
                    reason = f"{name} is already parametrized by something else"
                    raise CannotControl("The eigenbasis", each.words, reason, "Remove that parametrization first.")
            elif len(slots[id(getattr(owner, tensor))]) > 1:
                reason = f"{name} is one parameter shared by several modules, which would part ways"
                raise CannotControl("The eigenbasis", each.words, reason, "Share the module instead, or untie it.")


# --- one layer ------------------------------------------------------------------------------------------------------


def _eigenbasis(
    weights: AttentionWeights, form: EigenvalueForm, init: str, generator: torch.Generator | None
) -> Eigenbasis:
    if init == "fresh":
        return fresh_eigenbasis(Heads.of(weights), form, weights.w_v, generator)
    return kept_eigenbasis(Heads.of(weights), form, weights.w_v, weights.w_o)


def _install(each: Chosen, new: AttentionWeights, eigenbasis: Eigenbasis, store: ModuleStore) -> None:
    _set_biases(each, new, store)
    slots = [(store.owner(n), n.rpartition(".")[2]) for n in (each.block.value.weight, each.block.output.weight)]
    for owner, tensor in slots:
        if ours(owner, tensor):
            take_off(owner, tensor)
    (value, value_tensor), (output, output_tensor) = slots
    old_value, old_output = getattr(value, value_tensor), getattr(output, output_tensor)
    eigenbasis.to(old_value.device).requires_grad_(old_value.requires_grad or old_output.requires_grad)
    stored = each.stack.arch.stored
    put_on(value, value_tensor, ValueWeight(eigenbasis, old_value, stored, new.value_rows))
    put_on(output, output_tensor, OutputWeight(eigenbasis, old_output, stored))


@torch.no_grad()
def _set_biases(each: Chosen, new: AttentionWeights, store: ModuleStore) -> None:
    if each.block.value.bias and new.b_v is not None:
        bias = getattr(store.owner(each.block.value.bias), each.block.value.bias.rpartition(".")[2])
        is_own = new.value_rows is None or bias.numel() == new.b_v.numel()  # one entry per value channel
        rows = slice(None) if is_own or new.value_rows is None else new.value_rows.to(bias.device)
        bias[rows] = new.b_v.flatten().to(bias)
    if each.block.output.bias and new.b_o is not None:
        bias = getattr(store.owner(each.block.output.bias), each.block.output.bias.rpartition(".")[2])
        bias.copy_(new.b_o)


# --- reporting ------------------------------------------------------------------------------------------------------


def layer_control(
    each: Chosen, old: AttentionWeights, new: AttentionWeights, norm_signs_changed: int = 0
) -> LayerControl:
    """What became of one layer."""
    head_moves, whole = moved(_cpu(old.w_v), _cpu(old.w_o), _cpu(new.w_v), _cpu(new.w_o))
    group = old.n_heads // old.n_kv
    return LayerControl(
        stack=each.stack.label,
        layer=each.block.index,
        passes=each.stack.passes[each.position],
        before=_spectrum(old),
        after=_spectrum(new),
        moved=whole,
        constant_moved=_constant_moved(old, new),
        heads=tuple(HeadMove(head=h, kv_head=h // group, moved=move) for h, move in enumerate(head_moves)),
        norm_signs_changed=norm_signs_changed,
    )


def _constant_moved(old: AttentionWeights, new: AttentionWeights) -> float | None:
    before, after = constant(old), constant(new)
    if before is None or after is None or not before.norm() > 0:
        return None
    return ((after - before).norm() / before.norm()).item()


def _cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach()  # MPS has no float64


def _spectrum(weights: AttentionWeights) -> Spectrum:
    core = min(weights.d_model, weights.n_kv * weights.d_head)
    dtype = torch.float64 if core <= DENSE_UP_TO else torch.float32
    on_host = replace(weights, w_v=_cpu(weights.w_v), w_o=_cpu(weights.w_o))
    return spectrum(plain_map(on_host, dtype))


def _words(layers: list[LayerControl]) -> str:
    return "float64" if all(layer.before.route == "dense" for layer in layers) else "float32"
