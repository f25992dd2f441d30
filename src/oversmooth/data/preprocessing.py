"""Images and sounds, prepared as the model was trained to see them.

A model that is given pixels of another mean and scale runs as well and answers something else (DINOv2 with 0.5 and 0.5 looks
as if it sharpened), so nothing is guessed: photographs without known statistics are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.data.options import DataOptions
from oversmooth.errors import BrokenFile, MissingValue, WrongBatch, first_line
from oversmooth.models.inputs import AUDIO, image_shape
from oversmooth.models.source import Source

# --- pictures as the model was trained to see them: by its own processor, by its family's published one ---

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
BILINEAR, BICUBIC = 2, 3
"""PIL's numbers for them."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
Statistics = tuple[float, ...]
GIVE_BATCHES = "Give batches yourself: osm.measure(model, batches)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a picture becomes `height x width`: its shorter side resized and the middle cut out, or all of it squeezed."""

    height: int
    width: int
    shorter: int | None = None
    """What the shorter side becomes; `None` squeezes the whole picture."""
    resample: int = BICUBIC

    def __str__(self) -> str:
        first = f"shorter side to {self.shorter}, middle " if self.shorter else "whole picture to "
        return f"{first}{self.height} x {self.width}"

    def apply(self, image: Any) -> Any:
        if self.shorter is None:
            return image.resize((self.width, self.height), resample=self.resample)
        scale = self.shorter / min(image.size)
        sides = zip(image.size, (self.width, self.height), strict=True)
        width, height = (max(round(side * scale), least) for side, least in sides)
        resized = image.resize((width, height), resample=self.resample)
        left, top = (width - self.width) // 2, (height - self.height) // 2
        return resized.crop((left, top, left + self.width, top + self.height))


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the makers of a family did to pictures; sizes are those of the model unless they published another."""

    statistics: tuple[Statistics, Statistics]
    side: int | None = None
    """Input size, where it is not the one that the config says."""
    crop_share: float | None = None
    """Side of the middle over that of the shorter side, where the middle is cut out."""
    resample: int = BICUBIC


PUBLISHED = {
    "vit": Published(statistics=HALF, resample=BILINEAR),
    "vit_mae": Published(statistics=IMAGENET, resample=BICUBIC),
    "deit": Published(statistics=IMAGENET, crop_share=224 / 256),
    "beit": Published(statistics=HALF, resample=BILINEAR),
    "dinov2": Published(statistics=IMAGENET, side=224, crop_share=224 / 256),
    "dinov2_with_registers": Published(statistics=IMAGENET, side=224, crop_share=224 / 256),
    "dinov3_vit": Published(statistics=IMAGENET, resample=BILINEAR),
    "clip": Published(statistics=CLIP, crop_share=1.0),
    "clip_vision_model": Published(statistics=CLIP, crop_share=1.0),
    "siglip": Published(statistics=HALF),
    "siglip_vision_model": Published(statistics=HALF),
}
"""From the preprocessor files beside the families' first published checkpoints, not from the defaults of transformers'
classes: those give DeiT's pictures 0.5 and DINOv2's CLIP's statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """From pictures in RGB to what enters the model, and how to say it."""

    apply: Callable[[Sequence[Any]], Tensor]
    geometry: Geometry
    statement: str
    warnings: tuple[str, ...] = ()


def find_preprocessing(
    model: nn.Module, source: Source, config: Mapping[str, Any], reading: DataOptions, *, is_generated: bool
) -> Preprocessing:
    """What the model's makers did, with the user's choices in place of it; `UnknownPreprocessing` where nothing says it."""
    channels, height, width = image_shape(model, config)
    if channels not in (1, 3):
        raise WrongBatch("a model of images in colour or in grey", f"one of {channels} channels", GIVE_BATCHES)
    size = height, width
    own = _of_timm(model, (channels, *size)) or _of_processor(source, size) or _of_family(config, size)
    if own is None:
        own = _Own(None, None, Geometry(height=height, width=width, shorter=min(height, width)), "given by the user")
    if own.mean is not None and len(own.mean) != channels:
        own = replace(own, mean=None, std=None, processor=None)
    return _with_choices(own, reading, channels, is_generated)


@dataclass(frozen=True, slots=True)
class _Own:
    """What is known about a model: statistics, geometry, in whose words, and its processor if it has one."""

    mean: Statistics | None
    std: Statistics | None
    geometry: Geometry
    name: str
    processor: Callable[[Sequence[Any], Statistics, Statistics], Tensor] | None = None
    words: str = ""
    """What the processor does to sizes, where that is more than the geometry says."""


