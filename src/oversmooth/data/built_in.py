"""What a model is fed when nothing is given: texts and molecules of this package, generated pictures, sounds and ids."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from oversmooth.data.given import Given
from oversmooth.data.notations import Notation
from oversmooth.data.preprocessing import Geometry
from oversmooth.data.samples import sample_images, sample_sounds, sample_texts
from oversmooth.data.sounds import RATE

SAMPLE_COUNT = 16
"""Generated pictures, sounds or sequences of ids."""
SOUND_SECONDS = 2


def built_in_texts() -> Given:
    return _all_of(sample_texts())


def built_in_molecules(notation: Notation) -> Given:
    return _all_of(notation.samples())


def _all_of(texts: Sequence[str]) -> Given:
    return Given(iter(texts), sum(map(len, texts)))


def built_in_pictures(geometry: Geometry, seed: int) -> Iterator[Any]:
    """Generated pictures in RGB of the size that the model takes, or a little larger where its margins are cut off."""
    from PIL import Image

    scale = (geometry.shorter or 0) / min(geometry.height, geometry.width)
    height, width = (max(side, round(side * scale)) for side in (geometry.height, geometry.width))
    pixels = (sample_images(SAMPLE_COUNT, height, width, 3, seed) * 255).round().byte()
    return (Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in pixels)


def built_in_sounds(seed: int) -> Iterator[Tensor]:
    return iter(sample_sounds(SAMPLE_COUNT, RATE * SOUND_SECONDS, seed))
