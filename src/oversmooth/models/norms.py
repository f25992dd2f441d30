"""What a live normalization module divides each token by."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from oversmooth.models.declaration import NormKind, norm_centres

EPSILONS = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")


def epsilon_of(norm: nn.Module) -> float:
    """What a norm adds under its square root, under the names that libraries use for it; perhaps in a module inside."""
    for part in norm.modules():
        for name in EPSILONS:
            value = getattr(part, name, None)
            if isinstance(value, float):
                return value
    return 0.0


def token_scales(x: Float[Tensor, "*token d_model"], kind: NormKind, epsilon: float) -> Float[Tensor, "*token"]:
    """The number by which a norm divides each token, in float32 or better."""
    x = x if x.dtype == torch.float64 else x.float()
    squares = x.var(-1, correction=0) if norm_centres(kind) else x.square().mean(-1)
    return (squares + epsilon).sqrt()
