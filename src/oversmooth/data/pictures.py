"""Image files and bytes as pictures; what is broken, or would unpack to more than memory holds, is refused."""

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

from oversmooth.errors import UnreadableData, first_line

LARGEST_IMAGE = 100_000_000
"""Pixels. Unpacked, this is 300 MB; a file that claims more is refused before anything is unpacked."""
LARGEST_RATIO = 100
"""Of an image's sides: resizing the shorter one of a longer strip would make it huge."""


def open_picture(source: Path | bytes, name: str) -> Any:
    """A PIL image in RGB, read and unpacked; raises `UnreadableData` with the name otherwise."""
    return open_as_it_is(source, name).convert("RGB")


def open_as_it_is(source: Path | bytes, name: str) -> Any:
    """The same with the channels that the file has."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower than PIL's
            with Image.open(BytesIO(source) if isinstance(source, bytes) else source) as image:
                require_usable(image, name)
                image.load()
                return image
    except UnreadableData:
        raise
    except Image.DecompressionBombError as error:
        raise UnreadableData(
            name, f"an image of at most {LARGEST_IMAGE:,} pixels", "a header that claims more"
        ) from error
    except Exception as error:  # PIL's readers of broken files raise nearly anything
        raise UnreadableData(name, "an image", first_line(error)) from error


def require_usable(image: Any, name: str) -> None:
    """Refuses an image by the size that its header says."""
    width, height = image.size
    if width * height > LARGEST_IMAGE:
        raise UnreadableData(name, f"an image of at most {LARGEST_IMAGE:,} pixels", f"{width} x {height}")
    if max(width, height) > LARGEST_RATIO * min(width, height):
        found = f"{width} x {height}"
        raise UnreadableData(name, f"an image whose sides differ at most {LARGEST_RATIO} times", found)
