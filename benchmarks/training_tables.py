"""Runs of a recipe over variants and seeds, and the table that is made of them."""

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import harness
import torch

from oversmooth.environment.versions import TRAINING, machine, versions
from oversmooth.training.recipes.manifest import Manifest
from oversmooth.training.recipes.runner import RunRequest
from oversmooth.training.recipes.train import train

VARIANTS = ("vanilla", "sharpen", "smooth")
SEEDS = (0, 1, 2)
PROCESSES = 2
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """One recipe under several settings."""

    recipe: str
    data: str | None = None
    overrides: tuple[str, ...] = ()


def rows_of(tables: Sequence[Table]) -> list[Row]:
    """One row per table, variant and seed, each from a run of its own on one thread; prints as it goes.

    Two runs go on at once: small models gain nothing from a second thread.
    """
    combinations = [(table, variant, seed) for table in tables for seed in SEEDS for variant in VARIANTS]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        waiting = [pool.submit(_row, *words) for words in combinations]
        for done in as_completed(waiting):
            shown = {key: value for key, value in done.result().items() if key not in ("curves", "manifest")}
            print(json.dumps(shown), flush=True)
        return [done.result() for done in waiting]


def _one_thread() -> None:
    torch.set_num_threads(1)


def _row(table: Table, variant: str, seed: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        return _run(table, variant, seed, Path(folder) / "run")


def _run(table: Table, variant: str, seed: int, out: Path) -> Row:
    began = time.perf_counter()
    request = RunRequest(
        name=table.recipe,
        out=out,
        variant=variant,
        seed=seed,
        overrides=table.overrides,
        command=f"oversmooth train {Path(table.recipe).stem} --variant {variant} --seed {seed}",
    )
    run = train(request, table.data)
    assert run.analysis is not None, "this process is the first"
    measured, predicted = run.analysis.measurement, run.analysis.prediction
    assert measured is not None
    assert predicted is not None
    curves = {name: [point.mean for point in measured.curve(name)] for name in ("cosine", "hfc_lfc")}
    layers = run.analysis.inspection.layers
    return {
        "variant": variant,
        "seed": seed,
        "accuracy": run.results.get("eval_accuracy"),
        "loss": run.results.get("eval_loss"),
        "unigram_entropy": run.results.get("unigram_entropy"),
        "last_cosine": curves["cosine"][-1],
        "last_hfc_lfc": curves["hfc_lfc"][-1],
        "predicted_regimes": dict(Counter(layer.regime for layer in predicted.layers)),
        "smallest_eigenvalue": min(layer.plain.min_real for layer in layers),
        "largest_eigenvalue": max(layer.plain.max_real for layer in layers),
        "curves": curves,
        "seconds": round(time.perf_counter() - began, 1),
        "manifest": portable(run.manifest, table.recipe, table.data),
    }


def portable(manifest: Manifest, *places: str | None) -> dict[str, Any]:
    """A run's manifest without the folders of this machine that its recipe and its data lie in."""
    text = manifest.model_dump_json(exclude={"recipe"})
    for place in filter(None, places):
        text = text.replace(place, Path(place).name)
    found: dict[str, Any] = json.loads(text)
    return found


def spread(rows: Sequence[Row], variant: str, name: str) -> str:
    """Mean and standard deviation over seeds."""
    values = [row[name] for row in rows if row["variant"] == variant and row[name] is not None]
    if not values:
        return ""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def mean(rows: Sequence[Row], variant: str, name: str) -> float:
    return statistics.mean(row[name] for row in rows if row["variant"] == variant)


def regimes(rows: Sequence[Row], variant: str) -> str:
    """How many layers of all seeds are in each predicted regime."""
    total: Counter[str] = Counter()
    for row in rows:
        if row["variant"] == variant:
            total.update(row["predicted_regimes"])
    return ", ".join(f"{count} {name}" for name, count in total.most_common())


def theory_holds(rows: Sequence[Row]) -> dict[str, bool]:
    """What the theory says about the three variants, checked on every run."""
    inside = {"sharpen": (-1.0, 0.0), "smooth": (0.0, 1.0)}
    ends = [(row, inside[row["variant"]]) for row in rows if row["variant"] in inside]
    seeds = sorted({row["seed"] for row in rows})
    last = {(row["variant"], row["seed"]): row["last_cosine"] for row in rows}
    ratio = {(row["variant"], row["seed"]): row["last_hfc_lfc"] for row in rows}
    return {
        "every eigenvalue lies in its interval": all(
            low - 1e-5 <= row["smallest_eigenvalue"] and row["largest_eigenvalue"] <= high + 1e-5
            for row, (low, high) in ends
        ),
        "in every seed, tokens of smooth are more alike than those of sharpen (cosine)": all(
            last["smooth", seed] > last["sharpen", seed] for seed in seeds
        ),
        "in every seed, sharpen keeps more high frequencies than smooth (HFC/LFC)": all(
            ratio["sharpen", seed] > ratio["smooth", seed] for seed in seeds
        ),
        "vanilla lies between them on average (cosine)": mean(rows, "sharpen", "last_cosine")
        < mean(rows, "vanilla", "last_cosine")
        < mean(rows, "smooth", "last_cosine"),
    }


def save(name: str, title: str, rows: Sequence[Row], markdown: str, more: Mapping[str, Any]) -> None:
    """`results/NAME.json` with everything, `results/NAME.md` to read."""
    body = {
        "title": title,
        "rows": list(rows),
        **more,
        "threads": 1,
        "runs_at_once": PROCESSES,
        "machine": machine(),
        "commit": harness.commit(),
        "versions": dict(versions(TRAINING)),
    }
    harness.RESULTS.mkdir(exist_ok=True)
    for ending, text in ((".json", json.dumps(body, indent=1, allow_nan=False) + "\n"), (".md", markdown)):
        beside = harness.RESULTS / f"{name}{ending}.new"
        beside.write_text(text)
        beside.replace(harness.RESULTS / f"{name}{ending}")
