"""Labelled images: digits, CIFAR archives, folders, tables, the hub; and their splits.

`--data` may be: an archive `cifar-100-python.tar.gz` or the folder inside it; a folder with `train*.parquet` and
`test*.parquet` (or `validation*`); a folder with `train/CLASS/*.png` and `test/` or `val/`, or with `CLASS/*.png` alone; or
an id on the hub.
"""

import hashlib
import io
import lzma
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy
from PIL import Image

from oversmooth.data.raw import IMAGE_ENDINGS, import_datasets, load_hub_rows, load_rows, open_as_it_is, require_there
from oversmooth.errors import (
    BadValue,
    BrokenFile,
    MissingDependency,
    MissingValue,
    UnreadableData,
    UnsafePickle,
    first_line,
)
from oversmooth.recipes.vision_recipe import VisionData

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


# --- which images are for training, validation and test: seeded, stratified where a share is taken ---


@dataclass(frozen=True, slots=True)
class ImageSplit:
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


def cut_off(split: ImageSplit, count: int, seed: int, what: str) -> tuple[ImageSplit, ImageSplit]:
    """All but the last `count` of a seeded shuffle, each part in its old order, and those last ones."""
    if not 0 < count < len(split):
        raise BadValue(what, count, f"above 0 and below {len(split)}, the number of images")
    return _apart(split, seed, slice(-count, None))


def fold_out(split: ImageSplit, folds: int, fold: int, seed: int) -> tuple[ImageSplit, ImageSplit]:
    """All but one of `folds` parts of a seeded shuffle, and that part, each in its old order; each image is in one part."""
    return _apart(split, seed, slice(fold, None, folds))


def _apart(split: ImageSplit, seed: int, held_out: slice) -> tuple[ImageSplit, ImageSplit]:
    held = set(numpy.random.default_rng(seed).permutation(len(split))[held_out].tolist())
    parts = ([i for i in range(len(split)) if i not in held], sorted(held))
    rest, out = (ImageSplit(split.images, [split.positions[i] for i in part]) for part in parts)
    return rest, out


def share(split: ImageSplit, fraction: float, seed: int) -> ImageSplit:
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
    return ImageSplit(split.images, sorted(kept))


# --- CIFAR-10 and CIFAR-100 in the archive of their authors: pickles from Python 2 ---

TRAIN_FILES = {"cifar-100-python": ("train",), "cifar-10-batches-py": tuple(f"data_batch_{i}" for i in range(1, 6))}
TEST_FILES = {"cifar-100-python": "test", "cifar-10-batches-py": "test_batch"}
LABELS = (b"fine_labels", b"labels")
ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
"""What the pickles need beside `_reconstruct` of numpy, which has moved between its versions."""
CLASSES = {"cifar-100-python": 100, "cifar-10-batches-py": 10}
LARGEST_FILE = 1 << 30
"""Bytes; the largest file of the real archives has 155 MB."""
CifarSplit = tuple[numpy.ndarray, list[int]]


def read_cifar(path: Path) -> dict[str, CifarSplit]:
    """Pixels `(image, row, column, channel)` and labels of `train` and `test`; fine labels where there are two kinds."""
    folder = _cifar_folder(path)
    if folder is not None:
        return _splits(folder.name, lambda name: (folder / name).read_bytes(), str(folder))
    try:
        with tarfile.open(path, "r:*") as archive:
            files = [member for member in archive.getmembers() if member.isfile()]
            inside = {Path(member.name).parent.name for member in files}
            name = next((name for name in TRAIN_FILES if name in inside), None)
            if name is None:
                raise BrokenFile(str(path), f"a folder {' or '.join(TRAIN_FILES)}", ", ".join(sorted(inside)) or "none")

            members = {Path(m.name).name: m for m in files if Path(m.name).parent.name == name}

            def read(member: str) -> bytes:
                size = members[member].size
                if size > LARGEST_FILE:
                    raise BrokenFile(f"{path}/{member}", f"at most {LARGEST_FILE} bytes", f"{size} bytes")
                opened = archive.extractfile(members[member])
                assert opened is not None, "only files were listed"
                return opened.read()

            splits = _splits(name, read, str(path))
            assert archive.fileobj is not None, "it is open"
            while archive.fileobj.read(1 << 20):  # to its end, where gzip finds out whether this is what was packed
                pass
            return splits
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise BrokenFile(str(path), "a CIFAR archive (.tar.gz)", str(error) or type(error).__name__) from error


