"""Whether every weight that a run depends on came out of the checkpoint.

transformers and timm fill what a file does not hold with random numbers and say so in a log line. A measurement of random
weights looks like any other, so here it is an error. Parts behind the features that are measured may be missing: a base
model is often loaded from a checkpoint whose pooler or head was another one, or none.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from oversmooth.errors import IncompleteWeights

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, shape in the file, shape in the model."""
BEHIND_THE_FEATURES = frozenset(
    {
        *("pooler", "head", "head_dist", "fc_norm", "attn_pool", "lm_head", "classifier"),  # read the last features
        *("logit_scale", "logit_bias", "visual_projection", "text_projection"),  # compare two towers
        *("mask_token", "masked_spec_embed"),  # stand for masked inputs, in training only
    }
)
"""Parts of a name that mark weights which no measured feature depends on."""


def require_complete(
    target: str, missing: Iterable[str], mismatched: Iterable[Mismatch], unexpected: Iterable[str]
) -> None:
    """Raises `IncompleteWeights` where a weight that features depend on is missing or has another shape."""
    absent = [name for name in missing if _matters(name)]
    misfits = [item for item in mismatched if _matters(item[0])]
    if absent or misfits:
        raise IncompleteWeights(target, sorted(absent), sorted(misfits), sorted(unexpected))


def _matters(name: str) -> bool:
    return not BEHIND_THE_FEATURES & set(name.split("."))


def load_completely(model: nn.Module, state: Mapping[str, Tensor], target: str) -> None:
    """`load_state_dict` that leaves nothing random but what lies behind the features."""
    wanted = model.state_dict()
    shared = [name for name in wanted if name in state]
    mismatched = [
        (name, tuple(state[name].shape), tuple(wanted[name].shape))
        for name in shared
        if state[name].shape != wanted[name].shape
    ]
    missing = [name for name in wanted if name not in state]
    require_complete(target, missing, mismatched, [name for name in state if name not in wanted])
    misfits = {name for name, _, _ in mismatched}
    with torch.no_grad():
        model.load_state_dict({name: state[name] for name in shared if name not in misfits}, strict=False)
