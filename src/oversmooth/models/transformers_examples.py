"""Inputs for any model of transformers, made from its config and the names that its `forward` asks for.

Every name has a few shapes that models under that name accept; they are tried in turn.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.models.input_sizes import TOKENS, Sizes
from oversmooth.models.particular_inputs import PARTICULAR

FRAMES = 4
BINS = ("num_mel_bins", "feature_projection_input_dim", "feature_size", "input_feat_per_channel", "n_mels", "input_dim")
Maker = Callable[[Sizes], Iterator[Tensor]]


def _images(sizes: Sizes) -> Iterator[Tensor]:
    sides = dict.fromkeys((sizes.side, 8 * sizes.patch, 64, 224))
    for side in sides:
        yield sizes.floats(1, sizes.channels, side, side)
    frames = sizes.get("num_frames", "frames_per_clip", default=FRAMES)
    yield sizes.floats(1, frames, sizes.channels, sizes.side, sizes.side)
    yield sizes.floats(1, sizes.channels, frames, sizes.side, sizes.side)
    yield sizes.floats(1, 16, sizes.channels * sizes.patch**2)
    yield sizes.floats(16, sizes.channels * sizes.get("temporal_patch_size", default=1) * sizes.patch**2)
    yield sizes.floats(16, sizes.channels, sizes.patch, sizes.patch)
    yield sizes.floats(16, 2 * sizes.channels * sizes.patch**2)
    yield sizes.floats(1, 16, sizes.channels, sizes.patch, sizes.patch)
    yield sizes.floats(1, 1, sizes.channels, sizes.side, sizes.side)
    yield sizes.floats(1, 2, sizes.channels, sizes.side, sizes.side)
    yield sizes.floats(1, sizes.side, sizes.side, sizes.channels)


def _patches(sizes: Sizes) -> Iterator[Tensor]:
    temporal = sizes.get("temporal_patch_size", default=1)
    yield sizes.floats(16, sizes.channels * temporal * sizes.patch**2)
    yield sizes.floats(16, sizes.width)
    yield sizes.floats(1, TOKENS, sizes.width)
    yield sizes.floats(1, 64, sizes.get("input_dim", default=16))
    yield sizes.floats(1, sizes.channels, sizes.side, sizes.side)


def _sounds(sizes: Sizes) -> Iterator[Tensor]:
    bins = sizes.get(*BINS, default=16)
    length = sizes.get("max_length", "max_source_positions", default=0)
    for frames in dict.fromkeys((2 * length or 64, 2 * sizes.get("n_window", default=32), 256)):
        yield sizes.floats(1, bins, frames)
        yield sizes.floats(1, frames, bins)
    yield sizes.floats(1, 1, 64, bins)
    yield sizes.floats(1, length or 64, bins)
    yield sizes.floats(bins, 64)
    for usual in (128, 80):  # of models whose config does not say it
        yield sizes.floats(1, 64, usual)


def _waves(sizes: Sizes) -> Iterator[Tensor]:
    strides = (
        sizes.config.get("conv_stride")
        or sizes.config.get("upsampling_ratios")
        or sizes.config.get("downsampling_ratios")
    )
    stride = math.prod(strides) if isinstance(strides, list | tuple) else 320
    yield sizes.floats(1, stride * (TOKENS + 8))
    yield sizes.floats(1, sizes.get("max_length", default=64), sizes.get("num_mel_bins", default=16))
    yield sizes.floats(1, 1, stride * (TOKENS + 8))
    yield from _sounds(sizes)
    yield sizes.floats(
        1, sizes.get("context_length", "sequence_length", default=32), sizes.get("num_input_channels", default=1)
    )


def _series(sizes: Sizes) -> Iterator[Tensor]:
    length = sizes.get("context_length", "sequence_length", "seq_length", default=32)
    lags = sizes.config.get("lags_sequence") or [0]
    channels = sizes.get("num_input_channels", "input_size", default=1)
    yield sizes.floats(
        1, length + max(lags), *([channels] if channels > 1 or "num_input_channels" in sizes.config else [])
    )
    yield sizes.floats(1, length, channels)
    yield sizes.floats(1, length)


def _ids(sizes: Sizes) -> Iterator[Tensor]:
    yield sizes.ids()
    yield sizes.ids(64)
    codebooks = sizes.get("num_codebooks", "n_codebooks", default=4)
    yield sizes.ids(TOKENS * codebooks).reshape(1, TOKENS, codebooks)
    yield sizes.ids(TOKENS * codebooks).reshape(1, codebooks, TOKENS)
    yield sizes.ids(TOKENS * (codebooks + 1)).reshape(1, TOKENS, codebooks + 1)


def _one(make: Callable[[Sizes], Tensor]) -> Maker:
    return lambda sizes: iter([make(sizes)])


def _past(sizes: Sizes) -> int:
    return sizes.get("context_length", default=12) + max(sizes.config.get("lags_sequence") or [0])


MAKERS: Mapping[str, Maker] = {
    "input_ids": _ids,
    "decoder_input_ids": _one(lambda sizes: sizes.ids()),
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "images": _images,
    "image": _images,
    "pixels": _images,
    "sample": _images,
    "patch_embeds": _patches,
    "input_features": _sounds,
    "input_values": _waves,
    "past_values": _series,
    "hidden_states": _patches,
    "inputs_embeds": lambda sizes: iter([sizes.floats(1, TOKENS, sizes.width)]),
    "inputs": lambda sizes: iter([sizes.ids(), sizes.floats(1, TOKENS, sizes.get("d_model", default=32))]),
    "grid_thw": _one(lambda sizes: torch.tensor([[1, 4, 4]])),
    "image_grid_thw": _one(lambda sizes: torch.tensor([[1, 4, 4]])),
    "image_sizes": _one(lambda sizes: torch.tensor([[sizes.side, sizes.side]])),
    "spatial_shapes": _one(lambda sizes: torch.tensor([[4, 4]])),
    "pixel_attention_mask": _one(lambda sizes: torch.ones(1, 16, dtype=torch.long)),
    "pixel_position_ids": _one(
        lambda sizes: torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    ),
    "attention_mask": _one(lambda sizes: torch.ones(1, TOKENS, dtype=torch.long)),
    "padding_mask": _one(lambda sizes: torch.ones(1, 16, dtype=torch.bool)),
    "position_ids": _one(lambda sizes: torch.arange(TOKENS)[None]),
    "bbox": _one(lambda sizes: torch.zeros(1, TOKENS, 4, dtype=torch.long)),
    "past_time_features": _one(lambda sizes: sizes.floats(1, _past(sizes), 0)),
    "past_observed_mask": _one(lambda sizes: torch.ones(1, _past(sizes))),
    "future_values": _one(lambda sizes: sizes.floats(1, sizes.get("prediction_length", default=4))),
    "future_time_features": _one(lambda sizes: sizes.floats(1, sizes.get("prediction_length", default=4), 0)),
    "encoder_hidden_states": _one(
        lambda sizes: sizes.floats(
            1, TOKENS, sizes.get("encoder_hidden_size", "cross_attention_dim", "hidden_size", default=32)
        )
    ),
    "query_embeds": _one(lambda sizes: sizes.floats(1, 6, sizes.width)),
    "context": _one(lambda sizes: sizes.floats(1, TOKENS, sizes.width)),
    # The first two numbers of a patch are its row and its column.
    "flattened_patches": _one(
        lambda sizes: sizes.floats(1, 16, 2 + sizes.get("patch_embed_hidden_size", default=3 * sizes.patch**2)).abs()
    ),
    "feature_lens": _one(lambda sizes: torch.tensor([64])),
    "mask": _one(lambda sizes: torch.ones(1, 64, dtype=torch.bool)),
    "mel_spectrogram": _one(lambda sizes: sizes.floats(1, sizes.get("mel_dim", default=80), 64)),
    "audio_input_ids": _one(lambda sizes: sizes.ids(TOKENS * 4).reshape(1, TOKENS, 4)),
    "tgt_sizes": _one(lambda sizes: torch.tensor([[4, 4]])),
    "aspect_ratio_ids": _one(lambda sizes: torch.ones(1, 1, dtype=torch.long)),
    "aspect_ratio_mask": _one(lambda sizes: torch.ones(1, 1, sizes.get("max_num_tiles", default=4), dtype=torch.long)),
    "visual_feats": _one(lambda sizes: sizes.floats(1, 4, sizes.get("visual_feat_dim", default=8))),
    "visual_pos": _one(lambda sizes: sizes.floats(1, 4, sizes.get("visual_pos_dim", default=4))),
    "num_patches": _one(lambda sizes: torch.tensor(TOKENS - 4)),
    "input_features_mask": _one(lambda sizes: torch.ones(1, 64, dtype=torch.long)),
    "audio_mel": _one(lambda sizes: sizes.floats(1, 64, sizes.get("input_feat_size", default=128))),
    "audio_mel_mask": _one(lambda sizes: torch.zeros(1, 64, dtype=torch.bool)),
    "states": _one(lambda sizes: sizes.floats(1, TOKENS, sizes.get("state_dim", default=8))),
    "actions": _one(lambda sizes: sizes.floats(1, TOKENS, sizes.get("act_dim", default=8))),
    "rewards": _one(lambda sizes: sizes.floats(1, TOKENS, 1)),
    "returns_to_go": _one(lambda sizes: sizes.floats(1, TOKENS, 1)),
    "timesteps": _one(lambda sizes: torch.arange(TOKENS)[None]),
    "spectrogram": _one(lambda sizes: sizes.floats(1, 64, sizes.get("model_in_dim", "num_mel_bins", default=16))),
}
"""Name of an argument to the shapes that models accept under it, the likeliest first."""
MASKS_OF_TEXT = ("attention_mask", "position_ids")
TRIES = 24


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def transformers_examples(model: nn.Module, config: Mapping[str, Any], seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Inputs to try in turn."""
    sizes = Sizes(config, torch.Generator().manual_seed(seed))
    if (particular := PARTICULAR.get(str(config.get("model_type")))) is not None:
        yield particular(sizes)
    parameters = inspect.signature(model.forward).parameters
    required = _required(parameters)
    main = str(getattr(model, "main_input_name", "input_ids"))
    names = list(
        dict.fromkeys([*([main] if main in parameters else []), *(name for name in required if name in MAKERS)])
    )
    if not names:
        names = [name for name in parameters if name in MAKERS][:1]
    if config.get("is_encoder_decoder") and "decoder_input_ids" in parameters and "decoder_input_ids" not in names:
        names.append("decoder_input_ids")
    towers = [
        name for name in ("pixel_values", "input_values", "input_features") if name in parameters and name not in names
    ]
    choices = [list(MAKERS[name](sizes)) if name in MAKERS else [] for name in names]
    tried = itertools.islice(itertools.product(*choices), TRIES)
    found = [dict(zip(names, values, strict=True)) for values in tried]
    if "text_config" in config and towers and main == "input_ids" and found and config.get("model_type") in PAIRS:
        yield {**found[0], towers[0]: next(MAKERS[towers[0]](sizes))}
    # Some models need more than their signature says.
    extras = {
        name: next(MAKERS[name](sizes))
        for name in parameters
        if name in MAKERS and name not in names and name not in EITHER
    }
    sides = [name for name in extras if name in SIDE_INPUTS]
    for base in found:
        yield from _with_masks(base, {}, parameters)
        if sides:
            yield from _with_masks(base, {name: extras[name] for name in sides}, parameters)
    for base in found[:3] if set(extras) - set(sides) else ():
        yield from _with_masks(base, extras, parameters)
    if "inputs_embeds" in parameters and "input_ids" in names:
        yield {"inputs_embeds": next(MAKERS["inputs_embeds"](sizes))}