def _cifar_folder(path: Path) -> Path | None:
    for folder in (path, *(path / name for name in TRAIN_FILES)):
        if folder.name in TRAIN_FILES and (folder / TEST_FILES[folder.name]).is_file():
            return folder
    return None


def _splits(name: str, read: Callable[[str], bytes], where: str) -> dict[str, CifarSplit]:
    def batch(file: str) -> CifarSplit:
        try:
            return _batch(read(file), f"{where}/{file}", CLASSES[name])
        except (KeyError, OSError) as error:
            raise BrokenFile(where, f"the file {file}", "none") from error

    parts = [batch(file) for file in TRAIN_FILES[name]]
    train = numpy.concatenate([pixels for pixels, _ in parts]), [label for _, labels in parts for label in labels]
    return {"train": train, "test": batch(TEST_FILES[name])}


def _batch(content: bytes, where: str, classes: int) -> CifarSplit:
    try:
        found = _NumbersOnly(io.BytesIO(content), where).load()
    except UnsafePickle:
        raise
    except Exception as error:  # a broken pickle raises nearly anything
        raise BrokenFile(where, "a pickle of pixels and labels", first_line(error)) from error
    label_key = next((key for key in LABELS if isinstance(found, dict) and key in found), None)
    pixels = found.get(b"data") if isinstance(found, dict) else None
    if label_key is None or not isinstance(pixels, numpy.ndarray) or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise BrokenFile(where, "data of 3072 bytes per image, and labels", "something else")
    # An array can be made without its bytes; then it would take memory that the file does not have.
    if pixels.dtype != numpy.uint8 or not 0 < pixels.nbytes <= len(content):
        raise BrokenFile(where, "pixels as bytes, at least one image", f"{pixels.dtype} of shape {pixels.shape}")
    planes = pixels.reshape(-1, 3, 32, 32)
    return numpy.ascontiguousarray(planes.transpose(0, 2, 3, 1)), _labels(found[label_key], len(pixels), classes, where)


def _labels(found: Any, count: int, classes: int, where: str) -> list[int]:
    if not isinstance(found, list | tuple) or len(found) != count:
        said = f"{len(found)}" if isinstance(found, list | tuple) else type(found).__name__
        raise BrokenFile(where, f"a list of {count} labels", said)
    wrong = [label for label in found if type(label) is not int or not 0 <= label < classes]
    if wrong:
        raise BrokenFile(where, f"labels from 0 to {classes - 1}", repr(wrong[0])[:80])
    return list(found)


class _NumbersOnly(pickle.Unpickler):
    """Arrays, lists, dictionaries and text; everything else that a pickle can call is refused."""

    def __init__(self, file: io.BytesIO, where: str):
        super().__init__(file, encoding="bytes")
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return super().find_class("numpy._core.multiarray", name)
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise UnsafePickle(self.where, f"{module}.{name}")


# --- where images come from: scikit-learn's digits, CIFAR's own archive, parquet, a folder of images ---

TEST_NAMES = ("test", "val", "validation")
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label", "labels")
HASHED_UP_TO = 4 * 2**30
"""Bytes of local tables up to which their content is hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    train: ImageSplit
    test: ImageSplit
    validation: ImageSplit | None
    facts: Mapping[str, Any]
    """For the manifest."""

    @property
    def watched(self) -> ImageSplit:
        """What is evaluated during training."""
        return self.validation or self.test


@dataclass(frozen=True, slots=True)
class ImageSource:
    train: Images
    test: Images | None
    words: str
    sha256: str | None = None
    classes: Sequence[str] = ()
    """Names of the labels, where the source has them."""


def train_and_test(settings: VisionData, source: ImageSource) -> tuple[ImageSplit, ImageSplit]:
    """All images for training, and the source's own test images or some that are held out."""
    train = _all_of(source.train)
    if source.test is not None:
        return train, _all_of(source.test)
    if settings.folds:
        return fold_out(train, settings.folds, settings.fold, settings.split_seed)
    return cut_off(train, settings.test_images, settings.split_seed, "data.test_images")


