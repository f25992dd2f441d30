"""The eight tasks and two diagnostic sets of SuperGLUE: reading and encoding.

A model is shown `Row`s: one or two texts, and where needed the places of words in them. An `Example` is what is decided
at once: one row with one of several labels, or several rows of which one is right (COPA). MultiRC has an example for
every answer and ReCoRD one for every entity; their `group` is the question.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from oversmooth.data.raw import json_rows, load_hub_rows, require_there
from oversmooth.errors import UnreadableData

Record = Mapping[str, Any]
Span = tuple[int, int, int]
"""Which text, first character, character after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One input of the encoder."""

    first: str
    second: str | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One decision."""

    idx: tuple[int, ...]
    """The official number: of the record, or of paragraph, question and answer."""
    rows: tuple[Row, ...]
    label: int | None
    """Number of the right label or row; `None` in test sets."""
    group: tuple[int, ...] = ()
    """The question that examples with the same group answer together."""
    text: str = ""
    """The entity of ReCoRD that this example proposes."""
    golds: tuple[str, ...] = ()
    """The right entities of its question."""
    pair: int = -1
    """Number of the minimal pair of AX-g."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One set of SuperGLUE."""

    name: str
    folder: str
    """Its name in the official archive and in submissions."""
    labels: tuple[Any, ...]
    """As they are written in submissions; empty where one of several rows is chosen."""
    metrics: tuple[str, ...]
    """Of its score; two are averaged."""
    read: Callable[[Record], Iterator[Example]]
    choices: int = 1
    """Rows of one example."""
    spans: int = 0
    """Places of words in one row."""
    trained_on: str = ""
    """The task whose model answers a diagnostic set."""

    @property
    def hub(self) -> str:
        """Its configuration of the dataset on the hub."""
        return "wsc.fixed" if self.name == "wsc" else self.name

    @property
    def outputs(self) -> int:
        """Numbers that the classifier gives for one row."""
        return 1 if self.choices > 1 else len(self.labels)


def _label(record: Record, labels: tuple[Any, ...]) -> int | None:
    """The number of the label, whether it is written as a word, a truth value or a number."""
    if record.get("label") is None or record["label"] in ("", -1):
        return None
    said = record["label"]
    words = [str(label).lower() for label in labels]
    return words.index(str(said).lower()) if not isinstance(said, int) or isinstance(said, bool) else int(said)


TRUTH = ("false", "true")
ENTAILMENT = ("entailment", "not_entailment")
CB_LABELS = ("entailment", "contradiction", "neutral")


def _boolq(record: Record) -> Iterator[Example]:
    row = Row(first=record["question"], second=record["passage"])
    yield Example(idx=(int(record["idx"]),), rows=(row,), label=_label(record, TRUTH))


def _pair(labels: tuple[str, ...]) -> Callable[[Record], Iterator[Example]]:
    def read(record: Record) -> Iterator[Example]:
        """Premise and hypothesis; AX-b calls them sentence1 and sentence2."""
        first = record["premise"] if "premise" in record else record["sentence1"]
        second = record["hypothesis"] if "hypothesis" in record else record["sentence2"]
        pair = int(record.get("pair_id", -1))
        row = Row(first=first, second=second)
        yield Example(idx=(int(record["idx"]),), rows=(row,), label=_label(record, labels), pair=pair)

    return read


def _copa(record: Record) -> Iterator[Example]:
    """Each choice after the premise and the word that asks for a cause or an effect."""
    link = {"cause": "because", "effect": "so"}[record["question"]]
    first = f"{record['premise'].rstrip('.')} {link}"
    rows = tuple(Row(first=first, second=record[choice]) for choice in ("choice1", "choice2"))
    yield Example(idx=(int(record["idx"]),), rows=rows, label=_label(record, ()))


def _multirc(record: Record) -> Iterator[Example]:
    passage = record["passage"]
    for question in passage["questions"]:
        group = (int(record["idx"]), int(question["idx"]))
        for answer in question["answers"]:
            row = Row(first=f"{question['question']} {answer['text']}", second=passage["text"])
            yield Example(idx=(*group, int(answer["idx"])), rows=(row,), label=_label(answer, TRUTH), group=group)


PLACEHOLDER, HIGHLIGHT = "@placeholder", "\n@highlight\n"


def _record(record: Record) -> Iterator[Example]:
    """The query with every entity of the passage in its place; entities are written with their last character."""
    text = record["passage"]["text"]
    entities = list(dict.fromkeys(text[e["start"] : e["end"] + 1] for e in record["passage"]["entities"]))
    for query in record["qas"]:
        golds = tuple(dict.fromkeys(answer["text"] for answer in query.get("answers", ())))
        group = (int(query["idx"]),)
        for number, entity in enumerate(entities):
            row = Row(first=query["query"].replace(PLACEHOLDER, entity), second=text.replace(HIGHLIGHT, " "))
            label = int(entity in golds) if golds else None
            yield Example(idx=(*group, number), rows=(row,), label=label, group=group, text=entity, golds=golds)


