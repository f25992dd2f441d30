"""The Trainer of transformers as a recipe wants it: its private parts in one module, its data and errors as asked for."""

import ast
import hashlib
import inspect
import json
import pickle
import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer

import oversmooth.recipes
from oversmooth.errors import TrainingStopped, UnreadableData
from oversmooth.recipes.recipe import Intervals, Job
from oversmooth.recipes.train import load_recipe
from oversmooth.recipes.trainer import (
    FAILED,
    RecipeSteps,
    ReportingCollate,
    ReportingDataset,
    recipe_trainer,
    require_finite,
    without_errors,
)

# --- what is overridden, and what it was written against ---------------------------------------------------------------

OVERRIDDEN = sorted(name for name, value in vars(RecipeSteps).items() if callable(value) and hasattr(Trainer, name))
PRIVATE = {"_get_train_sampler", "_save_checkpoint", "_load_from_checkpoint"}
CALLERS = ("_run_epoch", "_maybe_log_save_evaluate", "_get_output_dir")
"""Private methods that decide when and with what those above are called."""
WRITTEN_AGAINST = Path(__file__).with_name("trainer_sources.json")
"""Signature and hash of each, of the transformers that was read last: `python -m tests.unit.recipes.test_trainer`."""


def described(method: object) -> dict[str, str]:
    """Its signature, and a hash of its statements: comments, docstrings and layout do not count."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method))).body[0]
    tree.body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    statements = "\n".join(ast.unparse(statement) for statement in tree.body)
    return {"signature": ast.unparse(tree.args), "statements": hashlib.sha256(statements.encode()).hexdigest()[:16]}


def difference(name: str, recorded: dict[str, str], owner: type = Trainer) -> str:
    """What is different now, in words; empty where nothing is."""
    method = getattr(owner, name, None)
    if method is None:
        return f"Trainer.{name} is gone: find what replaces it, or what its override was for."
    found = described(method)
    if found["signature"] != recorded["signature"]:
        return f"Trainer.{name} takes ({found['signature']}); it took ({recorded['signature']})."
    if found["statements"] != recorded["statements"]:
        return f"Trainer.{name} does something else: read it beside recipes/trainer.py, then record it again."
    return ""


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLERS])
def test_the_installed_trainer_is_the_one_that_the_overrides_were_written_against(name):
    assert difference(name, json.loads(WRITTEN_AGAINST.read_text())[name]) == ""


def test_a_trainer_that_changes_is_told_apart_method_by_method():
    class Other(Trainer):
        def _save_checkpoint(self, model, trial, metrics=None):
            pass

        def log(self, logs, start_time=None):
            print(logs)

    recorded = {name: described(getattr(Trainer, name)) for name in ("_save_checkpoint", "log")}
    assert "takes (self, model, trial, metrics=None)" in difference(
        "_save_checkpoint", recorded["_save_checkpoint"], Other
    )
    assert difference("log", described(Other.log), Other) == ""
    assert "does something else" in difference("log", {**described(Other.log), "statements": ""}, Other)
    assert "is gone" in difference("_no_such", {}, Other)


def test_three_private_methods_and_no_private_attribute_are_overridden():
    assert {name for name in OVERRIDDEN if name.startswith("_")} == PRIVATE
    assert all(getattr(RecipeSteps, name).__doc__.count("\n") == 0 for name in PRIVATE), "a reason in one line"
    tree = ast.parse(inspect.getsource(RecipeSteps))
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr[0] == "_"}
    assert named == PRIVATE


def test_pyproject_bounds_transformers_from_above_where_runs_are_trained():
    import tomllib

    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert any(re.fullmatch(r"transformers<\d+\.\d+", word) for word in extras["train"])


def private_calls(text: str) -> list[str]:
    """Private methods of a base class that are called, each a sign of an override."""
    return [
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
    ]


def test_private_methods_of_the_trainer_are_overridden_in_one_module():
    folder = Path(oversmooth.recipes.__file__).parent
    found = [path.name for path in sorted(folder.rglob("*.py")) if private_calls(path.read_text())]
    assert found == ["trainer.py"]


def test_the_search_for_overrides_can_fail():
    assert private_calls("class A(B):\n    def _save(self):\n        super()._save()\n") == ["_save"]


# --- data -----------------------------------------------------------------------------------------------------------


class Numbers(Dataset):
    """So many examples of one label; one of them may be unreadable."""

    def __init__(self, label: int, broken: int | None = None):
        self.label, self.broken = label, broken

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == self.broken:
            raise UnreadableData(f"{index}.png", "an image", "half of one")
        return {"x": torch.ones(2), "labels": self.label}


class Zero(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def stack(examples):
    labels = torch.tensor([example["labels"] for example in examples])
    return {"x": torch.stack([example["x"] for example in examples]), "labels": labels}


def mean_label(prediction):
    return {"label": float(prediction.label_ids.mean())}


def small_trainer(folder, training, workers):
    from transformers import TrainingArguments

    job = Job(
        recipe=load_recipe("digits"),
        build=Zero,
        train=training,
        evaluate=None,
        collate=stack,
        collate_evaluation=stack,
        steps=2,
        batch=2,
        learning_rate=lambda step, steps: 0.1,
        rhythm=Intervals(log=1, monitor=1, evaluate=1, save=1),
        probe=(),
        save=lambda model, path: None,
        loss=nn.functional.cross_entropy,
        metrics=mean_label,
    )
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_drop_last=True,
        dataloader_num_workers=workers,
        dataloader_persistent_workers=workers > 0,
        dataloader_pin_memory=False,
    )
    return recipe_trainer(job)(
        model=Zero(),
        args=arguments,
        data_collator=ReportingCollate(job.collate),
        train_dataset=ReportingDataset(training),
        compute_metrics=mean_label,
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_every_evaluation_sees_the_data_it_is_asked_for(tmp_path, workers):
    trainer = small_trainer(tmp_path, Numbers(0), workers)
    assert trainer.evaluate(Numbers(0))["eval_label"] == 0.0
    assert trainer.evaluate(Numbers(1))["eval_label"] == 1.0
    assert trainer.args.dataloader_persistent_workers == (workers > 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_arrives_with_its_fields(tmp_path, workers):
    trainer = small_trainer(tmp_path, Numbers(0, broken=1), workers)
    with pytest.raises(UnreadableData) as caught:
        trainer.train()
    assert (caught.value.data, caught.value.found) == ("1.png", "half of one")
    with pytest.raises(UnreadableData, match=r"3\.png"):
        trainer.evaluate(Numbers(0, broken=3))


def test_a_batch_with_an_unreadable_example_holds_its_error_alone():
    examples = ReportingDataset(Numbers(0, broken=1))
    collate = pickle.loads(pickle.dumps(ReportingCollate(stack)))
    batch = collate([examples[0], examples[1]])
    assert list(batch) == [FAILED]
    with pytest.raises(UnreadableData, match=r"1\.png"):
        without_errors(batch)
    assert without_errors(collate([examples[0]]))["labels"].tolist() == [0]


def test_a_loss_that_is_no_number_ends_the_run_with_advice(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(TrainingStopped, match=r"(?s)the loss is nan; lower .*step 5 is complete"):
        require_finite(float("nan"), 7, tmp_path)
    require_finite(1.0, 7, tmp_path)


if __name__ == "__main__":
    found = {name: described(getattr(Trainer, name)) for name in (*OVERRIDDEN, *CALLERS)}
    WRITTEN_AGAINST.write_text(json.dumps(found, indent=2) + "\n")
