"""`import oversmooth` costs little more than `import torch`, and loads nothing that a light command does not need."""

import json
import subprocess
import sys

HEAVY = (
    *("transformers", "timm", "torchvision", "datasets", "accelerate", "huggingface_hub", "fsspec", "aiohttp", "gguf"),
    *("pandas", "scipy", "matplotlib", "plotly", "jinja2", "pydantic", "typer", "rich", "PIL", "sklearn"),
)
ALLOWED_RATIO = 1.3
"""Of processor time, the best of three runs of each; measured 1.03 idle, 0.99 to 1.15 on a busy machine."""


def in_a_fresh_interpreter(statement: str) -> dict:
    report = "import json, sys, time; print(json.dumps({'seconds': time.process_time(), 'modules': list(sys.modules)}))"
    run = subprocess.run([sys.executable, "-c", f"{statement}\n{report}"], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def loaded_of(heavy: tuple[str, ...], statement: str) -> set[str]:
    packages = {name.split(".")[0] for name in in_a_fresh_interpreter(statement)["modules"]}
    return packages & set(heavy)


def test_importing_oversmooth_loads_no_heavy_package():
    assert loaded_of(HEAVY, "import oversmooth") == set()


def test_importing_the_command_line_loads_little_more():
    assert loaded_of(HEAVY, "import oversmooth.cli") <= {"typer", "rich"}


def test_the_guard_of_heavy_packages_can_fail():
    assert loaded_of(HEAVY, "import oversmooth, pydantic, typer") >= {"pydantic", "typer"}


def test_importing_oversmooth_costs_little_more_than_importing_torch():
    seconds = {"import torch": [], "import oversmooth": []}
    for _ in range(3):
        for statement, measured in seconds.items():
            measured.append(in_a_fresh_interpreter(statement)["seconds"])
    ratio = min(seconds["import oversmooth"]) / min(seconds["import torch"])
    assert ratio <= ALLOWED_RATIO
