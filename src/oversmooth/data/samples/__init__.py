"""Inputs for when none are given: texts, textbook reactions, antibodies, digits, generated images and sounds."""

from functools import cache
from importlib.resources import files
from io import BytesIO

import torch
from jaxtyping import Float, UInt8
from numpy import load, ndarray
from torch import Tensor


@cache
def sample_texts() -> tuple[str, ...]:
    """Short and long texts of several kinds: stories, science, news, mathematics, letters, verse, code, languages."""
    document = (files(__package__) / "texts.md").read_text(encoding="utf-8")
    _, _, body = document.partition("-->\n")
    return tuple(text.strip("\n") for text in body.split("\n---\n"))


DIGITS_SHAPE = (1, 8, 8)


@cache
def sample_digits() -> tuple[UInt8[ndarray, "y x"], ...]:
    """Four of each of scikit-learn's handwritten digits, 0 to 9, that our recipe `digits` holds out, from black to white.

    Made by `release/make_example_model.py`.
    """
    digits = load(BytesIO((files(__package__) / "digits.npy").read_bytes()), allow_pickle=False)
    return tuple(digits.reshape(-1, *digits.shape[-2:]))


@cache
def sample_reactions() -> tuple[str, ...]:
    """Reactions of every textbook as SMILES: esterification, acylation, Suzuki, Diels-Alder, Grignard, Wittig and so on."""
    return _lines("reactions.txt")


@cache
def sample_antibodies() -> tuple[str, ...]:
    """Variable domains, heavy and light, of eight antibodies of every pharmacy: trastuzumab, adalimumab, bevacizumab,
    rituximab, cetuximab, pembrolizumab, nivolumab and infliximab; those of mice in chimeric ones are called so."""
    return _lines("antibodies.txt")


def _lines(name: str) -> tuple[str, ...]:
    return tuple((files(__package__) / name).read_text(encoding="utf-8").split())


def sample_images(count: int, height: int, width: int, channels: int, seed: int) -> Float[Tensor, "image channel y x"]:
    """Generated pictures in [0, 1]: a cloudy background whose amplitude falls as 1/frequency, as in photographs, and
    a few discs and bars of one colour with sharp edges in front of it."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.fft.fftfreq(height)[:, None]
    x = torch.fft.fftfreq(width)[None, :]
    amplitude = 1.0 / torch.clamp((y.square() + x.square()).sqrt(), min=1.0 / max(height, width))
    noise = torch.randn(count, channels, height, width, generator=generator)
    clouds = torch.fft.ifft2(torch.fft.fft2(noise) * amplitude).real
    low, high = clouds.amin((1, 2, 3), keepdim=True), clouds.amax((1, 2, 3), keepdim=True)
    images = (clouds - low) / (high - low)
    rows = torch.linspace(0, 1, height)[:, None]
    columns = torch.linspace(0, 1, width)[None, :]
    for image in images:
        for _ in range(3):
            cy, cx, size, turn = torch.rand(4, generator=generator).tolist()
            colour = torch.rand(channels, 1, 1, generator=generator)
            disc = (rows - cy).square() + (columns - cx).square() < (0.05 + 0.2 * size) ** 2
            bar = ((rows - cy) * (1 - turn) + (columns - cx) * turn).abs() < 0.03
            image.copy_(torch.where(disc if size > 0.4 else bar, colour, image))
    return images


def sample_sounds(count: int, samples: int, seed: int) -> Float[Tensor, "sound sample"]:
    """Generated sounds at any rate: a few decaying tones over soft noise, zero mean and unit variance."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(samples) / 16_000.0
    sounds = 0.05 * torch.randn(count, samples, generator=generator)
    for sound in sounds:
        for _ in range(5):
            pitch, start, decay = torch.rand(3, generator=generator).tolist()
            since = (time - start * time[-1]).clamp(min=0)
            tone = torch.sin(2 * torch.pi * (100 + 2000 * pitch) * since)
            sound += tone * torch.exp(-since * (2 + 20 * decay)) * (since > 0)
    return (sounds - sounds.mean(1, keepdim=True)) / sounds.std(1, keepdim=True)
