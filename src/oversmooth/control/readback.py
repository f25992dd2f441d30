"""What is written is read back by the plain library, in a process that never imported this package, before it is handed over.

    original --(plain library)--> live model, changed in memory --> outputs on two inputs   \
                                                                                             } equal, or nothing is written
    unfinished folder --(plain library, another process)----------> outputs on the same two /

A config may hold settings that depend on the number of a block, a tensor may land in another place than the one that was
meant, and `from_pretrained` fills what it does not find with random numbers: none of that shows in the files themselves.
"""

import atexit
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import NotReadBack, OversmoothError, some_of, whole_message
from oversmooth.models import plain_load
from oversmooth.models.inputs import examples
from oversmooth.models.live import (
    SHARE_OF_MEMORY,
    free_memory,
    is_our_own_code,
    load_offloaded,
    load_plainly,
    must_offload,
    quiet_eval,
)
from oversmooth.models.open import open_source
from oversmooth.models.source import Source
from oversmooth.models.stores.store import TensorStore
from oversmooth.results import FileFacts, ReadBack

TOLERANCE = 1e-5
"""Largest difference of an output, relative to the largest number in it, in float32."""
HALF_TOLERANCE = 1e-3
"""Of a loss that was found in half precision."""
INPUTS = 2
REQUEST_FOLDER = ".readback"
"""Inside the unfinished folder, so that it goes wherever that goes."""
PLAIN_FILES = ("model.safetensors", "pytorch_model.bin")
Gaps = Mapping[str, Sequence[str]]
"""Names that were missing, unexpected or mismatched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the checkpoint has to give when it is read back."""

    inputs: Sequence[Mapping[str, Tensor]] = ()
    outputs: Sequence[Sequence[Tensor]] = ()
    gaps: Gaps = field(default_factory=dict)
    """Of the original: what it lacks, the new one may lack too."""
    block_by_block: bool = False
    not_checked: str = ""
    """Why nothing can be compared; empty where it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedLoss:
    """A loss that the plain library has to find too."""

    loss: float
    questions: Sequence[tuple[dict[str, Any], Tensor | None]]
    """Inputs and answers; embedding models are asked nothing."""
    shift: bool
    """Whether each token predicts the next one."""
    takes_first: bool
    is_half: bool
    of_embeddings: Callable[[Sequence[Tensor]], float]
    """The loss of a model with these embeddings, one tensor per batch."""


# --- what it has to give ----------------------------------------------------------------------------------------------


def original_changed(
    source: Source, change: Callable[[Source], AbstractContextManager[None]], changed_store: TensorStore | None = None
) -> Reference:
    """Outputs of the original as the plain library loads it, changed in memory by `change`, in float32.

    Where it does not fit into memory, it is read block by block; then weights cannot be changed in memory, and come from
    `changed_store` where there is one.
    """
    reason = _why_not_plain(source)
    if reason:
        return Reference(not_checked=reason)
    is_large = must_offload(source, torch.float32)
    gaps: Gaps = {}
    try:
        if is_large:
            model = load_offloaded(replace(source, store=changed_store or source.store), torch.float32)
        else:
            model, gaps = load_plainly(str(source.place), source.config)
            model.float()
    except Exception as error:  # the libraries raise errors without a common base
        return Reference(not_checked=f"the plain library does not load the original: {whole_message(error)}")
    if other := gaps.get("mismatched"):  # random there, so that nothing can be compared
        return Reference(
            not_checked=f"the plain library gives {some_of(list(other), 3)} another shape than the original"
        )
    opened = open_source(model)
    is_changed_already = is_large and changed_store is not None
    with quiet_eval(model):
        inputs = _inputs(model, opened.config)
        with nullcontext() if is_changed_already else change(opened):
            outputs = [plain_load.tensors_of(plain_load.run(model, each)) for each in inputs]
    return Reference(inputs=inputs, outputs=outputs, gaps=gaps, block_by_block=is_large)


@dataclass(frozen=True, slots=True)
class ChangedStore:
    """A checkpoint of which some tensors are read from elsewhere."""

    original: TensorStore
    changed: Collection[str]
    read_changed: Callable[[str], Tensor]

    @property
    def names(self) -> Collection[str]:
        return self.original.names

    def read(self, name: str) -> Tensor:
        return self.read_changed(name) if name in self.changed else self.original.read(name)

    def files(self) -> tuple[FileFacts, ...]:
        return self.original.files()


def of_live(model: nn.Module) -> Reference:
    """Outputs of a model that was just trained; it stays where it is."""
    first = next(model.parameters())
    if first.device.type != "cpu" or first.dtype != torch.float32:
        model = copy.deepcopy(model).cpu().float()
    with quiet_eval(model):
        inputs = _inputs(model, open_source(model).config)
        outputs = [plain_load.tensors_of(plain_load.run(model, each)) for each in inputs]
    return Reference(inputs=inputs, outputs=outputs)


def _why_not_plain(source: Source) -> str:
    """Why the plain library cannot load the original; empty where it can be tried."""
    if source.place is None or not (Path(source.place) / "config.json").is_file():
        return "there is no config.json beside the weights, or the plain library does not know the name of their file"
    if not any((Path(source.place) / f"{name}{end}").is_file() for name in PLAIN_FILES for end in ("", ".index.json")):
        return "the plain library does not know the name of the file of the weights"
    return ""


def _inputs(model: nn.Module, config: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Two inputs of one kind that the model accepts; none where it accepts nothing that is made up for it."""
    for kinds in zip(*(examples(model, config, seed) for seed in range(INPUTS)), strict=False):
        with suppress(Exception):  # the model rejects what is not for it in whatever way it likes
            plain_load.run(model, kinds[0])
            return list(kinds)
    return []


