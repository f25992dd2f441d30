"""What the shell offers is what the library knows."""

import os
import subprocess
import sys

import pytest

from oversmooth.claims.reproduce import CLAIMS
from oversmooth.commands import options as completion
from oversmooth.commands.list import KINDS
from oversmooth.commands.options import VALUES
from oversmooth.measurement.observer import GROUPS, known_metrics
from oversmooth.models.hooks.places import PLACES
from oversmooth.models.hooks.removal import PARTS
from oversmooth.models.live import TASKS as LOSS_TASKS
from oversmooth.prediction.what_if import WHAT_IFS
from oversmooth.recipes.superglue import SETTINGS
from oversmooth.recipes.superglue_tasks import TASKS
from oversmooth.recipes.train import load_recipe
from oversmooth.recipes.variants import VARIANTS
from oversmooth.worth.prune import BY
from tests.command_line import ROOT

TABLES = {
    "kind": tuple(KINDS),
    "claim": ("all", *(claim.name for claim in CLAIMS)),
    "loss_task": tuple(LOSS_TASKS),
    "metric": ("all", *GROUPS, *known_metrics()),
    "place": ("all", "stream", "norms", "branches", *PLACES),
    "part": PARTS,
    "prune_by": BY,
    "setting": tuple(SETTINGS),
    "task": ("superglue", *TASKS),
    "variant": VARIANTS,
    "what_if": tuple(f"{name}:" if form else name for name, (form, *_) in WHAT_IFS.items()),
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_values_of_an_option_are_those_of_its_table(kind):
    assert VALUES[kind] == TABLES[kind]


def test_lists_are_completed_behind_their_last_comma():
    assert completion.values("metric")("hfc_lfc,cosi") == ["hfc_lfc,cosine", "hfc_lfc,cosine_abs"]


def test_targets_are_files_and_folders(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.gguf").touch()
    (tmp_path / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    assert completion.targets("") == ["model/"]
    assert completion.targets("model/") == ["model/weights.gguf"]
    assert completion.targets("model/w") == ["model/weights.gguf"]
    assert completion.targets("nothing/here") == []


def test_recipes_are_the_shipped_ones():
    assert "digits" in completion.recipes("")
    for name in completion.recipes("cifar"):
        load_recipe(name)


def test_the_module_answers_the_shell_as_the_command_does():
    """`python -m oversmooth --install-completion` installs the completion of `oversmooth`."""
    asked = {"_OVERSMOOTH_COMPLETE": "complete_bash", "COMP_WORDS": "oversmooth surv", "COMP_CWORD": "1"}
    environment = {**os.environ, **asked, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "oversmooth"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split() == ["survey"]
