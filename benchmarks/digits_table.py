"""The table of the recipe `digits`: 12 layers, three variants, three seeds; `python benchmarks/digits_table.py`.

Accuracy on 360 test images, smoothing of the last layer on 64 of them, the regime that the theory predicts for each
layer, and whether smoothing and sharpening are where the theory says. Nine runs of about a minute, two at once on two cores.
"""

import sys

from training_tables import VARIANTS, Table, regimes, rows_of, save, spread, theory_holds

TITLE = "Handwritten digits, a vision transformer of 12 layers, three seeds"


def main() -> None:
    rows = rows_of([Table(recipe="digits")])
    holds = theory_holds(rows)
    lines = [
        f"# {TITLE}",
        "",
        "Made by `python benchmarks/digits_table.py`; every run and its manifest is in [digits.json](digits.json).",
        "Mean ± standard deviation over seeds 0, 1, 2. Cosine and HFC/LFC after the last layer.",
        "",
        "| variant | accuracy | cosine | HFC/LFC | predicted regimes (3 x 12 layers) |",
        "|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        cells = [spread(rows, variant, name) for name in ("accuracy", "last_cosine", "last_hfc_lfc")]
        lines.append(f"| {variant} | {' | '.join(cells)} | {regimes(rows, variant)} |")
    lines += ["", "| what the theory says | holds |", "|---|---|"]
    lines += [f"| {claim} | {'yes' if is_so else 'no'} |" for claim, is_so in holds.items()]
    save("digits", TITLE, rows, "\n".join(lines) + "\n", {"theory": holds})
    print("\n".join(lines))
    failed = [claim for claim, is_so in holds.items() if not is_so]
    if failed:
        sys.exit(f"not as the theory says: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
