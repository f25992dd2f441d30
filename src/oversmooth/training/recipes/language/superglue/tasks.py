"""The ten sets as a table, and how a record of the official jsonl becomes what a model is shown.

A model is shown `Row`s: one or two texts, and where needed the places of words in them. An `Example` is what is decided
at once: one row with one of several labels, or several rows of which one is right (COPA). MultiRC has an example for
every answer and ReCoRD one for every entity; their `group` is the question.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    hub: str
    """Its configuration of the dataset on the hub."""
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
        Task(name="boolq", folder="BoolQ", hub="boolq", labels=TRUTH, metrics=("accuracy",), read=_boolq),
        Task(
            name="cb",
            folder="CB",
            hub="cb",
            labels=CB_LABELS,
            metrics=("accuracy", "macro_f1"),
            read=_pair(CB_LABELS),
        ),
        Task(name="copa", folder="COPA", hub="copa", labels=(), metrics=("accuracy",), read=_copa, choices=2),
        Task(name="multirc", folder="MultiRC", hub="multirc", labels=TRUTH, metrics=("f1a", "em"), read=_multirc),
        Task(name="record", folder="ReCoRD", hub="record", labels=TRUTH, metrics=("f1", "em"), read=_record),
        Task(name="rte", folder="RTE", hub="rte", labels=ENTAILMENT, metrics=("accuracy",), read=_pair(ENTAILMENT)),
        Task(name="wic", folder="WiC", hub="wic", labels=TRUTH, metrics=("accuracy",), read=_wic, spans=2),
        Task(
            name="wsc",
            folder="WSC",
            hub="wsc.fixed",
            labels=("False", "True"),
            metrics=("accuracy",),
            read=_wsc,
            spans=2,
        ),
        Task(
            name="axb",
            folder="AX-b",
            hub="axb",
            labels=ENTAILMENT,
            metrics=("matthews",),
            read=_pair(ENTAILMENT),
            trained_on="rte",
        ),
        Task(
            name="axg",
            folder="AX-g",
            hub="axg",
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
