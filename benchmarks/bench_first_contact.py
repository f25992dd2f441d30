"""The first minutes: `make report` in a fresh clone, and from `pip install` to the first answer beside plain transformers.

Wheels come from pip's own cache, filled before anything is timed: what is compared is the work, not the network of the day.
Both sides install into new environments through constraints.txt, and both run the same folder with all-MiniLM-L6-v2. Wall
time beside processor time, which says more on a machine that does other things too.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import harness

from oversmooth.models.example_model import example_model

PIP_SPEED = 1.35
"""Times of plain transformers that our first answer may take: the extra hf also brings datasets and its pyarrow."""
DISK = 0.75
"""Share of everything's disk that `make report` may take."""
PLAIN = """
import sys
from transformers import AutoModel, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained(sys.argv[1]), AutoModel.from_pretrained(sys.argv[1])
print(model(**tokenizer(["Ice is lighter than water."], return_tensors="pt")).last_hidden_state.shape)
"""
OURS = """
import sys
import oversmooth as osm
print(osm.measure(sys.argv[1]))
"""


@dataclass
class Effort:
    """What some commands took."""

    seconds: float
    processor_seconds: float


def spent(*commands: Sequence[object], folder: Path = harness.ROOT) -> Effort:
    """Runs commands one after another; each has to succeed."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for command in commands:
        done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Effort(round(time.perf_counter() - start, 1), round(used, 1))


def pip(venv: Path, *words: object) -> list[object]:
    constraints = ("--constraint", harness.ROOT / "constraints.txt")
    return [venv / "bin" / "pip", "--disable-pip-version-check", "install", "--quiet", *constraints, *words]


def size_of(folder: Path) -> int:
    """Bytes on disk, as `du` counts them."""
    return int(subprocess.check_output(["du", "-s", "-B1", str(folder)], text=True).split()[0])


def packages_in(venv: Path) -> int:
    listed = subprocess.check_output([str(venv / "bin" / "pip"), "list", "--format", "json"], text=True)
    return len(json.loads(listed))


def first_answers(work: Path) -> dict[str, dict[str, object]]:
    """New environments, one with oversmooth and one with transformers; each step is timed by itself."""
    wheels = work / "wheels"
    build = [sys.executable, "-m", "hatchling", "build", "--directory", wheels, "--target", "wheel"]
    spent(build)
    (wheel,) = wheels.glob("*.whl")
    model = example_model()
    wanted = {"oversmooth": (f"{wheel}[hf]",), "transformers": ("transformers", "torch")}
    code = {"oversmooth": OURS, "transformers": PLAIN}
    found: dict[str, dict[str, object]] = {}
    for name in ("warm pip's cache", "oversmooth", "transformers"):
        venv = work / name.split()[0]
        spent([sys.executable, "-m", "venv", venv])
        install = spent(pip(venv, *wanted.get(name, wanted["oversmooth"])))
        if name in code:
            answer = [venv / "bin" / "python", "-I", "-c", code[name], model]
            steps = {"install": install, "first answer": spent(answer), "second answer": spent(answer)}
            sizes = {"bytes": size_of(venv), "packages": packages_in(venv)}
            found[name] = {**{step: asdict(effort) for step, effort in steps.items()}, **sizes}
        shutil.rmtree(venv)
    return found


def make_report(work: Path) -> dict[str, dict[str, object]]:
    """`make report` in a fresh clone, then what `make test` adds to it."""
    clone = work / "clone"
    spent(["git", "clone", "--quiet", harness.ROOT, clone])
    python = f"PYTHON={sys.executable}"
    found = {}
    for name, goal in (("make report", "report"), ("make test installs", ".venv/.ready-to-test")):
        effort = spent(["make", goal, python], folder=clone)
        sizes = {"bytes": size_of(clone / ".venv"), "packages": packages_in(clone / ".venv")}
        found[name] = {**asdict(effort), **sizes}
    assert "</html>" in (clone / "report.html").read_text(encoding="utf-8")
    return found


def until_answer(side: dict[str, object], key: str) -> float:
    return side["install"][key] + side["first answer"][key]  # type: ignore[index]


def write_first_answer(found: dict[str, dict[str, object]]) -> float:
    ours, plain = (until_answer(found[name], "processor_seconds") for name in ("oversmooth", "transformers"))
    walls = [until_answer(found[name], "seconds") for name in ("oversmooth", "transformers")]
    harness.write(
        "first_answer",
        claim="from `pip install` to the first answer about MiniLM: at most 1.35 times the processor time of "
        "`pip install transformers torch` and one pass of the same model",
        ours=f"{ours:.0f} s of processor time, {walls[0]:.0f} s in all",
        alternative=f"transformers: {plain:.0f} s, {walls[1]:.0f} s in all",
        ratio=ours / plain,
        numbers=found,
    )
    return ours / plain


def write_make_report(found: dict[str, dict[str, object]]) -> float:
    report, all_of_it = found["make report"], found["make test installs"]
    share = report["bytes"] / all_of_it["bytes"]  # type: ignore[operator]
    harness.write(
        "make_report",
        claim="`make report` in a fresh clone, its page included: at most 0.75 of the disk that everything takes",
        ours=f"{report['seconds']:.0f} s, {report['bytes'] / 1e9:.2f} GB, {report['packages']} packages",  # type: ignore[operator,str-bytes-safe]
        alternative=f"with what `make test` installs: {all_of_it['bytes'] / 1e9:.2f} GB, "  # type: ignore[operator]
        f"{all_of_it['packages']} packages, {all_of_it['seconds']:.0f} s more",
        ratio=share,
        numbers=found,
    )
    return share


def main() -> None:
    with TemporaryDirectory(prefix="first-contact-") as name:
        ratio = write_first_answer(first_answers(Path(name)))
        share = write_make_report(make_report(Path(name)))
    assert ratio <= PIP_SPEED, ratio
    assert share <= DISK, share


if __name__ == "__main__":
    main()
