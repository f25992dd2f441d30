"""Makes torchvision importable beside a torch of another build; transformers and timm import it and fall with it.

The torchvision wheel of the package index is built for CUDA torch: beside the CPU build its compiled operators do not
load, and its import stops at "operator torchvision::nms does not exist". Declaring the two operators whose schemas it
looks up lets the import finish; the operators themselves stay unavailable, and nothing here calls them.

`import oversmooth` puts a finder in front of the import system, so that the user's own `import timm` is cured too. It
answers for one name, costs nothing until that is imported, and does nothing where the import succeeds by itself.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torchvision"

_kept: list[object] = []
"""The library handle; the declarations live as long as it does."""


class TorchvisionCure(MetaPathFinder):
    """Finds torchvision where the other finders do, and executes it so that it is cured when it has to be."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        loader = spec.loader if spec is not None else None
        if loader is not None and hasattr(loader, "exec_module"):
            # On the loader itself, whose other abilities (resources, source code) then stay as they were.
            loader.exec_module = _cured(loader.exec_module)  # type: ignore[method-assign,assignment]
        return spec


def cure_torchvision_on_import() -> None:
    """Puts the finder in place, once."""
    if not any(isinstance(finder, TorchvisionCure) for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionCure())


def _cured(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def execute_and_cure(module: ModuleType) -> None:
        try:
            execute(module)
        except RuntimeError as error:
            if _kept or "torchvision::nms" not in str(error):
                raise
            for name in [name for name in sys.modules if name.startswith(f"{NAME}.")]:
                del sys.modules[name]  # half-imported
            _declare_operators()
            execute(module)

    return execute_and_cure


def _declare_operators() -> None:
    import torch

    library = torch.library.Library(NAME, "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
