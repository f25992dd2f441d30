"""Image transforms, MixUp and CutMix, with draws that depend on seed, epoch and image alone.

An example is asked for by its index and the number of its draw, counted over the whole run. All randomness of its
augmentation comes from (seed, draw): workers, processes and resumed runs therefore see the same pixels.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from oversmooth.recipes.corruptions import Corruption
from oversmooth.recipes.image_sets import LARGEST_KEPT, ImageSplit
from oversmooth.recipes.recipe import EpochSampler
from oversmooth.recipes.vision_recipe import VisionRecipe

Draw = tuple[int, int]
"""Index of an image, and the number of the draw."""
ROUNDING = 256
"""DeiT keeps a multiple of so many images of an epoch under repeated augmentation."""
_MASK = 2**64 - 1


def mixed_seed(*parts: int) -> int:
    """One well-spread seed from several numbers (splitmix64)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


@contextmanager
def drawn_from(*parts: int) -> Iterator[None]:
    """Inside, the global generators of random, numpy and torch start from these numbers; afterwards all is as before."""
    seed = mixed_seed(*parts)
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)  # torch.manual_seed would reseed every GPU too
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


class DrawSampler(EpochSampler):
    """Every image once per epoch in a seeded order; with `repeats`, a third (...) of them, each several times in a row.

    Repeated augmentation is that of DeiT's sampler with all processes taken together: copies of an image follow each
    other, so they meet in one batch, whether one process trains or many. An epoch ends with its last whole `batch`.
    """

    def __init__(self, count: int, seed: int, repeats: int = 1, batch: int = 1):
        self.count, self.seed, self.repeats = count, seed, repeats
        is_rounded = repeats > 1 and count >= ROUNDING
        self.length = (count // ROUNDING * ROUNDING if is_rounded else count) // batch * batch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Draw]:
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch) % 2**63)
        order = torch.randperm(self.count, generator=generator)
        order = order.repeat_interleave(self.repeats)[: self.length]
        first = self.epoch * self.length
        yield from ((index, first + place) for place, index in enumerate(order.tolist()))


# --- from images to batches: timm's transforms, MixUp and CutMix, driven by the draw of each image ---

Transform = Callable[[Image.Image], Tensor]
MIXING = 1
"""Keeps the random numbers of a mixture apart from those of its first image."""
GRID_IMAGES, GRID_COLUMNS = 64, 8


def training_transform(recipe: VisionRecipe) -> Transform:
    """timm's training transform; for small images its random resized crop is replaced, as in DeiT's code."""
    from timm.data.auto_augment import RandAugment, posterize
    from torchvision import transforms

    settings, size = recipe.augmentation, recipe.data.image_size
    found = _timm_transform(
        recipe,
        is_training=True,
        hflip=settings.flip,
        color_jitter=settings.color_jitter or None,
        auto_augment=settings.rand_augment or None,
        re_prob=settings.erasing,
        re_mode=settings.erasing_mode,
    )
    for policy in (step for step in found.transforms if isinstance(step, RandAugment)):
        for step in policy.ops:
            step.aug_fn = _posterize if step.aug_fn is posterize else step.aug_fn
    if settings.crop == "pad":
        found.transforms[0] = transforms.RandomCrop(size, padding=settings.padding)
    elif settings.crop == "none":
        found.transforms[0] = transforms.Resize((size, size), interpolation=transforms.InterpolationMode.BICUBIC)
    transform: Transform = found
    return transform


def _posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """timm's, also where no bit is kept: it draws that now and then, and Pillow refuses it since version 13.

    The picture is black then, as it was with the versions of Pillow that the published recipes ran on.
    """
    from PIL import ImageOps

    if bits_to_keep >= 8:
        return image
    return ImageOps.posterize(image, bits_to_keep) if bits_to_keep > 0 else image.point(lambda _: 0)


def evaluation_transform(recipe: VisionRecipe) -> tuple[Any, Transform]:
    """Resized so that the crop is `crop_ratio` of it and cut out of the middle; then normalised."""
    from torchvision import transforms

    steps = _timm_transform(recipe, is_training=False, crop_pct=recipe.evaluation.crop_ratio).transforms
    return transforms.Compose(steps[:-2]), transforms.Compose(steps[-2:])


