"""Claims for `inspect` at the geometry of DeepSeek-V3 (width 7168, 128 heads, latent of 512):

1. at least 20 times faster than the dense route to the same two spectra of the layer, the eigenvalues of the 7168 x 7168
   map and of the one with its norms folded in. `inspect` also has the spectrum of all 128 heads, for which the dense route
   would need 128 more such problems; they are not counted. The ratio to a single dense problem is in the numbers;
2. peak memory under 1.5 GiB.

One layer is written in bfloat16 with the names and shapes of the real one, random numbers of trained scale in it. Ours is a
process of its own: finding the family, reading, hashing and JSON are part of its time; start and imports, which the dense
route needs too, are not. Of the dense route only the eigenvalues are timed, once. Both sides have the same threads and take
turns; the shortest time of ours counts, and the largest peak, that of the whole process.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from bench_inspect_llama import assert_same_numbers
from safetensors import safe_open
from safetensors.torch import save_file

WIDTH, HEADS, LATENT, NOPE, ROPE, D_HEAD = 7168, 128, 512, 128, 64, 128
SCALE = 0.02
SPEED_CLAIM, PEAK_CLAIM = 20.0, 1.5 * 2**30
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": D_HEAD,
}


def inspect(folder: Path) -> None:
    """Prints the seconds of one inspection, after what it imports was imported, and its result."""
    import oversmooth as osm
    from oversmooth.spectra import inspect as inspection  # noqa: F401

    harness.fix()
    start = time.perf_counter()
    text = osm.inspect(folder).to_json()
    print(time.perf_counter() - start, text, sep="\n")


def inspected(folder: Path) -> tuple[float, dict[str, Any], int]:
    """Seconds, result and peak bytes of the process."""
    printed, _, peak = harness.run_measured([sys.executable, __file__, str(folder)])
    seconds, _, text = printed.partition("\n")
    return float(seconds), json.loads(text), peak


def write_checkpoint(folder: Path) -> Path:
    """One layer of DeepSeek-V3: what makes its values, and its output projection."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {
        "kv_a_proj_with_mqa": (LATENT + ROPE, WIDTH),
        "kv_b_proj": (HEADS * (NOPE + D_HEAD), LATENT),
        "o_proj": (WIDTH, HEADS * D_HEAD),
    }
    block = "model.layers.0"
    tensors = {f"{block}.self_attn.{n}.weight": (SCALE * torch.randn(s)).bfloat16() for n, s in shapes.items()}
    for name, width in {"input_layernorm": WIDTH, "self_attn.kv_a_layernorm": LATENT}.items():
        tensors[f"{block}.{name}.weight"] = (1 + 0.2 * torch.randn(width)).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


def dense(folder: Path) -> tuple[list[float], np.ndarray]:
    """Seconds and eigenvalues of the plain and of the folded map, formed head by head as anyone would."""
    with safe_open(folder / "model.safetensors", "pt") as file:

        def read(name: str) -> torch.Tensor:
            return file.get_tensor(f"model.layers.0.{name}.weight").double()

        down, latent_norm = read("self_attn.kv_a_proj_with_mqa")[:LATENT], read("self_attn.kv_a_layernorm")
        up = read("self_attn.kv_b_proj").unflatten(0, (HEADS, NOPE + D_HEAD))[:, NOPE:]
        w_o, norm = read("self_attn.o_proj"), read("input_layernorm")
    written = w_o @ up.flatten(0, 1)
    del w_o
    seconds, found = [], []
    for matrix in (written @ down, (written * latent_norm) @ (down * norm)):
        start = time.perf_counter()
        found.append(torch.linalg.eigvals(matrix).numpy())
        seconds.append(time.perf_counter() - start)
    return seconds, np.stack(found)


def main() -> None:
    harness.fix()
    with tempfile.TemporaryDirectory(prefix="oversmooth-bench-") as name:
        folder = write_checkpoint(Path(name) / "layer")
        runs = [inspected(folder)]
        dense_seconds, expected = dense(folder)
        runs.append(inspected(folder))
        result = runs[-1][1]
    error = assert_same_numbers(result["layers"][0], expected)
    assert len(result["layers"][0]["heads"]) == HEADS
    seconds, peak = min(run[0] for run in runs), max(run[2] for run in runs)
    ratio = sum(dense_seconds) / seconds
    path = harness.write(
        "inspect_deepseek",
        claim=f"`inspect` at DeepSeek-V3 geometry: at least {SPEED_CLAIM:g} times faster per layer, peak under 1.5 GiB",
        ours=f"{seconds:.1f} s per layer and {peak / 2**30:.2f} GiB, with the spectra of all {HEADS} heads",
        alternative=f"dense eigenvalues of the two {WIDTH} x {WIDTH} maps: {sum(dense_seconds):.0f} s per layer",
        ratio=ratio,
        numbers={
            "geometry": {"width": WIDTH, "heads": HEADS, "latent": LATENT, "d_head": D_HEAD, "stored": "bfloat16"},
            "seconds": [run[0] for run in runs],
            "peak_bytes": [run[2] for run in runs],
            "dense_seconds_of_plain_and_folded": dense_seconds,
            "ratio_to_one_dense_problem": min(dense_seconds) / seconds,
            "largest_difference_of_an_eigenvalue": error,
        },
    )
    print(f"{path}: {ratio:.1f} times faster, peak {peak / 2**30:.2f} GiB")
    assert ratio >= SPEED_CLAIM, f"claimed {SPEED_CLAIM:g}, measured {ratio:.1f}"
    assert peak < PEAK_CLAIM, f"peak of {peak / 2**30:.2f} GiB"


if __name__ == "__main__":
    inspect(Path(sys.argv[1])) if sys.argv[1:] else main()
