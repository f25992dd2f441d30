"""What `--data` means: files, folders, datasets or nothing at all, as batches that a model takes.

    nothing                     built-in texts, generated images or sounds, by the kind of model
    file.txt, any text file     paragraphs (separated by blank lines)
    folder of text files        one text per file
    folder of images            one image per file, subfolders included
    .parquet .jsonl .json .csv .arrow   rows; the text or image column is found
    NAME or NAME:SPLIT          a dataset of the `datasets` library, streamed

Tokenizers and image processors come from the model's own folder.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.data.samples import sample_images, sample_sounds, sample_texts
from oversmooth.errors import MissingDependency, UnreadableData, WrongBatch, first_line
from oversmooth.models.inputs import AUDIO, IMAGE, image_shape, input_kinds
from oversmooth.models.source import Source

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
TABLES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
SAMPLE_COUNT = 16
"""Generated images or sounds when no data are given."""
SOUND_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Data:
    """Batches and what to call them."""

    batches: Iterable[dict[str, Tensor]]
    description: str
    count: int | None
    """Number of sequences, where it is known beforehand."""


def load_data(
    data: str | None,
    model: nn.Module,
    source: Source,
    config: Mapping[str, Any],
    *,
    batch_size: int = 8,
    max_tokens: int = 128,
    max_samples: int | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Data:
    """Batches of the right kind for the model, from `--data` or built in; texts are cut at `max_tokens`."""
    kinds = input_kinds(model, config)
    encoders = {kind: _encoder(kind, model, source, config, max_tokens, trust_remote_code) for kind in kinds}
    if data is None:
        items, description = _built_in(kinds, model, config, seed), f"built-in samples ({' and '.join(kinds)})"
    else:
        items, description = _given(data, kinds), data
    items = islice(items, max_samples)
    return Data(_batched(items, encoders, batch_size), description, max_samples)


# --- items ----------------------------------------------------------------------------------------------------------

Item = Mapping[str, Any]
"""One example: its text, its PIL image, its pixels or its sound, by kind."""


def _built_in(kinds: tuple[str, ...], model: nn.Module, config: Mapping[str, Any], seed: int) -> Iterator[Item]:
    columns: dict[str, Iterable[Any]] = {}
    if "text" in kinds:
        columns["text"] = sample_texts()
    if "image" in kinds:
        channels, height, width = image_shape(model, config)
        count = len(sample_texts()) if "text" in kinds else SAMPLE_COUNT
        columns["image"] = sample_images(count, height, width, channels, seed)
    if "audio" in kinds:
        columns["audio"] = sample_sounds(SAMPLE_COUNT, 16_000 * SOUND_SECONDS, seed)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def _given(data: str, kinds: tuple[str, ...]) -> Iterator[Item]:
    if len(kinds) > 1:
        raise UnreadableData(data, "a model with one kind of input", f"one that takes {' and '.join(kinds)} together")
    kind = kinds[0]
    path = Path(data).expanduser()
    if kind == "audio":
        raise UnreadableData(data, "no --data for audio models (sounds are generated)", "data")
    if path.is_dir():
        return _folder(path, kind)
    if path.is_file():
        return _table(data, path, kind) if path.suffix in TABLES else _text_file(path, kind)
    return _dataset(data, kind)


def _folder(path: Path, kind: str) -> Iterator[Item]:
    found = sorted(entry for entry in path.rglob("*") if entry.is_file() and not entry.name.startswith("."))
    images = [entry for entry in found if entry.suffix.lower() in IMAGE_ENDINGS]
    if kind == "image":
        if not images:
            raise UnreadableData(str(path), f"images ({', '.join(IMAGE_ENDINGS)})", f"{len(found)} other files")
        return ({"image": _open_image(entry)} for entry in images)
    texts = [entry for entry in found if entry not in set(images)]
    if not texts:
        raise UnreadableData(str(path), "text files", f"{len(images)} images and nothing else" if images else "nothing")
    return ({"text": _read_text(entry)} for entry in texts)


def _text_file(path: Path, kind: str) -> Iterator[Item]:
    if kind == "image":
        if path.suffix.lower() in IMAGE_ENDINGS:
            return iter([{"image": _open_image(path)}])
        raise UnreadableData(str(path), "a folder of images, for a vision model", "one text file")
    paragraphs = [part.strip() for part in _read_text(path).split("\n\n")]
    return ({"text": part} for part in paragraphs if part)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableData(
            str(path), "text in UTF-8", f"byte {error.object[error.start]:#04x} at {error.start}"
        ) from error


def _open_image(path: Path) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise UnreadableData(str(path), "an image", str(error)) from error


def _table(data: str, path: Path, kind: str) -> Iterator[Item]:
    datasets = _import_datasets()
    try:
        rows = datasets.load_dataset(TABLES[path.suffix], data_files=str(path), split="train", streaming=True)
        return _columns(data, rows, kind)
    except Exception as error:  # pyarrow, json and datasets raise errors without a common base
        raise UnreadableData(data, f"a {path.suffix} table", first_line(error)) from error


def _dataset(data: str, kind: str) -> Iterator[Item]:
    datasets = _import_datasets()
    name, _, split = data.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        return _columns(data, rows, kind)
    except UnreadableData:
        raise
    except Exception as error:
        expected = "a file, a folder or a dataset name (NAME or NAME:SPLIT)"
        raise UnreadableData(data, expected, first_line(error)) from error


def _columns(data: str, rows: Any, kind: str) -> Iterator[Item]:
    """Rows with one column, the first that holds what the model takes."""
    iterator = iter(rows)
    preview = next(iterator, None)
    if preview is None:
        return iter(())
    fits: Callable[[Any], bool] = (lambda v: isinstance(v, str)) if kind == "text" else _is_image
    preferred = ("text", "content", "sentence", "document") if kind == "text" else ("image", "img")
    names = [name for name in (*preferred, *preview) if name in preview and fits(preview[name])]
    if not names:
        raise UnreadableData(data, f"a column with {kind}", f"the columns {', '.join(preview)}")
    return (
        {kind: _as_image(row[names[0]]) if kind == "image" else row[names[0]]} for row in chain([preview], iterator)
    )


def _is_image(value: Any) -> bool:
    return hasattr(value, "convert") or (isinstance(value, Mapping) and bool(value.get("bytes")))


def _as_image(value: Any) -> Any:
    from io import BytesIO

    from PIL import Image

    return (Image.open(BytesIO(value["bytes"])) if isinstance(value, Mapping) else value).convert("RGB")


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingDependency("datasets", "hf", "reading tables and datasets") from error
    return datasets


# --- encoding -------------------------------------------------------------------------------------------------------

Encode = Callable[[list[Any]], dict[str, Tensor]]


def _batched(items: Iterable[Item], encoders: Mapping[str, Encode], size: int) -> Iterator[dict[str, Tensor]]:
    iterator = iter(items)
    while rows := list(islice(iterator, size)):
        batch: dict[str, Tensor] = {}
        for kind, encode in encoders.items():
            batch |= encode([row[kind] for row in rows])
        yield batch


def _encoder(
    kind: str, model: nn.Module, source: Source, config: Mapping[str, Any], max_tokens: int, trust_remote_code: bool
) -> Encode:
    if kind == "text":
        return _text_encoder(source, config, max_tokens, trust_remote_code)
    if kind == "image":
        return _image_encoder(model, source, config)
    return _audio_encoder(model, config)


def _text_encoder(source: Source, config: Mapping[str, Any], max_tokens: int, trust_remote_code: bool) -> Encode:
    from transformers import AutoTokenizer

    place = source.place or getattr(getattr(source.module, "config", None), "_name_or_path", None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, local_files_only=Path(str(place)).is_dir()
        )
    except Exception as error:  # transformers raises OSError, ValueError, ImportError and tokenizers' own
        found = first_line(error) if place else "a model that was not loaded from a folder"
        advice = "Give batches of token ids yourself: osm.measure(model, batches)."
        raise WrongBatch("a tokenizer beside the model", found, advice) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked out, so that any token will do
    text = config.get("text_config") or config
    length = min(max_tokens, int(text.get("max_position_embeddings") or max_tokens))

    def encode(texts: list[str]) -> dict[str, Tensor]:
        encoded = tokenizer(texts, padding=True, truncation=True, max_length=length, return_tensors="pt")
        return {name: encoded[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in encoded}

    return encode


def _image_encoder(model: nn.Module, source: Source, config: Mapping[str, Any]) -> Encode:
    channels, height, width = image_shape(model, config)
    mean, std = _normalisation(model, source, channels)

    def encode(images: list[Any]) -> dict[str, Tensor]:
        pixels = [image if isinstance(image, Tensor) else _pixels(image, height, width) for image in images]
        return {IMAGE: (torch.stack(pixels) - mean) / std}

    return encode


def _pixels(image: Any, height: int, width: int) -> Tensor:
    """The largest centred part of the right proportions, resized, in [0, 1]."""
    import numpy
    from PIL import ImageOps

    fitted = ImageOps.fit(image, (width, height), method=3)  # bicubic
    return torch.from_numpy(numpy.asarray(fitted, dtype="float32") / 255.0).permute(2, 0, 1)


def _normalisation(model: nn.Module, source: Source, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation that the model was trained with; one half each where nothing says it."""
    found: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or _preprocessor_config(source)
    mean = found.get("mean") or found.get("image_mean") or [0.5] * channels
    std = found.get("std") or found.get("image_std") or [0.5] * channels
    if len(mean) != channels:
        mean, std = [0.5] * channels, [0.5] * channels
    return torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]


def _preprocessor_config(source: Source) -> Mapping[str, Any]:
    import json

    path = Path(str(source.place)) / "preprocessor_config.json"
    if source.place and path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def _audio_encoder(model: nn.Module, config: Mapping[str, Any]) -> Encode:
    if getattr(model, "main_input_name", "") == AUDIO[0]:
        return lambda sounds: {AUDIO[0]: torch.stack(sounds)}
    bins, frames = config["num_mel_bins"], 2 * config["max_source_positions"]

    def encode(sounds: list[Tensor]) -> dict[str, Tensor]:
        """Log amplitude of short windows, averaged into bands: enough like speech features to exercise the model."""
        window = torch.hann_window(400)
        wave = torch.stack(sounds)
        amplitude = torch.stft(wave, 400, hop_length=160, window=window, return_complex=True).abs()
        bands = torch.nn.functional.adaptive_avg_pool1d(amplitude.mT, bins).mT
        return {AUDIO[1]: torch.nn.functional.interpolate((bands + 1e-5).log10(), size=frames)}

    return encode