def splits_of(settings: VisionData, source: ImageSource, fraction: float) -> Splits:
    """The source's own test images or some held out, validation cut off, a share of the rest."""
    _require_classes(_all_of(source.train), settings.classes, "train", source.words)
    train, test = train_and_test(settings, source)
    validation = None
    if settings.validation_images:
        what = "data.validation_images"
        train, validation = cut_off(train, settings.validation_images, settings.split_seed, what)
    train = share(train, fraction, settings.split_seed)
    facts: dict[str, Any] = {"source": source.words, "source_sha256": source.sha256, "fraction": fraction}
    for name, split in (("train", train), ("test", test), ("validation", validation)):
        if split is not None:
            _require_classes(split, settings.classes, name, source.words)
            facts[name] = split.facts()
    return Splits(train=train, test=test, validation=validation, facts=facts)


def _all_of(images: Images) -> ImageSplit:
    return ImageSplit(images, list(range(len(images.labels))))


def _require_classes(split: ImageSplit, classes: int, name: str, where: str) -> None:
    labels = {split.images.labels[position] for position in split.positions}
    if not labels:
        raise UnreadableData(where, f"images for {name}", "none")
    if min(labels) < 0 or max(labels) >= classes or (name == "train" and len(labels) != classes):
        found = f"{len(labels)} classes, labels from {min(labels)} to {max(labels)}, in {name}"
        raise UnreadableData(where, f"{classes} classes, as data.classes of the recipe says", found)


def open_images(settings: VisionData, data: str | None) -> ImageSource:
    """The images of `data`, or of the recipe's own source."""
    name = data or settings.source
    if not name:
        raise MissingValue("--data (a folder of images or of parquet files, or an id on the hub)")
    path = Path(name).expanduser()
    if name == "digits":
        return _digits()
    if path.name.endswith((".tar.gz", ".tgz")) or _cifar_folder(path) is not None:
        found = read_cifar(path)
        train, test = (ArrayImages(*found[name]) for name in ("train", "test"))
        return ImageSource(train, test, f"CIFAR archive {path}")
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
        return _parquet(path, tables, settings) if tables else _image_folder(path)
    if path.is_file() and path.suffix.lower() == ".parquet":
        return _parquet(path, [path], settings)
    if path.exists() or path.is_absolute():
        expected = "a CIFAR archive (.tar.gz), a parquet file, a folder of images or parquet files, or an id on the hub"
        raise UnreadableData(name, expected, "a file of another kind" if path.exists() else "nothing")
    return _hub(name, settings)


def _digits() -> ImageSource:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency("scikit-learn", "train", "the data of the recipe digits") from error
    pixels, labels = load_digits(return_X_y=True)
    grey = numpy.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(numpy.uint8)  # stored as 0 to 16
    return ImageSource(ArrayImages(grey, labels.tolist()), None, "scikit-learn's digits (1,797 images of 8 x 8)")


# Not the "imagefolder" of datasets: that finds splits by words anywhere in a path, gives the images of a single folder no
# label, and passes over a class without images.
def _image_folder(path: Path) -> ImageSource:
    test = next((path / name for name in TEST_NAMES if (path / name).is_dir()), None)
    root = path / "train" if (path / "train").is_dir() else path
    classes = _class_folders(root)
    if test is not None and _class_folders(test) != classes:
        odd = sorted(set(classes) ^ set(_class_folders(test)))
        raise UnreadableData(str(path), "the same classes for training and test", f"{odd[0]} in one of them only")
    held_out = _files(test, classes) if test else None
    return ImageSource(_files(root, classes), held_out, f"image folder {path}", classes=classes)


def _class_folders(root: Path) -> list[str]:
    found = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(found) < 2:
        kinds = ", ".join(f"the one folder {name}" for name in found) or "no folder"
        images = sum(1 for entry in root.iterdir() if entry.suffix.lower() in IMAGE_ENDINGS)
        beside = f" and {images} images beside it" if images and found else f", {images} images" if images else ""
        raise UnreadableData(str(root), "a folder of images for each class, at least two", f"{kinds}{beside}")
    return found


