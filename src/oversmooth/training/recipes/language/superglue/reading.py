"""Examples of a set from the official folders of jsonl files, or from the dataset on the hub."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oversmooth.data.dataset_library import load_hub_rows
from oversmooth.data.given import require_there
from oversmooth.errors import UnreadableData
from oversmooth.training.recipes.language.superglue.tasks import Example, Record, Task

HUB = "aps/super_glue"
OFFICIAL = {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}
"""Splits are the official ones: trained on train, judged on validation once at the end, predicted for test."""


@dataclass(frozen=True, slots=True)
class Split:
    """The examples of one split, in official order, and the hash of the records they come from."""

    examples: tuple[Example, ...]
    sha256: str

    @property
    def is_labelled(self) -> bool:
        return bool(self.examples) and all(example.label is not None for example in self.examples)


def read_splits(task: Task, data: str | None) -> dict[str, Split]:
    """The splits that there are; a task needs train and validation, a diagnostic set has one, called validation."""
    local = Path(data).expanduser() if data else None
    splits = _folder(task, local) if local is not None and local.exists() else _hub(task, data or HUB)
    needed = ("validation",) if task.trained_on else ("train", "validation")
    for name in needed:
        if name not in splits or not splits[name].is_labelled:
            found = "one without labels" if name in splits else f"only {', '.join(splits) or 'nothing'}"
            raise UnreadableData(data or HUB, f"a labelled split {name!r} of {task.folder}", found)
    return splits


def _split(task: Task, records: Iterator[tuple[str, Record]]) -> Split:
    """Examples of records that come with the words for where they are."""
    found: list[Example] = []
    digest = hashlib.sha256()
    for where, record in records:
        try:
            found += task.read(record)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            words = f"{where}: {type(error).__name__}: {error}"
            raise UnreadableData(where.partition(",")[0], f"records of {task.folder}", words) from error
        digest.update(json.dumps(record, sort_keys=True, default=str).encode())
    return Split(tuple(found), digest.hexdigest())


# --- the official archive -------------------------------------------------------------------------------------------


def _folder(task: Task, root: Path) -> dict[str, Split]:
    folder = next((path for path in (root / task.folder, root / task.name, root) if _files(task, path)), None)
    if folder is None:
        found = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) if root.is_dir() else "a file"
        raise UnreadableData(
            str(root), f"a folder {task.folder} with {', '.join(OFFICIAL.values())}", found or "nothing"
        )
    return {name: _split(task, _jsonl(path)) for name, path in _files(task, folder).items()}


def _files(task: Task, folder: Path) -> dict[str, Path]:
    if task.trained_on:
        names = (f"{task.folder}.jsonl", "val.jsonl", "test.jsonl")
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        return {"validation": path} if path else {}
    return {name: folder / file for name, file in OFFICIAL.items() if (folder / file).is_file()}


def _jsonl(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UnreadableData(str(path), "one JSON object per line", f"line {number}: {error}") from error
            if "idx" not in record and isinstance(record, dict):
                record["idx"] = number - 1
            yield where, record


# --- the hub --------------------------------------------------------------------------------------------------------


def _hub(task: Task, name: str) -> dict[str, Split]:
    require_there(name)
    loaded = load_hub_rows(name, "the folders of the official archive, or a dataset of the hub", name, task.hub)
    found = {}
    for split in ("train", "validation", "test"):
        if split in loaded:
            rows = ((f"{name}, {split} row {i}", row) for i, row in enumerate(loaded[split]))
            as_split = "validation" if task.trained_on else split
            found[as_split] = _split(task, FROM_HUB.get(task.name, _numbered)(rows))
    return found


Rows = Iterator[tuple[str, Mapping[str, Any]]]


def _numbered(rows: Rows) -> Rows:
    """The hub writes labels as numbers in the order of ours; pairs of AX-g follow each other."""
    for where, row in rows:
        yield where, {"pair_id": int(row["idx"]) // 2, **row}


def _multirc_rows(rows: Rows) -> Rows:
    """The hub has a row for every answer; the official record holds a paragraph with its questions."""
    for where, row in rows:
        idx = row["idx"]
        answer = {"text": row["answer"], "idx": idx["answer"], "label": row["label"]}
        question = {"question": row["question"], "idx": idx["question"], "answers": [answer]}
        yield where, {"idx": idx["paragraph"], "passage": {"text": row["paragraph"], "questions": [question]}}


def _record_rows(rows: Rows) -> Rows:
    for where, row in rows:
        text = row["passage"]
        starts = [(text.find(entity), entity) for entity in row["entities"]]
        entities = [{"start": start, "end": start + len(entity) - 1} for start, entity in starts if start >= 0]
        answers = [{"text": answer} for answer in row["answers"]]
        query = {"query": row["query"], "idx": row["idx"]["query"], "answers": answers}
        yield where, {"passage": {"text": text, "entities": entities}, "qas": [query], "idx": row["idx"]["passage"]}


def _wsc_rows(rows: Rows) -> Rows:
    for where, row in rows:
        target = {name: row[name] for name in ("span1_index", "span1_text", "span2_index", "span2_text")}
        yield where, {**row, "target": target}


FROM_HUB: Mapping[str, Callable[[Rows], Rows]] = {
    "multirc": _multirc_rows,
    "record": _record_rows,
    "wsc": _wsc_rows,
}
