"""Small image sets in the formats in which CIFAR is offered: the authors' archive, parquet, a folder of images."""

import io
import pickle
import tarfile
from pathlib import Path

import numpy
from PIL import Image

from oversmooth.recipes.image_sets import Splits, open_images, splits_of
from oversmooth.recipes.vision_recipe import VisionData

Arrays = tuple[numpy.ndarray, list[int]]


def cifar_arrays(count: int, classes: int, seed: int) -> Arrays:
    """Noise with a bar of the class's own colour and place: what a model can learn in a few steps."""
    generator = numpy.random.default_rng(seed)
    pixels = generator.integers(0, 100, (count, 32, 32, 3), dtype=numpy.uint8)
    labels = [i % classes for i in range(count)]
    for i, label in enumerate(labels):
        start = 32 * label // classes
        pixels[i, :, start : start + 32 // classes, label % 3] = 255
    return pixels, labels


def write_cifar100(folder: Path, arrays: dict[str, Arrays], packed: bool = True) -> Path:
    """`cifar-100-python.tar.gz` or the folder inside it: pickled dictionaries with byte keys, planes of 1024 bytes."""
    inside = folder / "cifar-100-python"
    inside.mkdir(parents=True)
    for name, (pixels, labels) in arrays.items():
        rows = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), 3072)
        content = {
            b"filenames": [f"image_{i}.png".encode() for i in range(len(labels))],
            b"batch_label": b"training batch 1 of 1",
            b"fine_labels": labels,
            b"coarse_labels": [label // 5 for label in labels],
            b"data": rows,
        }
        (inside / name).write_bytes(pickle.dumps(content, protocol=2))
    (inside / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"a"]}, protocol=2))
    if not packed:
        return inside
    path = folder / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(inside, arcname="cifar-100-python")
    return path


def write_parquet(folder: Path, arrays: dict[str, Arrays]) -> Path:
    """As on the hub: PNG bytes in `img`, classes in `fine_label`."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    for name, (pixels, labels) in arrays.items():
        images = [{"bytes": _png(image), "path": None} for image in pixels]
        table = pyarrow.table({"img": images, "fine_label": labels})
        parquet.write_table(table, folder / f"{name}.parquet")
    return folder


def write_folder(folder: Path, arrays: dict[str, Arrays]) -> Path:
    """`train/class_0/00000.png` and so on."""
    for name, (pixels, labels) in arrays.items():
        for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            place = folder / name / f"class_{label}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i:05d}.png").write_bytes(_png(image))
    return folder


def _png(pixels: numpy.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def load_splits(settings: VisionData, data: str | None, fraction: float) -> Splits:
    """The splits of a recipe, of its own source or of `data`."""
    return splits_of(settings, open_images(settings, data), fraction)
