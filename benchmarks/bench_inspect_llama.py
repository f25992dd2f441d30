"""Claims for `oversmooth inspect FOLDER --format json` at the geometry of LLaMA-3-8B (width 4096, 32 heads, 8 value heads):

1. at least 10 times faster per layer than the dense route to the same two spectra, which takes the eigenvalues of the
   4096 x 4096 map and of the one with the norm folded in. `inspect` also has every head, norms and symmetry, and reads
   and hashes the file; for its heads the dense route would need 32 more such problems, which are not counted;
2. peak memory under 1.5 GiB;
3. peak memory of 32 layers at most 1.05 times that of 8 layers.

The checkpoint has the names, the header and the size of the real one (16 GB in bfloat16); what `inspect` reads holds
random numbers of trained scale, everything else is a hole in the file, so that it takes 1.3 GB of disk. The command
runs as a process of its own: start, imports and JSON are part of its time. The file is in the page cache, as it is when
it has just been downloaded. The dense eigenvalues are timed on one layer, with one thread and with two, and the faster
counts; the second is given up once it is slower than the first. Both take turns and the shortest time of each counts,
but the largest peak. Files are deleted at the end. The ratio to one dense problem per layer is in the numbers.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from llama_files import LlamaSizes, write_llama
from scipy.optimize import linear_sum_assignment

WIDTH, HEADS, N_KV, D_HEAD = 4096, 32, 8, 128
SIZES = LlamaSizes(width=WIDTH, heads=HEADS, value_heads=N_KV, head_width=D_HEAD, mlp=14336, vocabulary=128256)
LAYERS = (8, 32)
SCALE = 0.02
"""Standard deviation of the weights: about that of the trained matrices."""
ORDER = (8, 32, 8)
"""Runs in this order, each followed by the dense route."""
SPEED_CLAIM, PEAK_CLAIM, GROWTH_CLAIM = 10.0, 1.5 * 2**30, 1.05


def random_tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """What is written at this name; `None` for a hole."""
    if name.endswith("norm.weight"):
        return 1 + 0.2 * torch.randn(shape)
    return SCALE * torch.randn(shape) if "v_proj" in name or "o_proj" in name else None


def write_checkpoint(folder: Path, layers: int) -> Path:
    """A LLaMA folder of true size with holes where nothing is read."""
    return write_llama(folder, SIZES, layers, random_tensor)


def inspect_command(folder: Path) -> list[str]:
    return [sys.executable, "-c", "from oversmooth.cli import main; main()", "inspect", str(folder), "--format", "json"]


# --- the dense route, in a process of its own -----------------------------------------------------------------------


def dense_layer(folder: Path, threads: int, save: Path) -> None:
    """Eigenvalues of the two 4096 x 4096 maps of layer 0, saved; prints the seconds that each took."""
    from safetensors import safe_open

    torch.set_num_threads(threads)
    with safe_open(folder / "model.safetensors", "pt") as file:
        w_v = file.get_tensor("model.layers.0.self_attn.v_proj.weight").double().unflatten(0, (N_KV, D_HEAD))
        w_o = file.get_tensor("model.layers.0.self_attn.o_proj.weight").double()
        norm = file.get_tensor("model.layers.0.input_layernorm.weight").double()
    plain = w_o @ w_v.repeat_interleave(HEADS // N_KV, 0).flatten(0, 1)
    found, seconds = [], []
    for matrix in (plain, plain * norm):
        start = time.perf_counter()
        found.append(torch.linalg.eigvals(matrix).numpy())
        seconds.append(time.perf_counter() - start)
    np.save(save, np.stack(found))
    print(json.dumps(seconds))


def time_dense(folder: Path, threads: int, save: Path, give_up: float | None = None) -> list[float] | None:
    """Seconds of the two dense problems; `None` where both together took longer than `give_up`."""
    command = [sys.executable, __file__, "dense", str(folder), str(threads), str(save)]
    limit = give_up + 20 if give_up else None  # start and imports do not count
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit).stdout
    except subprocess.TimeoutExpired:
        return None
    return list(json.loads(output))


def assert_same_numbers(layer: dict[str, Any], dense: np.ndarray) -> float:
    """Largest distance of a paired eigenvalue, which has to be rounding."""
    largest = 0.0
    for found, expected in zip((layer["plain"], layer["folded"]), dense, strict=True):
        mine = np.array([complex(*value) for value in found["eigenvalues"]])
        ordered = expected[np.abs(expected).argsort()]
        np.testing.assert_allclose(ordered[: -len(mine)], 0, atol=1e-9)
        distance = np.abs(mine[:, None] - ordered[-len(mine) :])
        largest = max(largest, distance[linear_sum_assignment(distance)].max())
        np.testing.assert_allclose(found["rho_dc"], np.abs(1 + expected).max(), rtol=1e-9)
    np.testing.assert_allclose(largest, 0, atol=1e-9)
    return float(largest)


def main() -> None:
    harness.fix()
    with tempfile.TemporaryDirectory(prefix="oversmooth-bench-") as name:
        place = Path(name)
        folders = {layers: write_checkpoint(place / f"layers-{layers}", layers) for layers in LAYERS}
        file_bytes = (folders[LAYERS[-1]] / "model.safetensors").stat().st_size
        values = place / "dense.npy"
        seconds: dict[int, list[float]] = {layers: [] for layers in LAYERS}
        peaks: dict[int, list[int]] = {layers: [] for layers in LAYERS}
        bytes_read: dict[int, int] = {}
        dense: list[list[float]] = []
        for layers in ORDER:
            text, elapsed, peak_bytes = harness.run_measured(inspect_command(folders[layers]))
            seconds[layers].append(elapsed)
            peaks[layers].append(peak_bytes)
            result = json.loads(text)
            assert len(result["layers"]) == layers
            bytes_read[layers] = result["provenance"]["bytes_read"]
            dense.append(time_dense(folders[layers], 1, values) or [])
            error = assert_same_numbers(result["layers"][0], np.load(values))
        one_thread = min(map(sum, dense))
        two_threads = time_dense(folders[LAYERS[-1]], 2, place / "again.npy", give_up=one_thread)
    per_layer = min(min(seconds[layers]) / layers for layers in LAYERS)
    peak = {layers: max(peaks[layers]) for layers in LAYERS}
    both = min(one_thread, sum(two_threads) if two_threads else one_thread)
    ratio, growth = both / per_layer, peak[LAYERS[-1]] / peak[LAYERS[0]]
    numbers = {
        "geometry": {"width": WIDTH, "heads": HEADS, "value_heads": N_KV, "d_head": D_HEAD, "stored": "bfloat16"},
        "file_bytes": file_bytes,
        "bytes_read": bytes_read[LAYERS[-1]],
        "seconds": {f"{layers} layers": seconds[layers] for layers in LAYERS},
        "seconds_per_layer": per_layer,
        "dense_seconds_of_plain_and_folded": {
            "one thread": dense,
            "two threads": two_threads or "given up, slower than one thread",
        },
        "dense_layers_timed": 1,
        "ratio_to_one_dense_problem": min(map(min, [*dense, two_threads or dense[0]])) / per_layer,
        "peak_bytes": {f"{layers} layers": peaks[layers] for layers in LAYERS},
        "peak_ratio_32_to_8_layers": growth,
        "largest_difference_of_an_eigenvalue": error,
    }
    gib = {layers: peak[layers] / 2**30 for layers in LAYERS}
    harness.write(
        "inspect_llama_speed",
        claim=f"`inspect` at LLaMA-3-8B geometry: at least {SPEED_CLAIM:g} times faster per layer",
        ours=f"{per_layer:.1f} s per layer",
        alternative=f"dense eigenvalues of the two 4096 x 4096 maps: {both:.0f} s per layer",
        ratio=ratio,
        numbers=numbers,
    )
    harness.write(
        "inspect_llama_memory",
        claim=f"`inspect` of a {file_bytes / 1e9:.0f} GB checkpoint: peak memory under 1.5 GiB, whatever the depth",
        ours=f"{gib[32]:.2f} GiB for 32 layers",
        alternative=f"the same for 8 layers: {gib[8]:.2f} GiB",
        ratio=growth,
        numbers=numbers,
    )
    print(f"speed: {ratio:.1f} times faster; peak {gib[8]:.2f} and {gib[32]:.2f} GiB for 8 and 32 layers")
    assert ratio >= SPEED_CLAIM, f"claimed {SPEED_CLAIM:g}, measured {ratio:.1f}"
    assert max(peak.values()) < PEAK_CLAIM, f"peak of {max(gib.values()):.2f} GiB"
    assert growth <= GROWTH_CLAIM, f"32 layers take {growth:.3f} times the memory of 8"


if __name__ == "__main__":
    if sys.argv[1:2] == ["dense"]:
        dense_layer(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
