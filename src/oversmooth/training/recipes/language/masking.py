"""Masking: a quarter of the tokens is asked for; of these 80% are hidden, 10% replaced and 10% left as they are.

The draws belong to a sequence's place in the run, not to the process that loads it: processes, workers and resumed runs
see the same masks. Counts are exact, not expected: of 128 tokens 32 are asked for, 26 hidden, 3 replaced, 3 left.
"""

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from oversmooth.training.recipes.language.wordpiece import MASK, SPECIAL_TOKENS

MASK_ID = SPECIAL_TOKENS.index(MASK)
IGNORED = -100
HIDDEN_SHARE, REPLACED_SHARE = 0.8, 0.1


def mask_counts(length: int, share: float) -> tuple[int, int, int]:
    """How many tokens are asked for, how many of these are hidden and how many replaced.

    >>> mask_counts(128, 0.25)
    (32, 26, 3)
    """
    asked = round(share * length)
    hidden = round(HIDDEN_SHARE * asked)
    return asked, hidden, min(round(REPLACED_SHARE * asked), asked - hidden)


def drawn_for(seed: int, place: int) -> numpy.random.Generator:
    """Random numbers that belong to a place in a run; every pair has a stream of its own."""
    key = numpy.asarray([seed, place], numpy.uint64)  # a list would become float64 beyond 2^63 and lose its last digits
    return numpy.random.Generator(numpy.random.Philox(key=key))


def masked(
    sequences: NDArray[numpy.integer], places: NDArray[numpy.integer], *, share: float, vocabulary: int, seed: int
) -> dict[str, Tensor]:
    """Input ids and labels; `places` are the numbers of the sequences in the run. Special tokens are never asked for."""
    count, length = sequences.shape
    draws = numpy.empty((count, length))
    words = numpy.empty((count, length), numpy.int64)
    for row, place in enumerate(places):
        generator = drawn_for(seed, int(place))
        draws[row] = generator.random(length)
        words[row] = generator.integers(len(SPECIAL_TOKENS), vocabulary, length)
    inputs = sequences.astype(numpy.int64)
    is_special = inputs < len(SPECIAL_TOKENS)
    draws[is_special] = 2.0  # behind all others
    rank = draws.argsort(1, kind="stable").argsort(1, kind="stable")
    asked, hidden, replaced = mask_counts(length, share)
    is_asked = (rank < asked) & ~is_special
    labels = numpy.where(is_asked, inputs, IGNORED)
    inputs = numpy.where(is_asked & (rank < hidden), MASK_ID, inputs)
    inputs = numpy.where(is_asked & (rank >= hidden) & (rank < hidden + replaced), words, inputs)
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
