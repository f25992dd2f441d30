"""The common corruptions: fifteen ways in which photographs go wrong, at five severities, the same for the same image.

Kinds, severities and constants are those of Hendrycks and Dietterich (2019), the smaller set for images up to 64 pixels.
Three kinds differ in their making, so numbers are comparable with each other and not with the published files: glass
blur lets each pixel take a neighbour's value at once instead of swapping them in turn, frost is a generated texture
instead of photographs of ice, and motion blur and resizing are done by scipy and Pillow.
"""

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from jaxtyping import Float
from PIL import Image
from scipy import ndimage

Pixels = Float[numpy.ndarray, "row column channel"]
"""In [0, 1]; results may leave it and are clipped."""
Random = numpy.random.Generator
SEVERITIES = (1, 2, 3, 4, 5)
SMALL_UP_TO = 64


# --- noise ----------------------------------------------------------------------------------------------------------


def gaussian_noise(x: Pixels, random: Random, scale: float) -> Pixels:
    return x + random.normal(scale=scale, size=x.shape)


def shot_noise(x: Pixels, random: Random, photons: float) -> Pixels:
    return random.poisson(x * photons) / photons


def impulse_noise(x: Pixels, random: Random, amount: float) -> Pixels:
    struck = random.random(x.shape) < amount
    return numpy.where(struck, random.integers(0, 2, x.shape), x)


# --- blur -----------------------------------------------------------------------------------------------------------


def defocus_blur(x: Pixels, random: Random, radius: float, soften: float) -> Pixels:
    reach = max(8, math.ceil(radius))
    grid = numpy.arange(-reach, reach + 1)
    disk = (grid[:, None] ** 2 + grid[None, :] ** 2 <= radius**2).astype(float)
    disk = ndimage.gaussian_filter(disk / disk.sum(), soften, truncate=3)
    return ndimage.convolve(x, disk[:, :, None], mode="mirror")


def glass_blur(x: Pixels, random: Random, sigma: float, reach: float, times: float) -> Pixels:
    x = _gaussian(x, sigma)
    rows, columns = numpy.indices(x.shape[:2])
    for _ in range(int(times)):
        moved = [
            (place + random.integers(-int(reach), int(reach), place.shape, endpoint=True)).clip(0, size - 1)
            for place, size in ((rows, x.shape[0]), (columns, x.shape[1]))
        ]
        x = x[moved[0], moved[1]]
    return _gaussian(x, sigma)


def motion_blur(x: Pixels, random: Random, radius: float, sigma: float) -> Pixels:
    return _motion(x, radius, sigma, random.uniform(-45, 45))


def zoom_blur(x: Pixels, random: Random, largest: float, step: float) -> Pixels:
    factors = numpy.arange(1, largest, step)
    return (x + sum(_zoomed(x, factor) for factor in factors)) / (len(factors) + 1)


def _gaussian(x: Pixels, sigma: float) -> Pixels:
    return ndimage.gaussian_filter(x, (sigma, sigma, 0))


