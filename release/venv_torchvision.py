"""Makes the venv sound where torchvision is of another build than torch: `import timm` and `import peft` work by themselves.

Writes one `.pth` file into the site-packages of the interpreter that runs this; the Makefile does so after it installed.
Python runs its line when it starts: a finder is put in front of the import system, and nothing is imported. When
torchvision is asked for, the finder hands over to the one of `import oversmooth`, which declares the operators that are
missing. Without oversmooth, or without torchvision, imports are as ever.
"""

import sysconfig
from pathlib import Path

NAME = "oversmooth_torchvision.pth"
FINDER = """
class OversmoothTorchvision:
    def find_spec(self, name, path=None, target=None):
        import sys
        if name != "torchvision":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        try:
            from oversmooth.environment.versions import TorchvisionCure
        except ImportError:
            return None
        return TorchvisionCure().find_spec(name, path, target)
sys.meta_path.insert(0, OversmoothTorchvision())
"""


def line() -> str:
    """What the file holds: a `.pth` file runs lines that begin with `import`, each by itself."""
    return f"import sys; exec({FINDER!r})\n"


def write(folder: Path) -> Path:
    """The file in a folder of site-packages."""
    path = folder / NAME
    path.write_text(line(), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(sysconfig.get_path("purelib"))))
