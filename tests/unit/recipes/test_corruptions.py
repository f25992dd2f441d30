"""The common corruptions: deterministic, of the right size, and worse the more severe they are."""

import numpy
import pytest
from PIL import Image

from oversmooth.recipes.corruptions import KINDS, SEVERITIES, Corruption


def photograph(size, channels=3, seed=0):
    """Smooth shapes with an edge, as photographs have them."""
    generator = numpy.random.default_rng(seed)
    rows, columns = numpy.indices((size, size)) / size
    planes = [
        numpy.sin(6 * rows * generator.uniform(0.5, 2)) * numpy.cos(5 * columns) / 4 + 0.5 for _ in range(channels)
    ]
    pixels = numpy.stack(planes, -1)
    pixels[size // 4 : size // 2, size // 4 : size // 2] = generator.uniform(0.1, 0.9, channels)
    pixels = (pixels * 255).round().astype(numpy.uint8)
    return Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])


def distance(left, right):
    left, right = (numpy.asarray(image, dtype=float) for image in (left, right))
    return numpy.abs(left - right).mean() / 255


def test_there_are_fifteen_kinds_at_five_severities():
    assert len(KINDS) == 15
    assert all(len(small) == len(large) == len(SEVERITIES) for _, small, large in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "channels"), [(32, 3), (224, 3), (33, 1)])
def test_a_corrupted_image_has_the_size_and_mode_of_the_original_and_is_another(kind, size, channels):
    image = photograph(size, channels)
    for severity in (1, 5):
        corrupted = Corruption(kind, severity)(image, 0)
        assert (corrupted.size, corrupted.mode) == (image.size, image.mode)
        assert distance(image, corrupted) > 0 or (kind, severity) in (("defocus_blur", 1), ("glass_blur", 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_image_is_corrupted_in_the_same_way_every_time(kind):
    image = photograph(32)
    first, again = (Corruption(kind, 3)(image, 7) for _ in range(2))
    assert distance(first, again) == 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "noise" in kind or kind in ("snow", "frost", "fog")])
def test_two_images_have_random_numbers_of_their_own(kind):
    image = photograph(32)
    assert distance(Corruption(kind, 3)(image, 0), Corruption(kind, 3)(image, 1)) > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("elastic_transform", "glass_blur")])
@pytest.mark.parametrize("size", [32, 224])
def test_the_most_severe_corruption_moves_images_further_than_the_least(kind, size):
    """Over several images; elastic maps and glass change their character with severity, in the published set too."""
    images = [photograph(size, seed=seed) for seed in range(4)]
    moved = {
        severity: numpy.mean([distance(image, Corruption(kind, severity)(image, i)) for i, image in enumerate(images)])
        for severity in (1, 5)
    }
    assert moved[5] > moved[1]


def test_noise_has_the_stated_deviation():
    grey = Image.fromarray(numpy.full((64, 64, 3), 128, numpy.uint8))
    noisy = numpy.asarray(Corruption("gaussian_noise", 5)(grey, 0), dtype=float) / 255
    assert noisy.std() == pytest.approx(0.10, rel=0.05)


def test_brightness_and_contrast_are_exact_on_grey():
    grey = Image.fromarray(numpy.full((8, 8, 3), 102, numpy.uint8))  # 0.4
    numpy.testing.assert_allclose(numpy.asarray(Corruption("brightness", 5)(grey, 0)), 0.7 * 255, atol=0.51)
    half = numpy.zeros((8, 8, 3), numpy.uint8)
    half[:4] = 255
    low = numpy.asarray(Corruption("contrast", 2)(Image.fromarray(half), 0))
    assert {int(value) for value in numpy.unique(low)} == {64, 191}  # 0.5 -+ 0.25


def test_a_black_image_stays_finite_under_every_corruption():
    black = Image.fromarray(numpy.zeros((32, 32, 3), numpy.uint8))
    for kind in KINDS:
        for severity in SEVERITIES:
            changed = Corruption(kind, severity)(black, 0)  # a NaN would warn when it becomes a byte
            assert (changed.size, changed.mode) == (black.size, black.mode)
