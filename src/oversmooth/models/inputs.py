"""What a model is fed: the kinds of input it takes, how large its images are, which token ids it knows.

The one place that knows; data are read, batches are checked and examples are made up by it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import WrongBatch

IMAGE, TEXT, AUDIO = "pixel_values", "input_ids", ("input_values", "input_features")
"""Names of transformers' main inputs."""
TWO_TOWERS = ("clip", "siglip")
"""Models that read a text and an image at once; other composite models read text alone."""
EXAMPLE_TOKENS = 12
IMAGE_SIDE = 224
"""Of models whose config does not say it."""
POSITIONS_AFTER_PADDING = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "data2vec-text",
)
"""Model types whose positions begin behind the padding id, so that a few fewer tokens fit."""


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


def is_composite(config: Mapping[str, Any]) -> bool:
    return "text_config" in config and "vision_config" in config


def image_shape(model: nn.Module, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """`(channels, height, width)` of the images that the model was built for."""
    embed = getattr(model, "patch_embed", None)
    if embed is not None:
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


def example_inputs(model: nn.Module, config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs that the model accepts, by the names of its `forward`; for checks, not for measurements.

    Modules that are not transformers' are called with one positional tensor, under the name `""`.
    """

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def ids(sizes: Mapping[str, Any]) -> Tensor:
        length = min(EXAMPLE_TOKENS, sizes.get("max_position_embeddings") or EXAMPLE_TOKENS)
        return torch.randint(3, int(sizes.get("vocab_size") or 100), (1, length), generator=generator)

    model_type = config["model_type"]
    if model_type == "timm_vit":
        return {"": floats(1, *image_shape(model, config))}
    if model_type in ("torch_encoder", "torch_attention"):
        attention = next(part for part in model.modules() if isinstance(part, nn.MultiheadAttention))
        shape = (1, EXAMPLE_TOKENS) if attention.batch_first else (EXAMPLE_TOKENS, 1)
        return {"": floats(*shape, attention.embed_dim)}
    found: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", TEXT)
    if main == "input_features":
        found[main] = floats(1, config["num_mel_bins"], 2 * config["max_source_positions"])
    elif main == "input_values":
        stride = torch.tensor(config["conv_stride"]).prod().item()
        found[main] = floats(1, int(stride) * (EXAMPLE_TOKENS + 8))
    elif main == IMAGE or "vision_config" in config:
        found[IMAGE] = floats(1, *image_shape(model, config))
    if main == TEXT or "text_config" in config:
        found[TEXT] = ids(config.get("text_config") or config)
    if config.get("is_encoder_decoder"):
        found["decoder_input_ids"] = ids({**config, "max_position_embeddings": config.get("max_target_positions")})
    return found
