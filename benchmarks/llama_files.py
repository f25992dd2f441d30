"""Folders of LLaMA-like checkpoints in bfloat16 of true size, tensor by tensor, for benchmarks of reading."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

Numbers = Callable[[str, tuple[int, ...]], torch.Tensor | None]
"""What is written at a name and shape; `None` leaves a hole in the file, which takes no space on the disk."""


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    width: int
    heads: int
    value_heads: int
    head_width: int
    mlp: int
    vocabulary: int
    has_output_matrix: bool = True

    def shapes(self, layers: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, in the order of its names in the file."""
        keys, queries = self.value_heads * self.head_width, self.heads * self.head_width
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for i in range(layers):
            block = f"model.layers.{i}"
            found |= {
                f"{block}.input_layernorm.weight": (self.width,),
                f"{block}.mlp.down_proj.weight": (self.width, self.mlp),
                f"{block}.mlp.gate_proj.weight": (self.mlp, self.width),
                f"{block}.mlp.up_proj.weight": (self.mlp, self.width),
                f"{block}.post_attention_layernorm.weight": (self.width,),
                f"{block}.self_attn.k_proj.weight": (keys, self.width),
                f"{block}.self_attn.o_proj.weight": (self.width, queries),
                f"{block}.self_attn.q_proj.weight": (queries, self.width),
                f"{block}.self_attn.v_proj.weight": (keys, self.width),
            }
        found["model.norm.weight"] = (self.width,)
        return found | ({"lm_head.weight": (self.vocabulary, self.width)} if self.has_output_matrix else {})

    def config(self, layers: int) -> dict[str, object]:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM" if self.has_output_matrix else "LlamaModel"],
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.value_heads,
            "head_dim": self.head_width,
            "num_hidden_layers": layers,
            "vocab_size": self.vocabulary,
            "dtype": "bfloat16",
            "max_position_embeddings": 2048,
        }


def write_llama(folder: Path, sizes: LlamaSizes, layers: int, numbers: Numbers) -> Path:
    """The folder, with `config.json` and one safetensors file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sizes.config(layers)))
    shapes = sizes.shapes(layers)
    ends = np.cumsum([2 * int(np.prod(shape)) for shape in shapes.values()]).tolist()
    places = dict(zip(shapes, zip([0, *ends[:-1]], ends, strict=True), strict=True))
    header = {name: {"dtype": "BF16", "shape": shapes[name], "data_offsets": places[name]} for name in shapes}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        base = file.tell()
        for name, shape in shapes.items():
            if (tensor := numbers(name, shape)) is not None:
                file.seek(base + places[name][0])
                file.write(tensor.bfloat16().view(torch.uint8).numpy().data)
        file.truncate(base + ends[-1])
    return folder
