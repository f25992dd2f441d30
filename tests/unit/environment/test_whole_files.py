"""Files are written whole or not at all, links stay links, and devices and pipes are written into."""

import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from oversmooth.environment import files as whole_files
from oversmooth.environment.files import folder_whole, make_folder, remove_partials, require_writable, write_whole
from oversmooth.errors import NotWritable


def put(path: Path, text: str = "new") -> None:
    write_whole(path, lambda partial: partial.write_text(text))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole(tmp_path):
    put(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "new"
    assert names(tmp_path) == ["x"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "x").write_text("old")

    def fail(partial):
        partial.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(NotWritable, match="No space left on device"):
        write_whole(tmp_path / "x", fail)
    assert (tmp_path / "x").read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_the_rights_of_an_existing_file_are_kept(tmp_path):
    (tmp_path / "x").write_text("old")
    (tmp_path / "x").chmod(0o640)
    put(tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


# --- links ----------------------------------------------------------------------------------------------------------


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "target")
    put(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "target").read_text() == "new"
    assert (names(tmp_path), names(tmp_path / "far")) == (["far", "link"], ["target"])


def test_a_link_to_nothing_makes_its_target(tmp_path):
    (tmp_path / "link").symlink_to("target")
    put(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for act in (put, require_writable):
        with pytest.raises(NotWritable, match=r"Symlink loop|symbolic links"):
            act(tmp_path / "a")


def test_a_folder_behind_a_link_is_filled_and_the_link_stays(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far")
    with folder_whole(tmp_path / "link") as partial:
        (partial / "x").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "far") == ["x"]


# --- what is no file ------------------------------------------------------------------------------------------------


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    require_writable(tmp_path / "pipe")
    put(tmp_path / "pipe")
    reader.join()
    assert read == ["new"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_a_full_device_is_refused_and_stays_a_device():
    with pytest.raises(NotWritable, match="No space left on device"):
        put(Path("/dev/full"))
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_device_behind_a_link_stays_what_it_is(tmp_path):
    (tmp_path / "link").symlink_to("/dev/null")
    put(tmp_path / "link")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_an_open_stream_is_written_at_its_own_place(name, tmp_path):
    with (tmp_path / "x").open("w") as file:
        file.write("before ")
        file.flush()
        put(Path(name.format(file.fileno())))
        file.write(" after")
    assert (tmp_path / "x").read_text() == "before new after"
    assert names(tmp_path) == ["x"]


def test_a_stream_that_is_not_open_is_refused():
    with pytest.raises(NotWritable, match="Bad file descriptor"):
        put(Path("/dev/fd/987654"))


# --- names that no file can have ------------------------------------------------------------------------------------


NO_NAME = "name too long|null (byte|character)"


@pytest.mark.parametrize("name", ["n" * 256, "n" * 5000, "é" * 128, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path):
    for act in (put, require_writable, make_folder):
        with pytest.raises(NotWritable, match=NO_NAME):
            act(tmp_path / name)
    with pytest.raises(NotWritable, match=NO_NAME), folder_whole(tmp_path / name):
        pass
    assert names(tmp_path) == []


def test_the_longest_name_that_a_file_can_have_is_written(tmp_path):
    put(tmp_path / ("n" * 255))
    assert names(tmp_path) == ["n" * 255]


def test_a_file_below_a_file_is_refused(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(NotWritable, match="there is no folder"):
        put(tmp_path / "x" / "y")


# --- the end of the process -----------------------------------------------------------------------------------------


def test_what_is_half_written_is_removed_when_the_process_is_ended(tmp_path):
    def interrupted(partial):
        partial.write_text("half")
        assert len(names(tmp_path)) == 1
        remove_partials()
        assert names(tmp_path) == []

    with pytest.raises(NotWritable, match="No such file"):
        write_whole(tmp_path / "x", interrupted)
    with pytest.raises(NotWritable), folder_whole(tmp_path / "y") as partial:
        interrupted(partial / "z")
    assert names(tmp_path) == []
    assert not whole_files._PARTIALS


# --- what killed processes leave ---------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys
from pathlib import Path
from oversmooth.environment.files import folder_whole
with folder_whole(Path(sys.argv[1])) as partial:
    (partial / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_removes_what_a_killed_one_left(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")], check=False)
    assert [name for name in names(tmp_path) if name.endswith(".partial")]
    with folder_whole(tmp_path / "out") as partial:
        (partial / "x").write_text("new")
    assert names(tmp_path) == ["out"]


def test_what_living_processes_and_other_hosts_write_stays(tmp_path):
    others = [f".out.{os.getpid()}-99.partial", f".out.{2**22 + 1}-0-ffffff.partial", ".out.partial", "x.1-0.partial"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / f".out.{2**22 + 1}-0.partial").write_text("of a process that cannot be there")
    put(tmp_path / "x")
    assert names(tmp_path) == sorted([*others, "x"])


def test_a_number_that_was_given_to_a_later_process_does_not_protect_what_is_left(tmp_path):
    left = tmp_path / f".out.{os.getpid()}-99.partial"
    left.mkdir()
    os.utime(left, (1, 1))  # long before this process began
    put(tmp_path / "x")
    assert names(tmp_path) == ["x"]


def test_a_full_disk_is_said_whoever_writes(tmp_path):
    class SafetensorError(Exception):
        """As the library raises it; it is no OSError."""

    with (
        pytest.raises(NotWritable, match=r"(?s)No space left on device.*Free some space"),
        folder_whole(tmp_path / "out"),
    ):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert names(tmp_path) == []
    with pytest.raises(SafetensorError), folder_whole(tmp_path / "out"):
        raise SafetensorError("Error while deserializing header: invalid JSON")
    assert names(tmp_path) == []


def test_what_safetensors_says_of_a_file_that_cannot_grow_is_understood(tmp_path):
    from safetensors.torch import save_file

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(NotWritable, match="File too large"), folder_whole(tmp_path / "out") as partial:
            save_file({"x": torch.zeros(10000)}, partial / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == []
