"""Images with labels, wherever they are kept: arrays in memory, files, rows of a table."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy
from PIL import Image, UnidentifiedImageError

from oversmooth.errors import UnreadableData, first_line


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
        try:
            with Image.open(path) as opened:
                opened.load()
                return opened
        except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
            raise UnreadableData(str(path), "an image", first_line(error)) from error

    def identity(self, position: int) -> bytes:
        """The name: the bytes of a million images would take an hour to read."""
        return self.names[position].encode()


class TableImages:
    """Rows of a dataset of the `datasets` library, whose image column is not decoded."""

    def __init__(self, rows: Any, column: str, labels: Sequence[int], where: str):
        self.rows, self.column, self.labels, self.where = rows, column, labels, where

    def image(self, position: int) -> Image.Image:
        value = self.rows[position][self.column]
        try:
            with Image.open(io.BytesIO(value["bytes"]) if value["bytes"] is not None else value["path"]) as opened:
                opened.load()
                return opened
        except (UnidentifiedImageError, OSError, ValueError, TypeError, KeyError) as error:
            where = f"{self.where}, row {position}"
            raise UnreadableData(where, "an image", first_line(error)) from error

    def identity(self, position: int) -> bytes:
        """The position: the rows themselves are covered by the hash or the revision of the source."""
        return str(position).encode()
