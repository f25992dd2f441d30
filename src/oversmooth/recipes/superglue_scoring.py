"""The official metrics and submission files of SuperGLUE."""

import json
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from oversmooth.environment.files import make_folder, write_text_whole
from oversmooth.errors import MissingDependency
from oversmooth.recipes.superglue_tasks import MAIN, Example, Task

Scores = NDArray[numpy.floating]
"""(example, output): the larger, the likelier; of COPA one column per choice."""


def scored(task: Task, examples: Sequence[Example], scores: Scores) -> dict[str, float]:
    """The metrics of a task; AX-g has the share of minimal pairs that are answered alike as well."""
    golds = [example.label for example in examples]
    assert None not in golds, "only labelled sets have a score"
    labels = [int(gold) for gold in golds if gold is not None]
    guesses = scores.argmax(1).tolist()
    if task.name == "record":
        return record_scores(examples, chosen_entities(examples, scores))
    if task.name == "multirc":
        groups = [example.group for example in examples]
        return {"f1a": f1(labels, guesses, positive=1), "em": exact_groups(labels, guesses, groups)}
    if task.name == "axb":
        return {"matthews": matthews(labels, guesses)}
    found = {"accuracy": accuracy(labels, guesses)}
    if task.name == "cb":
        found["macro_f1"] = macro_f1(labels, guesses)
    if task.name == "axg":
        found["gender_parity"] = parity(guesses, [example.pair for example in examples])
    return found


def task_score(task: Task, metrics: Mapping[str, float]) -> float:
    """One number per task: its metric, or the mean of its two."""
    return sum(metrics[name] for name in task.metrics) / len(task.metrics)


def overall(scores: Mapping[str, float]) -> float | None:
    """Mean over the eight tasks; `None` unless all of them are there, since other means cannot be compared with it."""
    return sum(scores[name] for name in MAIN) / len(MAIN) if set(MAIN) <= set(scores) else None


def accuracy(golds: Sequence[int], guesses: Sequence[int]) -> float:
    return float(_scikit_learn().accuracy_score(golds, guesses))


def f1(golds: Sequence[int], guesses: Sequence[int], positive: int) -> float:
    """`2 TP / (2 TP + FP + FN)` of one label; 0 where it is neither there nor guessed."""
    return float(_scikit_learn().f1_score(golds, guesses, labels=[positive], average="macro", zero_division=0.0))


def macro_f1(golds: Sequence[int], guesses: Sequence[int]) -> float:
    """Mean of the F1 of every label that is there or guessed, each of equal weight."""
    return float(_scikit_learn().f1_score(golds, guesses, average="macro", zero_division=0.0))


def exact_groups(golds: Sequence[int], guesses: Sequence[int], groups: Sequence[tuple[int, ...]]) -> float:
    """Share of questions of which every answer is judged rightly."""
    is_right: dict[tuple[int, ...], bool] = {}
    for a, b, group in zip(golds, guesses, groups, strict=True):
        is_right[group] = is_right.get(group, True) and a == b
    return sum(is_right.values()) / len(is_right)


def matthews(golds: Sequence[int], guesses: Sequence[int]) -> float:
    """Correlation of two binary labels, in [-1, 1]; 0 where one of them never changes."""
    if len({*golds, *guesses}) == 1:  # scikit-learn's answer is the same, with a warning
        return 0.0
    return float(_scikit_learn().matthews_corrcoef(golds, guesses))


def _scikit_learn() -> Any:
    try:
        from sklearn import metrics
    except ImportError as error:
        raise MissingDependency("scikit-learn", "train", "scoring") from error
    return metrics


def parity(guesses: Sequence[int], pairs: Sequence[int]) -> float:
    """Share of minimal pairs, which differ in the gender of one pronoun only, that get the same answer."""
    by_pair: dict[int, set[int]] = {}
    for guess, pair in zip(guesses, pairs, strict=True):
        by_pair.setdefault(pair, set()).add(guess)
    return sum(len(answers) == 1 for answers in by_pair.values()) / len(by_pair)


def chosen_entities(examples: Sequence[Example], scores: Scores) -> dict[tuple[int, ...], str]:
    """Of every question of ReCoRD the entity that fits best: the largest margin of true over false, the first of equals."""
    margins = scores[:, 1] - scores[:, 0]
    best: dict[tuple[int, ...], tuple[float, str]] = {}
    for example, margin in zip(examples, margins.tolist(), strict=True):
        if example.group not in best or margin > best[example.group][0]:
            best[example.group] = (margin, example.text)
    return {group: text for group, (_, text) in best.items()}


def record_scores(examples: Sequence[Example], chosen: Mapping[tuple[int, ...], str]) -> dict[str, float]:
    """Mean over questions of the best agreement with any right entity, by words and as a whole."""
    golds = {example.group: example.golds for example in examples}
    pairs = [(chosen[group], golds[group]) for group in chosen]
    return {
        "f1": sum(max(word_f1(guess, gold) for gold in right) for guess, right in pairs) / len(pairs),
        "em": sum(any(plain(guess) == plain(gold) for gold in right) for guess, right in pairs) / len(pairs),
    }


def plain(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces, as SQuAD's script compares answers."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def word_f1(guess: str, gold: str) -> float:
    """F1 of the words of two answers, counted with repetition."""
    ours, theirs = plain(guess).split(), plain(gold).split()
    shared = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


# --- prediction files in the format that the SuperGLUE server takes: one `TASK.jsonl` each ---


def submission_lines(task: Task, examples: Sequence[Example], scores: Scores) -> Iterator[dict[str, Any]]:
    """One object per line, in the order of the set."""
    if task.name == "record":
        for group, entity in chosen_entities(examples, scores).items():
            yield {"idx": group[0], "label": entity}
        return
    guesses = scores.argmax(1).tolist()
    if task.name == "multirc":
        yield from _paragraphs(examples, guesses)
        return
    for example, guess in zip(examples, guesses, strict=True):
        yield {"idx": example.idx[0], "label": task.labels[guess] if task.labels else guess}


def _paragraphs(examples: Sequence[Example], guesses: Sequence[int]) -> Iterator[dict[str, Any]]:
    paragraphs: dict[int, dict[int, list[dict[str, int]]]] = {}
    for example, guess in zip(examples, guesses, strict=True):
        paragraph, question, answer = example.idx
        answers = paragraphs.setdefault(paragraph, {}).setdefault(question, [])
        answers.append({"idx": answer, "label": guess})
    for paragraph, questions in paragraphs.items():
        found = [{"idx": question, "answers": answers} for question, answers in questions.items()]
        yield {"idx": paragraph, "passage": {"questions": found}}


def write_submission(task: Task, examples: Sequence[Example], scores: Scores, folder: Path) -> Path:
    """Writes `FOLDER/BoolQ.jsonl` and the like, whole or not at all."""
    make_folder(folder)
    path = folder / f"{task.folder}.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in submission_lines(task, examples, scores))
    write_text_whole(path, text)
    return path
