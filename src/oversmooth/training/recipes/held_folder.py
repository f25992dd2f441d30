"""One run per folder, and none over another."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oversmooth.errors import NotWritable
from oversmooth.output.held_folders import LOCK, held
from oversmooth.output.whole_files import require_free


@contextmanager
def run_held(folder: Path, *, resume: bool) -> Iterator[None]:
    """Holds the folder of a run; refuses one that holds something else than the run to be resumed."""
    _require_place(folder, resume)
    with held(folder):
        _require_place(folder, resume)  # another run may have come and gone meanwhile
        yield


def _require_place(folder: Path, resume: bool) -> None:
    names = [entry.name for entry in folder.iterdir() if entry.name != LOCK] if folder.is_dir() else []
    # A run that was killed while it wrote its first file can be continued too.
    has_begun = "manifest.json" in names or (bool(names) and all(name.endswith(".partial") for name in names))
    if (resume and has_begun) or (folder.is_dir() and not names):
        return
    if "manifest.json" in names:
        advice = "Continue that run with --resume, or give a new folder."
        raise NotWritable(str(folder), "it holds a run already", advice)
    require_free(folder)
