"""Sounds as an audio model takes them: by its own feature extractor, or by the published one of its kind."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.data.preprocessing import PROCESSOR_FILES
from oversmooth.errors import BrokenFile, WrongBatch, first_line
from oversmooth.models.inputs import AUDIO
from oversmooth.models.source import Source

RATE = 16_000
"""Samples per second of generated sounds."""
Extract = Callable[[Sequence[Tensor]], dict[str, Tensor]]


def find_extractor(model: nn.Module, source: Source, config: Mapping[str, Any]) -> tuple[Extract, str]:
    """From waves at `RATE` to the model's inputs, and how to say it."""
    main = str(getattr(model, "main_input_name", AUDIO[0]))
    own = _own_extractor(source)
    if own is not None:
        found, file = own
        options = {"sampling_rate": RATE, "return_tensors": "pt"}
        return (
            lambda sounds: (
                {main: found([sound.numpy() for sound in sounds], padding=True, **options)[main]}
                if main == AUDIO[0]
                else {main: found([sound.numpy() for sound in sounds], **options)[main]}
            )
        ), f"the model's own feature extractor ({file})"
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
        advice = "Repair it, or remove it to use the published one of its kind."
        raise BrokenFile(
            str(folder / files[0]), "the settings of a feature extractor", first_line(error), advice
        ) from error


def _log_mel(main: str, config: Mapping[str, Any]) -> tuple[Extract, str]:
    """Whisper's features, with as many bands and frames as the model has."""
    from transformers import WhisperFeatureExtractor

    bins, positions = config.get("num_mel_bins"), config.get("max_source_positions")
    if not bins or not positions:
        raise WrongBatch(
            "a feature extractor beside the model",
            f"none, and a config that does not say how {main} are made",
            "Give batches yourself: osm.measure(model, batches).",
        )
    extractor = WhisperFeatureExtractor(feature_size=int(bins), sampling_rate=RATE)
    samples = 2 * int(positions) * extractor.hop_length

    def extract(sounds: Sequence[Tensor]) -> dict[str, Tensor]:
        waves = [sound.numpy() for sound in sounds]
        made = extractor(waves, sampling_rate=RATE, max_length=samples, return_tensors="pt")
        return {main: made[main]}

    return extract, f"log-mel features as published for Whisper, {bins} bands (there is no extractor beside the model)"
