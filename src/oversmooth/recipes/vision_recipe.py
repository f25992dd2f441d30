"""The sections of a vision recipe."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from oversmooth.errors import BadValue
from oversmooth.recipes.recipe import Count, Depth, Recipe, RecipeSection, Share, Width, require_possible

Positive = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
CountOrZero = Annotated[int, Field(ge=0)]


class VisionData(RecipeSection):
    """Where images come from when `--data` does not say it, and how they are split."""

    source: str = ""
    """`digits`, or an id on the hub; empty: `--data` has to say it."""
    classes: CountOrZero
    """0: as many as the training images have."""
    image_size: Annotated[int, Field(ge=0, le=16_384)]
    """Pixels of a side; 0: chosen by the sizes of the images."""
    channels: Literal[0, 1, 3] = 3
    """0: 1 where all images are grey, otherwise 3."""
    mean: list[float]
    """Of every channel; empty: that of the training images."""
    std: list[Positive]
    label_column: str = ""
    """Which column holds the label; without it the one called label or fine_label."""
    test_images: Annotated[int, Field(ge=0)] = 0
    """Images taken from a source that has no test split of its own: the last of a seeded shuffle."""
    validation_images: Annotated[int, Field(ge=0)] = 0
    """Images taken from training for choices: the last of a seeded shuffle. 0: the test split is watched instead."""
    split_seed: int = 0
    folds: Annotated[int, Field(ge=0)] = 0
    """Cuts the images of a source without a test split into so many parts instead; one of them is the test split."""
    fold: Annotated[int, Field(ge=0)] = 0
    """Which part is tested on, counted from 0."""

    @model_validator(mode="after")
    def _one_number_per_channel(self) -> "VisionData":
        lengths = {len(self.mean), len(self.std)} - {0}
        if self.channels and lengths - {self.channels}:
            found = (len(self.mean), len(self.std))
            raise BadValue("The lengths of data.mean and data.std", found, f"{self.channels}, one number per channel")
        return self

    @model_validator(mode="after")
    def _the_fold_is_one_of_them(self) -> "VisionData":
        if self.folds == 1 or self.fold >= max(1, self.folds):
            raise BadValue("data.fold", self.fold, f"below data.folds ({self.folds}), of which there are two or more")
        return self


class VisionModel(RecipeSection):
    """A timm VisionTransformer."""

    patch_size: CountOrZero
    """Pixels of a patch's side; 0: the smallest that makes at most 16 x 16 patches."""
    stem: Literal["patches", "convolution"] = "patches"
    """`convolution`: one of 7 x 7 and a pooling, of stride 2 each, before the patches, as in R+ViT (arXiv 2106.10270)."""
    depth: Depth
    width: Width
    heads: Count
    mlp_ratio: Positive = 4.0
    qkv_bias: bool = True
    drop_path: Share = 0.0
    """Stochastic depth of the last layer; it grows linearly from 0 at the first."""

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "VisionModel":
        if self.width % self.heads:
            raise BadValue("model.width", self.width, f"divisible by model.heads ({self.heads})")
        require_possible(self.depth, self.width, self.mlp_ratio * self.width)
        return self

    @model_validator(mode="after")
    def _the_stem_divides_patches(self) -> "VisionModel":
        if self.patch_size % self.stem_stride:
            expected = f"divisible by the stride of model.stem ({self.stem_stride})"
            raise BadValue("model.patch_size", self.patch_size, expected)
        return self

    @property
    def stem_stride(self) -> int:
        """Pixels between neighbours of the map that patches are cut from."""
        return 4 if self.stem == "convolution" else 1