def _wic(record: Record) -> Iterator[Example]:
    """The places of the word are given by character."""
    spans = tuple((which, int(record[f"start{which + 1}"]), int(record[f"end{which + 1}"])) for which in (0, 1))
    row = Row(first=record["sentence1"], second=record["sentence2"], spans=spans)
    yield Example(idx=(int(record["idx"]),), rows=(row,), label=_label(record, TRUTH))


def _wsc(record: Record) -> Iterator[Example]:
    """The places of the two phrases are given by word."""
    text, target = record["text"], record["target"]
    spans = tuple((0, *word_span(text, int(target[f"span{k}_index"]), target[f"span{k}_text"])) for k in (1, 2))
    yield Example(idx=(int(record["idx"]),), rows=(Row(first=text, spans=spans),), label=_label(record, TRUTH))


def word_span(text: str, word: int, phrase: str) -> tuple[int, int]:
    """Characters of a phrase whose first word is the `word`-th of the text.

    Some official numbers are off by a word or two, so the occurrence of the phrase nearest to that word counts; where the
    phrase does not occur at all, the word itself.
    """
    words, starts, at = text.split(), [], 0
    for each in words:
        at = text.index(each, at)
        starts.append(at)
        at += len(each)
    start = starts[min(word, len(starts) - 1)] if starts else 0
    low, sought = text.lower(), phrase.lower().strip()
    found = [i for i in range(len(text)) if low.startswith(sought, i)] if sought else []
    if found:
        begin = min(found, key=lambda i: abs(i - start))
        return begin, begin + len(sought)
    return start, start + (len(words[min(word, len(words) - 1)]) if words else 0)


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(name="boolq", folder="BoolQ", labels=TRUTH, metrics=("accuracy",), read=_boolq),
        Task(name="cb", folder="CB", labels=CB_LABELS, metrics=("accuracy", "macro_f1"), read=_pair(CB_LABELS)),
        Task(name="copa", folder="COPA", labels=(), metrics=("accuracy",), read=_copa, choices=2),
        Task(name="multirc", folder="MultiRC", labels=TRUTH, metrics=("f1a", "em"), read=_multirc),
        Task(name="record", folder="ReCoRD", labels=TRUTH, metrics=("f1", "em"), read=_record),
        Task(name="rte", folder="RTE", labels=ENTAILMENT, metrics=("accuracy",), read=_pair(ENTAILMENT)),
        Task(name="wic", folder="WiC", labels=TRUTH, metrics=("accuracy",), read=_wic, spans=2),
        Task(name="wsc", folder="WSC", labels=("False", "True"), metrics=("accuracy",), read=_wsc, spans=2),
        Task(
            name="axb",
            folder="AX-b",
            labels=ENTAILMENT,
            metrics=("matthews",),
            read=_pair(ENTAILMENT),
            trained_on="rte",
        ),
        Task(
            name="axg",
            folder="AX-g",
            labels=ENTAILMENT,
            metrics=("accuracy",),
            read=_pair(ENTAILMENT),
            trained_on="rte",
        ),
    )
}
MAIN = tuple(name for name, task in TASKS.items() if not task.trained_on)
"""The eight tasks whose mean is the score."""
DIAGNOSTIC = tuple(name for name, task in TASKS.items() if task.trained_on)


# --- examples of a set from the official folders of jsonl files, or from the dataset on the hub ---

HUB = "aps/super_glue"
OFFICIAL = {"train": "train.jsonl", "validation": "val.jsonl", "test": "test.jsonl"}
"""Splits are the official ones: trained on train, judged on validation once at the end, predicted for test."""


@dataclass(frozen=True, slots=True)
class TaskSplit:
    """The examples of one split, in official order, and the hash of the records they come from."""

    examples: tuple[Example, ...]
    sha256: str

    @property
    def is_labelled(self) -> bool:
        return bool(self.examples) and all(example.label is not None for example in self.examples)


def read_splits(task: Task, data: str | None) -> dict[str, TaskSplit]:
    """The splits that there are; a task needs train and validation, a diagnostic set has one, called validation."""
    local = Path(data).expanduser() if data else None
    splits = _folder(task, local) if local is not None and local.exists() else _hub(task, data or HUB)
    needed = ("validation",) if task.trained_on else ("train", "validation")
    for name in needed:
        if name not in splits or not splits[name].is_labelled:
            found = "one without labels" if name in splits else f"only {', '.join(splits) or 'nothing'}"
            raise UnreadableData(data or HUB, f"a labelled split {name!r} of {task.folder}", found)
    return splits


def _split(task: Task, records: Iterator[tuple[str, Record]]) -> TaskSplit:
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
    return TaskSplit(tuple(found), digest.hexdigest())


def _folder(task: Task, root: Path) -> dict[str, TaskSplit]:
    folder = next((path for path in (root / task.folder, root / task.name, root) if _files(task, path)), None)
    if folder is None:
        found = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) if root.is_dir() else "a file"
        expected = f"a folder {task.folder} with {', '.join(OFFICIAL.values())}"
        raise UnreadableData(str(root), expected, found or "nothing")
    return {name: _split(task, _official(path)) for name, path in _files(task, folder).items()}


