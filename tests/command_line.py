"""The command line inside this process: what it prints, and the code it exits with."""

import contextlib
import io
import sys
from dataclasses import dataclass

from oversmooth import cli


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
