"""The places of the residual stream, and the tensors in the arguments of a module call.

    place         what it is
    embedding     what enters the first block
    attn_norm     output of the attention sub-block's norm (before attention, or after the sum in post-norm blocks)
    attn_branch   what attention adds, with its gain and branch norm
    attn_sum      the stream after attention was added
    cross_*       the same for a decoder's cross-attention
    ffn_*         the same for the feed-forward sub-block
    between       the stream as the next block reads it, where something acts between two blocks
    other_sum     the stream after blocks without softmax attention (hybrids only)
    final_norm    output of the norm after the last block

Sums are not modules, so they are seen where the next module receives them: the input of the next norm, or the output
of the block. In parallel blocks attention counts as added first. No tensor is kept beyond its block.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_leaves

from oversmooth.results.measurement import PartName

# --- where features are seen: the residual stream, the branches and the norms of every block ---

SUB_BLOCKS = ("attn", "cross", "ffn")
STREAM = ("embedding", "between", "other_sum", "attn_sum", "cross_sum", "ffn_sum", "final_norm")
"""Places on the residual stream of every model; in post-norm blocks the norms are on it too (`on_stream`)."""
NORMS = ("attn_norm", "cross_norm", "ffn_norm")
BRANCHES = ("attn_branch", "cross_branch", "ffn_branch")
PLACES = (*STREAM, *NORMS, *BRANCHES)


def on_stream(name: str, residual: str) -> bool:
    """Whether a place is on the residual stream; changes between such places add up over depth."""
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
    """Carries an observer's error (its cause) through the model's forward pass, apart from the model's own errors."""

    def __init__(self, place: Place):
        self.place = place
        super().__init__(f"an observer failed at depth {place.depth}, {place.name}")


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks that are removed at the end of the context, also if registering one of them fails."""
    registered: list[Any] = []
    try:
        for handle in handles:  # a generator registers them one by one
            registered.append(handle)
        yield
    finally:
        for handle in registered:
            handle.remove()


# --- the features among what a module received and returned ---


def received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a module was called with: the first features, or those that have a usual name."""
    return all_received(args, kwargs)[0]


def all_received(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All features that a module was called with, the likeliest hidden states first."""
    usual = [kwargs[name] for name in ("hidden_states", "query", "src", "x") if name in kwargs]
    features = features_in((args, usual, kwargs))
    assert features, "a block receives its hidden states"
    return features


def features_in(value: Any) -> list[Tensor]:
    """Every tensor of floats in a value, whatever tuples, lists and mappings it is made of."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def returned(output: Any, like: Tensor | None = None) -> Tensor:
    """The features a module returned: the first tensor of a tuple or mapping that has the shape of `like`, else the first."""
    if isinstance(output, Tensor):
        return output
    return all_returned(output, like)[0]


def all_returned(output: Any, like: Tensor | None) -> list[Tensor]:
    """The features a module returned that have the shape of `like`; all of them where none has."""
    found = features_in(output)
    assert found, "a block returns its hidden states"
    return [tensor for tensor in found if like is not None and tensor.shape == like.shape] or found


PART_OF: dict[str, PartName] = {
    "attn_sum": "attention",
    "attn_norm": "norm after attention",
    "cross_sum": "cross-attention",
    "cross_norm": "norm after cross-attention",
    "ffn_sum": "feed-forward",
    "ffn_norm": "norm after feed-forward",
    "other_sum": "other blocks",
    "between": "between blocks",
    "final_norm": "final norm",
}
"""The part that ends at a place of the stream; a norm on the stream comes after the sub-block that it is named by."""
