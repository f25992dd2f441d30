"""`import oversmooth` costs little more than `import torch`, and loads nothing that a light command does not need."""

import json
import subprocess
import sys

import pytest

HEAVY = {
    *("transformers", "timm", "torchvision", "datasets", "accelerate", "huggingface_hub", "fsspec", "aiohttp", "gguf"),
    *("pandas", "scipy", "matplotlib", "plotly", "jinja2", "pydantic", "typer", "rich", "PIL", "sklearn"),
}
ALLOWED_RATIO = 1.3
"""Of processor time, the best of three runs of each; measured 1.03 idle, 0.99 to 1.15 on a busy machine."""


def in_a_fresh_interpreter(statement: str) -> dict:
    report = "import json, sys, time; print(json.dumps({'seconds': time.process_time(), 'modules': list(sys.modules)}))"
    run = subprocess.run([sys.executable, "-c", f"{statement}\n{report}"], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def heavy_packages(run: dict) -> set[str]:
    return {name.split(".")[0] for name in run["modules"]} & HEAVY


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict]]:
    """Three imports of each, in turns, so that a busy moment of the machine meets both."""
    statements = ("import torch", "import oversmooth")
    rounds = [{statement: in_a_fresh_interpreter(statement) for statement in statements} for _ in range(3)]
    return {statement: [each[statement] for each in rounds] for statement in statements}


def test_importing_oversmooth_loads_no_heavy_package(runs):
    assert heavy_packages(runs["import oversmooth"][0]) == set()


def test_importing_the_command_line_loads_only_what_parses_its_arguments():
    assert heavy_packages(in_a_fresh_interpreter("import oversmooth.cli")) <= {"typer", "rich"}


def test_the_guard_of_heavy_packages_can_fail():
    assert heavy_packages(in_a_fresh_interpreter("import pydantic, typer")) == {"pydantic", "typer"}


def test_importing_oversmooth_costs_little_more_than_importing_torch(runs):
    ours, torch_alone = (min(run["seconds"] for run in runs[name]) for name in ("import oversmooth", "import torch"))
    assert ours / torch_alone <= ALLOWED_RATIO