def _with_choices(own: _Own, reading: DataOptions, channels: int, is_generated: bool) -> Preprocessing:
    given_mean, given_std = reading.statistics(channels)
    mean, std = given_mean or own.mean, given_std or own.std
    warnings: tuple[str, ...] = ()
    if mean is None or std is None:
        if not is_generated:
            raise MissingValue(
                f"The mean and standard deviation of the pixels that {own.name} was trained with",
                "Its files do not name them, and wrong ones change every result. Pass --mean and --std, for example "
                "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 (those of ImageNet), or 0.5 and 0.5.",
            )
        mean, std = HALF[0][:channels], HALF[1][:channels]
        warnings = (
            "Nothing says which pixel statistics the model was trained with: generated pictures are given with mean and "
            "standard deviation 0.5. Pass them with --mean and --std.",
        )
    geometry, processor = own.geometry, own.processor
    if reading.size or reading.crop:
        side = reading.crop or reading.size or 0
        geometry = Geometry(height=side, width=side, shorter=reading.size or side)
        processor = None
    is_changed = bool(reading.size or reading.crop or given_mean or given_std)
    origin = f"{own.name}, changed by the user" if is_changed and own.name != "given by the user" else own.name
    sizes = own.words if processor is not None and own.words else str(geometry)
    statement = f"{origin}: {sizes}, mean {_numbers(mean)}, standard deviation {_numbers(std)}"
    fixed_mean, fixed_std = mean, std

    def apply(images: Sequence[Any]) -> Tensor:
        if processor is not None:
            return processor(images, fixed_mean, fixed_std)
        return torch.stack([_normalised(geometry.apply(image), fixed_mean, fixed_std) for image in images])

    return Preprocessing(apply=apply, geometry=geometry, statement=statement, warnings=warnings)


def _numbers(values: Statistics) -> str:
    different = values if len(set(values)) > 1 else values[:1]
    return " ".join(f"{value:.3g}" for value in different)


