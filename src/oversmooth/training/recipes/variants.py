"""What `--variant` means: the plain model, an interval for the eigenvalues, or a published baseline, by name."""

import copy

import torch
from torch import nn

from oversmooth.control.constrain import bake, constrain
from oversmooth.control.interventions import apply
from oversmooth.control.rules import RULES
from oversmooth.errors import UnknownName

INTERVALS = {"sharpen": (-1.0, 0.0), "smooth": (0.0, 1.0)}
VARIANTS = ("vanilla", *INTERVALS, *RULES)


def require_variant(variant: str) -> None:
    if variant not in VARIANTS:
        raise UnknownName("variant", variant, VARIANTS)


def put_on(
    model: nn.Module, variant: str, *, seed: int, basis: str = "orthogonal", positive_norms: bool = False
) -> None:
    """Turns a fresh model into its variant, in place, before the optimizer is built."""
    require_variant(variant)
    if variant in INTERVALS:
        low, high = INTERVALS[variant]
        generator = torch.Generator().manual_seed(seed)
        constrain(
            model,
            low=low,
            high=high,
            basis=basis,
            positive_norms=positive_norms,
            init="fresh",
            generator=generator,
        )
    elif variant in RULES:
        apply(model, variant)


def ordinary(model: nn.Module, variant: str) -> nn.Module:
    """A copy with ordinary weights; a baseline stays on its copy, because no ordinary weights can express it."""
    found = copy.deepcopy(model).cpu().eval()
    return found if variant in RULES else bake(found)


def leaves_ordinary_weights(variant: str) -> bool:
    """Whether the trained model loads in plain timm or transformers."""
    return variant not in RULES
