"""Small real data that tests use where `OVERSMOOTH_DATA` names a folder that holds them."""

import os
from pathlib import Path

import pytest


def real_data(name: str) -> Path:
    """The folder of that name, or a skip with its reason."""
    folder = Path(os.environ.get("OVERSMOOTH_DATA", "")) / name
    if "OVERSMOOTH_DATA" not in os.environ or not folder.is_dir():
        pytest.skip(f"OVERSMOOTH_DATA does not name a folder with {name} in it")
    return folder
