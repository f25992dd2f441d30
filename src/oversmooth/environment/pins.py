"""The versions this project is tested with, `constraints.txt`, and how the installed ones differ from them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

NAME = "constraints.txt"


@cache
def pinned_versions() -> dict[str, str] | None:
    """Version by package; `None` where the file is not there. It is packed into the wheel and lies above `src` in a clone."""
    package = Path(__file__).parent.parent
    for path in (package / NAME, package.parent.parent / NAME):
        if path.is_file():
            lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
            pins = (line.split("==", 1) for line in lines if "==" in line)
            return {name.lower().replace("_", "-"): version for name, version in pins}
    return None


def differences_from_pins(installed: Mapping[str, str]) -> dict[str, str]:
    """What is installed in another version than the pinned one, in words; a build such as +cpu is no other version."""
    pins = pinned_versions() or {}
    found = {}
    for package, version in installed.items():
        pinned = pins.get(package.lower().replace("_", "-"))
        if pinned is not None and pinned != version.split("+")[0]:
            found[package] = f"{version} instead of {pinned}"
    return found
