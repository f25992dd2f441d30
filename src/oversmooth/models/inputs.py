"""What a model takes as input, and example inputs that it accepts."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import WrongBatch

# --- what a model is fed: the kinds of input it takes, how large its images are, which token ids it knows ---

IMAGE, TEXT, AUDIO = "pixel_values", "input_ids", ("input_values", "input_features")
"""Names of transformers' main inputs."""
TWO_TOWERS = ("clip", "siglip")
"""Models that read a text and an image at once; other composite models read text alone."""
TOKENS = 12
"""In example inputs."""
OF_OTHER_KINDS = ("num_mel_bins", "conv_dim", "image_size", "patch_size")
"""Fields of configs whose models hear or see, although some know a vocabulary too."""
IMAGE_SIDE = 224
"""Of models whose config does not say it."""
POSITIONS_AFTER_PADDING = (
    *("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm"),
    "data2vec-text",
)
"""Model types whose positions begin behind the padding id, so fewer tokens fit."""


def input_kinds(model: nn.Module, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of input the model takes, `text`, `image` or `audio`; two-tower models take two."""
    if is_composite(config):
        return ("text", "image") if config["model_type"] in TWO_TOWERS else ("text",)
    main = getattr(model, "main_input_name", None)
    if main is None and config.get("model_type") != "timm_vit":
        raise WrongBatch(
            "a transformers or timm model",
            f"a {type(model).__name__}, whose inputs only you know",
            "Give batches yourself: osm.measure(model, batches).",
        )
    return ("image",) if main in (IMAGE, None) else ("text",) if main == TEXT else ("audio",)


def main_input(model: nn.Module) -> str:
    """The name of a transformers model's main input: the one that its class names, where its `forward` takes it.

    Towers of composite models often inherit `input_ids` and take something else first.
    """
    named = getattr(model, "main_input_name", TEXT)
    listed = [named] if isinstance(named, str) else list(named)
    parameters = signature(model.forward).parameters
    takes = [name for name, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return next((name for name in listed if name in takes), takes[0] if takes else str(listed[0]))


def reads_text(config: Mapping[str, Any]) -> bool:
    """Whether a config is clearly of a text model; only the loaded model knows for sure."""
    if is_composite(config):
        return config.get("model_type") not in TWO_TOWERS
    return "vocab_size" in config and not any(name in config for name in OF_OTHER_KINDS)


def is_composite(config: Mapping[str, Any]) -> bool:
    return "text_config" in config and "vision_config" in config


def image_shape(model: nn.Module, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """`(channels, height, width)` of the images that the model was built for."""
    embed = getattr(model, "patch_embed", None)
    if embed is not None and hasattr(embed, "img_size"):
        # Not `proj`, which in hybrid models reads the map of a convolutional stem.
        first = next(part for part in embed.modules() if isinstance(part, nn.Conv2d))
        return int(first.in_channels), int(embed.img_size[0]), int(embed.img_size[1])
    vision = config.get("vision_config") or config
    size = vision.get("image_size") or IMAGE_SIDE
    height, width = (size, size) if isinstance(size, int) else size
    return int(vision.get("num_channels") or 3), int(height), int(width)


def vocabulary_size(model: nn.Module, config: Mapping[str, Any]) -> int | None:
    """How many token ids the model knows: rows of its input embedding, or what its config says."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        rows = getattr(find(), "num_embeddings", None) if find is not None else None
    except NotImplementedError:  # composite models have one per part
        rows = None
    text = config.get("text_config") or config
    return rows or text.get("vocab_size")


def longest_text(config: Mapping[str, Any], wanted: int) -> int:
    """At most `wanted` tokens, and no more than the model has positions for."""
    text = config.get("text_config") or config
    positions = int(text.get("max_position_embeddings") or wanted)
    offset = int(text.get("pad_token_id") or 0) + 1 if text.get("model_type") in POSITIONS_AFTER_PADDING else 0
    return min(wanted, positions - offset)


# --- what the config of a model of transformers says about its inputs, and inputs of these sizes ---

FIRST_ID = 3
"""Smaller ids are often padding, beginning and end."""


class InputSizes:
    """What a config says about its inputs, under whatever name."""

    def __init__(self, config: Mapping[str, Any], generator: torch.Generator):
        self.config, self.generator = config, generator

    def get(self, *names: str, default: int) -> int:
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                value = value[-1]
            if isinstance(value, dict):
                value = value.get("height") or value.get("shortest_edge")
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return default

    def inside(self, part: str) -> "InputSizes":
        """What the config of a part says."""
        return InputSizes(self.config.get(part) or {}, self.generator)

    @property
    def width(self) -> int:
        return self.get("hidden_size", "d_model", "embed_dim", "n_embd", "dim", default=32)

    @property
    def images(self) -> "InputSizes":
        """What says the sizes of images: of models with two towers, the config of one of them."""
        return self.inside("vision_config") if self.config.get("model_type") in TWO_TOWERS else self

    @property
    def channels(self) -> int:
        return self.images.get("num_channels", "in_channels", "in_chans", default=3)

    @property
    def side(self) -> int:
        return self.images.get("image_size", "img_size", "input_size", "crop_size", default=64)

    @property
    def patch(self) -> int:
        return self.get("patch_size", "encoder_patch_size", "vision_patch_size", default=8)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, length: int = TOKENS) -> Tensor:
        text = self.config.get("text_config") or self.config
        vocabulary = text.get("vocab_size") if isinstance(text, Mapping) else None
        vocabulary = vocabulary if isinstance(vocabulary, int) else self.get("vocab_size", default=100)
        named = (value for name, value in self.config.items() if name.endswith(("_id", "_index")))
        special = {value for value in named if isinstance(value, int)}
        allowed = [number for number in range(min(vocabulary, 2048)) if number not in special and number >= FIRST_ID]
        allowed = allowed or list(range(vocabulary))
        chosen = torch.randint(0, len(allowed), (1, length), generator=self.generator)
        return torch.tensor(allowed)[chosen]


