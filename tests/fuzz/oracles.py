"""What must hold of every case, whatever is in it."""

import contextlib
import json
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oversmooth.errors import OversmoothError
from oversmooth.models.open import open_source
from tests.command_line import Done, oversmooth
from tests.fuzz import wholes
from tests.fuzz.cases import Case
from tests.rude_server import rude_server


@dataclass(frozen=True)
class Verdict:
    outcome: str
    """accepted or refused."""
    failure: str = ""
    """What does not hold, empty where everything does."""


def judged(case: Case) -> Verdict:
    """Runs a case in a folder of its own and says whether everything held."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
        _write(folder / "case", case.files)
        url = stack.enter_context(rude_server(case.server)) if case.server else ""
        words = [word.replace("{folder}", str(folder / "case")).replace("{url}", url) for word in case.arguments]
        with contextlib.chdir(folder):
            done = oversmooth(*words)
            failure = _of_the_process(case, done) or _of_the_tensors(case, folder / "case")
            failure = failure or (_of_the_whole(case, folder / "case") if done.returncode == 0 else "")
        if not failure and case.same_as and done.returncode == 0:
            failure = _of_the_numbers(case, done, folder / "sound")
    return Verdict("accepted" if done.returncode == 0 else "refused", failure)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in {".keep": b"", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _of_the_process(case: Case, done: Done) -> str:
    if done.returncode not in (0, 1, 2):
        return f"exit code {done.returncode}"
    if "Traceback" in done.stderr:
        return "a traceback"
    if done.returncode == 2 and not (done.stderr + done.stdout).strip():
        return "an error without a word"
    if case.is_sound and done.returncode != 0:
        return f"sound, and refused: {done.stderr[:300]}"
    return ""


def _of_the_tensors(case: Case, folder: Path) -> str:
    """Where we read a file, the format's own reader reads the same numbers from it."""
    if not case.reference:
        return ""
    try:
        store = open_source(folder / case.reference).store
        ours = {name: tensor for name in store.names if (tensor := _read(store, name)) is not None}
    except OversmoothError:
        return ""
    try:
        theirs = REFERENCES[Path(case.reference).suffix](folder / case.reference)
    except Exception as error:  # the references raise whatever they like
        return f"read, and the reference refuses it: {type(error).__name__}: {str(error)[:200]}"
    for name, tensor in ours.items():
        if name not in theirs:
            return f"{name!r:.100} read, and the reference does not have it"
        if not _equal(tensor, theirs[name]):
            return f"{name!r:.100} differs from what the reference reads"
    return ""


def _of_the_whole(case: Case, folder: Path) -> str:
    """What was written or put together is what another library makes of it."""
    if case.pruned and (folder / case.pruned).is_dir():
        return wholes.fails_to_load(folder / case.pruned)
    if case.table:
        from oversmooth import read_survey

        found = sorted(read_survey(folder / case.table, "model").target)
        wanted = sorted((folder / "list.txt").read_text().split())
        return "" if found == wanted else f"rows of {found}, not of {wanted}"
    if case.merged:
        store = open_source(folder / "adapter", base=str(folder / "base")).store
        try:
            theirs = wholes.peft_merged(folder)
        except Exception as error:  # it raises whatever it likes
            return f"read, and peft refuses it: {type(error).__name__}: {str(error)[:200]}"
        for name, tensor in theirs.items():
            if name in store.names and not torch.allclose(store.read(name).float(), tensor, atol=1e-5):
                return f"{name!r:.100} differs from what peft merges"
    return ""


def _read(store: Any, name: str) -> Tensor | None:
    """A tensor, or `None` where it alone is refused."""
    try:
        found: Tensor = store.read(name)
    except OversmoothError:
        return None
    return found


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    if not ours.is_floating_point() or ours.dtype != theirs.dtype:
        return torch.equal(ours.to(torch.complex128), theirs.to(torch.complex128))
    return bool(((ours.double() == theirs.double()) | (ours.double().isnan() & theirs.double().isnan())).all())


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def _pickle(path: Path) -> dict[str, Tensor]:
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    while isinstance(loaded, dict) and (inner := [value for value in loaded.values() if isinstance(value, dict)]):
        loaded = inner[0]
    return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}


def _gguf(path: Path) -> dict[str, Tensor]:
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        read = {
            tensor.name: (dequantize(tensor.data, tensor.tensor_type), tensor.shape)
            for tensor in GGUFReader(path).tensors
            if tensor.tensor_type.name in ("F32", "F16", "BF16", "Q8_0")
        }
    return {
        name: torch.from_numpy(values.astype("float32")).reshape([int(size) for size in reversed(shape)])
        for name, (values, shape) in read.items()
    }


REFERENCES = {".safetensors": _safetensors, ".bin": _pickle, ".gguf": _gguf}


def _of_the_numbers(case: Case, done: Done, folder: Path) -> str:
    """An answer about a damaged whole must be that about the sound one, where nothing that matters was damaged."""
    _write(folder, case.same_as)
    expected = oversmooth("inspect", folder, "--format", "json")
    found = [layer["plain"] for layer in json.loads(done.stdout)["layers"]]
    if found != [layer["plain"] for layer in json.loads(expected.stdout)["layers"]]:
        return "other numbers than those of the sound checkpoint"
    return ""


def seeded(seed: int, index: int) -> random.Random:
    """The generator of one case, the same on every machine."""
    return random.Random(f"oversmooth {seed} {index}")
