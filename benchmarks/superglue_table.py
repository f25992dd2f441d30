"""SuperGLUE on small encoders: `OVERSMOOTH_DATA=FOLDER python benchmarks/superglue_table.py REPRODUCTION`.

Two families: our mini-bert, from the runs that `oversmooth reproduce` left in REPRODUCTION, and MiniLM with its value maps
edited. Fixed before the runs: three tasks, their mean score is what counts, a unit is a seed (for mini-bert that of its
pretraining too), paired within the family against its vanilla, Holm over all comparisons, margin of 0.02; comparisons
with the free form came later. FOLDER/superglue has the official files, with all examples or a part of them; how many there
were is in the results. What is scored lies in REPRODUCTION/superglue with the manifests of its runs, and is not fine-tuned
again.

Known by then: an earlier table, by the same protocol, was seen and taken out because the manifests of its runs had not been
kept; all of its comparisons were undecided. MiniLM's variants are edits of trained weights against those weights, without a
control that is moved as far: they say what such an edit costs, not what the sign does.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from statistics import mean

import numpy
import torch
from training_tables import PROCESSES, SEEDS, Row, portable, save

from oversmooth.claims.claim import holm, outcome, paired_effect
from oversmooth.claims.experiments import FRESH
from oversmooth.control.edit import edit
from oversmooth.environment.files import write_whole
from oversmooth.models.example_model import example_model
from oversmooth.recipes.run_folder import read_manifest
from oversmooth.recipes.superglue import finetune
from oversmooth.recipes.superglue_scoring import scored, task_score
from oversmooth.recipes.superglue_tasks import TASKS, read_splits

CHOSEN = ("cb", "copa", "rte")
CHANGES = ("training.epochs=20", "optimizer.learning_rate=1e-4", "training.max_tokens=64")
"""A few dozen examples are a few steps an epoch: the rate of the setting would leave every encoder where it was. Inputs are
cut to 64 tokens (mini-bert has positions for 32), so that MiniLM takes minutes."""
MARGIN = 0.02
MINI_BERT = "mini-bert-600"
FREE = ("free", "sharpen", "smooth")
INTERVALS = {"sharpen": (-1.0, 0.0), "smooth": (0.0, 1.0)}
COMPARISONS = (
    *(("mini-bert", of, "vanilla") for of in FREE),
    *(("mini-bert", of, "free") for of in INTERVALS),
    *(("MiniLM", of, "vanilla") for of in INTERVALS),
)


def encoders(reproduction: Path, work: Path) -> Iterator[tuple[str, str, Sequence[int], Path]]:
    """Family, variant, seeds and folder of everything that is fine-tuned; the slowest first."""
    for variant, interval in INTERVALS.items():
        edit(example_model(), work / variant, interval=interval)
    for variant in ("vanilla", *INTERVALS):
        yield "MiniLM", variant, SEEDS, work / variant if variant in INTERVALS else example_model()
    for variant in ("vanilla", *FREE):
        for seed in SEEDS:
            run = f"{MINI_BERT}-{variant}-seed{FRESH + seed}"
            yield "mini-bert", variant, (seed,), reproduction / "runs" / run / "model"


def rows_of(family: str, variant: str, seeds: Sequence[int], folder: Path, data: Path, into: Path) -> list[Row]:
    """A row per seed and task of one encoder; kept, because a stopped table goes on."""
    kept = into / f"{family}-{variant}-seed{'-'.join(map(str, seeds))}.json"
    if not kept.exists():
        rows = _fine_tuned(family, variant, seeds, folder, data)
        write_whole(kept, lambda partial: partial.write_text(json.dumps(rows)))
    found: list[Row] = json.loads(kept.read_text())
    return found


def _fine_tuned(family: str, variant: str, seeds: Sequence[int], folder: Path, data: Path) -> list[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        found = finetune(str(folder), out, tasks=",".join(CHOSEN), seeds=seeds, data=str(data), overrides=CHANGES)
        manifests = {(task, seed): read_manifest(out / task / f"seed{seed}") for task in CHOSEN for seed in seeds}
    return [
        {
            "family": family,
            "variant": variant,
            "seed": seed,
            "task": task.task,
            "score": task.scores[order],
            "manifest": portable(manifests[task.task, seed], *map(str, (folder, data))),
        }
        for order, seed in enumerate(seeds)
        for task in found.tasks
    ]


def mean_scores(rows: Sequence[Row], family: str, variant: str) -> list[float]:
    """Over the tasks, one per seed."""
    by_seed = [
        [row["score"] for row in rows if (row["family"], row["variant"], row["seed"]) == (family, variant, seed)]
        for seed in SEEDS
    ]
    return [sum(scores) / len(scores) for scores in by_seed]


def compared(rows: Sequence[Row]) -> list[Row]:
    """Every variant against controls of its family, seed by seed."""
    effects = [
        paired_effect(mean_scores(rows, family, of), mean_scores(rows, family, against))
        for family, of, against in COMPARISONS
    ]
    adjusted = holm([effect.p for effect in effects])
    return [
        {
            "family": family,
            "difference": f"{of} minus {against}",
            "effect": str(effect),
            "p": round(p, 4),
            "outcome": outcome(effect, p, MARGIN),
        }
        for (family, of, against), effect, p in zip(COMPARISONS, effects, adjusted, strict=True)
    ]


def examples(data: Path) -> dict[str, dict[str, int]]:
    """Lines of the files that were trained on and scored."""
    folders = {task: data / TASKS[task].folder for task in CHOSEN}
    return {
        task: {split: len((folder / f"{split}.jsonl").read_text().splitlines()) for split in ("train", "val")}
        for task, folder in folders.items()
    }


def constant_scores(data: Path) -> dict[str, float]:
    """What the best constant answer scores in each task: an encoder at that level has learned nothing."""
    found = {}
    for name in CHOSEN:
        task = TASKS[name]
        examples = read_splits(task, str(data))["validation"].examples
        answers = sorted({example.label for example in examples if example.label is not None})
        one_hot = numpy.eye(answers[-1] + 1)
        constant = [numpy.tile(one_hot[answer], (len(examples), 1)) for answer in answers]
        found[name] = max(task_score(task, scored(task, examples, scores)) for scores in constant)
    return found


def _above(rows: Sequence[Row], level: float) -> str:
    """How many mean scores are clearly above a level."""
    means = [
        score
        for family, variant in dict.fromkeys((row["family"], row["variant"]) for row in rows)
        for score in mean_scores(rows, family, variant)
    ]
    return f"{sum(score > level + 0.05 for score in means)} of the {len(means)}"


def page(rows: Sequence[Row], comparisons: Sequence[Row], more: Row) -> str:
    counts, constant = more["examples"], more["constant"]
    level = mean(constant.values())
    sizes = ", ".join(f"{task.upper()} {count['train']} and {count['val']}" for task, count in counts.items())
    lines = [
        "# SuperGLUE on small encoders",
        "",
        "Made by `OVERSMOOTH_DATA=FOLDER python benchmarks/superglue_table.py REPRODUCTION`; every number is in",
        f"[superglue.json](superglue.json). Examples trained on and scored: {sizes}.",
        "",
        f"The best constant answer scores {', '.join(f'{task.upper()} {score:.3f}' for task, score in constant.items())}: "
        f"{level:.3f} on average. {_above(rows, level)} means below are more than 0.05 above",
        "that. Encoders that have not learned a task cannot show what their form does to it.",
        "",
        f"| family | variant | seed | {' | '.join(CHOSEN)} | mean |",
        f"|---|---|---|{'---|' * (len(CHOSEN) + 1)}",
    ]
    encoder = itemgetter("family", "variant", "seed")
    for (family, variant, seed), runs in groupby(rows, encoder):
        scores = [run["score"] for run in runs]
        numbers = " | ".join(f"{score:.3f}" for score in (*scores, sum(scores) / len(scores)))
        lines.append(f"| {family} | {variant} | {seed} | {numbers} |")
    lines += ["", f"| family | difference of the means | effect [95%] | p (Holm over {len(comparisons)}) | outcome |"]
    lines += ["|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row.values()))} |" for row in comparisons]
    return "\n".join(lines) + "\n"


def main() -> None:
    if len(sys.argv) != 2 or "OVERSMOOTH_DATA" not in os.environ:
        sys.exit((__doc__ or "").partition("\n")[0])
    data = Path(os.environ["OVERSMOOTH_DATA"]) / "superglue"
    reproduction = Path(sys.argv[1])
    into = reproduction / "superglue"
    into.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        waiting = [pool.submit(rows_of, *words, data, into) for words in encoders(reproduction, Path(name))]
        rows = []
        for future in waiting:
            rows += future.result()
            print({key: value for key, value in rows[-1].items() if key != "manifest"}, flush=True)
    comparisons = compared(rows)
    more = {"comparisons": comparisons, "examples": examples(data), "constant": constant_scores(data)}
    more |= {"overrides": CHANGES, "margin": MARGIN}
    markdown = page(rows, comparisons, more)
    save("superglue", "SuperGLUE on small encoders", rows, markdown, more)
    print(markdown)


if __name__ == "__main__":
    main()