class VisionTraining(RecipeSection):
    """How long, how many at once, and the learning rate over time."""

    epochs: Positive
    batch: Count
    """Images of one optimizer step, over all devices."""
    warmup_epochs: AtLeastZero = 0.0
    warmup_start: AtLeastZero = 0.0
    minimum_rate: AtLeastZero = 0.0
    warmup_first: bool = False
    """Warm-up before the epochs, in addition to them; otherwise it covers the first of them, as in timm."""
    rate_per_epoch: bool = False
    """The rate changes once per epoch, as in DeiT's code; otherwise at every step."""
    label_smoothing: Share = 0.0
    ema_decay: Share = 0.0
    """Of the moving average of weights; 0 keeps none."""


class Augmentation(RecipeSection):
    """What happens to training images, with timm's own implementations."""

    crop: Literal["none", "pad", "resized"] = "none"
    """`pad`: pad by `padding` and cut out; `resized`: a random part of the image, resized."""
    padding: Annotated[int, Field(ge=0)] = 0
    flip: Share = 0.0
    rand_augment: str = ""
    """Such as rand-m9-n2-mstd1.0."""
    color_jitter: AtLeastZero = 0.0
    erasing: Share = 0.0
    erasing_mode: Literal["const", "rand", "pixel"] = "pixel"
    mixup: AtLeastZero = 0.0
    cutmix: AtLeastZero = 0.0
    mix_probability: Share = 1.0
    switch_probability: Share = 0.5
    mix_group: Annotated[int, Field(ge=0)] = 0
    """Images that share one mixture; 0: all that one process sees at once. Two processes equal one where it is given."""
    repeats: Count = 1
    """Repeated augmentation: how many views of an image a batch holds."""

    @property
    def is_fixed(self) -> bool:
        """Whether an image looks the same every time, as far as it is not mixed with others."""
        return self.crop == "none" and not (self.flip or self.rand_augment or self.color_jitter or self.erasing)


class Evaluation(RecipeSection):
    """How the trained model is judged."""

    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    corruptions: bool = False
    """Also accuracy on corrupted test images, fifteen kinds at five severities."""
    corruption_images: Annotated[int, Field(ge=0)] = 0
    """How many test images are corrupted; 0: all."""


class VisionWatch(RecipeSection):
    """How often things are written, in epochs."""

    log_every: Positive = 0.1
    monitor_every: Positive = 1.0
    evaluate_every: Positive = 1.0
    save_every: Positive = 1.0
    probe_images: Count = 32
    """Test images on which smoothing is measured."""


class VisionRecipe(Recipe):
    """A run of image classification."""

    kind: Literal["vision"]
    data: VisionData
    model: VisionModel
    training: VisionTraining
    augmentation: Augmentation = Augmentation()
    evaluation: Evaluation = Evaluation()
    watch: VisionWatch = VisionWatch()

    @model_validator(mode="after")
    def _parts_fit(self) -> "VisionRecipe":
        is_known = self.data.image_size and self.model.patch_size
        if is_known and self.data.image_size % self.model.patch_size:
            expected = f"divisible by model.patch_size ({self.model.patch_size})"
            raise BadValue("data.image_size", self.data.image_size, expected)
        mixes = self.augmentation.mixup > 0 or self.augmentation.cutmix > 0
        group = self.augmentation.mix_group or self.training.batch
        if mixes and group % 2:
            key = "augmentation.mix_group" if self.augmentation.mix_group else "training.batch"
            raise BadValue(key, group, "even, because images are mixed in pairs")
        return self

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be inferred from the images."""
        data = self.data
        return all((data.classes, data.image_size, data.channels, data.mean, data.std, self.model.patch_size))

    def model_arguments(self) -> dict[str, Any]:
        """Keyword arguments of timm's VisionTransformer."""
        return {
            "img_size": self.data.image_size,
            "in_chans": self.data.channels,
            "num_classes": self.data.classes,
            "patch_size": self.model.patch_size // self.model.stem_stride,
            "depth": self.model.depth,
            "embed_dim": self.model.width,
            "num_heads": self.model.heads,
            "mlp_ratio": self.model.mlp_ratio,
            "qkv_bias": self.model.qkv_bias,
            "drop_path_rate": self.model.drop_path,
        }
