"""Claims for `measure` and `predict` of a LLaMA-like checkpoint of 6 GB in bfloat16 whose weights stay in their file:

1. peak memory below 2 GiB each;
2. at most 2.5 times as long as reading the file once plus the arithmetic of the pass.

Arithmetic is the straight line through what the same verb takes in memory on the first two and the first six layers of the
same checkpoint. The answer is checked first: on two layers, numbers with and without offloading agree to 1e-4. The file is
written here (random numbers of trained scale, the same for every layer but for their size) and deleted at the end; it is in
the page cache when it is read, as it is after a download, for both sides. Every run is a process of its own, and the time of
start and imports is left out. Beside it, in the numbers: seconds per layer through accelerate's offloading.
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
from llama_files import LlamaSizes, write_llama

SIZES = LlamaSizes(
    width=3072, heads=24, value_heads=8, head_width=128, mlp=8192, vocabulary=32000, has_output_matrix=False
)
LAYERS = 29
FEW, MORE = 2, 6
SCALE = 0.02
SEQUENCES, TOKENS = 4, 32
PEAK_CLAIM, TIME_CLAIM = 2 * 2**30, 2.5
CHUNK = 64 * 2**20


def write_checkpoint(folder: Path, layers: int) -> Path:
    drawn: dict[tuple[int, ...], torch.Tensor] = {}

    def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if shape not in drawn:
            drawn[shape] = torch.randn(shape)
        block = int(name.split(".")[2]) if ".layers." in name else layers
        size = 1 + block / 100
        return 1 + 0.1 * drawn[shape] * size if len(shape) == 1 else SCALE * size * drawn[shape]

    return write_llama(folder, SIZES, layers, numbers)


def run(verb: str, folder: Path, how: str) -> None:
    """One verb in this process, `how` being memory, ours or accelerate; prints its numbers and the seconds that it took."""
    import oversmooth as osm
    from oversmooth.models.open import open_source

    harness.fix()
    batch = [{"input_ids": torch.randint(3, SIZES.vocabulary, (SEQUENCES, TOKENS))}]
    start = time.perf_counter()
    target = offloaded_by_accelerate(folder) if how == "accelerate" else open_source(folder, offload=how == "ours")
    if verb == "measure":
        numbers = [value.mean for value in osm.measure(target, batch).values]
    else:
        found = osm.predict(target, batch, solve=1, heads=False)
        numbers = [rung.mean for layer in found.layers for rung in layer.rungs]
    print(json.dumps({"seconds": time.perf_counter() - start, "numbers": numbers}))


def offloaded_by_accelerate(folder: Path) -> torch.nn.Module:
    """The same checkpoint with its blocks left in the file by accelerate, which maps the file into memory."""
    from transformers import AutoModel

    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    places = {"embed_tokens": "cpu", "norm": "cpu", "rotary_emb": "cpu"} | {
        f"layers.{i}": "disk" for i in range(layers)
    }
    return AutoModel.from_pretrained(
        folder, device_map=places, offload_folder=folder.parent / f"offload-{layers}", dtype="auto"
    )


def timed(verb: str, folder: Path, how: str) -> tuple[dict[str, Any], int]:
    text, _, peak = harness.run_measured([sys.executable, __file__, verb, str(folder), how])
    return json.loads(text.splitlines()[-1]), peak


def seconds_of_reading(path: Path) -> float:
    """Every byte of the file once, through one small buffer."""
    start, buffer = time.perf_counter(), bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - start


def slope(verb: str, folders: dict[int, Path], how: str) -> tuple[float, float, list[float]]:
    """Seconds that do not depend on the number of layers, seconds per layer, and the numbers of the smaller checkpoint."""
    few, more = (timed(verb, folders[layers], how)[0] for layers in (FEW, MORE))
    each = max(more["seconds"] - few["seconds"], 0.0) / (MORE - FEW)
    return few["seconds"] - FEW * each, each, few["numbers"]


def main() -> None:
    harness.fix()
    with tempfile.TemporaryDirectory(prefix="oversmooth-bench-") as name:
        folders = {layers: write_checkpoint(Path(name) / str(layers), layers) for layers in (FEW, MORE, LAYERS)}
        whole = folders[LAYERS]
        size = (whole / "model.safetensors").stat().st_size
        results: dict[str, dict[str, float]] = {}
        for verb in ("measure", "predict"):
            fixed, each, expected = slope(verb, folders, "memory")
            others = {how: slope(verb, folders, how) for how in ("ours", "accelerate")}
            for _, _, numbers in others.values():
                np.testing.assert_allclose(numbers, expected, rtol=1e-4, atol=1e-5)
            found, peak = timed(verb, whole, "ours")
            reading = seconds_of_reading(whole / "model.safetensors")
            results[verb] = {
                "seconds": found["seconds"],
                "seconds_of_reading": reading,
                "seconds_of_arithmetic": fixed + each * LAYERS,
                "ratio": found["seconds"] / (reading + fixed + each * LAYERS),
                "peak_bytes": peak,
                "seconds_per_layer_in_memory": each,
                "seconds_per_layer": others["ours"][1],
                "seconds_per_layer_by_accelerate": others["accelerate"][1],
            }
    ratio = max(result["ratio"] for result in results.values())
    peak = max(result["peak_bytes"] for result in results.values())
    harness.write(
        "offload",
        claim=f"`measure` and `predict` of a {size / 1e9:.0f} GB checkpoint in less than 2 GiB",
        ours=f"peak {peak / 2**30:.2f} GiB; {results['measure']['seconds']:.0f} and {results['predict']['seconds']:.0f} s",
        alternative="reading the file once plus the arithmetic of the pass",
        ratio=ratio,
        numbers={"file_bytes": size, "sequences": SEQUENCES, "tokens": TOKENS, **results},
    )
    print(f"peak {peak / 2**30:.2f} GiB, {ratio:.2f} times reading and arithmetic")
    assert peak < PEAK_CLAIM, f"peak of {peak / 2**30:.2f} GiB"
    assert ratio <= TIME_CLAIM, f"claimed {TIME_CLAIM:g}, measured {ratio:.2f}"


if __name__ == "__main__":
    if len(sys.argv) == 4:
        run(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    else:
        main()
