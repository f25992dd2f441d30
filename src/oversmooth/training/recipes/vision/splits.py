"""Which images are for training, validation and test: seeded, stratified where a share is taken, and hashed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from oversmooth.errors import BadValue
from oversmooth.training.recipes.vision.images import Images


@dataclass(frozen=True, slots=True)
class Split:
    """A part of a source, by position."""

    images: Images
    positions: list[int]

    def __len__(self) -> int:
        return len(self.positions)

    def facts(self) -> dict[str, object]:
        """How many images, and a hash over what and in which order they are, with their labels."""
        digest = hashlib.sha256()
        for position in self.positions:
            digest.update(self.images.identity(position))
            digest.update(f"\t{self.images.labels[position]}\n".encode())
        return {"images": len(self), "sha256": digest.hexdigest()}


def cut_off(split: Split, count: int, seed: int, what: str) -> tuple[Split, Split]:
    """All but the last `count` of a seeded shuffle, each part in its old order, and those last ones."""
    if not 0 < count < len(split):
        raise BadValue(what, count, f"above 0 and below {len(split)}, the number of images")
    order = numpy.random.default_rng(seed).permutation(len(split))
    parts = (sorted(order[:-count].tolist()), sorted(order[-count:].tolist()))
    first, last = (Split(split.images, [split.positions[i] for i in part]) for part in parts)
    return first, last


def fold_out(split: Split, folds: int, fold: int, seed: int) -> tuple[Split, Split]:
    """All but one of `folds` parts of a seeded shuffle, and that part, each in its old order; each image is in one part."""
    order = numpy.random.default_rng(seed).permutation(len(split))
    held_out = set(order[fold::folds].tolist())
    parts = ([i for i in range(len(split)) if i not in held_out], sorted(held_out))
    rest, tested = (Split(split.images, [split.positions[i] for i in part]) for part in parts)
    return rest, tested


def share(split: Split, fraction: float, seed: int) -> Split:
    """A share of every class, drawn with a seed; smaller shares are parts of larger ones."""
    if fraction == 1:
        return split
    by_class: dict[int, list[int]] = {}
    for position in split.positions:
        by_class.setdefault(split.images.labels[position], []).append(position)
    generator = numpy.random.default_rng(seed)
    kept: list[int] = []
    for label in sorted(by_class):
        count = round(fraction * len(by_class[label]))
        if count == 0:
            smallest = 1 / (2 * len(by_class[label]))
            raise BadValue("fraction", fraction, f"above {smallest:.2g}, or class {label} would have no image")
        order: Sequence[int] = generator.permutation(len(by_class[label])).tolist()
        kept += [by_class[label][i] for i in order[:count]]
    return Split(split.images, sorted(kept))