# --- what it gives ----------------------------------------------------------------------------------------------------


def require_read_back(
    folder: Path,
    reference: Reference,
    verb: str,
    out: str,
    *,
    settings: Sequence[str] = (),
    loss: StatedLoss | None = None,
) -> ReadBack:
    """Compares the unfinished folder with the reference; raises where they differ. `settings` may be to blame."""
    if reference.not_checked:
        return ReadBack(inputs=0, not_checked=reference.not_checked)
    found = _asked(folder, reference, loss)

    def refuse(reason: str) -> NotReadBack:
        return NotReadBack(verb, out, reason, tuple(settings))

    if "error" in found:
        raise refuse(f"cannot be loaded and run ({found['error']})")
    assert not found["imported"], "the other process is as plain as the user's"
    for kind, what in (
        ("missing", "lacks weights that would be filled with random numbers"),
        ("unexpected", "holds weights that are not used"),
        ("mismatched", "holds weights of another shape"),
    ):
        if kind == "unexpected" and reference.block_by_block:
            continue  # the bare model is run, and has no place for the weights of a head
        known = {_without_number(name) for name in reference.gaps.get(kind, ())}
        if names := [name for name in found["gaps"][kind] if _without_number(name) not in known]:
            raise refuse(f"{what}: {some_of(names, 3)}")
    difference = _largest_difference(reference.outputs, found["outputs"])
    if difference is None:
        raise refuse("gives outputs of other shapes than the changed model did")
    if difference > TOLERANCE:
        raise refuse(f"gives outputs that differ by {difference:.2g} of their size from those of the changed model")
    again = _loss_again(found["losses"], loss, refuse)
    not_checked = "" if reference.inputs else "its outputs, because it runs on none of the inputs made up for it"
    if lacking := reference.gaps.get("missing", ()):
        not_checked = f"weights that the original lacks too: {some_of(list(lacking), 3)}"
    return ReadBack(
        inputs=len(reference.inputs),
        largest_difference=difference if reference.inputs else None,
        loss=again,
        block_by_block=reference.block_by_block,
        not_checked=not_checked,
    )


