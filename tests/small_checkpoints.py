"""Small checkpoints of ten families as bytes, made in no time: names and shapes as the real ones have, random numbers."""

import json
import random
from collections.abc import Callable

import numpy as np
from safetensors.numpy import save

WIDTH, LAYERS, HEADS = 16, 2, 2
Shapes = dict[str, tuple[int, ...]]


def _linear(name: str, out: int = WIDTH, in_: int = WIDTH, *, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (out, in_), **({f"{name}.bias": (out,)} if bias else {})}


def _norm(name: str, *, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (WIDTH,), **({f"{name}.bias": (WIDTH,)} if bias else {})}


def _llama(i: int, bias: bool = False) -> Shapes:
    block = f"model.layers.{i}"
    found = _norm(f"{block}.input_layernorm") | _norm(f"{block}.post_attention_layernorm")
    for part in "qkv":
        found |= _linear(f"{block}.self_attn.{part}_proj", bias=bias)
    return found | _linear(f"{block}.self_attn.o_proj") | _linear(f"{block}.mlp.up_proj", 4 * WIDTH)


def _qwen2(i: int) -> Shapes:
    return _llama(i, bias=True)


def _gpt2(i: int) -> Shapes:
    found = _norm(f"h.{i}.ln_1", bias=True) | _norm(f"h.{i}.ln_2", bias=True)
    found |= {f"h.{i}.attn.c_attn.weight": (WIDTH, 3 * WIDTH), f"h.{i}.attn.c_attn.bias": (3 * WIDTH,)}
    return found | {f"h.{i}.attn.c_proj.weight": (WIDTH, WIDTH), f"h.{i}.attn.c_proj.bias": (WIDTH,)}


def _bert(i: int) -> Shapes:
    block = f"encoder.layer.{i}"
    found: Shapes = {}
    for part in ("query", "key", "value"):
        found |= _linear(f"{block}.attention.self.{part}", bias=True)
    found |= _linear(f"{block}.attention.output.dense", bias=True)
    return (
        found | _norm(f"{block}.attention.output.LayerNorm", bias=True) | _norm(f"{block}.output.LayerNorm", bias=True)
    )


def _distilbert(i: int) -> Shapes:
    block = f"transformer.layer.{i}"
    found: Shapes = {}
    for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
        found |= _linear(f"{block}.attention.{part}", bias=True)
    return found | _norm(f"{block}.sa_layer_norm", bias=True) | _norm(f"{block}.output_layer_norm", bias=True)


def _neox(i: int) -> Shapes:
    block = f"gpt_neox.layers.{i}"
    found = _linear(f"{block}.attention.query_key_value", 3 * WIDTH, bias=True) | _linear(
        f"{block}.attention.dense", bias=True
    )
    return found | _norm(f"{block}.input_layernorm", bias=True) | _norm(f"{block}.post_attention_layernorm", bias=True)


def _opt(i: int) -> Shapes:
    block = f"model.decoder.layers.{i}"
    found: Shapes = {}
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        found |= _linear(f"{block}.self_attn.{part}", bias=True)
    return found | _norm(f"{block}.self_attn_layer_norm", bias=True) | _norm(f"{block}.final_layer_norm", bias=True)


def _vit(i: int) -> Shapes:
    block = f"encoder.layer.{i}"
    found: Shapes = {}
    for part in ("query", "key", "value"):
        found |= _linear(f"{block}.attention.attention.{part}", bias=True)
    found |= _linear(f"{block}.attention.output.dense", bias=True)
    return found | _norm(f"{block}.layernorm_before", bias=True) | _norm(f"{block}.layernorm_after", bias=True)


FAMILIES: dict[str, Callable[[int], Shapes]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "gemma": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
    "distilbert": _distilbert,
    "gpt_neox": _neox,
    "opt": _opt,
    "vit": _vit,
}
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "intermediate_size": 4 * WIDTH,
    "num_key_value_heads": HEADS,
    "vocab_size": 8,
}
OTHER_NAMES = {
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS},
    "distilbert": {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS},
}


def config_of(family: str) -> dict[str, object]:
    return {"model_type": family, **OTHER_NAMES.get(family, SIZES)}


def checkpoint(family: str, seed: int) -> dict[str, bytes]:
    """The files of a repository; another seed, other weights."""
    numbers = np.random.default_rng([seed, sorted(FAMILIES).index(family)])
    shapes = {name: shape for i in range(LAYERS) for name, shape in FAMILIES[family](i).items()}
    shapes["embeddings.word_embeddings.weight"] = (64, WIDTH)
    tensors = {
        name: (0.3 * numbers.standard_normal(shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    return {"config.json": json.dumps(config_of(family)).encode(), "model.safetensors": save(tensors)}


def repositories(count: int, seed: int = 0) -> tuple[dict[str, dict[str, bytes]], dict[str, set[str]]]:
    """So many repositories of all families, and which of them are duplicates, gated, broken, packed or empty."""
    draw = random.Random(seed)
    found: dict[str, dict[str, bytes]] = {}
    kinds: dict[str, set[str]] = {kind: set() for kind in ("duplicate", "gated", "broken", "refused", "empty")}
    originals: list[str] = []
    for number in range(count):
        family = sorted(FAMILIES)[number % len(FAMILIES)]
        name = f"{family}/model-{number:04d}"
        kind = draw.choices(("plain", *kinds), weights=(80, 10, 3, 3, 2, 2))[0]
        if kind == "duplicate" and originals:
            source = draw.choice(originals)
            found[name] = dict(found[source])
            kinds["duplicate"].add(name)
            continue
        files = checkpoint(family, number)
        if kind == "broken":
            files["model.safetensors"] = files["model.safetensors"][:-100]
        elif kind == "refused":
            files["config.json"] = json.dumps({"model_type": "mamba"}).encode()
        elif kind == "empty":
            del files["model.safetensors"]
        found[name] = files
        if kind in ("plain", "duplicate"):
            originals.append(name)
        else:
            kinds[kind].add(name)
    return found, kinds
