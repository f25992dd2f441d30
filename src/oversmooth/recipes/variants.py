"""What `--variant` means: the plain model, a form of H, a control that separates its parts, or a published baseline.

A difference between vanilla and `sharpen` has several possible causes: the sign of the eigenvalues, the size of H at the
start, its orthogonal basis, the form that training cannot leave, and the multiple of the identity that eigenvalues of one
sign put into H. Each control changes one of them. All forms of one seed start from the same basis and the same draws.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oversmooth.control.apply import apply
from oversmooth.control.constrain import bake, constrain
from oversmooth.control.eigenbasis import Eigenbasis, Heads, random_columns
from oversmooth.control.interventions import RULES, all_rules
from oversmooth.errors import CannotControl, UnknownName
from oversmooth.models.open import open_source
from oversmooth.models.stores.module import ModuleStore


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOfH:
    """`H = V diag(lambda) V^-1`: where lambda may go, and where it starts."""

    low: float
    high: float
    start: tuple[float, float] | None = None
    """Eigenvalues are drawn uniformly from here; without it, from the whole interval."""
    scale: str = "plain"
    words: str


FORMS = {
    "sharpen": FormOfH(low=-1.0, high=0.0, words="eigenvalues in [-1, 0], the paper's form"),
    "smooth": FormOfH(low=0.0, high=1.0, words="eigenvalues in [0, 1], the paper's form"),
    "sharpen-measured": FormOfH(low=-1.0, high=0.0, scale="measured", words="eigenvalues over token scale in [-1, 0]"),
    "smooth-measured": FormOfH(low=0.0, high=1.0, scale="measured", words="eigenvalues over token scale in [0, 1]"),
    "free": FormOfH(low=-1.0, high=1.0, words="the same form, either sign: [-1, 1]"),
    "sharpen-start": FormOfH(low=-1.0, high=1.0, start=(-1.0, 0.0), words="starts in [-1, 0], then free in [-1, 1]"),
    "smooth-start": FormOfH(low=-1.0, high=1.0, start=(0.0, 1.0), words="starts in [0, 1], then free in [-1, 1]"),
    "no-identity": FormOfH(low=-0.5, high=0.5, words="sharpen or smooth with its identity part -I/2 or I/2 taken off"),
}
MATCHED = "matched"
"""Ordinary weights that start orthogonal, with the norms that those of the forms have; nothing holds them there."""
WITHOUT_A_PLACE = {"differential": "needs pairs of query heads that read one value head"}
"""Interventions that the models of recipes have no place for, and why: every query head there has its own value head."""
VARIANTS = ("vanilla", *FORMS, MATCHED, *(name for name in RULES if name not in WITHOUT_A_PLACE))


def require_variant(variant: str) -> None:
    """Raises, before any work is done, if no model of a recipe can be trained so."""
    if variant in WITHOUT_A_PLACE:
        reason = f"it {WITHOUT_A_PLACE[variant]}, and there every query head has its own"
        advice = "Apply it with osm.apply to a model whose query heads share value heads."
        raise CannotControl(variant, "the models of recipes", reason, advice)
    if variant not in VARIANTS and variant not in all_rules():
        known = (*VARIANTS, *(name for name in all_rules() if name not in WITHOUT_A_PLACE))
        raise UnknownName("variant", variant, tuple(dict.fromkeys(known)))


def put_on(
    model: nn.Module, variant: str, *, seed: int, basis: str = "orthogonal", positive_norms: bool = False
) -> None:
    """Turns a fresh model into its variant, in place, before the optimizer is built."""
    require_variant(variant)
    generator = torch.Generator().manual_seed(seed)
    if variant in FORMS:
        form = FORMS[variant]
        options: Any = {"basis": basis, "positive_norms": positive_norms, "scale": form.scale}
        constrain(model, low=form.low, high=form.high, init="fresh", generator=generator, **options)
        if form.start is not None:
            _start_inside(model, form, form.start)
    elif variant == MATCHED:
        _start_orthogonal(model, generator)
    elif variant in all_rules():
        apply(model, variant)


def _eigenbases(model: nn.Module) -> set[Eigenbasis]:
    return {part for part in model.modules() if isinstance(part, Eigenbasis)}


@torch.no_grad()
def _start_inside(model: nn.Module, form: FormOfH, start: tuple[float, float]) -> None:
    """Moves the draws from the whole interval into the part of it where they shall start."""
    for eigenbasis in _eigenbases(model):
        drawn = (eigenbasis.psi - form.low) / (form.high - form.low)
        eigenbasis.psi.copy_(start[0] + (start[1] - start[0]) * drawn)


@torch.no_grad()
def _start_orthogonal(model: nn.Module, generator: torch.Generator) -> None:
    """Value rows of size 1 / sqrt(3), the root mean square of draws from [-1, 0] or [0, 1], and orthonormal outputs.

    The outputs are turned by a rotation of their own, so that H has no preferred sign, no symmetry and no identity part.
    """
    constrain(model, low=0.0, high=1.0, init="fresh", generator=generator)
    for eigenbasis in _eigenbases(model):
        eigenbasis.psi.fill_(1 / math.sqrt(3))
    bake(model)
    source = open_source(model)
    assert isinstance(source.store, ModuleStore), "an open module is read through a ModuleStore"
    turned: set[int] = set()
    for stack in source.stacks():
        for block in stack.names.blocks:
            weight = source.store.owner(block.output.weight).get_parameter(block.output.weight.rpartition(".")[2])
            if id(weight) in turned:  # one module at several depths
                continue
            turned.add(id(weight))
            is_out_in = stack.arch.stored == "out_in"
            d_model = weight.shape[0 if is_out_in else 1]
            turn = random_columns(Heads(d_model=d_model, n_heads=1, n_kv=1, d_head=d_model), generator).to(weight)
            weight.copy_(turn @ weight if is_out_in else weight @ turn)


def ordinary(model: nn.Module, variant: str) -> nn.Module:
    """A copy with ordinary weights; a baseline stays on its copy, because no ordinary weights can express it."""
    found = copy.deepcopy(model).cpu().eval()
    return found if variant in all_rules() else bake(found)


def leaves_ordinary_weights(variant: str) -> bool:
    """Whether the trained model loads in plain timm or transformers."""
    return variant not in all_rules()