def _normalised(image: Any, mean: Statistics, std: Statistics) -> Tensor:
    import numpy

    pixels = numpy.asarray(image.convert("L" if len(mean) == 1 else "RGB"), dtype="float32") / 255.0
    channels = torch.from_numpy(pixels)[None] if pixels.ndim == 2 else torch.from_numpy(pixels).permute(2, 0, 1)
    return (channels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


# --- what is known about a model ------------------------------------------------------------------------------------


def _of_timm(model: nn.Module, shape: tuple[int, int, int]) -> _Own | None:
    """timm's data config and its transform, at the size that the model was built for."""
    published = getattr(model, "pretrained_cfg", None)
    if not isinstance(published, Mapping) or not published.get("mean") or not published.get("std"):
        return None
    from timm.data import create_transform, resolve_data_config

    config = resolve_data_config({}, pretrained_cfg=dict(published)) | {"input_size": shape}
    if len(config["mean"]) != shape[0]:
        return None
    share = float(config["crop_pct"])
    shorter = int(min(shape[1:]) / share)
    geometry = Geometry(height=shape[1], width=shape[2], shorter=shorter)

    def process(images: Sequence[Any], mean: Statistics, std: Statistics) -> Tensor:
        transform: Any = create_transform(**(config | {"mean": mean, "std": std}), is_training=False)
        mode = "L" if shape[0] == 1 else "RGB"
        return torch.stack([transform(image.convert(mode)) for image in images])

    name = f"timm's data config of {published.get('architecture') or type(model).__name__}"
    return _Own(tuple(config["mean"]), tuple(config["std"]), geometry, name, process)


def _of_processor(source: Source, built_for: tuple[int, int]) -> _Own | None:
    """The image processor beside the model, in a folder or on the hub."""
    place = source.place or getattr(getattr(source.module, "config", None), "_name_or_path", None)
    if not place or str(place).startswith("timm:"):
        return None
    folder = Path(str(place))
    files = [name for name in PROCESSOR_FILES if (folder / name).is_file()]
    if folder.is_dir() and not files:
        return None
    from transformers import AutoImageProcessor

    try:
        processor: Any = AutoImageProcessor.from_pretrained(place, backend="pil", local_files_only=folder.is_dir())
        geometry = _geometry_of(processor, built_for)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError and its own
        if not files:
            return None
        advice, file = "Repair it, or remove it and pass --mean and --std.", str(folder / files[0])
        raise BrokenFile(file, "the settings of an image processor", first_line(error), advice) from error
    is_normalised = processor.do_normalize and processor.image_mean is not None
    mean, std = (processor.image_mean, processor.image_std) if is_normalised else ((0.0,) * 3, (1.0,) * 3)

    def process(images: Sequence[Any], mean: Statistics, std: Statistics) -> Tensor:
        given = [image.convert("L" if len(mean) == 1 else "RGB") for image in images]
        made = processor(images=given, return_tensors="pt", image_mean=list(mean), image_std=list(std))
        return made["pixel_values"]

    name = f"the model's own processor ({files[0] if files else place})"
    return _Own(tuple(map(float, mean)), tuple(map(float, std)), geometry, name, process, _words_of(processor))


def _geometry_of(processor: Any, built_for: tuple[int, int]) -> Geometry:
    """What leaves a processor of transformers: for the size of generated pictures, and where a user changes it."""
    size, crop = processor.size or {}, getattr(processor, "crop_size", None) or {}
    final = crop if getattr(processor, "do_center_crop", False) and crop else size
    side = final.get("shortest_edge")
    height, width = (final.get("height") or side or built_for[0], final.get("width") or side or built_for[1])
    resample = int(getattr(processor, "resample", None) or BICUBIC)
    return Geometry(height=int(height), width=int(width), shorter=size.get("shortest_edge"), resample=resample)


def _words_of(processor: Any) -> str:
    """What a processor of transformers says that it does to the size of a picture."""
    size, crop = processor.size or {}, getattr(processor, "crop_size", None) or {}
    steps = []
    if processor.do_resize and size.get("shortest_edge"):
        steps.append(f"shorter side to {size['shortest_edge']}")
    elif processor.do_resize and size.get("height"):
        steps.append(f"whole picture to {size['height']} x {size['width']}")
    if getattr(processor, "do_center_crop", False) and crop.get("height"):
        steps.append(f"middle {crop['height']} x {crop['width']}")
    return ", ".join(steps) or "size as it is"


def _of_family(config: Mapping[str, Any], size: tuple[int, int]) -> _Own | None:
    published = PUBLISHED.get(str(config.get("model_type")))
    if published is None:
        return None
    height, width = (min(side, published.side or side) for side in size)
    share = published.crop_share
    shorter = round(min(height, width) / share) if share else None
    geometry = Geometry(height=height, width=width, shorter=shorter, resample=published.resample)
    name = f"published preprocessing of {config['model_type']} (there is no processor beside the model)"
    mean, std = published.statistics
    return _Own(mean, std, geometry, name)


# --- sounds as an audio model takes them: by its own feature extractor ---

RATE = 16_000
"""Samples per second of generated sounds."""
Extract = Callable[[Sequence[Tensor]], dict[str, Tensor]]


def find_extractor(model: nn.Module, source: Source, config: Mapping[str, Any]) -> tuple[Extract, str]:
    """From waves at `RATE` to the model's inputs, and how to say it."""
    main = str(getattr(model, "main_input_name", AUDIO[0]))
    own = _own_extractor(source)
    if own is not None:
        found, file = own
        options = {"sampling_rate": RATE, "return_tensors": "pt", **({"padding": True} if main == AUDIO[0] else {})}

        def extract(sounds: Sequence[Tensor]) -> dict[str, Tensor]:
            return {main: found([sound.numpy() for sound in sounds], **options)[main]}

        return extract, f"the model's own feature extractor ({file})"
    if main == AUDIO[0]:
        return lambda sounds: {main: torch.stack(list(sounds))}, "waves of zero mean and unit variance"
    return _log_mel(main, config)


def _own_extractor(source: Source) -> tuple[Any, str] | None:
    place = source.place or getattr(getattr(source.module, "config", None), "_name_or_path", None)
    folder = Path(str(place))
    files = [name for name in PROCESSOR_FILES if place and (folder / name).is_file()]
    if not files:
        return None
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(place, local_files_only=True), files[0]
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError
        advice, file = "Repair it, or remove it to use the published one of its kind.", str(folder / files[0])
        raise BrokenFile(file, "the settings of a feature extractor", first_line(error), advice) from error


def _log_mel(main: str, config: Mapping[str, Any]) -> tuple[Extract, str]:
    """Whisper's features, with as many bands and frames as the model has."""
    from transformers import WhisperFeatureExtractor

    bins, positions = config.get("num_mel_bins"), config.get("max_source_positions")
    if not bins or not positions:
        found = f"none, and a config that does not say how {main} are made"
        raise WrongBatch("a feature extractor beside the model", found, GIVE_BATCHES)
    extractor = WhisperFeatureExtractor(feature_size=int(bins), sampling_rate=RATE)
    samples = 2 * int(positions) * extractor.hop_length

    def extract(sounds: Sequence[Tensor]) -> dict[str, Tensor]:
        waves = [sound.numpy() for sound in sounds]
        made = extractor(waves, sampling_rate=RATE, max_length=samples, return_tensors="pt")
        return {main: made[main]}

    return extract, f"log-mel features as published for Whisper, {bins} bands (there is no extractor beside the model)"
