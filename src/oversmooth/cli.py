"""The command line as a process: its streams, its signals and its exit codes.

Results go to stdout, everything else to stderr. 0: done. 1: `verify` found a mismatch, or the reader of a pipe went away.
2: an error, said in one message. 130: Ctrl-C, also where what was done until then is shown. Nothing heavy is imported before
the signals are taken care of.
"""

import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
NO_MEMORY = ("allocate memory", "not enough memory", "failed to map segment", "start new thread", "std::bad_alloc")
"""What Python, torch, the loader of libraries and the C library say where memory has run out."""
_ctrl_c: list[float] = []
"""When it was pressed, in this process."""


def main() -> None:
    """Entry point: whatever the input does, the process ends with a message and a code, never with a traceback."""
    _take_signals()
    _open_closed_streams()
    try:
        code = _run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if _is_out_of_memory(error):
            code = _no_memory()
        elif isinstance(error, OSError):
            code = _system_failed(error)
        else:
            raise
    code = _flush(INTERRUPTED if _ctrl_c else code)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C does not wait for threads to end
    sys.exit(code)


def _run() -> int:
    """Runs the command that the arguments name."""
    from oversmooth.errors import OversmoothError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or a file name beyond its encoding is no reason to stop
            stream.reconfigure(errors="backslashreplace")
    try:
        from oversmooth.commands.verbs import app

        with _own_warnings_as_messages():
            app(prog_name="oversmooth")  # also as `python -m oversmooth`, whose completion is that of the command
    except SystemExit as exit_:  # how typer ends, always
        return exit_.code if isinstance(exit_.code, int) else 0
    except OversmoothError as error:
        if _is_out_of_memory(error.__cause__):
            return _no_memory()
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, here or below what was made of it."""
    while error is not None:
        is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
        is_said = isinstance(error, ImportError | RuntimeError | OSError) and any(
            word in str(error) for word in NO_MEMORY
        )
        if isinstance(error, MemoryError) or is_system or is_said:
            return True
        error = error.__cause__ or error.__context__
    return False


def _no_memory() -> int:
    with contextlib.suppress(OSError, MemoryError):
        sys.stderr.write("error: This needs more memory than there is.\n")
    return 2


@contextlib.contextmanager
def _own_warnings_as_messages() -> Iterator[None]:
    """Warnings of other libraries are shown as Python shows them."""
    import warnings

    show = warnings.showwarning

    def shown(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if category.__module__.startswith("oversmooth."):
            sys.stderr.write(f"warning: {message}\n")
        else:
            show(message, category, *where, **more)

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = show


def _take_signals() -> None:
    """A process that is asked to end removes what it has half written; then the signal does what it always does."""
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:  # not in a worker that was forked later
            from oversmooth.environment.files import remove_partials

            remove_partials()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == own:
            _ctrl_c.append(time.monotonic())
        raise KeyboardInterrupt

    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        with contextlib.suppress(ValueError):  # not in the main thread: the signals are somebody else's
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)


def _open_closed_streams() -> None:
    """A stream that was closed (`>&-`) is opened on nothing, so that no file of ours becomes number 1 or 2."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def _flush(code: int) -> int:
    """The exit code, after everything that was printed has gone where it should."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _system_failed(error)
    return code


def _system_failed(error: OSError) -> int:
    """A full disk is an error; the reader of a pipe may leave when it has seen enough."""
    words = f"{error.filename} cannot be used" if error.filename else "The output cannot be written"
    with contextlib.suppress(OSError, ValueError):  # io.UnsupportedOperation is both
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())  # what is left in the buffer goes nowhere, instead of failing again
        os.close(nothing)
    if error.errno == errno.EPIPE:
        return 1
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {words}: {error.strerror or error}.\n")
    return 2
