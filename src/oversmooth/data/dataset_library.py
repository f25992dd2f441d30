"""The `datasets` library in one place: tables and datasets of the hub, with errors that say what was expected."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from oversmooth.errors import MissingDependency, UnreadableData, first_line


def load_rows(where: str, expected: str, name: str, *more: str, **options: Any) -> Any:
    """What `datasets.load_dataset` gives for a name; what it cannot load is `UnreadableData` about `where`."""
    datasets = import_datasets()
    try:
        return datasets.load_dataset(name, *more, **options)
    except Exception as error:  # pyarrow, json and datasets raise errors without a common base
        raise UnreadableData(where, expected, first_line(error)) from error


def load_hub_rows(where: str, expected: str, name: str, *more: str, **options: Any) -> Any:
    """`load_rows` of a dataset on the hub, which is asked once whether it has it.

    A name that the hub does not know is refused at once, with files here that are spelled nearly like it. Where the hub
    cannot be reached, only what was downloaded before is tried, instead of asking for half a minute.
    """
    import_datasets()
    near = near_names(Path(where)) if Path(where).parent.is_dir() else ""
    answer = _answer(name)
    if answer == "no":
        raise UnreadableData(where, expected, f"nothing of that name, neither here nor on the hub{near}")
    try:
        with _offline(answer == "none"):
            return load_rows(where, expected, name, *more, **options)
    except UnreadableData as error:
        unreachable = "nothing of that name here, and the hub cannot be reached"
        raise UnreadableData(where, expected, (unreachable if answer == "none" else error.found) + near) from error


def _answer(name: str) -> str:
    """What the hub says about a dataset: `yes`, `no`, or `none` where it cannot be asked."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return "none"
    try:
        HfApi().dataset_info(name, timeout=10)
    except RepositoryNotFoundError:
        return "no"
    except (HfHubHTTPError, HFValidationError):  # busy, forbidden, ill-formed: the library knows what to do
        return "yes"
    except Exception:  # no network; the client's errors have no common base
        return "none"
    return "yes"


@contextmanager
def _offline(is_offline: bool) -> Iterator[None]:
    """The hub is not asked inside."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if is_offline:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


def near_names(path: Path) -> str:
    """What lies beside a path that is not there and is spelled nearly like it, in words; empty where nothing is."""
    try:
        names = [entry.name for entry in islice(path.parent.iterdir(), 10_000)]
    except OSError:
        return f"; the folder {str(path.parent)!r} is not there either"
    near = difflib.get_close_matches(path.name, names, n=3)
    return f"; close: {', '.join(near)}" if near else ""


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
