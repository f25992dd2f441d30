"""Prediction files in the format that the SuperGLUE server takes: one `TASK.jsonl` each."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oversmooth.output.whole_files import make_folder, write_whole
from oversmooth.training.recipes.language.superglue.scoring import Scores, chosen_entities, predicted
from oversmooth.training.recipes.language.superglue.tasks import Example, Task


def submission_lines(task: Task, examples: Sequence[Example], scores: Scores) -> Iterator[dict[str, Any]]:
    """One object per line, in the order of the set."""
    if task.name == "record":
        for group, entity in chosen_entities(examples, scores).items():
            yield {"idx": group[0], "label": entity}
        return
    guesses = predicted(scores)
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
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path
