"""What the config of a model of transformers says about its inputs, and inputs of these sizes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TOKENS = 12
FIRST_ID = 3
"""Smaller ids are often padding, beginning and end."""


class Sizes:
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

    def inside(self, part: str) -> "Sizes":
        """What the config of a part says."""
        return Sizes(self.config.get(part) or {}, self.generator)

    @property
    def width(self) -> int:
        return self.get("hidden_size", "d_model", "embed_dim", "n_embd", "dim", default=32)

    @property
    def channels(self) -> int:
        return self.get("num_channels", "in_channels", "in_chans", default=3)

    @property
    def side(self) -> int:
        return self.get("image_size", "img_size", "input_size", "crop_size", default=64)

    @property
    def patch(self) -> int:
        return self.get("patch_size", "encoder_patch_size", "vision_patch_size", default=8)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def ids(self, length: int = TOKENS) -> Tensor:
        text = self.config.get("text_config") or self.config
        vocabulary = text.get("vocab_size") if isinstance(text, Mapping) else None
        vocabulary = vocabulary if isinstance(vocabulary, int) else self.get("vocab_size", default=100)
        special = {
            value for name, value in self.config.items() if name.endswith(("_id", "_index")) and isinstance(value, int)
        }
        allowed = [number for number in range(min(vocabulary, 2048)) if number not in special and number >= FIRST_ID]
        allowed = allowed or list(range(vocabulary))
        chosen = torch.randint(0, len(allowed), (1, length), generator=self.generator)
        return torch.tensor(allowed)[chosen]