def _loss_again(found: Any, stated: StatedLoss | None, refuse: Callable[[str], OversmoothError]) -> float | None:
    if stated is None or found is None:
        return None
    loss = stated.of_embeddings(found["embeddings"]) if found["embeddings"] else found["total"] / max(found["count"], 1)
    allowed = HALF_TOLERANCE if stated.is_half else TOLERANCE
    if not abs(loss - stated.loss) <= allowed * max(1.0, abs(stated.loss)):
        raise refuse(f"has the loss {loss:.6g}, not the {stated.loss:.6g} that was found before it was written")
    return loss


def _without_number(name: str) -> str:
    """The name of a tensor whatever the number of its block."""
    return "".join("#" if letter.isdigit() else letter for letter in name).replace("##", "#")


def _largest_difference(expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor]]) -> float | None:
    """Relative to the largest finite number of each tensor; `None` where numbers or shapes of tensors differ."""
    largest = 0.0
    if [[t.shape for t in one] for one in expected] != [[t.shape for t in one] for one in found]:
        return None
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one, other, strict=True):
            same = (a == b) | (a.isnan() & b.isnan())
            if bool(same.all()):
                continue
            size = a[a.isfinite()].abs().max() if a.isfinite().any() else torch.tensor(1.0)
            apart = torch.where(same, 0.0, (a - b).abs()) / size.clamp(min=1e-30)
            largest = max(largest, apart.nan_to_num(nan=torch.inf).max().item())
    return largest


# --- the other process ------------------------------------------------------------------------------------------------


def _asked(folder: Path, reference: Reference, loss: StatedLoss | None) -> dict[str, Any]:
    """The answer of the plain process about a folder."""
    place = folder / REQUEST_FOLDER
    place.mkdir()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        judging = None
        if loss is not None and not reference.block_by_block:
            judging = {"shift": loss.shift, "takes_first": loss.takes_first}
        request = {
            "folder": str(folder.absolute()),
            "library": "timm" if "architecture" in config and "model_type" not in config else "transformers",
            "trusts_own_code": is_our_own_code(folder, config),
            "threads": torch.get_num_threads(),
            "judging": judging,
            "offload": str(place / "offload") if reference.block_by_block else None,
            "memory": int(SHARE_OF_MEMORY * (free_memory() or 0)),
        }
        (place / plain_load.REQUEST).write_text(json.dumps(request), encoding="utf-8")
        questions = [] if loss is None else list(loss.questions)
        given = {"inputs": [dict(each) for each in reference.inputs], "questions": questions}
        torch.save(given, place / plain_load.INPUTS)
        code = _PLAIN.ask(place)
        if not (place / plain_load.ANSWER).is_file():
            reason = "it needs more memory than there is" if code == -9 else f"its process ended with code {code}"
            return {"error": reason}
        answer: dict[str, Any] = torch.load(place / plain_load.ANSWER, weights_only=True)
        return answer
    finally:
        shutil.rmtree(place, ignore_errors=True)


class PlainProcess:
    """A process with torch, transformers and timm, and nothing of this package; started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, place: Path) -> int | None:
        """Lets it answer the request in a folder; the exit code of the fork that did, or of the process itself."""
        with self._lock:
            for _ in range(2):  # a process that has waited for long is gone: then a new one is asked
                process = self._running()
                assert process.stdin is not None
                assert process.stdout is not None
                with suppress(BrokenPipeError):
                    process.stdin.write(json.dumps(str(place.absolute())) + "\n")
                    process.stdin.flush()
                    said = process.stdout.readline()
                    if said:
                        return int(said)
                code = process.wait()
                if code:
                    return code
            return None

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.end()
            # -P: the folder of the script is not searched, whose modules belong to this package. A session of its own:
            # Ctrl-C is for us, and it ends when its input does.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(plain_load.__file__)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                cwd=tempfile.gettempdir(),  # ours may be removed while it waits for the next request
                start_new_session=True,
            )
            self._owner = os.getpid()
        return self._process

    def end(self) -> None:
        """Ends it, where it is ours and still there."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        process.wait()


_PLAIN = PlainProcess()
atexit.register(_PLAIN.end)
