"""A vision recipe becomes a job."""

import os
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from oversmooth.errors import BadRecipe, BadValue, NotDivisible, OddNumber
from oversmooth.training.recipes.job import Evaluate, Job, Numbers, Rhythm
from oversmooth.training.recipes.runner import RunRequest, parts_of_a_batch
from oversmooth.training.recipes.schedule import warm_cosine
from oversmooth.training.recipes.schema import Recipe
from oversmooth.training.recipes.train import RecipeKind
from oversmooth.training.recipes.vision.augment import (
    GRID_IMAGES,
    EvaluationImages,
    TrainingBatch,
    TrainingImages,
    evaluation_batch,
    save_grid,
)
from oversmooth.training.recipes.vision.corruptions import KINDS, SEVERITIES, Corruption
from oversmooth.training.recipes.vision.data import Splits, open_images, require_trainable, splits_of
from oversmooth.training.recipes.vision.draws import DrawSampler
from oversmooth.training.recipes.vision.inferring import completed, require_fits
from oversmooth.training.recipes.vision.model import build_model, decays, save_model
from oversmooth.training.recipes.vision.settings import VisionRecipe, Watch
from oversmooth.training.recipes.vision.splits import Split, share


def vision_job(recipe: Recipe, data: str | None, request: RunRequest) -> Job:
    """Data, model, schedule and judgement of one run."""
    assert isinstance(recipe, VisionRecipe)
    recipe, splits = _fitted(recipe, data, request)
    training = TrainingImages(splits.train, recipe, request.seed)
    batch = recipe.training.batch
    require_trainable(batch, len(training))
    sampler = DrawSampler(len(training), request.seed, recipe.augmentation.repeats, batch)
    _require_groups(recipe)
    per_epoch = len(sampler) // batch
    collate = TrainingBatch(recipe, request.seed)
    watched = EvaluationImages(splits.watched, recipe)
    shown = min(recipe.watch.probe_images, len(watched))
    return Job(
        recipe=recipe,
        build=partial(build_model, recipe),
        train=training,
        evaluate=watched,
        collate=collate,
        collate_evaluation=evaluation_batch,
        steps=steps_of(recipe, per_epoch),
        batch=batch,
        learning_rate=partial(learning_rate, recipe, per_epoch),
        rhythm=_rhythm(recipe.watch, per_epoch),
        probe=[{"x": evaluation_batch([watched[i] for i in range(shown)])["x"]}],
        save=partial(save_model, recipe),
        sampler=sampler,
        loss=soft_cross_entropy,
        metrics=accuracy,
        decays=decays,
        ema_decay=recipe.training.ema_decay or None,
        final=partial(_judged, recipe, splits),
        preview=partial(_save_first_batch, recipe, training, sampler, collate),
        facts=splits.facts,
    )


def _fitted(recipe: VisionRecipe, data: str | None, request: RunRequest) -> tuple[VisionRecipe, Splits]:
    """The images, and the recipe with what it left open taken from them; refuses a recipe that does not fit them."""
    source = open_images(recipe.data, data)
    recipe, inferred = completed(recipe, source, request.name)
    for line in inferred:
        request.say(line)
    splits = splits_of(recipe.data, source, request.fraction)
    try:
        require_fits(recipe, splits.train)
    except BadValue as mistake:
        raise BadRecipe(request.name, mistake) from mistake
    said = {"source_inferred": inferred} if inferred else {}
    return recipe, replace(splits, facts={**splits.facts, **said})


def _require_groups(recipe: VisionRecipe) -> None:
    """Mixing groups must fill what one process sees at once."""
    group = recipe.augmentation.mix_group
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    at_once, _ = parts_of_a_batch(recipe.training.batch, processes, recipe.hardware.micro_batch)
    if group and at_once % group:
        raise NotDivisible("The batch of one process", at_once, "augmentation.mix_group", group)
    if not group and at_once % 2 and (recipe.augmentation.mixup or recipe.augmentation.cutmix):
        raise OddNumber("The batch of one process", at_once, "images are mixed in pairs")


def steps_of(recipe: VisionRecipe, per_epoch: int) -> int:
    settings = recipe.training
    epochs = settings.epochs + (settings.warmup_epochs if settings.warmup_first else 0)
    return max(1, round(epochs * per_epoch))


def learning_rate(recipe: VisionRecipe, per_epoch: int, step: int, steps: int) -> float:
    """The rate of a step, counted in whole epochs where the recipe says so."""
    settings = recipe.training
    return warm_cosine(
        step // per_epoch * per_epoch if settings.rate_per_epoch else step,
        peak=recipe.optimizer.learning_rate,
        warmup_steps=round(settings.warmup_epochs * per_epoch),
        cosine_steps=round(settings.epochs * per_epoch),
        start=settings.warmup_start,
        minimum=settings.minimum_rate,
        warmup_first=settings.warmup_first,
    )


def _rhythm(watch: Watch, per_epoch: int) -> Rhythm:
    def steps(epochs: float) -> int:
        return max(1, round(epochs * per_epoch))

    return Rhythm(
        log=steps(watch.log_every),
        monitor=steps(watch.monitor_every),
        evaluate=steps(watch.evaluate_every),
        save=steps(watch.save_every),
    )


def soft_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, against class numbers or against targets that sum to one."""
    return F.cross_entropy(logits.float(), labels)


def accuracy(predicted: Any) -> Numbers:
    """Share of images whose largest logit is the right one."""
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def _judged(recipe: VisionRecipe, splits: Splits, evaluate: Evaluate) -> Numbers:
    """Accuracy on the test split where another one was watched, and on corrupted test images where that is asked for."""
    found: Numbers = {}
    if splits.validation is not None:
        found |= evaluate(EvaluationImages(splits.test, recipe), "test")
    if recipe.evaluation.corruptions:
        count = recipe.evaluation.corruption_images or len(splits.test)
        some = share(splits.test, min(1.0, count / len(splits.test)), recipe.data.split_seed)
        found |= _robustness(recipe, some, evaluate)
    return found


def _robustness(recipe: VisionRecipe, test: Split, evaluate: Evaluate) -> Numbers:
    """Accuracy on corrupted images: of every kind over its severities, and the mean of all kinds."""
    found = {}
    for kind in KINDS:
        seen = [EvaluationImages(test, recipe, Corruption(kind, severity)) for severity in SEVERITIES]
        right = [evaluate(images, "corrupted")["corrupted_accuracy"] for images in seen]
        found[f"corruption/{kind}"] = sum(right) / len(right)
    return {"corruption_accuracy": sum(found.values()) / len(found), **found}


def _save_first_batch(
    recipe: VisionRecipe, images: TrainingImages, sampler: DrawSampler, collate: TrainingBatch, folder: Path
) -> None:
    draws = islice(iter(sampler), min(GRID_IMAGES, recipe.training.batch) // 2 * 2 or 1)
    batch = collate([images[draw] for draw in draws])
    save_grid(batch["x"], recipe, folder / "first-batch.png")


KIND = RecipeKind(recipe=VisionRecipe, job=vision_job)
