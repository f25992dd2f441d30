"""Real images at CPU scale: 8 layers, 10,000 images of CIFAR-10, three variants, three seeds, and a tenth of the data.

OVERSMOOTH_DATA=FOLDER python benchmarks/cifar10_table.py      (FOLDER/cifar10 holds train.parquet and test.parquet)

Accuracy on 2,000 test images, smoothing over depth, accuracy under 15 corruptions at 5 severities, and the same runs on
a stratified tenth of the training images. About a quarter of an hour on two cores.
"""

import os
import sys
from pathlib import Path

from training_tables import VARIANTS, Row, Table, mean, regimes, rows_of, save, spread, theory_holds

TITLE = "10,000 images of CIFAR-10, a vision transformer of 8 layers, three seeds"
RECIPE = str(Path(__file__).parent / "cifar10_small.toml")
FRACTION = 0.1


def curve(rows: list[Row], variant: str, name: str) -> str:
    """Mean over seeds at every depth."""
    curves = [row["curves"][name] for row in rows if row["variant"] == variant]
    return " ".join(f"{sum(values) / len(values):.2f}" for values in zip(*curves, strict=True))


def page(whole: list[Row], tenth: list[Row], holds: dict[str, bool]) -> str:
    lines = [
        f"# {TITLE}",
        "",
        "Made by `OVERSMOOTH_DATA=FOLDER python benchmarks/cifar10_table.py`; every run and its manifest is in",
        "[cifar10.json](cifar10.json). A small model and few epochs: a check of direction, not of the paper's accuracies.",
        "Mean ± standard deviation over seeds 0, 1, 2.",
        "",
        "| variant | accuracy | under corruption | on a tenth of the data | cosine | HFC/LFC | predicted (3 x 8 layers) |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        cells = [spread(whole, variant, name) for name in ("accuracy", "corruption_accuracy")]
        cells += [spread(tenth, variant, "accuracy")]
        cells += [spread(whole, variant, name) for name in ("last_cosine", "last_hfc_lfc")]
        lines.append(f"| {variant} | {' | '.join(cells)} | {regimes(whole, variant)} |")
    lines += ["", "| variant | mean cosine in the embedding and after layers 1 to 8 |", "|---|---|"]
    lines += [f"| {variant} | {curve(whole, variant, 'cosine')} |" for variant in VARIANTS]
    lines += ["", f"| corruption | {' | '.join(VARIANTS)} |", f"|---|{'---|' * len(VARIANTS)}"]
    for kind in whole[0]["corruptions"]:
        flat = [{**row, "kind": row["corruptions"][kind]} for row in whole]
        cells = [f"{mean(flat, variant, 'kind'):.3f}" for variant in VARIANTS]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines += ["", "| what the theory says | holds |", "|---|---|"]
    lines += [f"| {claim} | {'yes' if is_so else 'no'} |" for claim, is_so in holds.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    if "OVERSMOOTH_DATA" not in os.environ:
        sys.exit("OVERSMOOTH_DATA must name a folder that holds cifar10/train.parquet and cifar10/test.parquet")
    data = str(Path(os.environ["OVERSMOOTH_DATA"]) / "cifar10")
    without = ("evaluation.corruptions=false",)
    tables = [
        Table(recipe=RECIPE, data=data),
        Table(recipe=RECIPE, data=data, fraction=FRACTION, overrides=without),
    ]
    rows = rows_of(tables)
    whole, tenth = ([row for row in rows if row["fraction"] == table.fraction] for table in tables)
    holds = theory_holds(whole)
    text = page(whole, tenth, holds)
    save("cifar10", TITLE, rows, text, {"theory": holds})
    print(text)
    failed = [claim for claim, is_so in holds.items() if not is_so]
    if failed:
        sys.exit(f"not as the theory says: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
