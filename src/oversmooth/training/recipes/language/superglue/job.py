"""One task and one seed as a job of the shared runner."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy
from torch import nn

from oversmooth.analysis import analyze
from oversmooth.models.inputs import longest_text
from oversmooth.models.opening import open_source
from oversmooth.output.whole_files import write_whole
from oversmooth.training.recipes.job import Evaluate, Job, Numbers, Rhythm
from oversmooth.training.recipes.language.superglue.classifier import Classifier, load_encoder, save_classifier
from oversmooth.training.recipes.language.superglue.encoding import Collate, EncodedExamples
from oversmooth.training.recipes.language.superglue.reading import Split
from oversmooth.training.recipes.language.superglue.scoring import scored
from oversmooth.training.recipes.language.superglue.submission import write_submission
from oversmooth.training.recipes.language.superglue.tasks import TASKS, Example, Task
from oversmooth.training.recipes.runner import WHAT_IFS, RunRequest
from oversmooth.training.recipes.schedule import warm_cosine
from oversmooth.training.recipes.schema import Count, Optimizer, Recipe, Section, Share

PROBE_ROWS = 8
BEFORE = "analysis-before.json"


class FinetuneTraining(Section):
    """How long and how many at once."""

    epochs: Count
    batch: Count = 16
    warmup: Share = 0.1
    """Share of the steps over which the rate grows; then half a cosine to 0."""
    max_tokens: Count = 256
    """Longer inputs are cut, the longer text first; never more than the encoder has positions."""


class FinetuneRecipe(Recipe):
    kind: Literal["finetune"] = "finetune"
    training: FinetuneTraining


def _setting(name: str, epochs: int, rate: float) -> FinetuneRecipe:
    return FinetuneRecipe(
        budget="minutes to hours, by task and encoder",
        expected=f"the {name} setting of RECIPES: AdamW .9/.98, eps 1e-6, no decay, cosine with 10% warm-up",
        optimizer=Optimizer(learning_rate=rate, weight_decay=0.0, betas=(0.9, 0.98), epsilon=1e-6),
        training=FinetuneTraining(epochs=epochs),
    )


SETTINGS: Mapping[str, FinetuneRecipe] = {
    "superglue": _setting("SuperGLUE", epochs=10, rate=1e-5),
    "glue": _setting("GLUE", epochs=5, rate=4e-5),
}


@dataclass
class Judge:
    """Turns logits into official metrics, and prediction files; it is told which set is being evaluated."""

    task: Task
    examples: tuple[Example, ...]
    folder: Path
    split: str = "validation"
    found: dict[str, Numbers] = field(default_factory=dict)

    def __call__(self, predicted: Any) -> Numbers:
        scores = numpy.asarray(predicted.predictions, numpy.float64)[: len(self.examples)]
        if os.environ.get("RANK", "0") == "0":
            write_submission(self.task, self.examples, scores, self.folder / self.split)
        if any(example.label is None for example in self.examples):
            return {}
        return scored(self.task, self.examples, scores)


def task_job(
    task: Task,
    splits: Mapping[str, Split],
    diagnostics: Mapping[str, Split],
    checkpoint: str,
    tokenizer: Any,
    recipe: FinetuneRecipe,
    request: RunRequest,
    known_before: Path | None = None,
) -> Job:
    """Trains on train, judges on validation once at the end, predicts test and the diagnostic sets.

    `known_before`: the analysis of the same encoder on the same task, where a run with another seed has left it.
    """
    settings = recipe.training
    examples = {name: split.examples for name, split in splits.items()}
    max_tokens = longest_text(open_source(checkpoint).config, min(settings.max_tokens, tokenizer.model_max_length))
    encoded = partial(EncodedExamples, tokenizer=tokenizer, max_tokens=max_tokens)
    collate = Collate(tokenizer.pad_token_id)
    judge = Judge(task, examples["validation"], request.out / "predictions")
    probe = _probe(encoded(examples["validation"]), collate)
    per_epoch = math.ceil(len(examples["train"]) / settings.batch)
    steps = per_epoch * settings.epochs
    others = {"test": (task, splits["test"])} if "test" in splits else {}
    others |= {name: (TASKS[name], split) for name, split in diagnostics.items()}
    return Job(
        recipe=recipe,
        build=partial(build, checkpoint, task),
        train=encoded(examples["train"]),
        evaluate=encoded(examples["validation"]),
        collate=collate,
        collate_evaluation=collate,
        steps=steps,
        batch=settings.batch,
        learning_rate=partial(learning_rate, recipe),
        rhythm=Rhythm(
            log=max(1, per_epoch // 4),
            monitor=steps + 1,  # at the start only; the analyses before and after say more
            evaluate=steps + 1,  # once, after training: nothing is chosen on the validation split
            save=per_epoch,
            keep_checkpoints=1,
        ),
        probe=[probe],
        save=partial(save_classifier, tokenizer),
        metrics=judge,
        final=partial(_predict_others, judge, others, encoded),
        preview=partial(_analysis_before, checkpoint, probe, known_before),
        trainer_arguments={"dataloader_drop_last": False},
        facts={
            "source": checkpoint,
            "splits": {name: {"examples": len(s.examples), "sha256": s.sha256} for name, s in splits.items()},
        },
    )


def _predict_others(
    judge: Judge,
    others: Mapping[str, tuple[Task, Split]],
    encoded: Callable[[Sequence[Example]], EncodedExamples],
    evaluate: Evaluate,
) -> Numbers:
    """Predictions for the sets that nothing was trained or chosen on; their numbers where they are labelled."""
    found: Numbers = {}
    for name, (task, split) in others.items():
        judge.task, judge.examples, judge.split = task, split.examples, "test"
        numbers = evaluate(encoded(split.examples), name)
        found |= {key: value for key, value in numbers.items() if not key.endswith("_loss")}
    return found


def build(checkpoint: str, task: Task) -> nn.Module:
    return Classifier(load_encoder(checkpoint), outputs=task.outputs, spans=task.spans)


def learning_rate(recipe: FinetuneRecipe, step: int, steps: int) -> float:
    warmup = round(recipe.training.warmup * steps)
    peak = recipe.optimizer.learning_rate
    return warm_cosine(step, peak=peak, warmup_steps=warmup, cosine_steps=steps - warmup, warmup_first=True)


def _probe(examples: EncodedExamples, collate: Collate) -> dict[str, Any]:
    """The first validation rows, as the encoder sees them."""
    rows = [row for i in range(min(PROBE_ROWS, len(examples))) for row in examples[i]["rows"]][:PROBE_ROWS]
    batch = collate([{"rows": [{**row, "spans": []}], "label": 0} for row in rows])
    return {name: batch[name] for name in batch if name != "labels"}


def _analysis_before(checkpoint: str, probe: dict[str, Any], known: Path | None, folder: Path) -> None:
    """Before any step no seed has been used yet: one analysis serves all of them."""
    if known is not None and known.is_file():
        text = known.read_text(encoding="utf-8")
    else:
        text = analyze(load_encoder(checkpoint).eval(), [probe], what_ifs=WHAT_IFS).to_json(indent=1)
    write_whole(folder / BEFORE, lambda partial_: partial_.write_text(text, encoding="utf-8"))
