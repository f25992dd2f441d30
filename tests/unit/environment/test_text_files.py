"""Small text files that a user names."""

from pathlib import Path

import pytest

from oversmooth.environment import files as text_files
from oversmooth.environment.files import read_text_file
from oversmooth.errors import BrokenFile


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero on this system")
def test_a_device_that_never_ends_is_refused():
    with pytest.raises(BrokenFile, match="more than 64 MB"):
        read_text_file(Path("/dev/zero"), "rules")


def test_the_longest_file_is_read_and_a_longer_one_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LARGEST_TEXT", 3)
    (tmp_path / "x").write_text("abc")
    assert read_text_file(tmp_path / "x", "rules") == "abc"
    (tmp_path / "x").write_text("abcd")
    with pytest.raises(BrokenFile, match="more than"):
        read_text_file(tmp_path / "x", "rules")


def test_a_folder_and_other_bytes_are_refused_in_words(tmp_path):
    with pytest.raises(BrokenFile, match="Is a directory"):
        read_text_file(tmp_path, "rules")
    (tmp_path / "x").write_bytes(b"a\xff")
    with pytest.raises(BrokenFile, match="not UTF-8 text, at 1"):
        read_text_file(tmp_path / "x", "rules")
