"""Versions, commit and hardware of this process; fixes for torchvision and noisy libraries.

The torchvision wheel of the package index is built for CUDA torch: beside the CPU build its compiled operators do not
load, and its import stops at "operator torchvision::nms does not exist". Declaring the two operators whose schemas it
looks up lets the import finish; the operators themselves stay unavailable, and nothing here calls them.

`import oversmooth` puts a finder in front of the import system, so that the user's own `import timm` is cured too. It
answers for one name, costs nothing until that is imported, and does nothing where the import succeeds by itself.

The Trainer of transformers imports peft where that is installed, and peft bitsandbytes. On processors with instructions for
bfloat16 that one warns at its import that a package with a kernel for 4-bit products is missing. Our recipes multiply no
4-bit weights. Whoever does in a script of their own imports bitsandbytes there, and sees the hint.
"""

import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

# --- which versions, which commit, which machine: the one answer that results ---

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
    import torch

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


# --- makes torchvision importable beside a torch of another build ---

NAME = "torchvision"

_kept: list[object] = []
"""The library handle; the declarations live as long as it does."""


class TorchvisionCure(MetaPathFinder):
    """Finds torchvision where the other finders do, and executes it so that it is cured when it has to be."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        others = [finder for finder in sys.meta_path if not _is_cure(finder) and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        loader = spec.loader if spec is not None else None
        if loader is not None and hasattr(loader, "exec_module"):
            # On the loader itself, whose other abilities (resources, source code) then stay as they were.
            loader.exec_module = _cured(loader.exec_module)  # type: ignore[method-assign,assignment]
        return spec


def cure_torchvision_on_import() -> None:
    """Puts the finder in place, once."""
    if not any(_is_cure(finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionCure())


def _is_cure(finder: object) -> bool:
    """By name: our venv may have loaded this file under another name (release/venv_torchvision.py)."""
    return type(finder).__name__ == TorchvisionCure.__name__


def _cured(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_and_cure(module: ModuleType) -> None:
        try:
            execute(module)
        except RuntimeError as error:
            if _kept or "torchvision::nms" not in str(error):
                raise
            for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
                del sys.modules[name]  # half-imported
            _declare_operators()
            execute(module)

    return execute_and_cure


def _declare_operators() -> None:
    import torch

    library = torch.library.Library(NAME, "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


# --- imports of the Trainer without a hint that concerns nobody who trains here ---

LOGGER = "bitsandbytes.backends.cpu.ops"
HINT = "Failed to load CPU gemm_4bit_forward"


@contextmanager
def without_kernel_hint() -> Iterator[None]:
    """Drops this one message inside, and no other."""
    logger = logging.getLogger(LOGGER)
    logger.addFilter(_is_another)
    try:
        yield
    finally:
        logger.removeFilter(_is_another)


def _is_another(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(HINT)


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """One thread inside: splitting small products costs more than it gains, most of all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    if when:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def end_with_parent() -> None:
    """Ends this process when the one that started it ends, even by SIGKILL, which gives nobody time to say so."""

    def watch() -> None:
        parent = parent_process()
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    Thread(target=watch, daemon=True).start()
