"""Draws, augmentation and batches: the same for the same draw, whoever loads them, and as the recipe says."""

import itertools
import random

import numpy
import pytest
import torch
from PIL import Image

from oversmooth.recipes.augment import (
    DrawSampler,
    EvaluationImages,
    TrainingBatch,
    TrainingImages,
    drawn_from,
    mixed_seed,
    save_grid,
    training_transform,
)
from oversmooth.recipes.image_sets import ArrayImages, DecodedOnce, ImageSplit
from oversmooth.recipes.train import load_recipe

COUNT = 24


@pytest.fixture(scope="module")
def split():
    pixels = numpy.random.default_rng(0).integers(0, 256, (COUNT, 32, 32, 3), dtype=numpy.uint8)
    return ImageSplit(ArrayImages(pixels, [i % 100 for i in range(COUNT)]), list(range(COUNT)))


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("cifar100", ["augmentation.mix_group=8", "training.batch=16"])


def loaded(split, recipe, seed=0, epoch=0, size=16):
    images, sampler = TrainingImages(split, recipe, seed), DrawSampler(len(split), seed)
    sampler.epoch = epoch
    return [images[draw] for draw in list(sampler)[:size]]


# --- draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_an_epoch_has_every_image_once_in_another_order_each_time(count):
    sampler = DrawSampler(count, seed=3)
    first = list(sampler)
    sampler.epoch = 1
    second = list(sampler)
    assert sorted(index for index, _ in first) == sorted(index for index, _ in second) == list(range(count))
    assert [number for _, number in first + second] == list(range(2 * count))
    assert count < 7 or [index for index, _ in first] != [index for index, _ in second]


def test_an_epoch_ends_with_its_last_whole_batch():
    sampler = DrawSampler(50, seed=1, batch=16)
    assert len(list(sampler)) == len(sampler) == 48
    sampler.epoch = 2
    assert next(iter(sampler))[1] == 96


def test_the_order_belongs_to_the_seed_and_the_epoch():
    assert list(DrawSampler(50, seed=1)) == list(DrawSampler(50, seed=1))
    assert list(DrawSampler(50, seed=1)) != list(DrawSampler(50, seed=2))


def test_repeated_augmentation_shows_a_third_of_the_images_three_times_in_one_process():
    sampler = DrawSampler(1000, seed=0, repeats=3)
    indices = [index for index, _ in sampler]
    assert len(indices) == len(sampler) == 768  # 256 x floor(1000 / 256), as in DeiT
    for start in range(0, 768, 3):
        assert len(set(indices[start : start + 3])) == 1
    assert len(set(indices)) == 256
    assert len({number for _, number in sampler}) == 768  # each view has random numbers of its own


def test_repeated_augmentation_selects_as_timms_sampler_does():
    from timm.data.distributed_sampler import RepeatAugSampler

    theirs = RepeatAugSampler(range(1000), num_replicas=1, rank=0, num_repeats=3)
    ours = DrawSampler(1000, seed=0, repeats=3)
    counts = [numpy.unique(list(indices), return_counts=True)[1] for indices in (theirs, [i for i, _ in ours])]
    assert counts[0].tolist() == counts[1].tolist()


def test_two_views_of_an_image_differ(split, recipe):
    images = TrainingImages(split, recipe, 0)
    assert not torch.equal(images[(0, 0)]["pixels"], images[(0, 1)]["pixels"])


def test_global_generators_are_left_as_they_were():
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    expected = random.random(), numpy.random.rand(), torch.rand(1)
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    with drawn_from(5, 6):
        inside = random.random(), numpy.random.rand(), torch.rand(1)
    assert (random.random(), numpy.random.rand(), torch.rand(1)) == expected
    with drawn_from(5, 6):
        assert (random.random(), numpy.random.rand(), torch.rand(1)) == inside


def test_seeds_of_neighbouring_draws_have_nothing_in_common():
    seeds = [mixed_seed(0, i) for i in range(1000)]
    assert len(set(seeds)) == 1000
    flips = [(a ^ b).bit_count() for a, b in itertools.pairwise(seeds)]
    assert 31 < numpy.mean(flips) < 33
    assert mixed_seed(1, 2) != mixed_seed(2, 1)


# --- batches --------------------------------------------------------------------------------------------------------


