"""A run says where its versions are not the pinned ones."""

import logging
import subprocess
import tomllib
from pathlib import Path

from oversmooth.environment.versions import TRAINING, commit, differences_from_pins, machine, pinned_versions, versions
from oversmooth.recipes.run_folder import new_session

ROOT = Path(__file__).parents[3]


def test_every_pin_is_read_and_every_package_of_a_manifest_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip()]
    assert len(pinned_versions()) == len(lines)
    assert dict(versions(TRAINING)).keys() - {"python", "oversmooth"} <= pinned_versions().keys()


def test_packages_that_are_not_installed_have_no_version():
    assert [name for name, _ in versions(("torch", "unheard-of"))] == ["python", "torch"]


def test_the_commit_is_that_of_the_clone_and_marked_where_files_differ():
    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "src").strip()
    assert commit() == git("rev-parse", "HEAD").strip() + ("+" if changed else "")


def test_a_package_outside_of_its_clone_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr("oversmooth.environment.versions.PACKAGE", tmp_path / "site-packages" / "oversmooth")
    assert commit() is None


def test_the_machine_is_one_line():
    assert "cores" in machine()
    assert "\n" not in machine()


def test_the_pins_are_packed_into_the_wheel():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert packed == {"constraints.txt": "oversmooth/constraints.txt"}


def test_another_version_is_named_with_both_and_another_build_is_not():
    torch = pinned_versions()["torch"]
    installed = {"torch": f"{torch}+cpu", "numpy": "1.0", "Scikit_Learn": "0.1", "unheard-of": "3"}
    assert differences_from_pins(installed) == {
        "numpy": f"1.0 instead of {pinned_versions()['numpy']}",
        "Scikit_Learn": f"0.1 instead of {pinned_versions()['scikit-learn']}",
    }


def test_a_session_that_differs_says_so(caplog, monkeypatch):
    with caplog.at_level(logging.WARNING):
        assert new_session(0, 1).other_than_pinned == {}
        assert not caplog.records
        monkeypatch.setattr("oversmooth.recipes.run_folder.versions", lambda *_: {"numpy": "1.0"})
        assert set(new_session(0, 1).other_than_pinned) == {"numpy"}
    assert "Versions other than those of constraints.txt: numpy 1.0 instead of" in caplog.text
