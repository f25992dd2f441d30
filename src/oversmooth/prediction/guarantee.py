"""What the weights of a layer decide for any attention, and where the assumptions of the theorem end."""

from collections.abc import Sequence
from dataclasses import dataclass

from oversmooth.prediction.theory.heads import certificate, channel_eigenvalues
from oversmooth.prediction.theory.layer import AttentionLayer
from oversmooth.prediction.theory.sample import LayerSample

EQUAL_SCALES = 1e-6
"""Relative spread of the tokens' scales up to which they are one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """What the weights decide for any attention."""

    regime: str
    """smoothing or sharpening."""
    scale_spread: float | None
    """Relative spread of the tokens' scales, at which it was computed; `None` where none act or all are equal, so that
    every assumption of the theorem holds."""


def guarantee(layer: AttentionLayer, samples: Sequence[LayerSample]) -> Guarantee | None:
    """What one sign of all eigenvalues guarantees for any attention; `None` where that is not enough.

    In a pre-norm layer each channel evolves by `I + l A D^-1`, D the tokens' scales. With unequal ones the positive
    matrix `A D^-1` still has one dominating direction (Perron and Frobenius), in which tokens are parallel: `l > 0`
    smooths, `l` in [-min s, 0) sharpens. Causal attention is not positive, and a norm on the branch rescales what is
    written: there nothing is claimed unless scales are equal. Gains of the token that is written, and latent values, are
    outside the theorem.
    """
    if layer.weights.beyond_plain is not None:
        return None
    spread = max((sample.scale_spread or 0.0 for sample in samples), default=0.0)
    smallest = min((sample.smallest_scale for sample in samples if sample.smallest_scale is not None), default=1.0)
    is_equal = spread <= EQUAL_SCALES
    if not is_equal and (layer.norm_on_branch is not None or any(sample.is_causal for sample in samples)):
        return None
    values = channel_eigenvalues(layer.branch, smallest)
    found = None if values is None else certificate(values, 0.0)
    return None if found is None else Guarantee(regime=found.regime, scale_spread=None if is_equal else spread)
