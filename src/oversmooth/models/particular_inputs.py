"""Inputs of model types of transformers whose `forward` does not tell by its names what it takes.

They come before what `transformers_examples` makes up from names and config. `Sizes` reads the config.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oversmooth.models.input_sizes import TOKENS, Sizes

GRID = 4
"""Patches along a side of a small image."""


def _frames_of_codes(sizes: Sizes, codebooks: int) -> Tensor:
    return sizes.ids(TOKENS * codebooks).reshape(1, TOKENS, codebooks)


def _whole_windows(sizes: Sizes) -> Tensor:
    """Token ids that fill windows of attention: padding would be queries that see nothing."""
    window = sizes.get("attention_window", default=TOKENS)
    return sizes.ids(window * -(-TOKENS // window))


def _row_of_patches(sizes: Sizes) -> dict[str, Tensor]:
    """The patches of an image side by side in one row, and the grid that they were cut from."""
    row = sizes.floats(1, sizes.channels, sizes.patch, GRID * GRID * sizes.patch)
    return {"pixel_values": row, "target_sizes": torch.tensor([[GRID, GRID]])}


def _tiled_image(sizes: Sizes) -> dict[str, Tensor]:
    tiles = sizes.get("max_num_tiles", default=4)
    return {
        "pixel_values": sizes.floats(1, 1, tiles, sizes.channels, sizes.side, sizes.side),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
    }


def _image_in_text(sizes: Sizes) -> dict[str, Tensor]:
    vision = sizes.inside("vision_config")
    return {
        "input_ids": sizes.ids(),
        "pixel_values": sizes.floats(1, 1, 3, vision.side, vision.side),
        "image_attention_mask": torch.ones(1, TOKENS, 1, dtype=torch.long),
    }


def _decoded_beside_context(sizes: Sizes) -> dict[str, Tensor]:
    layers = sizes.config.get("target_layer_ids") or [0]
    return {
        "noise_embeds": sizes.floats(1, TOKENS, sizes.width),
        "context_hidden_states": sizes.floats(1, GRID, sizes.width * len(layers)),
        "position_ids": torch.arange(TOKENS + GRID)[None],
    }


PARTICULAR: Mapping[str, Callable[[Sizes], dict[str, Tensor]]] = {
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
