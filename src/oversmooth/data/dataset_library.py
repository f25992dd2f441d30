"""The `datasets` library in one place: tables and datasets of the hub, with errors that say what was expected."""

from typing import Any

from oversmooth.errors import MissingDependency, UnreadableData, first_line


def load_rows(where: str, expected: str, name: str, *more: str, **options: Any) -> Any:
    """What `datasets.load_dataset` gives for a name; what it cannot load is `UnreadableData` about `where`."""
    datasets = import_datasets()
    try:
        return datasets.load_dataset(name, *more, **options)
    except Exception as error:  # pyarrow, json and datasets raise errors without a common base
        raise UnreadableData(where, expected, first_line(error)) from error


def name_and_split(data: str) -> tuple[str, str]:
    """`NAME:SPLIT`, or `NAME` alone for its split train."""
    name, _, split = data.partition(":")
    return name, split or "train"


def import_datasets() -> Any:
    """The library, without progress bars."""
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency("datasets", "hf", "reading tables and datasets") from error
    datasets.disable_progress_bars()
    return datasets
