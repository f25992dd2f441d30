"""Where images come from: scikit-learn's digits, CIFAR's own archive, parquet, a folder of images, or the hub.

`--data` may be: an archive `cifar-100-python.tar.gz` or the folder inside it; a folder with `train*.parquet` and
`test*.parquet` (or `validation*`); a folder with `train/CLASS/*.png` and `test/` or `val/`, or with `CLASS/*.png` alone; or
an id on the hub.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from oversmooth.data.dataset_library import import_datasets, load_hub_rows, load_rows
from oversmooth.data.given import IMAGE_ENDINGS, require_there
from oversmooth.errors import BadValue, MissingDependency, MissingValue, UnreadableData
from oversmooth.training.recipes.vision.cifar_archive import is_cifar, read_cifar
from oversmooth.training.recipes.vision.images import ArrayImages, DecodedOnce, FileImages, Images, TableImages
from oversmooth.training.recipes.vision.settings import Data
from oversmooth.training.recipes.vision.splits import Split, cut_off, fold_out, share

TEST_NAMES = ("test", "val", "validation")
IMAGE_COLUMNS = ("img", "image")
LABEL_COLUMNS = ("label", "fine_label", "labels")
HASHED_UP_TO = 4 * 2**30
"""Bytes of local tables up to which their content is hashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    train: Split
    test: Split
    validation: Split | None
    facts: Mapping[str, Any]
    """For the manifest."""

    @property
    def watched(self) -> Split:
        """What is evaluated during training."""
        return self.validation or self.test


@dataclass(frozen=True, slots=True)
class Source:
    train: Images
    test: Images | None
    words: str
    sha256: str | None = None
    classes: Sequence[str] = ()
    """Names of the labels, where the source has them."""


def load_splits(settings: Data, data: str | None, fraction: float) -> Splits:
    """The splits of a recipe, of its own source or of `data`."""
    return splits_of(settings, open_images(settings, data), fraction)


def train_and_test(settings: Data, source: Source) -> tuple[Split, Split]:
    """All images for training, and the source's own test images or some that are held out."""
    train = _whole(source.train)
    if source.test is not None:
        return train, _whole(source.test)
    if settings.folds:
        return fold_out(train, settings.folds, settings.fold, settings.split_seed)
    return cut_off(train, settings.test_images, settings.split_seed, "data.test_images")


def splits_of(settings: Data, source: Source, fraction: float) -> Splits:
    """The source's own test images or some held out, validation cut off, a share of the rest."""
    _require_classes(_whole(source.train), settings.classes, "train", source.words)
    train, test = train_and_test(settings, source)
    validation = None
    if settings.validation_images:
        what = "data.validation_images"
        train, validation = cut_off(train, settings.validation_images, settings.split_seed, what)
    train = share(train, fraction, settings.split_seed)
    found = {"train": train, "test": test, **({"validation": validation} if validation else {})}
    for name, split in found.items():
        _require_classes(split, settings.classes, name, source.words)
    facts: dict[str, Any] = {"source": source.words, "source_sha256": source.sha256, "fraction": fraction}
    facts |= {name: split.facts() for name, split in found.items()}
    return Splits(train=train, test=test, validation=validation, facts=facts)


def _whole(images: Images) -> Split:
    return Split(images, list(range(len(images.labels))))


def _require_classes(split: Split, classes: int, name: str, where: str) -> None:
    labels = {split.images.labels[position] for position in split.positions}
    if not labels:
        raise UnreadableData(where, f"images for {name}", "none")
    if min(labels) < 0 or max(labels) >= classes or (name == "train" and len(labels) != classes):
        found = f"{len(labels)} classes, labels from {min(labels)} to {max(labels)}, in {name}"
        raise UnreadableData(where, f"{classes} classes, as data.classes of the recipe says", found)


def open_images(settings: Data, data: str | None) -> Source:
    """The images of `data`, or of the recipe's own source."""
    name = data or settings.source
    if not name:
        raise MissingValue("--data (a folder of images or of parquet files, or an id on the hub)")
    path = Path(name).expanduser()
    if name == "digits":
        return _digits()
    if is_cifar(path):
        return _cifar(path)
    if path.is_dir():
        tables = sorted(path.rglob("*.parquet"))
        return _parquet(path, tables, settings) if tables else _folder(path)
    if path.is_file() and path.suffix.lower() == ".parquet":
        return _parquet(path, [path], settings)
    if path.exists() or path.is_absolute():
        expected = (
            "a CIFAR archive (.tar.gz), a parquet file, a folder of images or of parquet files, or an id on the hub"
        )
        raise UnreadableData(name, expected, "a file of another kind" if path.exists() else "nothing")
    return _hub(name, settings)


