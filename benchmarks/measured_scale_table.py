"""Sharpened digits ViTs of 12 layers, plain and at the measured scale: what every attention layer does.

python benchmarks/measured_scale_table.py FOLDER     trains what is not in FOLDER yet (24 runs of a minute), keeps it
python benchmarks/measured_scale_table.py --summary  the few lines that docs/control.md shows of what is kept

A layer counts as smoothing where log(HFC/LFC) falls by more than 0.05 across its attention, on 64 test images. For each of
these the rungs of the ladder say which step carries it. Five folds run at the learning rate that validation images chose,
three more at the recipe's own, where token scales become smaller.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

from training_tables import Row, kept_table, save

from oversmooth.claims.context import ClaimContext, Trained, chosen_rates
from oversmooth.claims.experiments import DEEP, DEEP_TUNING, runs_of
from oversmooth.claims.trained import SMOOTHS

VARIANTS = ("sharpen", "sharpen-measured")
AT_THE_TUNED_RATE = replace(DEEP, first_seed=0)
AT_THE_RECIPES_RATE = replace(AT_THE_TUNED_RATE, name="digits-12-layers-recipes-rate", units=3, tuned_by=None)
TITLE = "Sharpened vision transformers of 12 layers on digits: the plain interval and that of the map that acts"


def row(run: Trained, variant: str, seed: int) -> Row:
    assert run.analysis.prediction is not None, "a trained model can be run"
    layers = [
        {
            "layer": layer.layer,
            "measured": layer.measured,
            "regime": layer.regime,
            "scale": layer.scale,
            "scale_spread": layer.scale_spread,
            "acting_eigenvalue": plain.min_real / layer.scale,
            "rungs": {rung.name: rung.mean for rung in layer.rungs},
        }
        for layer, spectrum in zip(run.analysis.prediction.layers, run.analysis.inspection.layers, strict=True)
        if (plain := spectrum.plain) is not None and layer.scale is not None and layer.measured is not None
    ]
    return {
        "variant": variant,
        "rate": run.manifest.recipe["optimizer"]["learning_rate"],
        "seed": seed,
        "accuracy": run.manifest.results["eval_accuracy"],
        "last_cosine": run.last("cosine"),
        "worst_layer": min(run.attention_changes()),
        "smoothing_layers": sum(change < -SMOOTHS for change in run.attention_changes()),
        "layers": layers,
        "manifest": json.loads(run.manifest.model_dump_json(exclude={"recipe"})),
    }


def largest_step_down(layer: Row) -> tuple[str, float]:
    """The step of the ladder that takes most away from the theorem's answer, and how much."""
    steps = {name: value - before for (_, before), (name, value) in pairwise(layer["rungs"].items())}
    name = min(steps, key=lambda step: steps[step])
    return name, steps[name]


def smoothing(layers: Sequence[Row]) -> list[Row]:
    """Those that smooth."""
    return [layer for layer in layers if layer["measured"] < -SMOOTHS]


def exceptions(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each layer that smooths."""
    for each in rows:
        for layer in smoothing(each["layers"]):
            name, step = largest_step_down(layer)
            numbers = f"{layer['rungs']['typical']:+.3f} | {layer['measured']:+.3f} | {name} ({step:+.3f})"
            yield f"| {each['variant']} | {each['rate']:g} | {each['seed']} | {layer['layer']} | {numbers} |"


def summary(rows: Sequence[Row]) -> str:
    """A line for each rate and form, over all folds."""
    lines = [
        "| rate | form | layers that smooth by more than 0.05 | worst layer | most taken off by | acting eigenvalue |",
        "|---|---|---|---|---|---|",
    ]
    for (rate, variant), runs in groupby(rows, key=itemgetter("rate", "variant")):
        layers = [layer for each in runs for layer in each["layers"]]
        found = smoothing(layers)
        reasons = Counter(largest_step_down(layer)[0] for layer in found)
        words = ", ".join(f"{name} ({count})" for name, count in reasons.most_common()) or "-"
        worst = min(layer["measured"] for layer in layers)
        acting = min(layer["acting_eigenvalue"] for layer in layers)
        cells = f"{len(found)} of {len(layers)} | {worst:+.3f} | {words} | {acting:.2f}"
        lines.append(f"| {rate:g} | `{variant}` | {cells} |")
    return "\n".join(lines)


def page(rows: Sequence[Row]) -> str:
    lines = [
        f"# {TITLE}",
        "",
        "Made by `python benchmarks/measured_scale_table.py FOLDER`; every layer, rung and manifest is in",
        "[measured_scale.json](measured_scale.json). Attention's change of log(HFC/LFC): below 0 it smooths. The",
        "acting eigenvalue is the most negative one of H over the mean token scale; below -2 the theorem promises nothing.",
        "",
        "| variant | rate | fold | accuracy | last cosine | worst layer | smooth by more than 0.05 | acting eigenvalue |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        acting = min(layer["acting_eigenvalue"] for layer in each["layers"])
        cells = [f"{each[name]:.3f}" for name in ("accuracy", "last_cosine", "worst_layer")]
        count = f"{each['smoothing_layers']} of {len(each['layers'])}"
        run = f"{each['variant']} | {each['rate']:g} | {each['seed']}"
        lines.append(f"| {run} | {' | '.join(cells)} | {count} | {acting:.2f} |")
    lines += [
        "",
        "Layers that smooth by more than 0.05, and the step of the ladder that takes most away from the theorem's answer:",
        "",
        "| variant | rate | fold | layer | typical pass of the map | measured | largest step down |",
        "|---|---|---|---|---|---|---|",
        *exceptions(rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--summary"]:
        print(summary(kept_table("measured_scale")["rows"]))
        return
    materials = ClaimContext(out=Path(sys.argv[1]), targets=())
    rates = chosen_rates(materials, {DEEP_TUNING: VARIANTS})
    planned = [
        run for experiment in (AT_THE_TUNED_RATE, AT_THE_RECIPES_RATE) for run in runs_of(experiment, VARIANTS, rates)
    ]
    materials.train(planned)
    rows = [row(materials.trained(each), each.variant, each.seed) for each in planned]
    rows.sort(key=lambda found: (found["rate"], found["variant"], found["seed"]))
    text = page(rows)
    save("measured_scale", TITLE, rows, text, {})
    print(text)


if __name__ == "__main__":
    main()