def _files(task: Task, folder: Path) -> dict[str, Path]:
    if task.trained_on:
        names = (f"{task.folder}.jsonl", "val.jsonl", "test.jsonl")
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        return {"validation": path} if path else {}
    return {name: folder / file for name, file in OFFICIAL.items() if (folder / file).is_file()}


def _official(path: Path) -> Iterator[tuple[str, Record]]:
    for number, record in json_rows(str(path), path):
        yield f"{path}, line {number + 1}", {"idx": number, **record}


def _hub(task: Task, name: str) -> dict[str, TaskSplit]:
    require_there(name)
    loaded = load_hub_rows(name, "the folders of the official archive, or a dataset of the hub", name, task.hub)
    as_official = FROM_HUB.get(task.name, _numbered)
    found = {}
    for split in ("train", "validation", "test"):
        if split in loaded:
            rows = ((f"{name}, {split} row {i}", as_official(row)) for i, row in enumerate(loaded[split]))
            found["validation" if task.trained_on else split] = _split(task, rows)
    return found


def _numbered(row: Record) -> Record:
    """The hub writes labels as numbers in the order of ours; pairs of AX-g follow each other."""
    return {"pair_id": int(row["idx"]) // 2, **row}


def _multirc_record(row: Record) -> Record:
    """The hub has a row for every answer; the official record holds a paragraph with its questions."""
    idx = row["idx"]
    answer = {"text": row["answer"], "idx": idx["answer"], "label": row["label"]}
    question = {"question": row["question"], "idx": idx["question"], "answers": [answer]}
    return {"idx": idx["paragraph"], "passage": {"text": row["paragraph"], "questions": [question]}}


def _record_record(row: Record) -> Record:
    text = row["passage"]
    starts = [(text.find(entity), entity) for entity in row["entities"]]
    entities = [{"start": start, "end": start + len(entity) - 1} for start, entity in starts if start >= 0]
    answers = [{"text": answer} for answer in row["answers"]]
    query = {"query": row["query"], "idx": row["idx"]["query"], "answers": answers}
    return {"passage": {"text": text, "entities": entities}, "qas": [query], "idx": row["idx"]["passage"]}


def _wsc_record(row: Record) -> Record:
    return {**row, "target": {name: row[name] for name in ("span1_index", "span1_text", "span2_index", "span2_text")}}


FROM_HUB = {"multirc": _multirc_record, "record": _record_record, "wsc": _wsc_record}


# --- examples as tensors: tokens of every row ---

NO_LABEL = 0
"""Stands where a test set has none; what is computed from it is thrown away."""


def token_ranges(row: Row, offsets: Sequence[tuple[int, int]], texts: Sequence[int | None]) -> list[list[int]]:
    """For each span the tokens that overlap it; none where it was cut off."""
    tokens = list(enumerate(zip(offsets, texts, strict=True)))
    return [
        [i for i, ((a, b), text) in tokens if text == which and a < end and b > start]
        for which, start, end in row.spans
    ]


class EncodedExamples(Dataset[dict[str, Any]]):
    """Tokenized when asked for: ReCoRD has millions of rows."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any, max_tokens: int):
        self.examples, self.tokenizer, self.max_tokens = examples, tokenizer, max_tokens

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.examples[index]
        label = NO_LABEL if example.label is None else example.label
        return {"rows": [self._row(row) for row in example.rows], "label": label}

    def _row(self, row: Row) -> dict[str, Any]:
        encoded = self.tokenizer(
            row.first,
            row.second,
            truncation="longest_first" if row.second is not None else True,
            max_length=self.max_tokens,
            return_offsets_mapping=True,
        )
        spans = token_ranges(row, encoded["offset_mapping"], encoded.sequence_ids())
        kept = {name: encoded[name] for name in ("input_ids", "token_type_ids") if name in encoded}
        return {**kept, "spans": spans}


class Collate:
    """Rows padded to the longest: (example, token), or (example, choice, token) where a task has choices."""

    def __init__(self, pad_token_id: int):
        self.pad = pad_token_id

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [row for item in items for row in item["rows"]]
        length = max(len(row["input_ids"]) for row in rows)
        mask = torch.zeros(len(rows), length, dtype=torch.long)
        batch = {"input_ids": torch.full((len(rows), length), self.pad), "attention_mask": mask}
        if "token_type_ids" in rows[0]:
            batch["token_type_ids"] = torch.zeros(len(rows), length, dtype=torch.long)
        if rows[0]["spans"]:
            batch["span_mask"] = torch.zeros(len(rows), len(rows[0]["spans"]), length)
        for number, row in enumerate(rows):
            size = len(row["input_ids"])
            for name in batch.keys() & {"input_ids", "token_type_ids"}:
                batch[name][number, :size] = torch.tensor(row[name])
            batch["attention_mask"][number, :size] = 1
            for span, tokens in enumerate(row["spans"]):
                batch["span_mask"][number, span, tokens] = 1
        choices = len(items[0]["rows"])
        if choices > 1:
            batch = {name: tensor.unflatten(0, (len(items), choices)) for name, tensor in batch.items()}
        return {**batch, "labels": torch.tensor([item["label"] for item in items])}
