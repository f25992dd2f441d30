"""`finetune`: an encoder on SuperGLUE tasks, with its scores and smoothing before and after.

OUT/TASK/seedN/             a run of the shared runner: manifest, ordinary checkpoint, analyses before and after
OUT/TASK/seedN/predictions/ validation/ and test/, in the official submission format
OUT/submission/seedN/       the test predictions of all tasks together, as the server takes them
OUT/results.json            the table
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import numpy
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from oversmooth.analysis import Stage, analyze
from oversmooth.environment.files import make_folder, write_text_whole
from oversmooth.errors import BadValue, MissingValue, NotSupported, UnknownName, first_line
from oversmooth.models.inputs import longest_text
from oversmooth.models.live import load_model, register_own_models
from oversmooth.models.open import open_source
from oversmooth.recipes.recipe import (
    Count,
    Evaluate,
    Intervals,
    Job,
    Numbers,
    Optimizer,
    Recipe,
    RecipeSection,
    Share,
    overridden,
    parsed,
    warm_cosine,
)
from oversmooth.recipes.run_folder import ANALYSIS, read_analysis
from oversmooth.recipes.superglue_scoring import overall, scored, task_score, write_submission
from oversmooth.recipes.superglue_tasks import (
    DIAGNOSTIC,
    MAIN,
    TASKS,
    Collate,
    EncodedExamples,
    Example,
    Task,
    TaskSplit,
    read_splits,
)
from oversmooth.recipes.train import WHAT_IFS, RunRequest, is_first_process, place_held, train_job
from oversmooth.results import EndOfDepth, FinetuneResult, Missing, TaskResult, no_progress

DROPOUT = 0.1


class Classifier(nn.Module):
    """`classifier(dropout(tanh(dense([mean over tokens; mean over span 1; ...]))))`.

    With choices, inputs have one more axis, `(example, choice, token)`, and each choice gets one number.
    """

    def __init__(self, encoder: nn.Module, *, outputs: int, spans: int):
        super().__init__()
        self.encoder, self.spans = encoder, spans
        width = int(encoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
        self.dense = nn.Linear((1 + spans) * width, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(width, outputs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        span_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        lead = input_ids.shape[:-1]
        more = {} if token_type_ids is None else {"token_type_ids": token_type_ids.flatten(0, -2)}
        mask = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).flatten(0, -2)
        h = self.encoder(input_ids=input_ids.flatten(0, -2), attention_mask=mask, **more).last_hidden_state
        whole = _mean(h, mask)
        marked = [whole] * self.spans  # nothing is marked where only the encoder is looked at, as by an analysis
        if span_mask is not None:
            marked = [_mean(h, span) for span in span_mask.flatten(0, -3).unbind(1)]
        features = self.dropout(torch.tanh(self.dense(torch.cat([whole, *marked], -1))))
        logits = self.classifier(features)
        found = {"logits": logits.view(lead) if len(lead) == 2 else logits}
        return found if labels is None else {"loss": F.cross_entropy(found["logits"].float(), labels), **found}


def _mean(h: Tensor, keep: Tensor) -> Tensor:
    """Mean over the kept tokens; zero where none is kept."""
    weights = keep.to(h.dtype)[..., None]
    return (h * weights).sum(1) / weights.sum(1).clamp(min=1)


def load_encoder(checkpoint: str) -> Any:
    """A text encoder from a folder or the hub, trainable, with the dropout of fine-tuning."""
    source = open_source(checkpoint)
    encoder: Any = load_model(source, "finetune")
    config = encoder.config if hasattr(encoder, "config") else None
    if config is None or getattr(encoder, "main_input_name", "") != "input_ids" or config.is_encoder_decoder:
        raise _cannot_finetune(checkpoint, "text into one vector per token", f"a {type(encoder).__name__}")
    for module in encoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = DROPOUT
    if hasattr(config, "hidden_dropout_prob"):
        config.hidden_dropout_prob = DROPOUT
    pooler = getattr(encoder, "pooler", None)
    if isinstance(pooler, nn.Module):
        pooler.requires_grad_(False)  # not on the way to the loss, which distributed training would wait for
    return encoder


def load_tokenizer(checkpoint: str) -> Any:
    """The tokenizer beside the encoder; it has to know where in the text its tokens are."""
    register_own_models()
    from transformers import AutoTokenizer

    place = open_source(checkpoint).place or checkpoint
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=Path(place).is_dir())
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and tokenizers' own
        raise _cannot_finetune(checkpoint, "a tokenizer beside the weights", first_line(error)) from error
    if not tokenizer.is_fast:
        expected = "a tokenizer that knows places in the text (tokenizer.json)"
        raise _cannot_finetune(checkpoint, expected, "a slow one")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked out, so that any token will do
    return tokenizer


def _cannot_finetune(checkpoint: str, expected: str, found: str) -> NotSupported:
    advice = "Give the folder or hub id of a text encoder (BERT or similar) with its tokenizer."
    return NotSupported("Fine-tuning", f"for {checkpoint!r}", f"expected {expected}, found {found}", advice)


def save_classifier(tokenizer: Any, model: nn.Module, folder: Path) -> None:
    """The encoder as an ordinary checkpoint with its tokenizer, and the head beside it as `head.safetensors`."""
    from safetensors.torch import save_file
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    assert isinstance(model, Classifier)
    model.encoder.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    head = {name: value for name, value in model.state_dict().items() if not name.startswith("encoder.")}
    save_file(head, folder / "head.safetensors", metadata={"format": "pt"})


# --- one task and one seed as a job of the shared runner ---

PROBE_ROWS = 8
BEFORE = "analysis-before.json"


class FinetuneTraining(RecipeSection):
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
class TaskScorer:
    """Turns logits into official metrics, and prediction files; it is told which set is being evaluated."""

    task: Task
    examples: tuple[Example, ...]
    folder: Path
    split: str = "validation"
    found: dict[str, Numbers] = field(default_factory=dict)

    def __call__(self, predicted: Any) -> Numbers:
        scores = numpy.asarray(predicted.predictions, numpy.float64)[: len(self.examples)]
        if is_first_process():
            write_submission(self.task, self.examples, scores, self.folder / self.split)
        if any(example.label is None for example in self.examples):
            return {}
        return scored(self.task, self.examples, scores)


def task_job(
    task: Task,
    splits: Mapping[str, TaskSplit],
    diagnostics: Mapping[str, TaskSplit],
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
    judge = TaskScorer(task, examples["validation"], request.out / "predictions")
    probe = _probe(encoded(examples["validation"]), collate)
    per_epoch = math.ceil(len(examples["train"]) / settings.batch)
    steps = per_epoch * settings.epochs
    others = {"test": (task, splits["test"])} if "test" in splits else {}
    others |= {name: (TASKS[name], split) for name, split in diagnostics.items()}
    return Job(
        recipe=recipe,
        build=lambda: Classifier(load_encoder(checkpoint), outputs=task.outputs, spans=task.spans),
        train=encoded(examples["train"]),
        evaluate=encoded(examples["validation"]),
        collate=collate,
        collate_evaluation=collate,
        steps=steps,
        batch=settings.batch,
        learning_rate=partial(learning_rate, recipe),
        rhythm=Intervals(
            log=max(1, per_epoch // 4),
            monitor=steps + 1,  # at the start only; the analyses before and after say more
            evaluate=steps + 1,  # once, after training: nothing is chosen on the validation split
            save=per_epoch,
            keep_checkpoints=1,
        ),
        probe=[probe],
        save=partial(save_classifier, tokenizer),
        saved_part="encoder",
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
    judge: TaskScorer,
    others: Mapping[str, tuple[Task, TaskSplit]],
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
    write_text_whole(folder / BEFORE, text)


# --- `finetune`: an encoder on several tasks with several seeds, the score beside the smoothing ---

ALL = "superglue"


def chosen_tasks(words: str) -> list[str]:
    """Names from `superglue` or a list with commas; diagnostic sets bring the task that answers them."""
    names = [word.strip().lower().replace("-", "") for word in words.split(",") if word.strip()]
    if names == [ALL]:
        return list(TASKS)
    for name in names:
        if name not in TASKS:
            raise UnknownName("task", name, [ALL, *TASKS])
    if not names:
        raise BadValue("--tasks", words, f"{ALL} or a comma-separated list such as boolq,cb")
    needed = dict.fromkeys([*names, *(TASKS[name].trained_on for name in names if TASKS[name].trained_on)])
    return [name for name in TASKS if name in needed]


def chosen_setting(name: str, overrides: Sequence[str]) -> FinetuneRecipe:
    if name not in SETTINGS:
        raise UnknownName("setting", name, list(SETTINGS))
    return parsed(FinetuneRecipe, overridden(SETTINGS[name].model_dump(mode="json"), overrides), name)


def finetune(
    checkpoint: str,
    out: Path,
    *,
    tasks: str = ALL,
    seeds: Sequence[int] = (0,),
    data: str | None = None,
    setting: str = "superglue",
    overrides: Sequence[str] = (),
    resume: bool = False,
    command: str = "",
    stage: Stage = lambda name: no_progress,
) -> FinetuneResult:
    """Everything that `oversmooth finetune` does."""
    if not seeds:
        raise MissingValue("--seeds")
    if len(set(seeds)) < len(seeds):
        raise BadValue("--seeds", list(seeds), "seeds that are all different")
    recipe, names = chosen_setting(setting, overrides), chosen_tasks(tasks)
    trained = [name for name in names if name in MAIN]
    diagnostic = [name for name in names if name in DIAGNOSTIC]
    request = RunRequest(name=setting, out=out, overrides=tuple(overrides), resume=resume, command=command)
    places = {
        (name, seed): replace(request, out=out / name / f"seed{seed}", seed=seed) for name in trained for seed in seeds
    }
    tokenizer = load_tokenizer(checkpoint)
    splits = {name: read_splits(TASKS[name], data) for name in names}  # all of them, before hours are spent on one
    results: dict[str, list[dict[str, float]]] = {name: [] for name in trained}
    with ExitStack() as all_places:  # refused before hours are spent on the first
        for place in places.values():
            make_folder(place.out.parent)
            all_places.enter_context(place_held(place))
        for (name, seed), place in places.items():
            extra = {other: splits[other]["validation"] for other in diagnostic if TASKS[other].trained_on == name}
            first = places[name, seeds[0]].out / BEFORE
            job = task_job(TASKS[name], splits[name], extra, checkpoint, tokenizer, recipe, place, first)
            results[name].append(train_job(job, place, stage(f"{TASKS[name].folder}, seed {seed}")).results)
            for path in sorted((place.out / "predictions" / "test").glob("*.jsonl")):
                make_folder(out / "submission" / f"seed{seed}")
                shutil.copyfile(path, out / "submission" / f"seed{seed}" / path.name)
    found = _table(names, tuple(seeds), results, out, checkpoint=checkpoint, setting=setting, data=data or "the hub")
    write_text_whole(out / "results.json", found.to_json(indent=2) + "\n")
    return found


def _table(
    names: list[str], seeds: tuple[int, ...], results: dict[str, list[dict[str, float]]], out: Path, **facts: str
) -> FinetuneResult:
    rows = []
    for name in names:
        task = TASKS[name]
        runs = results[task.trained_on or name]
        prefix = f"{name}_" if task.trained_on else "eval_"
        metrics = {
            key.removeprefix(prefix): tuple(run[key] for run in runs) for key in runs[0] if key.startswith(prefix)
        }
        metrics.pop("loss", None)
        scores = tuple(task_score(task, {key: values[i] for key, values in metrics.items()}) for i in range(len(seeds)))
        folders = [out / name / f"seed{seed}" for seed in seeds]
        rows.append(
            TaskResult(
                task=name,
                seeds=seeds,
                metrics=metrics,
                scores=scores,
                mean=mean(scores),
                spread=stdev(scores) if len(scores) > 1 else None,
                before=None if task.trained_on else end_of_depth(folders[0] / BEFORE),
                after=() if task.trained_on else tuple(end_of_depth(folder / ANALYSIS) for folder in folders),
                missing=() if len(scores) > 1 else (Missing(field="spread", reason="there is one seed"),),
            )
        )
    by_seed = [overall({row.task: row.scores[i] for row in rows}) for i in range(len(seeds))]
    complete = tuple(value for value in by_seed if value is not None)
    absent = () if complete else (Missing(field="overall", reason="it needs all eight tasks"),)
    return FinetuneResult(seeds=seeds, tasks=tuple(rows), overall=complete or None, missing=absent, **facts)


def end_of_depth(path: Path) -> EndOfDepth:
    """The last block's numbers of a saved analysis."""
    analysis = read_analysis(path)
    found: dict[str, Any] = {}
    for metric in ("cosine", "hfc_lfc"):
        curve = analysis.measurement.curve(metric) if analysis.measurement else []
        found[metric] = curve[-1].mean if curve else None
    layers = analysis.prediction.layers if analysis.prediction else ()
    found["smoothing_layers"] = sum(layer.regime == "smoothing" for layer in layers) if layers else None
    absent = tuple(Missing(field=name, reason=f"{path.name} has none") for name in found if found[name] is None)
    return EndOfDepth(**found, layers=len(analysis.inspection.layers), missing=absent)
