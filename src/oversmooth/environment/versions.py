"""Which versions, which commit, which machine: the one answer that results, manifests and benchmarks write down."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PINS = "constraints.txt"
"""The versions this project is tested with; packed into the wheel, above `src` in a clone."""
PACKAGE = Path(__file__).parent.parent
NUMBERS = ("oversmooth", "torch", "numpy", "scipy", "safetensors", "transformers", "timm", "gguf")
"""Packages whose code can change a number of an analysis."""
TRAINING = (*NUMBERS, "accelerate", "datasets", "tokenizers", "torchvision", "scikit-learn", "pillow", "pydantic")
"""Packages whose code can change a trained model."""


@cache  # a search through every installed package, for facts that do not change
def versions(packages: Sequence[str] = NUMBERS) -> tuple[tuple[str, str], ...]:
    """Python and those of the packages that are installed, each with its version, sorted."""
    found = [("python", platform.python_version())]
    for package in packages:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(sorted(found))


@cache
def pinned_versions() -> dict[str, str] | None:
    """Version by package as `constraints.txt` has it; `None` where the file is not there."""
    for path in (PACKAGE / PINS, PACKAGE.parent.parent / PINS):
        if path.is_file():
            lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
            pins = (line.split("==", 1) for line in lines if "==" in line)
            return {name.lower().replace("_", "-"): version for name, version in pins}
    return None


def differences_from_pins(installed: Mapping[str, str]) -> dict[str, str]:
    """What is installed in another version than the pinned one, in words; a build such as +cpu is no other version."""
    pins = pinned_versions() or {}
    found = {}
    for package, version in installed.items():
        pinned = pins.get(package.lower().replace("_", "-"))
        if pinned is not None and pinned != version.split("+")[0]:
            found[package] = f"{version} instead of {pinned}"
    return found


def commit(paths: Sequence[str] = ("src",)) -> str | None:
    """The commit of the clone that this package runs from, with a `+` where these paths differ from it; else `None`."""
    clone = PACKAGE.parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(clone), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", str(Path(__file__).relative_to(clone)))  # another project's clone has it not
        changed = git("status", "--porcelain", "--untracked-files=no", *paths)
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def hardware(processes: int) -> dict[str, Any]:
    """What a run of so many processes ran on."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": processes,
        "system": platform.platform(),
    }


def machine() -> str:
    """Processor, cores, memory and system, in one line."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cpu()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def cpu() -> str:
    """The processor's name, as Linux knows it or Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