# --- inputs of model types of transformers whose `forward` does not tell by its names what it takes ---

GRID = 4
"""Patches along a side of a small image."""


def _frames_of_codes(sizes: InputSizes, codebooks: int) -> Tensor:
    return sizes.ids(TOKENS * codebooks).reshape(1, TOKENS, codebooks)


def _whole_windows(sizes: InputSizes) -> Tensor:
    """Token ids that fill windows of attention: padding would be queries that see nothing."""
    window = sizes.get("attention_window", default=TOKENS)
    return sizes.ids(window * -(-TOKENS // window))


def _row_of_patches(sizes: InputSizes) -> dict[str, Tensor]:
    """The patches of an image side by side in one row, and the grid that they were cut from."""
    row = sizes.floats(1, sizes.channels, sizes.patch, GRID * GRID * sizes.patch)
    return {"pixel_values": row, "target_sizes": torch.tensor([[GRID, GRID]])}


def _tiled_image(sizes: InputSizes) -> dict[str, Tensor]:
    tiles = sizes.get("max_num_tiles", default=4)
    return {
        "pixel_values": sizes.floats(1, 1, tiles, sizes.channels, sizes.side, sizes.side),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }


def _image_in_text(sizes: InputSizes) -> dict[str, Tensor]:
    vision = sizes.inside("vision_config")
    return {
        "input_ids": sizes.ids(),
        "pixel_values": sizes.floats(1, 1, 3, vision.side, vision.side),
        "image_attention_mask": torch.ones(1, TOKENS, 1, dtype=torch.long),
    }


def _decoded_beside_context(sizes: InputSizes) -> dict[str, Tensor]:
    layers = sizes.config.get("target_layer_ids") or [0]
    return {
        "noise_embeds": sizes.floats(1, TOKENS, sizes.width),
        "context_hidden_states": sizes.floats(1, GRID, sizes.width * len(layers)),
        "position_ids": torch.arange(TOKENS + GRID)[None],
    }


PARTICULAR: Mapping[str, Callable[[InputSizes], dict[str, Tensor]]] = {
    "blt_local_decoder": lambda sizes: {
        "inputs_embeds": sizes.floats(1, TOKENS, sizes.width),
        "patch_embeds": sizes.floats(1, GRID, sizes.get("hidden_size_global", default=32)),
    },
    "blt_local_encoder": lambda sizes: {
        "input_ids": sizes.ids(),
        "num_patches": torch.tensor(GRID),
        "patch_ids": (torch.arange(TOKENS) // (TOKENS // GRID))[None],
    },
    "dia_decoder": lambda sizes: {
        "input_ids": _frames_of_codes(sizes, sizes.get("num_channels", default=9)),
        "encoder_hidden_states": sizes.floats(1, TOKENS, sizes.get("cross_hidden_size", default=32)),
    },
    "fun_asr_nano_encoder": lambda sizes: {
        # Seven frames side by side make one feature.
        "input_features": sizes.floats(1, TOKENS, 7 * sizes.get("num_mel_bins", default=80)),
        "input_features_mask": torch.ones(1, TOKENS, dtype=torch.long),
    },
    "higgs_audio_v2": lambda sizes: {"audio_input_ids": _frames_of_codes(sizes, sizes.get("num_codebooks", default=8))},
    "idefics": _image_in_text,
    "inkling_audio": lambda sizes: {"audio_input_ids": _frames_of_codes(sizes, sizes.get("num_codebooks", default=80))},
    "led": lambda sizes: {"input_ids": _whole_windows(sizes), "decoder_input_ids": sizes.ids()},
    "longformer": lambda sizes: {"input_ids": _whole_windows(sizes)},
    "lightglue": lambda sizes: {"pixel_values": sizes.floats(1, 2, 3, 64, 64)},
    "lw_detr_vit": lambda sizes: {"pixel_values": sizes.floats(1, sizes.channels, 8 * sizes.patch, 8 * sizes.patch)},
    "mimi_decoder": lambda sizes: {"latents": sizes.floats(1, sizes.width, TOKENS)},
    "minicpm_ocr_vision": _row_of_patches,
    "minicpmv4_6_vision": _row_of_patches,
    "minicpmv4_7_vision": _row_of_patches,
    "mllama_vision_model": _tiled_image,
    "molmo2_vision": lambda sizes: {
        "pixel_values": sizes.floats(
            1, sizes.get("num_position_embeddings", default=16), sizes.channels * sizes.patch**2
        )
    },
    "moshi_depth": lambda sizes: {
        "input_ids": sizes.ids(sizes.get("num_codebooks", default=8)),
        "last_hidden_state": sizes.floats(
            1, sizes.get("num_codebooks", default=8), sizes.get("input_size", default=32)
        ),
    },
    "muse_glimmer_assistant": _decoded_beside_context,
    "muse_spark_audio": lambda sizes: {"input_values": sizes.floats(1, GRID * 1920)},
    "phi4_multimodal_audio": lambda sizes: {
        "hidden_states": sizes.floats(1, 64, sizes.get("input_size", default=80)),
        "mask": torch.ones(1, 64, dtype=torch.bool),
    },
    "pocket_tts_audio_tokenizer_decoder": lambda sizes: {"latents": sizes.floats(1, sizes.width, TOKENS)},
    "speecht5": lambda sizes: {
        "input_values": sizes.floats(1, TOKENS, sizes.width),
        "decoder_input_values": sizes.floats(1, TOKENS, sizes.width),
    },
    "tvp": lambda sizes: {
        "input_ids": sizes.ids(),
        "pixel_values": sizes.floats(
            1, sizes.get("num_frames", default=1), 3, *[sizes.get("max_img_size", default=64)] * 2
        ),
    },
    "unlimited_ocr_vision_encoder": lambda sizes: {"patch_embeds": sizes.floats(1, sizes.width, GRID, GRID)},
    "xclip_vision_model": lambda sizes: {
        "pixel_values": sizes.floats(sizes.get("num_frames", default=4), sizes.channels, sizes.side, sizes.side)
    },
}
"""Model type to inputs of the names of its `forward`."""


# --- inputs for any model of transformers, made from its config and the names that its `forward` asks for ---

FRAMES = 4
BINS = ("num_mel_bins", "feature_projection_input_dim", "feature_size", "input_feat_per_channel", "n_mels", "input_dim")


def _images(sizes: InputSizes) -> Iterator[Tensor]:
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


def _patches(sizes: InputSizes) -> Iterator[Tensor]:
    temporal = sizes.get("temporal_patch_size", default=1)
    yield sizes.floats(16, sizes.channels * temporal * sizes.patch**2)
    yield sizes.floats(16, sizes.width)
    yield sizes.floats(1, TOKENS, sizes.width)
    yield sizes.floats(1, 64, sizes.get("input_dim", default=16))
    yield sizes.floats(1, sizes.channels, sizes.side, sizes.side)


def _sounds(sizes: InputSizes) -> Iterator[Tensor]:
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


def _waves(sizes: InputSizes) -> Iterator[Tensor]:
    names = ("conv_stride", "upsampling_ratios", "downsampling_ratios")
    strides = next((found for name in names if (found := sizes.config.get(name))), None)
    stride = math.prod(strides) if isinstance(strides, list | tuple) else 320
    yield sizes.floats(1, stride * (TOKENS + 8))
    yield sizes.floats(1, sizes.get("max_length", default=64), sizes.get("num_mel_bins", default=16))
    yield sizes.floats(1, 1, stride * (TOKENS + 8))
    yield from _sounds(sizes)
    length = sizes.get("context_length", "sequence_length", default=32)
    yield sizes.floats(1, length, sizes.get("num_input_channels", default=1))


def _series(sizes: InputSizes) -> Iterator[Tensor]:
    length = sizes.get("context_length", "sequence_length", "seq_length", default=32)
    lags = sizes.config.get("lags_sequence") or [0]
    channels = sizes.get("num_input_channels", "input_size", default=1)
    has_channels = channels > 1 or "num_input_channels" in sizes.config
    yield sizes.floats(1, length + max(lags), *([channels] if has_channels else []))
    yield sizes.floats(1, length, channels)
    yield sizes.floats(1, length)


def _ids(sizes: InputSizes) -> Iterator[Tensor]:
    yield sizes.ids()
    yield sizes.ids(64)
    codebooks = sizes.get("num_codebooks", "n_codebooks", default=4)
    yield _frames_of_codes(sizes, codebooks)
    yield sizes.ids(TOKENS * codebooks).reshape(1, codebooks, TOKENS)
    yield _frames_of_codes(sizes, codebooks + 1)


def _past(sizes: InputSizes) -> int:
    return sizes.get("context_length", default=12) + max(sizes.config.get("lags_sequence") or [0])


MAKERS: Mapping[str, Callable[[InputSizes], Tensor | Iterator[Tensor]]] = {
    "input_ids": _ids,
    "decoder_input_ids": lambda sizes: sizes.ids(),
    **dict.fromkeys(("pixel_values", "pixel_values_videos", "images", "image", "pixels", "sample"), _images),
    "patch_embeds": _patches,
    "input_features": _sounds,
    "input_values": _waves,
    "past_values": _series,
    "hidden_states": _patches,
    **dict.fromkeys(("inputs_embeds", "context"), lambda sizes: sizes.floats(1, TOKENS, sizes.width)),
    "inputs": lambda sizes: iter([sizes.ids(), sizes.floats(1, TOKENS, sizes.get("d_model", default=32))]),
    **dict.fromkeys(("grid_thw", "image_grid_thw"), lambda sizes: torch.tensor([[1, 4, 4]])),
    "image_sizes": lambda sizes: torch.tensor([[sizes.side, sizes.side]]),
    **dict.fromkeys(("spatial_shapes", "tgt_sizes"), lambda sizes: torch.tensor([[4, 4]])),
    "pixel_attention_mask": lambda sizes: torch.ones(1, 16, dtype=torch.long),
    "pixel_position_ids": lambda sizes: torch.stack(
        torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1
    ).reshape(1, 16, 2),
    "attention_mask": lambda sizes: torch.ones(1, TOKENS, dtype=torch.long),
    "padding_mask": lambda sizes: torch.ones(1, 16, dtype=torch.bool),
    **dict.fromkeys(("position_ids", "timesteps"), lambda sizes: torch.arange(TOKENS)[None]),
    "bbox": lambda sizes: torch.zeros(1, TOKENS, 4, dtype=torch.long),
    "past_time_features": lambda sizes: sizes.floats(1, _past(sizes), 0),
    "past_observed_mask": lambda sizes: torch.ones(1, _past(sizes)),
    "future_values": lambda sizes: sizes.floats(1, sizes.get("prediction_length", default=4)),
    "future_time_features": lambda sizes: sizes.floats(1, sizes.get("prediction_length", default=4), 0),
    "encoder_hidden_states": lambda sizes: sizes.floats(
        1, TOKENS, sizes.get("encoder_hidden_size", "cross_attention_dim", "hidden_size", default=32)
    ),
    "query_embeds": lambda sizes: sizes.floats(1, 6, sizes.width),
    # The first two numbers of a patch are its row and its column.
    "flattened_patches": lambda sizes: sizes.floats(
        1, 16, 2 + sizes.get("patch_embed_hidden_size", default=3 * sizes.patch**2)
    ).abs(),
    "feature_lens": lambda sizes: torch.tensor([64]),
    "mask": lambda sizes: torch.ones(1, 64, dtype=torch.bool),
    "mel_spectrogram": lambda sizes: sizes.floats(1, sizes.get("mel_dim", default=80), 64),
    "audio_input_ids": lambda sizes: _frames_of_codes(sizes, 4),
    "aspect_ratio_ids": lambda sizes: torch.ones(1, 1, dtype=torch.long),
    "aspect_ratio_mask": lambda sizes: torch.ones(1, 1, sizes.get("max_num_tiles", default=4), dtype=torch.long),
    "visual_feats": lambda sizes: sizes.floats(1, 4, sizes.get("visual_feat_dim", default=8)),
    "visual_pos": lambda sizes: sizes.floats(1, 4, sizes.get("visual_pos_dim", default=4)),
    "num_patches": lambda sizes: torch.tensor(TOKENS - 4),
    "input_features_mask": lambda sizes: torch.ones(1, 64, dtype=torch.long),
    "audio_mel": lambda sizes: sizes.floats(1, 64, sizes.get("input_feat_size", default=128)),
    "audio_mel_mask": lambda sizes: torch.zeros(1, 64, dtype=torch.bool),
    "states": lambda sizes: sizes.floats(1, TOKENS, sizes.get("state_dim", default=8)),
    "actions": lambda sizes: sizes.floats(1, TOKENS, sizes.get("act_dim", default=8)),
    **dict.fromkeys(("rewards", "returns_to_go"), lambda sizes: sizes.floats(1, TOKENS, 1)),
    "spectrogram": lambda sizes: sizes.floats(1, 64, sizes.get("model_in_dim", "num_mel_bins", default=16)),
}
"""Name of an argument to what models accept under it, the likeliest shape first."""
TRIES = 24


def _made(name: str, sizes: InputSizes) -> Iterator[Tensor]:
    found = MAKERS[name](sizes)
    return iter([found]) if isinstance(found, Tensor) else found


def _required(parameters: Mapping[str, Parameter]) -> list[str]:
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def transformers_examples(model: nn.Module, config: Mapping[str, Any], seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Inputs to try in turn, from the config and the names that `forward` asks for."""
    sizes = InputSizes(config, torch.Generator().manual_seed(seed))
    if (particular := PARTICULAR.get(str(config.get("model_type")))) is not None:
        yield particular(sizes)
    parameters = signature(model.forward).parameters
    main, known = str(getattr(model, "main_input_name", TEXT)), [name for name in parameters if name in MAKERS]
    required = [name for name in _required(parameters) if name in MAKERS]
    names = list(dict.fromkeys([main, *required] if main in parameters else required)) or known[:1]
    if config.get("is_encoder_decoder") and "decoder_input_ids" in parameters and "decoder_input_ids" not in names:
        names.append("decoder_input_ids")
    choices = [list(_made(name, sizes)) if name in MAKERS else [] for name in names]
    tried = itertools.islice(itertools.product(*choices), TRIES)
    found = [dict(zip(names, values, strict=True)) for values in tried]
    towers = [name for name in (IMAGE, *AUDIO) if name in parameters and name not in names]
    if "text_config" in config and towers and main == TEXT and found and config.get("model_type") in PAIRS:
        yield {**found[0], towers[0]: next(_made(towers[0], sizes))}
    # Some models need more than their signature says.
    extras = {name: next(_made(name, sizes)) for name in known if name not in names and name not in EITHER}
    sides = [name for name in extras if name in SIDE_INPUTS]
    for base in found:
        yield from _with_masks(base, {}, parameters)
        if sides:
            yield from _with_masks(base, {name: extras[name] for name in sides}, parameters)
    for base in found[:3] if set(extras) - set(sides) else ():
        yield from _with_masks(base, extras, parameters)
    if "inputs_embeds" in parameters and "input_ids" in names:
        yield {"inputs_embeds": next(_made("inputs_embeds", sizes))}


def _with_masks(
    base: Mapping[str, Tensor], more: Mapping[str, Tensor], parameters: Mapping[str, Parameter]
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


SIDE_INPUTS = (
    *("bbox", "encoder_hidden_states", "image_sizes", "spatial_shapes", "pixel_attention_mask", "grid_thw"),
    *("pixel_position_ids", "feature_lens", "xpath_tags_seq", "input_features_mask", "tgt_sizes"),
    *("visual_feats", "visual_pos"),
)
"""Arguments that come with the main input."""
EITHER = ("inputs_embeds", "hidden_states", "inputs", "images", "image", "position_ids", "decoder_input_ids")
"""Arguments that replace others."""
PAIRS = (
    *("clip", "siglip", "siglip2", "metaclip_2", "chinese_clip", "altclip", "align", "blip", "clipseg", "owlvit"),
    *("owlv2", "clap", "groupvit", "x_clip", "flava"),
)
"""Types that need a text and something else at once."""


# --- inputs of any model: by its config if it has one, else what its first layer can take ---

SEQUENCES = 3
"""Of features: another number than that of their tokens, so the two axes can be told apart."""
SIDES = (224, 32, 64, 256, 192)
"""Sides of square images that are tried if the size is unknown."""
SIDE_NAMES = ("img_size", "image_size", "input_size", "input_resolution")


def examples(model: nn.Module, config: Mapping[str, Any], seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Random inputs to try in turn, by the names of `forward`, the likeliest first; for checks, not for measurements.

    Modules that are not transformers' are called with one positional tensor, under the name `""`.
    """
    generator = torch.Generator().manual_seed(seed)
    if hasattr(model, "main_input_name"):
        yield from transformers_examples(model, config, seed)
        return
    if config.get("model_type") == "timm_vit":
        yield {"": torch.randn(1, *image_shape(model, config), generator=generator)}
    elif config.get("model_type") == "torch_encoder":
        attention = next(part for part in model.modules() if isinstance(part, nn.MultiheadAttention))
        shape = (1, TOKENS) if attention.batch_first else (TOKENS, 1)
        yield {"": torch.randn(*shape, attention.embed_dim, generator=generator)}
    required = _required(signature(model.forward).parameters)
    for first in _firsts(model, generator):
        for other in _others(first) if required[1:] else (first,):
            yield {"": first, **dict.fromkeys(required[1:], other)}


def with_memory(model: nn.Module, example: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The example with another sequence of another length for one optional argument; what runs so may be cross-attention.

    Without its context, a block that can attend to one often attends to its own sequence in its place.
    """
    first = example.get("")
    if hasattr(model, "main_input_name") or first is None or not 2 <= first.ndim <= 3:
        return
    for name, parameter in signature(model.forward).parameters.items():
        if parameter.default is None and name not in example:
            yield {**example, name: _shorter(first)}


def _shorter(first: Tensor) -> Tensor:
    return first.flip(0, 1)[:, : -max(1, first.shape[1] // 4)]


def _others(first: Tensor) -> Iterator[Tensor]:
    """What further required arguments could be; another sequence of another length shows cross-attention, so it is first.

    Then another one of the same length; query, key and value of one sequence; masks that hide nothing.
    """
    if 2 <= first.ndim <= 3:
        yield _shorter(first)
        yield first.flip(0, 1)
    yield first
    if 2 <= first.ndim <= 3:
        for hides_nothing in (True, False):
            yield torch.full(first.shape[:2], hides_nothing)


def _firsts(model: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
    """What the first layer could take, after what a timm model says of itself."""
    declared = getattr(model, "default_cfg", None)
    size: Sequence[int] = (declared.get("input_size") if isinstance(declared, Mapping) else None) or ()
    if len(size) == 3:
        yield torch.randn(1, *size, generator=generator)
    if any(hasattr(part, "patch_embed") for part in model.modules()):
        for height, width in _sides(model):
            yield torch.randn(1, 3, height, width, generator=generator)
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            yield torch.randint(0, part.num_embeddings, (SEQUENCES, TOKENS), generator=generator)
        elif isinstance(part, nn.Conv2d):
            for height, width in _sides(model):
                yield torch.randn(1, part.in_channels, height, width, generator=generator)
        elif isinstance(part, nn.Conv1d):
            yield torch.randn(1, part.in_channels, 64 * TOKENS, generator=generator)
        elif (features := _width(part)) is not None:
            yield torch.randn(SEQUENCES, TOKENS, features, generator=generator)
        else:
            continue
        break
    widths = {parameter.shape[-1] for parameter in model.parameters() if parameter.ndim > 1}
    for width in sorted(widths):
        yield torch.randn(SEQUENCES, TOKENS, width, generator=generator)


def _width(part: nn.Module) -> int | None:
    if isinstance(part, nn.MultiheadAttention):
        return part.embed_dim
    if isinstance(part, nn.Linear):
        return part.in_features
    if isinstance(part, nn.LayerNorm | nn.RMSNorm):
        return int(part.weight.shape[-1]) if part.weight is not None else None
    return None


def _sides(model: nn.Module) -> Iterator[tuple[int, int]]:
    for part in model.modules():
        for name in SIDE_NAMES:
            side = getattr(part, name, None)
            if isinstance(side, int) and side > 1:
                yield side, side
            elif isinstance(side, tuple | list) and len(side) == 2 and all(isinstance(s, int) for s in side):
                yield side[0], side[1]
    for side in SIDES:
        yield side, side
