"""Two runs never train in one folder; what a killed run left behind does not count."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oversmooth.environment.files import LOCK, held
from oversmooth.errors import FolderInUse
from oversmooth.recipes.train import RunRequest, place_held
from tests.command_line import ROOT

HOLDER = """
import sys
from pathlib import Path
from oversmooth.environment.files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds `tmp_path / "run"`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "run"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    with process:
        yield process
        process.kill()


def test_a_folder_in_use_is_refused_with_who_holds_it_until_that_process_is_killed(holder, tmp_path):
    out = tmp_path / "run"
    words = rf"is in use: a run there is held by process {holder.pid} on {socket.gethostname()}, since 20\d\d-"
    for resume in (False, True):
        with pytest.raises(FolderInUse, match=words), place_held(RunRequest(name="digits", out=out, resume=resume)):
            pass
    assert json.loads((out / LOCK).read_text())["pid"] == holder.pid
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (out / LOCK).is_file()
    with place_held(RunRequest(name="digits", out=out)):
        assert json.loads((out / LOCK).read_text())["pid"] == os.getpid()


def test_nothing_is_left_of_a_folder_in_which_nothing_was_written(tmp_path):
    with held(tmp_path / "a" / "run"):
        pass
    assert list(Path(tmp_path / "a").iterdir()) == []