def test_targets_sum_to_one_and_no_class_is_below_its_share_of_the_smoothing(split, recipe):
    for epoch in range(10):
        batch = TrainingBatch(recipe, 0)(loaded(split, recipe, epoch=epoch))
        torch.testing.assert_close(batch["labels"].sum(1), torch.ones(16))
        torch.testing.assert_close(batch["labels"].amin(), torch.tensor(0.1 / 100))
        assert batch["x"].shape == (16, 3, 32, 32)


def test_without_mixing_targets_are_smoothed_classes(split):
    plain = load_recipe("cifar100", ["augmentation.mixup=0", "augmentation.cutmix=0"])
    examples = loaded(split, plain)
    targets = TrainingBatch(plain, 0)(examples)["labels"]
    for target, example in zip(targets, examples, strict=True):
        assert target[example["label"]].item() == pytest.approx(0.9 + 0.1 / 100)
    torch.testing.assert_close(targets.sum(1), torch.ones(16))


def test_mixup_and_cutmix_both_happen_and_mix_the_targets_as_the_pixels(split, recipe):
    kinds = set()
    for epoch in range(12):
        examples = loaded(split, recipe, epoch=epoch, size=8)
        batch = TrainingBatch(recipe, 0)([dict(example) for example in examples])
        mine, other = examples[0]["pixels"], examples[7]["pixels"]
        from_me, from_other = (batch["x"][0] == mine).all(0), (batch["x"][0] == other).all(0)
        label = examples[0]["label"]
        weight = (batch["labels"][0, label].item() - 0.001) / 0.9
        if bool((from_me | from_other).all()):
            kinds.add("cutmix")
            assert weight == pytest.approx(from_me.float().mean().item(), abs=0.02)
        else:
            kinds.add("mixup")
            torch.testing.assert_close(batch["x"][0], weight * mine + (1 - weight) * other, atol=1e-4, rtol=0)
    assert kinds == {"mixup", "cutmix"}


def test_two_processes_see_together_what_one_sees(split, recipe):
    examples = loaded(split, recipe)
    whole = TrainingBatch(recipe, 0)([dict(example) for example in examples])
    halves = [TrainingBatch(recipe, 0)([dict(e) for e in examples[part]]) for part in (slice(8), slice(8, 16))]
    for name in ("x", "labels"):
        torch.testing.assert_close(torch.cat([half[name] for half in halves]), whole[name], rtol=0, atol=0)


def test_a_batch_is_the_same_however_many_workers_load_it(split, recipe):
    def first(workers):
        images, sampler = TrainingImages(split, recipe, 0), DrawSampler(COUNT, 0)
        collate = TrainingBatch(recipe, 0)
        loader = torch.utils.data.DataLoader(images, 16, sampler=sampler, collate_fn=collate, num_workers=workers)
        return next(iter(loader))

    alone, helped = first(0), first(2)
    torch.testing.assert_close(alone["x"], helped["x"], rtol=0, atol=0)
    torch.testing.assert_close(alone["labels"], helped["labels"], rtol=0, atol=0)


def test_the_transform_of_cifar_is_timms_with_a_padded_crop(recipe, split):
    names = [type(step).__name__ for step in TrainingImages(split, recipe, 0).transform.transforms]
    assert names == ["RandomCrop", "RandomHorizontalFlip", "RandAugment", "MaybeToTensor", "Normalize"]


def test_the_transform_of_imagenet_is_timms(split):
    recipe = load_recipe("imagenet-deit-ti")
    steps = TrainingImages(split, recipe, 0).transform.transforms
    names = [type(step).__name__ for step in steps]
    assert names[0] == "RandomResizedCropAndInterpolation"
    assert names[-1] == "RandomErasing"
    assert (steps[-1].probability, steps[-1].per_pixel) == (0.25, True)
    assert "ColorJitter" not in names  # timm leaves it out beside RandAugment
    pixels = EvaluationImages(split, recipe)[0]["pixels"]
    assert pixels.shape == (3, 224, 224)


def test_evaluation_images_are_normalised_and_otherwise_untouched(split, recipe):
    seen = EvaluationImages(split, recipe)[3]["pixels"]
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (recipe.data.mean, recipe.data.std))
    expected = torch.from_numpy(split.images.pixels[3]).permute(2, 0, 1) / 255
    torch.testing.assert_close(seen * std + mean, expected, atol=1e-5, rtol=0)