def _motion(x: Pixels, radius: float, sigma: float, angle: float) -> Pixels:
    """One-sided Gaussian weights along a line, as ImageMagick does it."""
    width = 2 * int(radius) + 1
    weights = numpy.exp(-(numpy.arange(width) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    rows, columns = (numpy.arange(size) for size in x.shape[:2])
    result = numpy.zeros_like(x)
    for step, weight in enumerate(weights):
        down, right = (round(step * part(math.radians(angle))) for part in (math.sin, math.cos))
        seen_rows, seen_columns = (rows + down).clip(0, len(rows) - 1), (columns + right).clip(0, len(columns) - 1)
        result += weight * x[seen_rows][:, seen_columns]
    return result


def _zoomed(x: Pixels, factor: float) -> Pixels:
    """The middle of the image, enlarged to its size."""
    height, width = x.shape[:2]
    top, left = (size * (1 - 1 / factor) / 2 for size in (height, width))
    box = (left, top, width - left, height - top)
    planes = [Image.fromarray(x[:, :, i].astype(numpy.float32)) for i in range(x.shape[2])]
    resized = [plane.resize((width, height), Image.Resampling.BILINEAR, box) for plane in planes]
    return numpy.stack([numpy.asarray(plane) for plane in resized], -1)


# --- weather --------------------------------------------------------------------------------------------------------


def snow(
    x: Pixels,
    random: Random,
    mean: float,
    scale: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    kept: float,
) -> Pixels:
    flakes = _zoomed(random.normal(mean, scale, (*x.shape[:2], 1)), zoom)
    flakes = numpy.where(flakes < threshold, 0, flakes).clip(0, 1)
    flakes = _motion(flakes, radius, sigma, random.uniform(-135, -45))
    pale = numpy.maximum(x, x.mean(-1, keepdims=True) * 1.5 + 0.5)
    return kept * x + (1 - kept) * pale + flakes + numpy.rot90(flakes, 2)


def frost(x: Pixels, random: Random, kept: float, ice: float) -> Pixels:
    ridges = 1 - 2 * numpy.abs(_plasma(x.shape[:2], 1.8, random) - 0.5)  # bright veins where the clouds are half grey
    texture = (ridges[:, :, None] ** 2 * numpy.array([0.85, 0.95, 1.0]))[:, :, : x.shape[2]]
    return kept * x + ice * texture


def fog(x: Pixels, random: Random, thickness: float, decay: float) -> Pixels:
    brightest = x.max()
    clouds = _plasma(x.shape[:2], decay, random)[:, :, None]
    return (x + thickness * clouds) * brightest / (brightest + thickness)


def brightness(x: Pixels, random: Random, more: float) -> Pixels:
    """Value of HSV raised; hue and saturation stay."""
    value = x.max(-1, keepdims=True)
    raised = (value + more).clip(0, 1)
    return numpy.where(value > 0, x * raised / numpy.maximum(value, 1e-6), raised)


def _plasma(shape: tuple[int, int], decay: float, random: Random) -> Float[numpy.ndarray, "row column"]:
    """Clouds in [0, 1] by the diamond-square algorithm on a torus."""
    size = 1 << (max(shape) - 1).bit_length()
    clouds = numpy.zeros((size, size))
    step, height = size, 100.0

    def moved(total: numpy.ndarray) -> numpy.ndarray:
        return total / 4 + height * random.uniform(-height, height, total.shape)

    while step >= 2:
        half = step // 2
        corners = clouds[::step, ::step]
        pairs = corners + numpy.roll(corners, -1, 0)
        clouds[half::step, half::step] = moved(pairs + numpy.roll(pairs, -1, 1))
        middles = clouds[half::step, half::step]
        across = middles + numpy.roll(middles, 1, 0) + corners + numpy.roll(corners, -1, 1)
        clouds[::step, half::step] = moved(across)
        down = middles + numpy.roll(middles, 1, 1) + corners + numpy.roll(corners, -1, 0)
        clouds[half::step, ::step] = moved(down)
        step, height = half, height / decay
    clouds -= clouds.min()
    return (clouds / clouds.max())[: shape[0], : shape[1]]


# --- digital --------------------------------------------------------------------------------------------------------


def contrast(x: Pixels, random: Random, kept: float) -> Pixels:
    mean = x.mean((0, 1), keepdims=True)
    return (x - mean) * kept + mean


def elastic_transform(x: Pixels, random: Random, strength: float, sigma: float, skew: float) -> Pixels:
    """A random affine map and a smooth displacement; all three constants are shares of the image's size."""
    height, width = x.shape[:2]
    centre, third = numpy.array([height, width]) / 2, min(height, width) // 3
    points = centre + third * numpy.array([[1, 1], [1, -1], [-1, -1]])
    moved = points + random.uniform(-1, 1, (3, 2)) * skew * height
    affine = numpy.linalg.solve(numpy.hstack([moved, numpy.ones((3, 1))]), points)  # from the new places to the old
    where = numpy.moveaxis(numpy.indices((height, width)), 0, -1).reshape(-1, 2)
    seen = (numpy.hstack([where, numpy.ones((len(where), 1))]) @ affine).T.reshape(2, height, width)
    for axis in range(2):
        wander = random.uniform(-1, 1, (height, width))
        smoothed = ndimage.gaussian_filter(wander, sigma * height, mode="reflect", truncate=3) if sigma else wander
        seen[axis] += smoothed * strength * height
    planes = [ndimage.map_coordinates(x[:, :, i], seen, order=1, mode="reflect") for i in range(x.shape[2])]
    return numpy.stack(planes, -1)


def pixelate(x: Pixels, random: Random, share: float) -> Pixels:
    image = _to_image(x)
    small = image.resize((max(1, int(image.width * share)), max(1, int(image.height * share))), Image.Resampling.BOX)
    return _to_pixels(small.resize(image.size, Image.Resampling.BOX))


def jpeg_compression(x: Pixels, random: Random, quality: float) -> Pixels:
    buffer = io.BytesIO()
    _to_image(x).save(buffer, "JPEG", quality=int(quality))
    with Image.open(buffer) as opened:
        return _to_pixels(opened)


# --- all of them ----------------------------------------------------------------------------------------------------

Constants = tuple[float, ...]
KINDS: Mapping[str, tuple[Callable[..., Any], tuple[Constants, ...], tuple[Constants, ...]]] = {
    "gaussian_noise": (
        gaussian_noise,
        ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,)),
        ((0.08,), (0.12,), (0.18,), (0.26,), (0.38,)),
    ),
    "shot_noise": (shot_noise, ((500,), (250,), (100,), (75,), (50,)), ((60,), (25,), (12,), (5,), (3,))),
    "impulse_noise": (
        impulse_noise,
        ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,)),
        ((0.03,), (0.06,), (0.09,), (0.17,), (0.27,)),
    ),
    "defocus_blur": (
        defocus_blur,
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    ),
    "glass_blur": (
        glass_blur,
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    ),
    "motion_blur": (
        motion_blur,
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    ),
    "zoom_blur": (
        zoom_blur,
        ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.33, 0.03)),
    ),
    "snow": (
        snow,
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (
        frost,
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    ),
    "fog": (
        fog,
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    ),
    "brightness": (brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,)), ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,))),
    "contrast": (contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,)), ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,))),
    "elastic_transform": (
        elastic_transform,
        ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    ),
    "pixelate": (pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,)), ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,))),
    "jpeg_compression": (jpeg_compression, ((80,), (65,), (58,), (50,), (40,)), ((25,), (18,), (15,), (10,), (7,))),
}
"""Name to the function, and its constants at the five severities for small and for large images."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """One kind at one severity."""

    kind: str
    severity: int

    def __call__(self, image: Image.Image, position: int) -> Image.Image:
        """The corrupted image; the position of an image in its split decides its random numbers."""
        function, small, large = KINDS[self.kind]
        constants = (small if max(image.size) <= SMALL_UP_TO else large)[self.severity - 1]
        random = numpy.random.default_rng([list(KINDS).index(self.kind), self.severity, position])
        return _to_image(function(_to_pixels(image), random, *map(float, constants)))


def _to_pixels(image: Image.Image) -> Pixels:
    pixels = numpy.asarray(image, dtype=numpy.float64) / 255
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _to_image(x: Pixels) -> Image.Image:
    pixels = numpy.round(x.clip(0, 1) * 255).astype(numpy.uint8)
    return Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0])
