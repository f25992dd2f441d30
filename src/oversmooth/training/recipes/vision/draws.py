"""Random numbers that belong to an image's place in the run, not to the process that happens to load it.

An example is asked for by its index and the number of its draw, counted over the whole run. All randomness of its
augmentation comes from (seed, draw): workers, processes and resumed runs therefore see the same pixels.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from oversmooth.training.recipes.job import EpochSampler

Draw = tuple[int, int]
"""Index of an image, and the number of the draw."""
ROUNDING = 256
"""DeiT keeps a multiple of so many images of an epoch under repeated augmentation."""
_MASK = 2**64 - 1


def mixed_seed(*parts: int) -> int:
    """One well-spread seed from several numbers (splitmix64)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


@contextmanager
def drawn_from(*parts: int) -> Iterator[None]:
    """Inside, the global generators of random, numpy and torch start from these numbers; afterwards all is as before."""
    seed = mixed_seed(*parts)
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)  # torch.manual_seed would reseed every GPU too
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


class DrawSampler(EpochSampler):
    """Every image once per epoch in a seeded order; with `repeats`, a third (...) of them, each several times in a row.

    Repeated augmentation is that of DeiT's sampler with all processes taken together: copies of an image follow each
    other, so they meet in one batch, whether one process trains or many. An epoch ends with its last whole `batch`.
    """

    def __init__(self, count: int, seed: int, repeats: int = 1, batch: int = 1):
        self.count, self.seed, self.repeats = count, seed, repeats
        is_rounded = repeats > 1 and count >= ROUNDING
        self.length = (count // ROUNDING * ROUNDING if is_rounded else count) // batch * batch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Draw]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch) % 2**63)
        order = torch.randperm(self.count, generator=generator)
        order = order.repeat_interleave(self.repeats)[: self.length]
        first = self.epoch * self.length
        yield from ((index, first + place) for place, index in enumerate(order.tolist()))