def _timm_transform(recipe: VisionRecipe, **more: Any) -> Any:
    from timm.data import create_transform

    data = recipe.data
    size, mean, std = (data.channels, data.image_size, data.image_size), tuple(data.mean), tuple(data.std)
    return create_transform(size, interpolation="bicubic", mean=mean, std=std, **more)


class TrainingImages(Dataset[dict[str, Any]]):
    """Augmented images by draw; kept after the first time where every draw gives the same pixels."""

    def __init__(self, split: ImageSplit, recipe: VisionRecipe, seed: int):
        self.split, self.seed, self.mode = split, seed, mode_of(recipe)
        self.transform = training_transform(recipe)
        pixels = recipe.data.channels * recipe.data.image_size**2 * torch.float32.itemsize
        self.keeps = recipe.augmentation.is_fixed and pixels * len(split) <= LARGEST_KEPT
        self.kept: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, draw: Draw) -> dict[str, Any]:
        index, number = draw
        position = self.split.positions[index]
        pixels = self.kept.get(position)
        if pixels is None:
            image = self.split.images.image(position).convert(self.mode)
            with drawn_from(self.seed, number):
                pixels = self.transform(image)
            if self.keeps:
                self.kept[position] = pixels
        return {"pixels": pixels, "label": self.split.images.labels[position], "draw": number}


class EvaluationImages(Dataset[dict[str, Any]]):
    """Images as they are, or corrupted at the size at which the model sees them."""

    def __init__(self, split: ImageSplit, recipe: VisionRecipe, corruption: Corruption | None = None):
        self.split, self.mode, self.corruption = split, mode_of(recipe), corruption
        self.sized, self.normalised = evaluation_transform(recipe)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = self.split.positions[index]
        image = self.sized(self.split.images.image(position).convert(self.mode))
        if self.corruption is not None:
            image = self.corruption(image, position)
        return {"pixels": self.normalised(image), "label": self.split.images.labels[position]}


def mode_of(recipe: VisionRecipe) -> str:
    return "L" if recipe.data.channels == 1 else "RGB"


class TrainingBatch:
    """Examples to a batch with soft targets: MixUp or CutMix within groups, then label smoothing. Targets sum to one."""

    def __init__(self, recipe: VisionRecipe, seed: int):
        from timm.data import Mixup

        settings = recipe.augmentation
        self.seed, self.group = seed, settings.mix_group
        self.classes, self.smoothing = recipe.data.classes, recipe.training.label_smoothing
        self.mix = None
        if settings.mixup > 0 or settings.cutmix > 0:
            self.mix = Mixup(
                mixup_alpha=settings.mixup,
                cutmix_alpha=settings.cutmix,
                prob=settings.mix_probability,
                switch_prob=settings.switch_probability,
                label_smoothing=self.smoothing,
                num_classes=self.classes,
            )

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        pixels = torch.stack([example["pixels"] for example in examples])
        labels = torch.tensor([example["label"] for example in examples])
        size = self.group or len(examples)
        targets = []
        for start in range(0, len(examples), size):
            part = slice(start, start + size)
            targets.append(self._targets(pixels[part], labels[part], examples[start]["draw"]))
        return {"x": pixels, "labels": torch.cat(targets)}

    def _targets(self, pixels: Tensor, labels: Tensor, draw: int) -> Tensor:
        """Mixes the pixels in place and returns their targets."""
        from timm.data.mixup import mixup_target

        if self.mix is None:
            return mixup_target(labels, self.classes, 1.0, self.smoothing)
        with drawn_from(self.seed, draw, MIXING):
            return self.mix(pixels, labels)[1]


def evaluation_batch(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    pixels = torch.stack([example["pixels"] for example in examples])
    return {"x": pixels, "labels": torch.tensor([example["label"] for example in examples])}


def save_grid(pixels: Tensor, recipe: VisionRecipe, path: Path) -> None:
    """A picture of a batch as the model sees it, with the normalisation undone."""
    from torchvision.utils import make_grid

    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (recipe.data.mean, recipe.data.std))
    seen = (pixels[:GRID_IMAGES] * std + mean).clamp(0, 1)
    grid = (make_grid(seen, nrow=GRID_COLUMNS, padding=1) * 255).round().to(torch.uint8)
    Image.fromarray(grid.permute(1, 2, 0).numpy()).save(path, format="PNG")
