"""Checkpoints of a run, each whole or absent."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oversmooth.errors import NotWritable, first_line

PARTIAL = ".partial"
WEIGHTS, AVERAGE = "model.safetensors", "average.safetensors"
CHECKPOINT = "checkpoint-"


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints of a run, ascending."""
    found = [entry.name.removeprefix(CHECKPOINT) for entry in folder.glob(f"{CHECKPOINT}*") if entry.is_dir()]
    return sorted(int(name) for name in found if name.isdigit())


@contextmanager
def whole_or_absent(
    folder: Path, step: int, *, writes: bool, keep: int, wait_for_everyone: Callable[[], None]
) -> Iterator[Path]:
    """A folder to write a checkpoint into, renamed when it is complete: a kill at any moment leaves whole ones.

    `writes` is true in one of several processes, which wait for each other; of the older checkpoints, `keep` stay.
    """
    partial, name = folder / PARTIAL, f"{CHECKPOINT}{step}"
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
    wait_for_everyone()
    try:
        yield partial
        wait_for_everyone()
        if writes:
            _reach_the_disk(partial / name)
            shutil.rmtree(folder / name, ignore_errors=True)
            os.replace(partial / name, folder / name)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(folder / f"{CHECKPOINT}{old}", ignore_errors=True)
    except _write_errors() as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise NotWritable(str(folder / name), first_line(error), "Free some space.") from error
    wait_for_everyone()


def _write_errors() -> tuple[type[Exception], ...]:
    from safetensors import SafetensorError

    return (OSError, RuntimeError, SafetensorError)  # torch.save raises RuntimeError on a full disk


def _reach_the_disk(folder: Path) -> None:
    """A rename may reach the disk before the bytes do; then a power cut would leave a checkpoint of zeros."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
