"""Lets `import timm` and `import peft` work in our venv, where torchvision is of another build than torch.

The Makefile runs this after installing. It writes one `.pth` file into the site-packages of its interpreter. Python runs
that file at startup: it adds an import finder for torchvision and imports nothing. The finder loads the cure from its
file rather than from the package, so that a process which must not import oversmooth still gets it.
"""

import sysconfig
from pathlib import Path

NAME = "oversmooth_torchvision.pth"
CURE = Path(__file__).parent.parent / "src/oversmooth/environment/versions.py"
FINDER = """
class OversmoothTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        import sys, importlib.util, os.path
        if any(type(finder).__name__ == "TorchvisionCure" for finder in sys.meta_path) or not os.path.isfile(CURE):
            return None  # oversmooth was imported first, or is gone
        spec = importlib.util.spec_from_file_location("_torchvision_cure", CURE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        cure = module.TorchvisionCure()
        sys.meta_path[:] = [cure if finder is self else finder for finder in sys.meta_path]
        return cure.find_spec(name, path, target)
if not any(type(finder).__name__ == "OversmoothTorchvision" for finder in sys.meta_path):
    sys.meta_path.insert(0, OversmoothTorchvision())  # once: Python may read the same .pth file twice
"""


def line(cure: Path = CURE) -> str:
    """The content of the file: Python executes each line of a `.pth` file that begins with `import`."""
    return f"import sys; exec({f'import sys; CURE = {str(cure)!r}' + FINDER!r}, {{}})\n"


def write(folder: Path, cure: Path = CURE) -> Path:
    """Writes the file into a folder of site-packages."""
    path = folder / NAME
    path.write_text(line(cure), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(sysconfig.get_path("purelib"))))
