"""Claim for `oversmooth inspect FOLDER --spectrum extremes` at the geometry of LLaMA-3-8B (width 4096, 32 and 8 heads):
at least 4 times faster per layer than `inspect` without it, with the same extremes.

Both find the extremes of the 1024 x 1024 cores of every layer, plain and with the norm folded in: largest `|1 + lambda|`,
largest `|lambda|`, leftmost and rightmost. They have to agree to 1e-5 of the spectral radius, and every residual of
the fast route to 4e-6; it computes in float32 and its residuals in float64. `inspect` without it computes in
float64, and has all eigenvalues, every head and the symmetry of each layer besides; that it has more is the point.

The checkpoint is that of `bench_inspect_llama.py`: random matrices, whose eigenvalues have no gap at the rim, which is the
hard case for a Krylov space. Both read the same files as processes of their own, take turns, and the shortest time of each
counts. Time per layer is what 8 layers take longer than 2, divided by 6: reading included, the start of Python not.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import harness
from bench_inspect_llama import D_HEAD, HEADS, N_KV, WIDTH, inspect_command, write_checkpoint

FEW, MANY, ROUNDS = 2, 8, 2
CLAIM, AGREE_TO, LARGEST_RESIDUAL = 4.0, 1e-5, 4e-6
ROUTES = {"extremes": ["--spectrum", "extremes"], "all": []}
NAMES = ("rho_dc", "spectral_radius", "min_real", "max_real")


def largest_difference(fast: dict[str, Any], all_: dict[str, Any]) -> float:
    """Largest difference of an extreme, in units of the spectral radius; asserts that both routes were what they should."""
    largest = 0.0
    for mine, theirs in zip(fast["layers"], all_["layers"], strict=True):
        for kind in ("plain", "folded"):
            found, expected = mine[kind], theirs[kind]
            assert (found["route"], expected["route"]) == ("krylov", "dense")
            assert found["residual"] <= LARGEST_RESIDUAL, f"a residual of {found['residual']}"
            distances = [abs(found[name] - expected[name]) for name in NAMES]
            largest = max(largest, *(distance / expected["spectral_radius"] for distance in distances))
    return largest


def main() -> None:
    harness.fix()
    runs = [(route, layers) for route in ROUTES for layers in (FEW, MANY)]
    seconds: dict[tuple[str, int], list[float]] = {run: [] for run in runs}
    peaks: dict[str, int] = dict.fromkeys(ROUTES, 0)
    texts: dict[tuple[str, int], str] = {}
    with tempfile.TemporaryDirectory(prefix="oversmooth-bench-") as name:
        folders = {layers: write_checkpoint(Path(name) / f"layers-{layers}", layers) for layers in (FEW, MANY)}
        for _ in range(ROUNDS):
            for route, layers in runs:
                command = [*inspect_command(folders[layers]), *ROUTES[route]]
                texts[route, layers], elapsed, peak = harness.run_measured(command)
                seconds[route, layers].append(elapsed)
                peaks[route] = max(peaks[route], peak)
    fast, everything = (json.loads(texts[route, MANY]) for route in ROUTES)
    difference = largest_difference(fast, everything)
    assert difference <= AGREE_TO, f"the extremes differ by {difference}"
    per_layer = {route: (min(seconds[route, MANY]) - min(seconds[route, FEW])) / (MANY - FEW) for route in ROUTES}
    ratio = per_layer["all"] / per_layer["extremes"]
    residuals = [layer[kind]["residual"] for layer in fast["layers"] for kind in ("plain", "folded")]
    harness.write(
        "inspect_extremes",
        claim="`inspect --spectrum extremes` at the geometry of LLaMA-3-8B: at least "
        f"{CLAIM:g} times faster per layer, same extremes",
        ours=f"{per_layer['extremes']:.2f} s per layer",
        alternative=f"`inspect` with all eigenvalues and heads: {per_layer['all']:.2f} s per layer",
        ratio=ratio,
        numbers={
            "geometry": {"width": WIDTH, "heads": HEADS, "value_heads": N_KV, "d_head": D_HEAD, "stored": "bfloat16"},
            "seconds": {f"{route}, {layers} layers": found for (route, layers), found in seconds.items()},
            "seconds_per_layer": per_layer,
            "peak_bytes": peaks,
            "largest_difference_of_an_extreme": difference,
            "largest_residual": max(residuals),
        },
    )
    print(f"{ratio:.1f} times faster; extremes differ by {difference:.0e}, residuals up to {max(residuals):.0e}")
    assert ratio >= CLAIM, f"claimed {CLAIM:g}, measured {ratio:.1f}"


if __name__ == "__main__":
    main()
