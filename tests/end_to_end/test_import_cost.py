"""What starts, starts at once: `import oversmooth`, every `--help`, `--version` and completion without torch."""

import json
import os
import subprocess
import sys

import pytest
import typer

import oversmooth
from oversmooth.commands.verbs import app
from tests.command_line import ROOT

HEAVY = {
    *("torch", "numpy", "safetensors", "jaxtyping"),
    *("transformers", "timm", "torchvision", "datasets", "accelerate", "huggingface_hub", "fsspec", "aiohttp", "gguf"),
    *("pandas", "scipy", "resvg_py", "jinja2", "pydantic", "typer", "rich", "PIL", "sklearn"),
}
PARSERS = {"typer", "rich", "pydantic"}
"""What the command line itself is made of."""
VERBS = tuple(typer.main.get_command(app).commands)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
RUN = "import sys; from oversmooth.cli import main; sys.argv = {words!r}\ntry: main()\nexcept SystemExit: pass"


def in_a_fresh_interpreter(code: str, **environment: str):
    """What the last line that the code prints says in JSON."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env={**ENVIRONMENT, **environment})
    return json.loads(run.stdout.splitlines()[-1])


def heavy_packages(statement: str, **environment: str) -> set[str]:
    listing = "import json, sys; print(json.dumps(list(sys.modules)))"
    modules = in_a_fresh_interpreter(f"{statement}\n{listing}", **environment)
    return {name.split(".")[0] for name in modules} & HEAVY


def processor_time(statement: str) -> float:
    """Of one statement in an interpreter of its own; the better of two, because noise only adds."""
    code = f"import time, json; start = time.process_time()\n{statement}\nprint(); print(time.process_time() - start)"
    return min(in_a_fresh_interpreter(code) for _ in range(2))


def test_importing_oversmooth_loads_no_heavy_package():
    assert heavy_packages("import oversmooth") == set()


def test_the_help_of_every_verb_and_the_version_load_only_what_parses_arguments():
    words = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
    statements = "\n".join(RUN.format(words=["oversmooth", *each]) for each in words)
    assert heavy_packages(statements) <= PARSERS


def test_completion_loads_only_what_parses_arguments_and_knows_verbs_options_and_values():
    def completed(*words: str) -> list[str]:
        environment = {"_OVERSMOOTH_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["oversmooth", *words])}
        environment["COMP_CWORD"] = str(len(words))
        code = "from oversmooth.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        code += "import sys, json; print(); print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
        run = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv = ['oversmooth']\n{code}"],
            capture_output=True,
            text=True,
            env={**ENVIRONMENT, **environment},
            cwd=ROOT,
        )
        *lines, modules = run.stdout.splitlines()
        assert set(json.loads(modules)) & HEAVY <= PARSERS
        return [line for line in lines if line]

    assert completed("mea") == ["measure"]
    assert "--max-samples" in completed("measure", "--max-s")
    assert completed("train", "digits", "--variant", "shar")[0] == "sharpen"
    assert completed("inspect", "pyproj") == ["pyproject.toml"]


def test_the_guard_of_heavy_packages_can_fail():
    assert heavy_packages("import pydantic, typer") == {"pydantic", "typer"}
    assert "torch" in heavy_packages("import oversmooth; oversmooth.inspect")


def test_help_takes_less_than_a_quarter_of_the_time_of_importing_torch():
    assert processor_time(RUN.format(words=["oversmooth", "--help"])) < processor_time("import torch") / 4


# --- lazy names -----------------------------------------------------------------------------------------------------


def test_every_public_name_is_found_and_comes_from_where_its_home_says():
    assert set(oversmooth._HOMES) == set(oversmooth.__all__)
    for name in oversmooth.__all__:
        assert getattr(oversmooth, name).__module__.startswith(oversmooth._HOMES[name]), name


def test_type_checkers_see_every_name_from_the_same_module():
    import ast
    from pathlib import Path

    (block,) = [node for node in ast.parse(Path(oversmooth.__file__).read_text()).body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == oversmooth._HOMES


def test_an_unknown_name_is_an_attribute_error_and_dir_lists_the_known():
    with pytest.raises(AttributeError, match="no attribute 'insect'"):
        oversmooth.insect  # noqa: B018
    assert set(oversmooth.__all__) <= set(dir(oversmooth))
    assert (
        oversmooth.__version__
        in subprocess.run(
            [sys.executable, "-m", "oversmooth", "--version"], capture_output=True, text=True, env=ENVIRONMENT
        ).stdout
    )
