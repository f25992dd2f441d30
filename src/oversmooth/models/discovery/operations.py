"""PyTorch's operations by what they do to numbers: move them, keep them, or make new ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


KEEPS_VALUES = _names("masked_fill masked_fill_ nan_to_num where native_dropout")
"""Numbers stay what they are except where a mask says that they do not count."""

MOVES = KEEPS_VALUES | _names(
    "view _unsafe_view reshape _reshape_alias transpose t permute expand slice select split split_with_sizes chunk "
    "unbind squeeze unsqueeze clone contiguous alias detach cat stack index_select index gather roll flip repeat "
    "repeat_interleave constant_pad_nd _to_copy copy_ unfold im2col movedim narrow lift_fresh "
    "index_put index_put_ slice_scatter select_scatter pixel_shuffle pixel_unshuffle as_strided"
)
"""The result holds numbers of the arguments and nothing else, perhaps in another order, precision or number."""

SAME_TOKENS = MOVES - _names("cat stack index_put index_put_ slice_scatter select_scatter flip")
"""Moves after which a tensor still is the same features as before; a flip puts one sequence in the place of another."""

COPIES = _names("clone _to_copy cat stack contiguous index_select index repeat permute constant_pad_nd")
"""Moves that make new memory, after which the storage no longer says which parameter it was."""

FACTORIES = _names("zeros empty zeros_like empty_like new_zeros new_empty full new_full ones")
SOFTMAX = _names("_softmax _safe_softmax")
ALTERING = _names("add add_ sub sub_ mul mul_ div div_ native_layer_norm native_batch_norm")
"""Operations between attention maps that leave them attention maps, of another kind."""
PRODUCTS = _names("mm addmm bmm baddbmm convolution")
"""Operations that make every number out of many."""


@contextmanager
def paused() -> Iterator[None]:
    """Operations of our own inside a traced pass are not the model's."""
    with torch.utils._python_dispatch._disable_current_modes():
        yield
