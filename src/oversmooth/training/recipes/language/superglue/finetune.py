"""`finetune`: an encoder on several tasks with several seeds, the score beside the smoothing.

OUT/TASK/seedN/             a run of the shared runner: manifest, ordinary checkpoint, analyses before and after
OUT/TASK/seedN/predictions/ validation/ and test/, in the official submission format
OUT/submission/seedN/       the test predictions of all tasks together, as the server takes them
OUT/results.json            the table
"""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from oversmooth.errors import BadValue, GivenTwice, MissingValue, UnknownName
from oversmooth.output.whole_files import make_folder, write_whole
from oversmooth.results import Analysis, EndOfDepth, FinetuneResult, Missing, Progress, TaskResult, no_progress
from oversmooth.training.recipes.language.superglue.classifier import load_tokenizer
from oversmooth.training.recipes.language.superglue.job import BEFORE, SETTINGS, FinetuneRecipe, task_job
from oversmooth.training.recipes.language.superglue.reading import read_splits
from oversmooth.training.recipes.language.superglue.scoring import overall, task_score
from oversmooth.training.recipes.language.superglue.tasks import DIAGNOSTIC, MAIN, TASKS
from oversmooth.training.recipes.runner import RunRequest, place_held, train_job
from oversmooth.training.recipes.schema import overridden, parsed

ALL = "superglue"
Stage = Callable[[str], Progress]


def chosen_tasks(words: str) -> list[str]:
    """Names from `superglue` or a list with commas; diagnostic sets bring the task that answers them."""
    names = [word.strip().lower().replace("-", "") for word in words.split(",") if word.strip()]
    if names == [ALL]:
        return list(TASKS)
    for name in names:
        if name not in TASKS:
            raise UnknownName("task", name, [ALL, *TASKS])
    if not names:
        raise BadValue("--tasks", words, f"{ALL} or a comma-separated list such as boolq,cb")
    needed = dict.fromkeys([*names, *(TASKS[name].trained_on for name in names if TASKS[name].trained_on)])
    return [name for name in TASKS if name in needed]


def chosen_setting(name: str, overrides: Sequence[str]) -> FinetuneRecipe:
    if name not in SETTINGS:
        raise UnknownName("setting", name, list(SETTINGS))
    tables = overridden(SETTINGS[name].model_dump(mode="json"), overrides)
    return parsed(FinetuneRecipe, tables, name)


def finetune(
    checkpoint: str,
    out: Path,
    *,
    tasks: str = ALL,
    seeds: Sequence[int] = (0,),
    data: str | None = None,
    setting: str = "superglue",
    overrides: Sequence[str] = (),
    resume: bool = False,
    command: str = "",
    stage: Stage = lambda name: no_progress,
) -> FinetuneResult:
    """Everything that `oversmooth finetune` does."""
    if not seeds:
        raise MissingValue("--seeds")
    if twice := [seed for seed in seeds if list(seeds).count(seed) > 1]:
        raise GivenTwice("The seed", twice[0])
    recipe, names = chosen_setting(setting, overrides), chosen_tasks(tasks)
    trained = [name for name in names if name in MAIN]
    diagnostic = [name for name in names if name in DIAGNOSTIC]
    request = RunRequest(name=setting, out=out, overrides=tuple(overrides), resume=resume, command=command)
    places = {
        (name, seed): replace(request, out=out / name / f"seed{seed}", seed=seed) for name in trained for seed in seeds
    }
    tokenizer = load_tokenizer(checkpoint)
    splits = {name: read_splits(TASKS[name], data) for name in names}  # all of them, before hours are spent on one
    results: dict[str, list[dict[str, float]]] = {name: [] for name in trained}
    with ExitStack() as all_places:  # refused before hours are spent on the first
        for place in places.values():
            make_folder(place.out.parent)
            all_places.enter_context(place_held(place))
        for (name, seed), place in places.items():
            extra = {other: splits[other]["validation"] for other in diagnostic if TASKS[other].trained_on == name}
            first = places[name, seeds[0]].out / BEFORE
            job = task_job(TASKS[name], splits[name], extra, checkpoint, tokenizer, recipe, place, first)
            results[name].append(train_job(job, place, stage(f"{TASKS[name].folder}, seed {seed}")).results)
            _collect(place.out, out / "submission" / f"seed{seed}")
    found = _table(names, tuple(seeds), results, out, checkpoint=checkpoint, setting=setting, data=data or "the hub")
    text = found.to_json(indent=2) + "\n"
    write_whole(out / "results.json", lambda partial: partial.write_text(text, encoding="utf-8"))
    return found


def _collect(run_folder: Path, submission: Path) -> None:
    """Test predictions of one run beside those of the others."""
    for path in sorted((run_folder / "predictions" / "test").glob("*.jsonl")):
        make_folder(submission)
        shutil.copyfile(path, submission / path.name)


def _table(
    names: list[str], seeds: tuple[int, ...], results: dict[str, list[dict[str, float]]], out: Path, **facts: str
) -> FinetuneResult:
    rows = []
    for name in names:
        task = TASKS[name]
        runs = results[task.trained_on or name]
        prefix = f"{name}_" if task.trained_on else "eval_"
        metrics = {
            key.removeprefix(prefix): tuple(run[key] for run in runs) for key in runs[0] if key.startswith(prefix)
        }
        metrics.pop("loss", None)
        scores = tuple(task_score(task, {key: values[i] for key, values in metrics.items()}) for i in range(len(seeds)))
        folders = [out / name / f"seed{seed}" for seed in seeds]
        rows.append(
            TaskResult(
                task=name,
                seeds=seeds,
                metrics=metrics,
                scores=scores,
                mean=mean(scores),
                spread=stdev(scores) if len(scores) > 1 else None,
                before=None if task.trained_on else end_of_depth(folders[0] / BEFORE),
                after=() if task.trained_on else tuple(end_of_depth(folder / "analysis.json") for folder in folders),
                missing=() if len(scores) > 1 else (Missing(field="spread", reason="there is one seed"),),
            )
        )
    by_seed = [overall({row.task: row.scores[i] for row in rows}) for i in range(len(seeds))]
    complete = tuple(value for value in by_seed if value is not None)
    absent = () if complete else (Missing(field="overall", reason="it needs all eight tasks"),)
    return FinetuneResult(seeds=seeds, tasks=tuple(rows), overall=complete or None, missing=absent, **facts)


def end_of_depth(path: Path) -> EndOfDepth:
    """The last block's numbers of a saved analysis."""
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    analysis = Analysis.from_dict(loaded, where=str(path))
    found: dict[str, Any] = {}
    for metric in ("cosine", "hfc_lfc"):
        curve = analysis.measurement.curve(metric) if analysis.measurement else []
        found[metric] = curve[-1].mean if curve else None
    layers = analysis.prediction.layers if analysis.prediction else ()
    found["smoothing_layers"] = sum(layer.regime == "smoothing" for layer in layers) if layers else None
    absent = tuple(Missing(field=name, reason=f"{path.name} has none") for name in found if found[name] is None)
    return EndOfDepth(**found, layers=len(analysis.inspection.layers), missing=absent)
