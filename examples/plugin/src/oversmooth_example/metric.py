"""A metric."""

import torch
from torch import Tensor


def farthest_pair(h: Tensor, keep: Tensor) -> Tensor:
    """Smallest cosine between any two tokens of a sequence, one number per sequence; 1 means that all are parallel.

    h is (batch, token, d_model) and keep (batch, token), False for padding, where h may hold anything.
    """
    x = torch.nn.functional.normalize(h.float().masked_fill(~keep[..., None], 0), dim=-1)
    both = keep[:, None, :] & keep[:, :, None]
    return (x @ x.mT).masked_fill(~both, 1).amin((1, 2))
