"""Inputs that a model accepts, made up for checks: by its config where it has one, by its first layer where not.

A model without a config is fed what its first layer can take: token ids for an embedding, an image for a convolution in
two dimensions, features for anything else. Features have three sequences of twelve tokens, so that the sizes of the two
axes tell them apart.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.models.identify import declared_for
from oversmooth.models.inputs import EXAMPLE_TOKENS, example_inputs
from oversmooth.models.transformers_examples import transformers_examples

SEQUENCES = 3
SIDES = (224, 32, 64, 256, 192)
"""Sides of square images that are tried where nothing says the size."""
SIDE_NAMES = ("img_size", "image_size", "input_size", "input_resolution")


def examples(model: nn.Module, config: Mapping[str, Any], seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Inputs to try in turn, the likeliest first."""
    generator = torch.Generator().manual_seed(seed)
    if hasattr(model, "main_input_name"):
        if declared_for(str(config.get("model_type"))):
            yield example_inputs(model, config, generator)
        yield from transformers_examples(model, config, seed)
        return
    if config.get("model_type") in OURS:
        yield example_inputs(model, config, generator)
    required = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD,)
    ]
    for first in _firsts(model, generator):
        # Several required arguments are most often query, key and value of one sequence.
        yield {"": first, **dict.fromkeys(required[1:], first)}


OURS = ("timm_vit", "torch_encoder", "torch_attention")
"""Names that we give models without a config of their own."""


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
            yield torch.randint(0, part.num_embeddings, (SEQUENCES, EXAMPLE_TOKENS), generator=generator)
        elif isinstance(part, nn.Conv2d):
            for height, width in _sides(model):
                yield torch.randn(1, part.in_channels, height, width, generator=generator)
        elif isinstance(part, nn.Conv1d):
            yield torch.randn(1, part.in_channels, 64 * EXAMPLE_TOKENS, generator=generator)
        elif (features := _width(part)) is not None:
            yield torch.randn(SEQUENCES, EXAMPLE_TOKENS, features, generator=generator)
        else:
            continue
        break
    widths = {parameter.shape[-1] for parameter in model.parameters() if parameter.ndim > 1}
    for width in sorted(widths):
        yield torch.randn(SEQUENCES, EXAMPLE_TOKENS, width, generator=generator)


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
