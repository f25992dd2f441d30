"""The training job of image classification, and what it infers from the data.

A sample of the training images, evenly spaced and always the same, says how large they are, whether they have colour, and
their mean and deviation per channel. Nothing is inferred from test images.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor, nn

from oversmooth.errors import BadRecipe, BadValue, UnreadableData
from oversmooth.recipes.augment import (
    GRID_IMAGES,
    DrawSampler,
    EvaluationImages,
    TrainingBatch,
    TrainingImages,
    evaluation_batch,
    save_grid,
)
from oversmooth.recipes.corruptions import KINDS, SEVERITIES, Corruption
from oversmooth.recipes.image_sets import (
    ImageSource,
    ImageSplit,
    Splits,
    open_images,
    share,
    splits_of,
    train_and_test,
)
from oversmooth.recipes.recipe import Evaluate, Intervals, Job, Numbers, Recipe, parsed, warm_cosine
from oversmooth.recipes.train import RecipeKind, RunRequest, parts_of_a_batch, process_count
from oversmooth.recipes.vision_recipe import VisionRecipe, VisionWatch

ARCHITECTURES = {"patches": "vit_tiny_patch16_224", "convolution": "vit_tiny_r_s16_p8_224"}
"""By stem, the entry of timm's registry that carries the sizes; each of them is overridden."""
FIRST_CONVOLUTIONS = {"patches": "patch_embed.proj", "convolution": "patch_embed.backbone.conv"}
NOT_SAVED = ("drop_path_rate",)
"""Arguments that matter in training only."""


def build_model(recipe: VisionRecipe) -> nn.Module:
    """A fresh model; seed torch before."""
    import timm

    model: nn.Module = timm.create_model(ARCHITECTURES[recipe.model.stem], **recipe.model_arguments())
    return model


def save_model(recipe: VisionRecipe, model: nn.Module, folder: Path) -> None:
    """Writes what `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""
    from timm.models import save_for_hf

    arguments = {name: value for name, value in recipe.model_arguments().items() if name not in NOT_SAVED}
    config: dict[str, Any] = {
        "pretrained_cfg": {
            "input_size": [recipe.data.channels, recipe.data.image_size, recipe.data.image_size],
            "fixed_input_size": True,
            "mean": recipe.data.mean,
            "std": recipe.data.std,
            "crop_pct": recipe.evaluation.crop_ratio,
            "interpolation": "bicubic",
            "classifier": "head",
            "first_conv": FIRST_CONVOLUTIONS[recipe.model.stem],
            "num_classes": recipe.data.classes,
        }
    }
    save_for_hf(model, str(folder), model_config=config, model_args=arguments, safe_serialization=True)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """DeiT's rule: matrices only, no positions and tokens; nor the tangent of a basis, which decay would turn back."""
    return parameter.ndim > 1 and not name.endswith(("pos_embed", "cls_token", ".tangent"))


# --- what a recipe leaves open, from the images themselves; and whether what it says fits them ---

SAMPLED = 256
"""Training images that are looked at."""
CHECKED = 16
"""Training images that a complete recipe is compared with."""
LARGEST = 224
"""Pixels of a side beyond which images are made smaller: the size of ImageNet's recipes."""
PATCHES = 16
"""Patches of a side at most: 256 tokens and the class token, as for CIFAR-100."""
PATCH_SIZES = (2, 4, 8, 16)
HELD_OUT = 5
"""One image in so many is for test where the source has no test images."""
SMALLEST_SHARE = 0.5
"""Of a recipe's image size: images that are all smaller than this would be blown up more than twice."""
GREY_MODES = ("1", "L", "I", "I;16", "F", "LA")


@dataclass(frozen=True, slots=True)
class ImageSample:
    """What a sample of images looks like."""

    sizes: Sequence[tuple[int, int]]
    """Width and height."""
    has_colour: bool
    mean: Sequence[float]
    """Of one channel where nothing has colour, otherwise of three; in [0, 1]."""
    std: Sequence[float]


def looked_at(split: ImageSplit, count: int = SAMPLED) -> ImageSample:
    """A sample of a split."""
    images = _sample(split, count)
    has_colour = any(_has_colour(image) for image in images)
    total, squares, count = 0.0, 0.0, 0
    for image in images:
        pixels = numpy.asarray(image.convert("RGB" if has_colour else "L"), numpy.float64) / 255
        pixels = pixels.reshape(image.width * image.height, -1)
        total, squares, count = total + pixels.sum(0), squares + (pixels**2).sum(0), count + len(pixels)
    mean = numpy.atleast_1d(total / count)
    std = numpy.sqrt(numpy.maximum(numpy.atleast_1d(squares / count) - mean**2, 0.0))
    sizes = [image.size for image in images]
    return ImageSample(sizes, has_colour, [round(float(x), 4) for x in mean], [round(float(x), 4) for x in std])