def _files(root: Path, classes: list[str]) -> Images:
    names, labels = [], []
    for label, name in enumerate(classes):
        inside = sorted(p for p in (root / name).rglob("*") if p.suffix.lower() in IMAGE_ENDINGS)
        if not inside:
            others = [p for p in (root / name).rglob("*") if p.is_file()]
            endings = ", ".join(sorted({p.suffix.lower() or "no ending" for p in others})[:4])
            found = f"{len(others)} files of other kinds ({endings})" if others else "nothing"
            raise UnreadableData(str(root / name), f"images ({', '.join(sorted(IMAGE_ENDINGS))})", found)
        names += [str(p.relative_to(root)) for p in inside]
        labels += [label] * len(inside)
    return DecodedOnce(FileImages(root, names, labels))


def _parquet(path: Path, tables: list[Path], settings: VisionData) -> ImageSource:
    def named(*starts: str) -> list[str]:
        return [str(t) for t in tables if t.name.startswith(starts) or t.parent.name in starts]

    test = [] if path.is_file() else named("test") or named("validation", "val")
    train = named("train") or [str(table) for table in tables if str(table) not in test]
    if not train:
        found = ", ".join(table.name for table in tables[:4])
        raise UnreadableData(str(path), "train*.parquet, and test*.parquet or validation*.parquet", found)
    files = {"train": train, **({"test": test} if test else {})}
    rows = load_rows(str(path), "parquet files", "parquet", data_files=files)
    hashed = _sha256([Path(file) for name in files for file in files[name]])
    return _tables(rows, "test" if test else None, settings, str(path), hashed)


def _hub(name: str, settings: VisionData) -> ImageSource:
    require_there(name)
    rows = load_hub_rows(name, "an archive, a folder or an id on the hub (give what you have with --data)", name)
    test = next((split for split in ("validation", "test") if split in rows), None)
    if "train" not in rows:
        raise UnreadableData(name, "a split train, and test or validation", ", ".join(rows))
    if "test" in rows and -1 not in rows["test"].unique(_label_column(rows["test"], settings, name)):
        test = "test"  # ImageNet's own test labels are hidden: its validation split is what everyone tests on
    return _tables(rows, test, settings, name, None)


def _tables(rows: Any, test: str | None, settings: VisionData, where: str, sha256: str | None) -> ImageSource:
    parts, classes = [], _class_names(rows["train"], settings, where)
    for name in ("train", *([test] if test else [])):
        table = rows[name]
        image = next((column for column in IMAGE_COLUMNS if column in table.column_names), None)
        if image is None:
            raise UnreadableData(where, f"a column {' or '.join(IMAGE_COLUMNS)}", ", ".join(table.column_names))
        labels = [_number(label, classes, where) for label in table[_label_column(table, settings, where)]]
        undecoded = table.cast_column(image, import_datasets().Image(decode=False)).select_columns([image])
        parts.append(DecodedOnce(TableImages(undecoded, image, labels, f"{where}, {name}")))
    return ImageSource(parts[0], parts[1] if test else None, f"tables of {where}", sha256, classes)


def _class_names(table: Any, settings: VisionData, where: str) -> Sequence[str]:
    """Names of the labels: declared by the table, or the words that stand in the place of numbers."""
    column = _label_column(table, settings, where)
    declared = getattr(table.features[column], "names", None)
    return list(declared or sorted(label for label in table.unique(column) if isinstance(label, str)))


def _number(label: object, classes: Sequence[str], where: str) -> int:
    """A label as a number: as it is, or the place of its word among the classes."""
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if not isinstance(label, int):
        found = "an empty cell" if label is None else f"{label!r:.40}"
        raise UnreadableData(where, "a whole number, or a word that the training images have, as label", found)
    return label


def _label_column(table: Any, settings: VisionData, where: str) -> str:
    wanted = (settings.label_column,) if settings.label_column else LABEL_COLUMNS
    found = next((column for column in wanted if column in table.column_names), None)
    if found is None:
        raise UnreadableData(where, f"a column {' or '.join(wanted)}", ", ".join(table.column_names))
    return found


def _sha256(files: list[Path]) -> str | None:
    if sum(file.stat().st_size for file in files) > HASHED_UP_TO:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
