"""What all benchmarks share: fixed seed and threads, interleaved timing, peak memory of a process, one JSON per claim.

A benchmark states its claim, asserts that both sides give the same answer, times them in one run, writes its numbers
and then asserts the claim, so that a failed claim leaves its numbers behind.
"""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from oversmooth.environment import versions as environment

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
SEED = 0
THREADS = 2
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Names of glibc's malloc.h."""


def fix(threads: int = THREADS) -> None:
    """The same seed and number of threads in every run."""
    torch.manual_seed(SEED)
    torch.set_num_threads(threads)


def keep_memory() -> None:
    """Freed memory stays with the process (glibc only): else each step faults large tensors in again, by chance or not."""
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def best_seconds(alternatives: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Shortest time of each alternative; they take turns, so that a busy machine slows all of them alike."""
    best = dict.fromkeys(alternatives, float("inf"))
    for _ in range(rounds):
        for name, run in alternatives.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


LAUNCHER = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""
"""Starts a process and writes its peak. Linux counts the memory of the process that forks to the one that it starts, so
that a small one has to start it: started from a benchmark, everything would seem as large as the benchmark itself."""


def run_measured(command: Sequence[str]) -> tuple[str, float, int]:
    """Output, seconds and peak resident bytes of a process, which has to succeed."""
    with tempfile.NamedTemporaryFile("r") as peak:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-S", "-c", LAUNCHER, peak.name, *command],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - start
        found = int(peak.read())
    return done.stdout, seconds, found * (1 if sys.platform == "darwin" else 1024)


def write(name: str, *, claim: str, ours: str, alternative: str, ratio: float, numbers: Mapping[str, Any]) -> Path:
    """Writes `results/NAME.json`, beside the old one first; the texts and the ratio are what the table shows."""
    RESULTS.mkdir(exist_ok=True)
    body = {
        "claim": claim,
        "ours": ours,
        "alternative": alternative,
        "ratio": ratio,
        "numbers": dict(numbers),
        "seed": SEED,
        "threads": THREADS,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": environment.machine(),
        "versions": dict(environment.versions(PACKAGES)),
    }
    path = RESULTS / f"{name}.json"
    beside = path.with_suffix(".json.new")
    beside.write_text(json.dumps(body, indent=2, allow_nan=False) + "\n")
    beside.replace(path)
    return path


PACKAGES = ("oversmooth", "torch", "numpy", "scipy", "safetensors", "weightwatcher")


def commit() -> str:
    """The commit that was measured, shortened, with a `+` where files differ from it."""
    found = environment.commit(["src", "benchmarks/*.py"])
    return "unknown" if found is None else found[:12] + found[40:]
