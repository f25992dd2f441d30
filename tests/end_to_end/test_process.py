"""The command line as a process: signals, streams that are full or closed, and what is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT
from tests.contract.tiny_models import tiny_model

RUN = "from oversmooth.cli import main; main()"
AT_IMPORT = """
import builtins, os, signal
real = builtins.__import__
def watched(name, *rest, **more):
    if name == {module!r}:
        builtins.__import__ = real
        os.kill(os.getpid(), signal.{signal})
    return real(name, *rest, **more)
builtins.__import__ = watched
"""
AT_CALL = """
import os, signal, importlib
home = importlib.import_module({module!r})
real = home.{name}
def watched(*arguments, **options):
    os.kill(os.getpid(), signal.{signal})
    return real(*arguments, **options)
home.{name} = watched
"""


def _heed_signals() -> None:
    """Background jobs of a shell ignore the one, `nohup` the other; their children would too."""
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)


def run(*arguments: object, before: str = "", shell: str = "", **options) -> subprocess.CompletedProcess[str]:
    """`oversmooth ARGUMENTS` after `before` in a process of its own; `shell` is what follows it on the command line."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"{before}\n{RUN}", *map(str, arguments)]
    if shell:
        command = ["bash", "-c", f'"$@" {shell}', "bash", *command]
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=_heed_signals,
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    tiny_model("bert")[0].save_pretrained(folder)
    return folder


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_ctrl_c_while_modules_are_loaded_ends_with_130_and_no_traceback(module, folder):
    done = run("inspect", folder, before=AT_IMPORT.format(module=module, signal="SIGINT"))
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_ctrl_c_during_the_work_ends_with_130_and_no_traceback(folder):
    done = run("inspect", folder, before=AT_CALL.format(module="torch.linalg", name="eigvals", signal="SIGINT"))
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


def test_ctrl_c_before_and_after_the_first_batch_of_a_measurement_ends_with_130(folder):
    texts = folder / "texts.txt"
    texts.write_text("1 2 3 4\n" * 40)
    words = ("measure", folder, "--ids", texts, "--batch-size", "2")
    for module, name in (
        ("oversmooth.measurement.passes", "prepare"),
        ("oversmooth.measurement.passes", "sequences_in"),
    ):
        done = run(*words, before=AT_CALL.format(module=module, name=name, signal="SIGINT"))
        assert done.returncode == 130, done.stderr
        assert "nothing to measure" not in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are those of Linux")
def test_a_process_without_memory_says_so():
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (200 * 2**20,) * 2)"
    done = run("inspect", before=code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: This needs more memory than there is.\n"


# --- the end from outside -------------------------------------------------------------------------------------------


CSV = ("inspect", "{model}", "-o", "{out}.csv")
EDIT = ("edit", "{model}", "--sharpen", "--output", "{out}")


@pytest.mark.parametrize(
    ("name", "arguments"), [("SIGTERM", CSV), ("SIGINT", CSV), ("SIGTERM", EDIT), ("SIGHUP", EDIT)]
)
def test_a_process_that_is_ended_while_it_writes_leaves_nothing_behind(name, arguments, folder, tmp_path):
    words = [word.format(model=folder, out=tmp_path / "out") for word in arguments]
    before = AT_CALL.format(module="os", name="replace", signal=name)
    done = run(*words, before=before)
    assert done.returncode == (130 if name == "SIGINT" else -getattr(signal, name))
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_process_above_does_write_when_it_is_left_alone(folder, tmp_path):
    done = run("inspect", folder, "-o", tmp_path / "out.csv")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


# --- streams --------------------------------------------------------------------------------------------------------

COMMANDS = [("list", "architectures"), ("inspect", "{model}", "--format", "json")]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_full_disk_is_said_in_one_line(words, folder):
    done = run(*(word.format(model=folder) for word in words), shell="> /dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: The output cannot be written: No space left on device.\n"


def test_a_reader_that_leaves_is_no_error_of_ours():
    done = run("list", "architectures", shell="| true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) in ((1, ""), (0, ""))  # 0: everything was in the pipe already


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_changes_nothing_else(closed, folder, tmp_path):
    done = run("inspect", folder, "-o", tmp_path / "rows.csv", shell=closed)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "rows.csv").read_text().startswith("model,stack,layer,")


def test_an_error_with_stderr_closed_still_has_its_code():
    done = run("inspect", "/nowhere/at/all.safetensors", shell="2>&-")
    assert done.returncode == 2


@pytest.mark.slow
def test_a_page_goes_to_stdout_where_it_is_told_to(folder, tmp_path):
    saved = tmp_path / "analysis.json"
    run("report", folder, "--max-samples", "2", "-o", saved, "-o", tmp_path / "x.html", check=True)
    whole = (tmp_path / "x.html").read_text()
    for shell in ("", f"> {tmp_path / 'y.html'}"):
        done = run("report", saved, "-o", "/dev/stdout", shell=shell)
        text = done.stdout or (tmp_path / "y.html").read_text()
        assert done.returncode == 0
        assert text.startswith(whole)
        assert "report: /dev/stdout" in text[len(whole) :]
    assert Path("/dev/stdout").exists()
