"""Claim for `oversmooth inspect FOLDER --format json` on a checkpoint of an undeclared family at the geometry of an 8B
model (width 4096, 32 heads, 8 value heads): peak memory under 2.5 GiB, discovery included.

The checkpoint is the one of `bench_inspect_llama.py` under a model type without a declaration (`arcee`, whose attention has
the same names): a skeleton of two blocks with its true widths is built from the config, watched, proved, saved and matched
with the names on disk, and then the file is streamed as always. The alternative is the declared family: the same file as a
LLaMA. Both read the same tensors, so every eigenvalue has to be the same. Optionally the number of layers: 32 by default.
"""

import json
import sys
import tempfile
from pathlib import Path

import bench_inspect_llama as declared
import harness

PEAK_CLAIM = 2.5 * 2**30


def main(layers: int) -> None:
    harness.fix()
    with tempfile.TemporaryDirectory(prefix="oversmooth-bench-") as name:
        folder = declared.write_checkpoint(Path(name) / "model", layers)
        file_bytes = (folder / "model.safetensors").stat().st_size
        known, known_seconds, known_peak = harness.run_measured(declared.inspect_command(folder))
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "arcee", "architectures": ["ArceeForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
        found, found_seconds, found_peak = harness.run_measured(declared.inspect_command(folder))
    result, expected = json.loads(found), json.loads(known)
    assert result["layers"] == expected["layers"], "discovered and declared differ"
    error = result["provenance"]["discovery_error"]
    assert error is not None, "the type is declared"
    gib = found_peak / 2**30
    harness.write(
        "discover_llama_memory",
        claim=f"`inspect` of an undeclared family at the widths of an 8B model, {layers} layers: peak under 2.5 GiB",
        ours=f"{gib:.2f} GiB, discovery included (proof error {error:.0e})",
        alternative=f"the same file as a declared family: {known_peak / 2**30:.2f} GiB",
        ratio=found_peak / known_peak,
        numbers={
            "layers": layers,
            "file_bytes": file_bytes,
            "peak_bytes": {"discovered": found_peak, "declared": known_peak},
            "seconds": {"discovered": found_seconds, "declared": known_seconds},
            "proof_error": error,
        },
    )
    print(
        f"peak {gib:.2f} GiB discovered, {known_peak / 2**30:.2f} GiB declared; {found_seconds:.0f} and {known_seconds:.0f} s"
    )
    assert found_peak < PEAK_CLAIM, f"peak of {gib:.2f} GiB"


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else declared.LAYERS[-1])
