"""A run says where its versions are not the pinned ones."""

import logging
import tomllib
from pathlib import Path

from oversmooth.environment.pins import differences_from_pins, pinned_versions
from oversmooth.training.recipes.manifest import new_session, versions, warned_differences

ROOT = Path(__file__).parents[3]


def test_every_pin_is_read_and_every_package_of_a_manifest_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.strip()]
    assert len(pinned_versions()) == len(lines)
    assert set(versions()) - {"python", "oversmooth"} <= pinned_versions().keys()


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


def test_a_session_that_differs_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert new_session(0, 1).other_than_pinned == {}
        assert not caplog.records
        assert warned_differences({"numpy": "1.0"})
    assert "Versions other than those of constraints.txt: numpy 1.0 instead of" in caplog.text
