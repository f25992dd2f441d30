"""Where features are seen: the residual stream, the branches and the norms of every block.

    place         what it is
    embedding     what enters the first block
    attn_norm     output of the attention sub-block's norm (before attention, or after the sum in post-norm blocks)
    attn_branch   what attention adds, with its gain and branch norm
    attn_sum      the stream after attention was added
    cross_*       the same for a decoder's cross-attention
    ffn_*         the same for the feed-forward sub-block
    other_sum     the stream after blocks without softmax attention (hybrids only)
    final_norm    output of the norm after the last block

Sums are not modules, so they are seen where the next module receives them: the input of the next norm, or the output
of the block. In parallel blocks attention counts as added first. No tensor is kept beyond its block.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

SUB_BLOCKS = ("attn", "cross", "ffn")
STREAM = ("embedding", "other_sum", "attn_sum", "cross_sum", "ffn_sum", "final_norm")
"""Places on the residual stream of every model; in post-norm blocks the norms are on it too (`on_stream`)."""
NORMS = ("attn_norm", "cross_norm", "ffn_norm")
BRANCHES = ("attn_branch", "cross_branch", "ffn_branch")
PLACES = (*STREAM, *NORMS, *BRANCHES)


def on_stream(name: str, residual: str) -> bool:
    """Whether a place lies on the residual stream, so that changes between such places add up over depth."""
    return name in STREAM or (residual == "post" and name in NORMS)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One place in one pass through a model."""

    stack: str
    depth: int
    """0 for the embedding, k + 1 in block k, as in the hidden states of transformers; in passes, not in weights."""
    name: str


Observe = Callable[[Place, Float[Tensor, "batch token d_model"]], None]


class ObserverFailed(Exception):
    """Carries an error of whoever looks on (its cause) through the model's forward pass, apart from the model's own."""

    def __init__(self, place: Place):
        self.place = place
        super().__init__(f"an observer failed at depth {place.depth}, {place.name}")
