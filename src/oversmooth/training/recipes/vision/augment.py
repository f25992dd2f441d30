"""From images to batches: timm's transforms, MixUp and CutMix, driven by the draw of each image."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from oversmooth.training.recipes.vision.corruptions import Corruption
from oversmooth.training.recipes.vision.draws import Draw, drawn_from
from oversmooth.training.recipes.vision.images import LARGEST_KEPT
from oversmooth.training.recipes.vision.settings import VisionRecipe
from oversmooth.training.recipes.vision.splits import Split

Transform = Callable[[Image.Image], Tensor]
MIXING = 1
"""Keeps the random numbers of a mixture apart from those of its first image."""
GRID_IMAGES, GRID_COLUMNS = 64, 8


def training_transform(recipe: VisionRecipe) -> Transform:
    """timm's training transform; for small images its random resized crop is replaced, as in DeiT's code."""
    from timm.data import create_transform
    from torchvision import transforms

    settings, size = recipe.augmentation, recipe.data.image_size
    found = create_transform(
        (recipe.data.channels, size, size),
        is_training=True,
        hflip=settings.flip,
        color_jitter=settings.color_jitter or None,
        auto_augment=settings.rand_augment or None,
        re_prob=settings.erasing,
        re_mode=settings.erasing_mode,
        interpolation="bicubic",
        mean=tuple(recipe.data.mean),
        std=tuple(recipe.data.std),
    )
    if settings.crop == "pad":
        found.transforms[0] = transforms.RandomCrop(size, padding=settings.padding)
    elif settings.crop == "none":
        found.transforms[0] = transforms.Resize((size, size), interpolation=transforms.InterpolationMode.BICUBIC)
    transform: Transform = found
    return transform


def evaluation_transform(recipe: VisionRecipe) -> tuple[Any, Transform]:
    """Resized so that the crop is `crop_ratio` of it and cut out of the middle; then normalised."""
    from timm.data import create_transform
    from torchvision import transforms

    size = recipe.data.image_size
    steps = create_transform(
        (recipe.data.channels, size, size),
        is_training=False,
        crop_pct=recipe.evaluation.crop_ratio,
        interpolation="bicubic",
        mean=tuple(recipe.data.mean),
        std=tuple(recipe.data.std),
    ).transforms
    return transforms.Compose(steps[:-2]), transforms.Compose(steps[-2:])


class TrainingImages(Dataset[dict[str, Any]]):
    """Augmented images by draw; kept after the first time where every draw gives the same pixels."""

    def __init__(self, split: Split, recipe: VisionRecipe, seed: int):
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
            pixels = self._drawn(position, number)
            if self.keeps:
                self.kept[position] = pixels
        return {"pixels": pixels, "label": self.split.images.labels[position], "draw": number}

    def _drawn(self, position: int, number: int) -> Tensor:
        image = self.split.images.image(position).convert(self.mode)
        with drawn_from(self.seed, number):
            return self.transform(image)


class EvaluationImages(Dataset[dict[str, Any]]):
    """Images as they are, or corrupted at the size at which the model sees them."""

    def __init__(self, split: Split, recipe: VisionRecipe, corruption: Corruption | None = None):
        self.split, self.mode, self.corruption = split, mode_of(recipe), corruption
        self.sized, self.normalised = evaluation_transform(recipe)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = self.split.positions[index]
        image = self.split.images.image(position).convert(self.mode)
        image = self.sized(image)
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