def _sample(split: ImageSplit, count: int) -> list[Image.Image]:
    """Evenly spaced images; one that cannot be read is left for training to name, unless none can."""
    found: list[Image.Image] = []
    error: UnreadableData | None = None
    taken = min(count, len(split))
    for position in (split.positions[k * len(split) // taken] for k in range(taken)):
        try:
            found.append(split.images.image(position))
        except UnreadableData as unreadable:
            error = unreadable
    if error is not None and not found:
        raise error
    return found


def _has_colour(image: Image.Image) -> bool:
    """Whether its channels differ anywhere."""
    if image.mode in GREY_MODES:
        return False
    channels = numpy.asarray(image.convert("RGB"))
    return bool((channels != channels[..., :1]).any())


def completed(recipe: VisionRecipe, source: ImageSource, name: str) -> tuple[VisionRecipe, list[str]]:
    """The recipe with everything that it left open filled in, and in words what was filled in."""
    if recipe.is_complete:
        return recipe, []
    tables = recipe.model_dump(mode="json")
    data, said = tables["data"], []
    if not data["classes"]:
        data["classes"] = len(set(source.train.labels))
        names = ", ".join(source.classes[:6]) + (", ..." if len(source.classes) > 6 else "")
        said.append(f"data.classes = {data['classes']}" + (f": {names}" if names else ""))
    if source.test is None and not (data["test_images"] or data["folds"]):
        data["test_images"] = max(1, len(source.train.labels) // HELD_OUT)
        held_out = f"no test images are there, so one in {HELD_OUT} is held out"
        said.append(f"data.test_images = {data['test_images']}: {held_out}")
    train, test = train_and_test(recipe.data.model_copy(update={"test_images": data["test_images"]}), source)
    seen = looked_at(train)
    said += _fill_sizes(tables, seen, recipe.model.stem_stride)
    if not data["channels"]:
        data["channels"] = 3 if seen.has_colour else 1
        look = "have colour" if seen.has_colour else "are grey"
        said.append(f"data.channels = {data['channels']}: the images {look}")
    for statistic in ("mean", "std"):
        if not data[statistic]:
            numbers = _per_channel(getattr(seen, statistic), data["channels"])
            data[statistic] = [number or 1.0 for number in numbers] if statistic == "std" else numbers
            said.append(f"data.{statistic} = {data[statistic]}: of {len(seen.sizes):,} training images")
    lead = f"Inferred from {source.words}: {len(train):,} images for training, {len(test):,} for test."
    return parsed(VisionRecipe, tables, name), [lead, *said]


def _fill_sizes(tables: dict[str, Any], seen: ImageSample, stride: int) -> list[str]:
    """The size of images and patches, which have to divide each other; the stride of the stem divides both."""
    data, model, said = tables["data"], tables["model"], []
    shorter = [min(size) for size in seen.sizes]
    wanted = data["image_size"] or max(min(int(median(shorter)), LARGEST), 1)
    if not model["patch_size"]:
        possible = [size for size in PATCH_SIZES if size % stride == 0 and wanted / size <= PATCHES]
        fitting = [size for size in possible if not data["image_size"] or wanted % size == 0]
        model["patch_size"] = fitting[0] if fitting else wanted
        limit = f"the smallest with at most {PATCHES} x {PATCHES} patches"
        said.append(f"model.patch_size = {model['patch_size']}: {limit}")
    if not data["image_size"]:
        data["image_size"] = max(wanted // model["patch_size"], 1) * model["patch_size"]
        reach = f"shorter sides from {min(shorter)} to {max(shorter)} pixels"
        said.append(f"data.image_size = {data['image_size']}: {reach}, whole patches of {model['patch_size']}")
    return said


def _per_channel(numbers: Sequence[float], channels: int) -> list[float]:
    """Statistics of grey images serve all channels; those of colours have one grey mean."""
    if len(numbers) == channels:
        return list(numbers)
    return list(numbers) * channels if len(numbers) == 1 else [round(sum(numbers) / len(numbers), 4)]


def require_fits(recipe: VisionRecipe, split: ImageSplit) -> None:
    """Refuses a recipe that would throw colours away, cut images to pieces or blow them up."""
    seen, size = looked_at(split, CHECKED), recipe.data.image_size
    if recipe.data.channels == 1 and seen.has_colour:
        raise BadValue("data.channels", 1, "3, because the images have colour")
    if recipe.augmentation.crop == "pad":
        odd = next((found for found in seen.sizes if found != (size, size)), None)
        if odd is not None:
            other = "or augmentation.crop another than 'pad', which resizes nothing"
            raise BadValue("data.image_size", size, f"{odd[0]}, the size of the images, {other}")
    largest = max(max(found) for found in seen.sizes)
    if largest < SMALLEST_SHARE * size:
        expected = f"at most {int(largest / SMALLEST_SHARE)}: no image is larger than {largest}"
        raise BadValue("data.image_size", size, expected)


# --- A vision recipe becomes a job ---


def vision_job(recipe: Recipe, data: str | None, request: RunRequest) -> Job:
    """Data, model, schedule and judgement of one run."""
    assert isinstance(recipe, VisionRecipe)
    recipe, splits = _fitted(recipe, data, request)
    training = TrainingImages(splits.train, recipe, request.seed)
    batch = recipe.training.batch
    if len(training) < batch:
        raise BadValue("training.batch", batch, f"at most {len(training)}, the number of images of one epoch")
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
    processes = process_count()
    at_once, _ = parts_of_a_batch(recipe.training.batch, processes, recipe.hardware.micro_batch)
    if group and at_once % group:
        raise BadValue("The batch of one process", at_once, f"divisible by augmentation.mix_group ({group})")
    if not group and at_once % 2 and (recipe.augmentation.mixup or recipe.augmentation.cutmix):
        raise BadValue("The batch of one process", at_once, "even, because images are mixed in pairs")


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


def _rhythm(watch: VisionWatch, per_epoch: int) -> Intervals:
    def steps(epochs: float) -> int:
        return max(1, round(epochs * per_epoch))

    log, monitor = steps(watch.log_every), steps(watch.monitor_every)
    return Intervals(log=log, monitor=monitor, evaluate=steps(watch.evaluate_every), save=steps(watch.save_every))


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


def _robustness(recipe: VisionRecipe, test: ImageSplit, evaluate: Evaluate) -> Numbers:
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
