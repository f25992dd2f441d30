"""Runs of a recipe over variants and seeds, and the table that is made of them."""

import hashlib
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

from oversmooth.claims.claim import Effect, holm, outcome, paired_effect
from oversmooth.claims.context import ClaimContext, Trained
from oversmooth.claims.experiments import PlannedRun
from oversmooth.claims.trained import BOTH
from oversmooth.environment.versions import TRAINING, machine, versions
from oversmooth.recipes.run_folder import Manifest

VARIANTS = ("vanilla", "sharpen", "smooth")
SEEDS = (0, 1, 2)
NO_DIFFERENCE = "No difference larger than the margin: its 90% interval lies inside."
PROCESSES = 2
"""Runs at once, each on one thread: small models gain nothing from a second one."""
Row = dict[str, Any]


# --- runs -----------------------------------------------------------------------------------------------------------


def kept_table(name: str) -> Row:
    """`results/NAME.json`; empty where there is none yet."""
    path = harness.RESULTS / f"{name}.json"
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    return found


def rows_of(name: str, planned: Sequence[PlannedRun], out: Path, row: Callable[[Trained], Row]) -> list[Row]:
    """A row per run. What the kept table or `out` holds with the same settings is not trained again."""
    materials = ClaimContext(out=out, targets=())
    kept = {_settings(each["manifest"]): each for each in kept_table(name).get("rows", ())}
    settings = {run: _planned(run) for run in planned}
    missing = [run for run in planned if settings[run] not in kept]
    materials.train(missing)
    kept |= {settings[run]: row(materials.trained(run)) for run in missing}
    return [kept[settings[run]] for run in planned]


Settings = tuple[str, int, float, str | None]
"""Variant, seed, share of the data and hash of the recipe with all overrides: the same ones give the same bits."""


def _settings(manifest: Mapping[str, Any]) -> Settings:
    return manifest["variant"], manifest["seed"], manifest["fraction"], manifest.get("recipe_sha256")


def _planned(run: PlannedRun) -> Settings:
    return run.variant, run.seed, run.fraction, hash_of(run.settings["recipe"])


def hash_of(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def row_of(run: Trained) -> Row:
    """What a run came to, and what the theory says of its layers."""
    measured, predicted = run.analysis.measurement, run.analysis.prediction
    assert measured is not None, "a trained model can be run"
    assert predicted is not None, "a trained model can be run"
    results, layers = run.manifest.results, run.analysis.inspection.layers
    curves = {name: [point.mean for point in measured.curve(name)] for name in ("cosine", "hfc_lfc")}
    return {
        "variant": run.manifest.variant,
        "seed": run.manifest.seed,
        "accuracy": results.get("eval_accuracy"),
        "loss": results.get("eval_loss"),
        "unigram_entropy": results.get("unigram_entropy"),
        "last_cosine": curves["cosine"][-1],
        "last_hfc_lfc": curves["hfc_lfc"][-1],
        "attention": sum(run.attention_changes()),
        "predicted_regimes": dict(Counter(layer.regime for layer in predicted.layers)),
        "smallest_eigenvalue": min(layer.plain.min_real for layer in layers),
        "largest_eigenvalue": max(layer.plain.max_real for layer in layers),
        "curves": curves,
        "manifest": portable(run.manifest),
    }


def portable(manifest: Manifest, *places: str | None) -> dict[str, Any]:
    """A run's manifest without the folders of this machine that its recipe and its data lie in; of the recipe, its hash."""
    text = manifest.model_dump_json(exclude={"recipe"})
    for place in filter(None, places):
        text = text.replace(place, Path(place).name)
    found: dict[str, Any] = json.loads(text)
    return found | {"recipe_sha256": hash_of(manifest.recipe)}


# --- what they come to ----------------------------------------------------------------------------------------------


def values_of(rows: Sequence[Row], variant: str, name: str) -> list[float]:
    """Seed by seed; seeds without a value are left out."""
    return [row[name] for row in rows if row["variant"] == variant and row[name] is not None]


def spread(rows: Sequence[Row], variant: str, name: str) -> str:
    """Mean and standard deviation over seeds."""
    values = values_of(rows, variant, name)
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" if values else ""


def mean(rows: Sequence[Row], variant: str, name: str) -> float:
    return statistics.mean(values_of(rows, variant, name))


def regimes(rows: Sequence[Row], variant: str) -> str:
    """How many layers of all seeds are in each predicted regime."""
    total: Counter[str] = Counter()
    for row in rows:
        if row["variant"] == variant:
            total.update(row["predicted_regimes"])
    return ", ".join(f"{count} {name}" for name, count in total.most_common())


def effect_of(rows: Sequence[Row], metric: str, of: str, against: str) -> Effect:
    """Of one variant minus another, over the seeds that have both."""
    by_seed = [
        {row["seed"]: row[metric] for row in rows if row["variant"] == variant and row[metric] is not None}
        for variant in (of, against)
    ]
    seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
    return paired_effect(*([values[seed] for seed in seeds] for values in by_seed))


def compared(rows: Sequence[Row], metrics: Sequence[str], margin: float) -> list[Row]:
    """Sharpen and smooth against both controls, seed by seed; corrected over all comparisons of the table."""
    pairs = [(metric, of, against) for metric in metrics for of, against in BOTH]
    effects = [effect_of(rows, *pair) for pair in pairs]
    adjusted = holm([effect.p for effect in effects])
    return [
        {
            "comparison": f"{metric.replace('_', ' ')} of {of} minus {against}",
            "effect": str(effect),
            "p": round(p, 4),
            "margin": margin,
            "outcome": outcome(effect, p, margin),
        }
        for (metric, of, against), effect, p in zip(pairs, effects, adjusted, strict=True)
    ]


def comparisons_table(comparisons: Sequence[Row]) -> list[str]:
    """Lines of Markdown."""
    names = ["comparison", "effect [95%]", f"p (Holm over {len(comparisons)})", "margin", "outcome"]
    head = ["", f"| {' | '.join(names)} |", "|---|---|---|---|---|"]
    rows = [f"| {' | '.join(map(str, each.values()))} |" for each in comparisons]
    return [*head, *rows, "", NO_DIFFERENCE]


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


def holds_table(title: str, holds: Mapping[str, bool]) -> list[str]:
    """Lines of Markdown."""
    head = ["", f"| {title} | holds |", "|---|---|"]
    return head + [f"| {claim} | {'yes' if is_so else 'no'} |" for claim, is_so in holds.items()]


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
