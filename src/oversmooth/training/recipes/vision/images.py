"""Images with labels, wherever they are kept: arrays in memory, files, rows of a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy
from PIL import Image

from oversmooth.data.pictures import open_as_it_is
from oversmooth.errors import UnreadableData

LARGEST_KEPT = 256 * 2**20
"""Bytes of pixels that a source may keep in memory, in every process that loads from it."""


@runtime_checkable
class Images(Protocol):
    """A sequence of images and their labels."""

    labels: Sequence[int]

    def image(self, position: int) -> Image.Image:
        """The image, in the mode in which it is kept; raises `UnreadableData` with its name."""
        ...

    def identity(self, position: int) -> bytes:
        """What the hash of a split is made of."""
        ...


class ArrayImages:
    """Images of one size in memory, `(image, row, column)` or `(image, row, column, channel)` bytes."""

    def __init__(self, pixels: numpy.ndarray, labels: Sequence[int]):
        self.pixels, self.labels = pixels, labels

    def image(self, position: int) -> Image.Image:
        return Image.fromarray(self.pixels[position])

    def identity(self, position: int) -> bytes:
        return self.pixels[position].tobytes()


class FileImages:
    """Image files below one folder."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int]):
        self.root, self.names, self.labels = root, names, labels

    def image(self, position: int) -> Image.Image:
        path = self.root / self.names[position]
        return open_as_it_is(path, str(path))

    def identity(self, position: int) -> bytes:
        """The name: the bytes of a million images would take an hour to read."""
        return self.names[position].encode()


class TableImages:
    """Rows of a dataset of the `datasets` library, whose image column is not decoded."""

    def __init__(self, rows: Any, column: str, labels: Sequence[int], where: str):
        self.rows, self.column, self.labels, self.where = rows, column, labels, where

    def image(self, position: int) -> Image.Image:
        where = f"{self.where}, row {position}"
        value = self.rows[position][self.column]
        if not isinstance(value, Mapping) or not (value.get("bytes") or value.get("path")):
            raise UnreadableData(where, "an image", "an empty cell" if value is None else f"a {type(value).__name__}")
        return open_as_it_is(value["bytes"] or Path(value["path"]), where)

    def identity(self, position: int) -> bytes:
        """The position: the rows themselves are covered by the hash or the revision of the source."""
        return str(position).encode()


class DecodedOnce:
    """Images of another source, kept decoded where all of them together are small: most of the loading of small images is
    finding and unpacking them. They are shared, so nobody may change one in place."""

    def __init__(self, images: Images):
        self.images, self.labels = images, images.labels
        self.largest = LARGEST_KEPT // max(1, len(images.labels))
        self.decoded: dict[int, Image.Image] = {}

    def image(self, position: int) -> Image.Image:
        if position in self.decoded:
            return self.decoded[position]
        image = self.images.image(position)
        if image.width * image.height * len(image.getbands()) <= self.largest:
            self.decoded[position] = image
        return image

    def identity(self, position: int) -> bytes:
        return self.images.identity(position)
