"""What a recipe leaves open, from the images themselves; and whether what it says fits them.

A sample of the training images, evenly spaced and always the same, says how large they are, whether they have colour, and
their mean and deviation per channel. Nothing is inferred from test images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy
from PIL import Image

from oversmooth.errors import BadValue, UnreadableData
from oversmooth.training.recipes.schema import parsed
from oversmooth.training.recipes.vision.data import Source, train_and_test
from oversmooth.training.recipes.vision.settings import VisionRecipe
from oversmooth.training.recipes.vision.splits import Split

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
class Seen:
    """What a sample of images looks like."""

    sizes: Sequence[tuple[int, int]]
    """Width and height."""
    has_colour: bool
    mean: Sequence[float]
    """Of one channel where nothing has colour, otherwise of three; in [0, 1]."""
    std: Sequence[float]


def looked_at(split: Split, count: int = SAMPLED) -> Seen:
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
    return Seen(sizes, has_colour, [round(float(x), 4) for x in mean], [round(float(x), 4) for x in std])


def _sample(split: Split, count: int) -> list[Image.Image]:
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


def completed(recipe: VisionRecipe, source: Source, name: str) -> tuple[VisionRecipe, list[str]]:
    """The recipe with everything that it left open filled in, and in words what was filled in."""
    if recipe.is_complete:
        return recipe, []
    tables = recipe.model_dump(mode="json")
    data, said = tables["data"], []
    if not data["classes"]:
        said.append(_count_classes(data, source))
    if source.test is None and not (data["test_images"] or data["folds"]):
        data["test_images"] = max(1, len(source.train.labels) // HELD_OUT)
        said.append(
            f"data.test_images = {data['test_images']}: no test images are there, so one in {HELD_OUT} is held out"
        )
    train, test = train_and_test(recipe.data.model_copy(update={"test_images": data["test_images"]}), source)
    seen = looked_at(train)
    said += _fill_sizes(tables, seen, recipe.model.stem_stride)
    if not data["channels"]:
        data["channels"] = 3 if seen.has_colour else 1
        said.append(
            f"data.channels = {data['channels']}: the images {'have colour' if seen.has_colour else 'are grey'}"
        )
    for statistic in ("mean", "std"):
        if not data[statistic]:
            data[statistic] = _per_channel(getattr(seen, statistic), data["channels"])
            data[statistic] = [number or 1.0 for number in data[statistic]] if statistic == "std" else data[statistic]
            said.append(f"data.{statistic} = {data[statistic]}: of {len(seen.sizes):,} training images")
    lead = f"Inferred from {source.words}: {len(train):,} images for training, {len(test):,} for test."
    return parsed(VisionRecipe, tables, name), [lead, *said]


def _count_classes(data: dict[str, Any], source: Source) -> str:
    count = len(set(source.train.labels))
    data["classes"] = count
    names = ", ".join(source.classes[:6]) + (", ..." if len(source.classes) > 6 else "")
    return f"data.classes = {count}" + (f": {names}" if names else "")


def _fill_sizes(tables: dict[str, Any], seen: Seen, stride: int) -> list[str]:
    """The size of images and patches, which have to divide each other; the stride of the stem divides both."""
    data, model, said = tables["data"], tables["model"], []
    shorter = [min(size) for size in seen.sizes]
    wanted = data["image_size"] or max(min(int(median(shorter)), LARGEST), 1)
    if not model["patch_size"]:
        possible = [size for size in PATCH_SIZES if size % stride == 0 and wanted / size <= PATCHES]
        fitting = [size for size in possible if not data["image_size"] or wanted % size == 0]
        model["patch_size"] = fitting[0] if fitting else wanted
        said.append(
            f"model.patch_size = {model['patch_size']}: the smallest with at most {PATCHES} x {PATCHES} patches"
        )
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


def require_fits(recipe: VisionRecipe, split: Split) -> None:
    """Refuses a recipe that would throw colours away, cut images to pieces or blow them up."""
    seen, size = looked_at(split, CHECKED), recipe.data.image_size
    if recipe.data.channels == 1 and seen.has_colour:
        raise BadValue("data.channels", 1, "3, because the images have colour")
    if recipe.augmentation.crop == "pad":
        odd = next((found for found in seen.sizes if found != (size, size)), None)
        if odd is not None:
            expected = (
                f"{odd[0]}, the size of the images, or augmentation.crop another than 'pad', which resizes nothing"
            )
            raise BadValue("data.image_size", size, expected)
    if max(max(found) for found in seen.sizes) < SMALLEST_SHARE * size:
        largest = max(max(found) for found in seen.sizes)
        raise BadValue(
            "data.image_size", size, f"at most {int(largest / SMALLEST_SHARE)}: no image is larger than {largest}"
        )
