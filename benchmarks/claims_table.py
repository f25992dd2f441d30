"""The paper's claims at CPU scale, kept: judgements, numbers and the manifest of every run.

python benchmarks/claims_table.py            runs `oversmooth reproduce all`, less than half an hour on two cores
python benchmarks/claims_table.py FOLDER     keeps what such a run left in FOLDER

Weights, checkpoints and analyses of the runs are not kept: their manifests hold the commands that give the same bits.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

KEPT = harness.RESULTS / "claims"


def keep(folder: Path) -> None:
    """Replaces what was kept before."""
    shutil.rmtree(KEPT, ignore_errors=True)
    for name in ("claims.md", "claims.json", "manifest.json"):
        KEPT.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, KEPT / name)
    for manifest in sorted(folder.glob("runs/*/manifest.json")):
        place = KEPT / "runs" / manifest.parent.name
        place.mkdir(parents=True)
        shutil.copy(manifest, place)


def main() -> None:
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-m", "oversmooth", "reproduce", "all", "--out", name], check=True)
        keep(Path(name))


if __name__ == "__main__":
    main()
