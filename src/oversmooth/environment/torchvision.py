"""Makes torchvision importable beside a CPU-only torch; transformers and timm import it and fall with it.

The torchvision wheel of the package index is built for CUDA torch: beside the CPU build its compiled operators do not
load, and its import stops at "operator torchvision::nms does not exist". Declaring the two operators whose schemas it
looks up lets the import finish; the operators themselves stay unavailable, and nothing here calls them.
"""

import importlib.util

_kept: list[object] = []
"""The library handle; the declarations live as long as it does."""


def ensure_torchvision() -> None:
    """Declares the missing operators when torchvision is installed and cannot be imported for want of them."""
    if _kept or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        import sys

        import torch

        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # half-imported
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
        import torchvision  # noqa: F401