def _with_masks(
    base: Mapping[str, Tensor], more: Mapping[str, Tensor], parameters: Mapping[str, inspect.Parameter]
) -> Iterator[dict[str, Tensor]]:
    """The inputs with masks of their own length; of sounds, time is one axis or the other."""
    example = {**base, **more}
    first = next(iter(base.values()), None)
    if "attention_mask" in more and "input_ids" not in base and first is not None:
        example["attention_mask"] = torch.ones(1, first.shape[1] if 1 < first.ndim < 4 else TOKENS, dtype=torch.long)
    if "input_features_mask" in example and "input_features" in base:
        for length in dict.fromkeys((base["input_features"].shape[-1], base["input_features"].shape[1])):
            yield {**example, "input_features_mask": torch.ones(1, length, dtype=torch.long)}
    else:
        yield example


def _words(names: str) -> tuple[str, ...]:
    return tuple(names.split())


SIDE_INPUTS = _words(
    "bbox encoder_hidden_states image_sizes spatial_shapes pixel_attention_mask grid_thw pixel_position_ids feature_lens "
    "xpath_tags_seq input_features_mask tgt_sizes visual_feats visual_pos"
)
"""Arguments that come with the main input."""
EITHER = ("inputs_embeds", "hidden_states", "inputs", "images", "image", "position_ids", "decoder_input_ids")
"""Arguments that stand in the place of others."""
PAIRS = _words(
    "clip siglip siglip2 metaclip_2 chinese_clip altclip align blip clipseg owlvit owlv2 clap groupvit x_clip flava"
)
"""Types that need a text and something else at once."""
