"""Claim: `oversmooth --help` takes less than a quarter of the time of `import torch`, `import oversmooth` less than a tenth.

Whole processes, processor time, interleaved; the time of an empty interpreter is taken off both sides. What the help must
say, and that torch was not imported, is asserted before anything is timed.
"""

import os
import subprocess
import sys

import harness

CLAIM = 1 / 4
IMPORT_CLAIM = 1 / 10
ROUNDS = 7
COMMAND = "import sys; from oversmooth.cli import main; sys.argv = ['oversmooth', {words}]; main()"
ALTERNATIVES = {
    "nothing": "pass",
    "import oversmooth": "import oversmooth",
    "oversmooth --help": COMMAND.format(words="'--help'"),
    "oversmooth --version": COMMAND.format(words="'--version'"),
    "oversmooth measure --help": COMMAND.format(words="'measure', '--help'"),
    "import torch": "import torch",
}


def processor_seconds(code: str) -> float:
    """User and system time of one interpreter that runs the code."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, code
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


def check_answers() -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    said = subprocess.run(
        [sys.executable, "-c", code + ALTERNATIVES["oversmooth --help"]], capture_output=True, text=True, check=True
    ).stdout
    assert "measure" in said, said
    assert said.splitlines()[-1] == "False", "torch was imported"


def main() -> None:
    harness.fix()
    check_answers()
    best = dict.fromkeys(ALTERNATIVES, float("inf"))
    for _ in range(ROUNDS):
        for name, code in ALTERNATIVES.items():
            best[name] = min(best[name], processor_seconds(code))
    own = {name: seconds - best["nothing"] for name, seconds in best.items()}
    ratios = {name: seconds / own["import torch"] for name, seconds in own.items()}
    harness.write(
        "startup",
        claim="`oversmooth --help`: less than a quarter of the time of `import torch`; `import oversmooth`: under a tenth",
        ours=f"--help {own['oversmooth --help']:.2f} s, import oversmooth {own['import oversmooth']:.3f} s",
        alternative=f"import torch {own['import torch']:.2f} s",
        ratio=ratios["oversmooth --help"],
        numbers={"processor_seconds": best, "ratio_to_torch": ratios},
    )
    for name, ratio in ratios.items():
        print(f"{name}: {own[name]:.3f} s, {ratio:.3f} of import torch")
    assert ratios["oversmooth --help"] < CLAIM
    assert ratios["import oversmooth"] < IMPORT_CLAIM


if __name__ == "__main__":
    main()