# --- sources --------------------------------------------------------------------------------------------------------


def _digits() -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency("scikit-learn", "train", "the data of the recipe digits") from error
    pixels, labels = load_digits(return_X_y=True)
    grey = numpy.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(numpy.uint8)  # stored as 0 to 16
    return Source(ArrayImages(grey, labels.tolist()), None, "scikit-learn's digits (1,797 images of 8 x 8)")


def _cifar(path: Path) -> Source:
    found = read_cifar(path)
    train, test = (ArrayImages(*found[name]) for name in ("train", "test"))
    return Source(train, test, f"CIFAR archive {path}")


def _folder(path: Path) -> Source:
    test = next((path / name for name in TEST_NAMES if (path / name).is_dir()), None)
    root = path / "train" if (path / "train").is_dir() else path
    classes = _class_folders(root)
    if test is not None and _class_folders(test) != classes:
        odd = sorted(set(classes) ^ set(_class_folders(test)))
        raise UnreadableData(str(path), "the same classes for training and test", f"{odd[0]} in one of them only")
    held_out = _files(test, classes) if test else None
    return Source(_files(root, classes), held_out, f"image folder {path}", classes=classes)


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
            raise UnreadableData(str(root / name), f"images ({', '.join(sorted(IMAGE_ENDINGS))})", _inside(root / name))
        names += [str(p.relative_to(root)) for p in inside]
        labels += [label] * len(inside)
    return DecodedOnce(FileImages(root, names, labels))


def _inside(folder: Path) -> str:
    """What lies in a folder that has no images, in words."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    endings = ", ".join(sorted({p.suffix.lower() or "no ending" for p in files})[:4])
    return f"{len(files)} files of other kinds ({endings})" if files else "nothing"


def _parquet(path: Path, tables: list[Path], settings: Data) -> Source:
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


def _hub(name: str, settings: Data) -> Source:
    require_there(name)
    rows = load_hub_rows(name, "an archive, a folder or an id on the hub (give what you have with --data)", name)
    test = next((split for split in ("validation", "test") if split in rows), None)
    if "train" not in rows:
        raise UnreadableData(name, "a split train, and test or validation", ", ".join(rows))
    if "test" in rows and -1 not in rows["test"].unique(_label_column(rows["test"], settings, name)):
        test = "test"  # ImageNet's own test labels are hidden: its validation split is what everyone tests on
    return _tables(rows, test, settings, name, None)


def _tables(rows: Any, test: str | None, settings: Data, where: str, sha256: str | None) -> Source:
    parts, classes = [], _class_names(rows["train"], settings, where)
    for name in ("train", *([test] if test else [])):
        table = rows[name]
        image = next((column for column in IMAGE_COLUMNS if column in table.column_names), None)
        if image is None:
            raise UnreadableData(where, f"a column {' or '.join(IMAGE_COLUMNS)}", ", ".join(table.column_names))
        labels = [_number(label, classes, where) for label in table[_label_column(table, settings, where)]]
        undecoded = table.cast_column(image, import_datasets().Image(decode=False)).select_columns([image])
        parts.append(DecodedOnce(TableImages(undecoded, image, labels, f"{where}, {name}")))
    return Source(parts[0], parts[1] if test else None, f"tables of {where}", sha256, classes)


def _class_names(table: Any, settings: Data, where: str) -> Sequence[str]:
    """Names of the labels: declared by the table, or the words that stand in the place of numbers."""
    column = _label_column(table, settings, where)
    declared = getattr(table.features[column], "names", None)
    if declared:
        return list(declared)
    words = {label for label in table.unique(column) if isinstance(label, str)}
    return sorted(words)


def _number(label: object, classes: Sequence[str], where: str) -> int:
    """A label as a number: as it is, or the place of its word among the classes."""
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if not isinstance(label, int):
        found = "an empty cell" if label is None else f"{label!r:.40}"
        raise UnreadableData(where, "a whole number, or a word that the training images have, as label", found)
    return label


def _label_column(table: Any, settings: Data, where: str) -> str:
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


def require_trainable(batch: int, images: int) -> None:
    """Raises where not even one batch can be filled."""
    if images < batch:
        raise BadValue("training.batch", batch, f"at most {images}, the number of images of one epoch")
