"""Small sound checkpoints of every declared family, made from the declarations themselves."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oversmooth.models.declaration import NORM_ROLES, Arch
from oversmooth.models.families import ARCHITECTURES
from oversmooth.models.identify import gguf_form

N_HEADS, D_HEAD = 2, 4
WIDTH = N_HEADS * D_HEAD
FAMILIES = [arch for name, arch in ARCHITECTURES.items() if name != "torch_attention"]
GGUF_FAMILIES = [replace(gguf_form(arch), name=name) for arch in FAMILIES for name in arch.gguf]


@dataclass(frozen=True)
class Tiny:
    arch: Arch
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def tiny_checkpoint(rng: random.Random, arch: Arch) -> Tiny:
    """A checkpoint of one to three blocks, drawn with the generator."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    blocks = 1 if arch.shared_layers else rng.randint(1, 3)
    n_kv = {"heads": N_HEADS, "config": rng.choice((1, N_HEADS))}.get(str(arch.n_kv), arch.n_kv)
    config: dict[str, Any] = {
        "model_type": arch.model_types[0],
        "hidden_size": WIDTH,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": n_kv,
        "num_hidden_layers": blocks,
    }
    config |= {condition.key: not condition.value for condition in arch.when}
    if arch.residual_gain:
        config[arch.residual_gain] = 0.5
    tensors: dict[str, Tensor] = {}
    for i in range(blocks):
        block = arch.paths.block.split("|")[0].format(i=i)
        for path, shape in _shapes(arch, int(n_kv)).items():
            stored = shape[::-1] if arch.stored == "in_out" and len(shape) == 2 else shape
            tensors[f"{block}.{path}"] = torch.randn(stored, generator=generator)
    if rng.random() < 0.3:
        dtype = rng.choice((torch.float16, torch.bfloat16, torch.float64))
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return Tiny(arch, config, tensors)


def _shapes(arch: Arch, n_kv: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one block, each with its shape (out, in)."""

    def tensor(path: str, what: str) -> str:
        first = path.split("|")[0]
        return first.replace("*", what) if "*" in first else f"{first}.{what}"

    rows = n_kv * D_HEAD if arch.paths.v else (N_HEADS + 2 * n_kv) * D_HEAD
    shapes: dict[str, tuple[int, ...]] = {
        tensor(arch.paths.v or arch.paths.qkv, "weight"): (rows, WIDTH),
        tensor(arch.paths.o, "weight"): (WIDTH, WIDTH),
        tensor(arch.paths.o, "bias"): (WIDTH,),
    }
    for role in NORM_ROLES:
        if path := getattr(arch.paths, role):
            shapes[tensor(path, "weight")] = (WIDTH,)
            if arch.norm == "layer":
                shapes[tensor(path, "bias")] = (WIDTH,)
    if arch.paths.attn_gain:
        shapes[arch.paths.attn_gain.split("|")[0]] = (WIDTH,)
    return shapes
