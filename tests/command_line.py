"""The command line inside this process or in others: what it prints, and the code it exits with."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from oversmooth import cli

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def oversmooth(*arguments: object) -> Done:
    """Runs `oversmooth ARGUMENTS` through the real entry point; a traceback would be raised, not printed."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["oversmooth", *map(str, arguments)]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as exit_:
        code = exit_.code
    finally:
        sys.argv = before
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def in_two_processes(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node 2 oversmooth ARGUMENTS`, on a port that is free."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]
    return _process([*launcher, sys.executable, "-c", "from oversmooth.cli import main; main()", *arguments])


def killed(moment: str, count: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`oversmooth ARGUMENTS`, killed at a moment of `killed_training.py`."""
    return _process([sys.executable, ROOT / "tests" / "killed_training.py", moment, count, *arguments])


def fresh_python(code: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs code in an interpreter of its own, as a reader who pastes it would; inside a folder, if one is given."""
    return _process([sys.executable, "-c", code], folder)


def _process(command: list[object], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