def test_the_picture_of_a_batch_shows_its_pixels(split, recipe, tmp_path):
    pixels = torch.stack([EvaluationImages(split, recipe)[i]["pixels"] for i in range(10)])
    save_grid(pixels, recipe, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as picture:
        shown = numpy.asarray(picture)
    assert shown.shape == (2 * 33 + 1, 8 * 33 + 1, 3)  # two rows of eight, a pixel apart
    numpy.testing.assert_array_equal(shown[1:33, 34:66], split.images.pixels[1])
    numpy.testing.assert_array_equal(shown[34:66, 34:66], split.images.pixels[9])


# --- what is kept in memory -----------------------------------------------------------------------------------------


class Counted:
    """Images that count how often each is asked for."""

    def __init__(self, images):
        self.images, self.labels, self.asked = images, images.labels, []

    def image(self, position):
        self.asked.append(position)
        return self.images.image(position)

    def identity(self, position):
        return self.images.identity(position)


UNCHANGED = ["augmentation.crop=none", "augmentation.flip=0", "augmentation.rand_augment=", "augmentation.erasing=0"]


@pytest.mark.parametrize("name", ["cifar100", "cifar100-deep", "imagenet-deit-s", "imagenet-deit-ti"])
def test_thousands_of_draws_of_a_recipe_give_finite_pixels(name):
    """Crops of 16 pixels in place of 224: what is drawn does not depend on the size, the time does."""
    recipe = load_recipe(name, ["data.image_size=16"])
    transform = training_transform(recipe)
    pixels = numpy.random.default_rng(0).integers(0, 255, (20, 24, recipe.data.channels), dtype=numpy.uint8)
    image = Image.fromarray(pixels)
    with drawn_from(0):
        for _ in range(3000):
            assert transform(image).isfinite().all()


def test_a_picture_of_which_no_bit_is_kept_is_black():
    recipe = load_recipe("imagenet-deit-s")
    (drawn,) = [step for step in training_transform(recipe).transforms if hasattr(step, "ops")]
    (operation,) = [each for each in drawn.ops if each.name.startswith("Posterize")]
    image = Image.fromarray(numpy.full((4, 4, 3), 200, dtype=numpy.uint8))
    assert numpy.asarray(operation.aug_fn(image, 0)).max() == 0
    assert numpy.asarray(operation.aug_fn(image, 1)).max() == 128
    assert numpy.asarray(operation.aug_fn(image, 8)).max() == 200


def test_images_that_always_look_the_same_are_transformed_once(split):
    fixed = load_recipe("cifar100", [*UNCHANGED, "augmentation.color_jitter=0"])
    counted = Counted(split.images)
    images = TrainingImages(ImageSplit(counted, split.positions), fixed, 0)
    first, again = images[3, 0], images[3, 99]
    assert counted.asked == [3]
    assert torch.equal(first["pixels"], again["pixels"])
    assert (first["label"], first["draw"], again["draw"]) == (3, 0, 99)
    assert torch.equal(first["pixels"], TrainingImages(split, fixed, 5)[3, 7]["pixels"]), "and no seed changes them"


@pytest.mark.parametrize(
    "setting", ["crop=pad", "flip=0.5", "rand_augment=rand-m9-n2", "color_jitter=0.4", "erasing=0.2"]
)
def test_images_that_a_draw_changes_are_not_kept(split, setting):
    drawn = load_recipe("cifar100", [*UNCHANGED, "augmentation.color_jitter=0", f"augmentation.{setting}"])
    images = TrainingImages(split, drawn, 0)
    assert images[3, 0]["draw"] == 0
    assert not images.kept


def test_small_images_are_decoded_once_and_give_the_same_pixels(split, recipe):
    counted = Counted(split.images)
    kept = ImageSplit(DecodedOnce(counted), split.positions)
    for _ in range(2):
        for mine, plain in zip(loaded(kept, recipe), loaded(split, recipe), strict=True):
            assert torch.equal(mine["pixels"], plain["pixels"]), "nobody changed a shared image"
    assert len(counted.asked) == len(set(counted.asked)) == 16
    assert kept.facts() == split.facts()


def test_images_that_would_fill_the_memory_are_decoded_every_time(split, monkeypatch):
    monkeypatch.setattr("oversmooth.recipes.image_sets.LARGEST_KEPT", COUNT * 32 * 32 * 3 - 1)
    counted = Counted(split.images)
    images = DecodedOnce(counted)
    for _ in range(2):
        images.image(5)
    assert counted.asked == [5, 5]
