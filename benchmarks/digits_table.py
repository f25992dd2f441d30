"""The table of the recipe `digits`: 12 layers, three variants, three seeds; `python benchmarks/digits_table.py RUNS`.

Accuracy on 360 test images, smoothing of the last layer on 64 of them, the regime that the theory predicts for each
layer, and whether smoothing and sharpening are where the theory says. Nine runs of about a minute, two at once on two cores.
What the kept table or RUNS holds with the same settings is not trained again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from training_tables import SEEDS, VARIANTS, Row, holds_table, regimes, row_of, rows_of, save, spread, theory_holds

from oversmooth.claims.experiments import PlannedRun

TITLE = "Handwritten digits, a vision transformer of 12 layers, three seeds"


def page(rows: Sequence[Row]) -> str:
    lines = [
        f"# {TITLE}",
        "",
        "Made by `python benchmarks/digits_table.py RUNS`; every run and its manifest is in [digits.json](digits.json).",
        "Mean ± standard deviation over seeds 0, 1, 2. Cosine and HFC/LFC after the last layer.",
        "",
        "| variant | accuracy | cosine | HFC/LFC | predicted regimes (3 x 12 layers) |",
        "|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        cells = [spread(rows, variant, name) for name in ("accuracy", "last_cosine", "last_hfc_lfc")]
        lines.append(f"| {variant} | {' | '.join(cells)} | {regimes(rows, variant)} |")
    return "\n".join(lines + holds_table("what should be so", theory_holds(rows))) + "\n"


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit((__doc__ or "").partition("\n")[0])
    planned = [PlannedRun(recipe="digits", variant=variant, seed=seed) for seed in SEEDS for variant in VARIANTS]
    rows = rows_of("digits", planned, Path(sys.argv[1]), row_of)
    holds, text = theory_holds(rows), page(rows)
    save("digits", TITLE, rows, text, {"theory": holds})
    print(text)
    failed = [claim for claim, is_so in holds.items() if not is_so]
    if failed:
        sys.exit(f"not as the theory says: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
