"""The table of the recipe `mini-bert`: three variants; `python benchmarks/mini_bert_table.py`.

Masked-token loss on held-out text beside the unigram entropy of the corpus, smoothing of the last layer, the regime that
the theory predicts for each layer. Runs of a few minutes, two at once on two cores. With OVERSMOOTH_DATA also on tiny
Shakespeare (`python benchmarks/mini_bert_table.py shakespeare`), into a table of its own.
"""

import os
import sys
from pathlib import Path

import training_tables
from training_tables import VARIANTS, Table, regimes, rows_of, save, theory_holds

BELOW = 0.5
"""Nats by which the loss must be below the entropy, to be clearly below it."""


def main() -> None:
    training_tables.SEEDS = (0,)
    name, title, table = (
        "mini_bert",
        "The documentation inside Python, a crammed BERT of 8 layers",
        Table(recipe="mini-bert"),
    )
    if sys.argv[1:] == ["shakespeare"]:
        text = Path(os.environ["OVERSMOOTH_DATA"]) / "text" / "tinyshakespeare.txt"
        name, title = "mini_bert_shakespeare", "Tiny Shakespeare, a crammed BERT of 8 layers"
        table = Table(recipe="mini-bert", data=str(text), overrides=("data.source=tinyshakespeare.txt",))
    rows = rows_of([table])
    holds = theory_holds(rows)
    holds[f"the masked-token loss of every variant is more than {BELOW} nats below the unigram entropy"] = all(
        row["loss"] < row["unigram_entropy"] - BELOW for row in rows
    )
    lines = [
        f"# {title}",
        "",
        f"Made by `python benchmarks/mini_bert_table.py`; every run and its manifest is in [{name}.json]({name}.json).",
        "Loss in nats per masked token, on held-out text. Cosine and HFC/LFC after the last layer. One seed: how the losses",
        "of variants compare is judged in [claim 7](claims/claims.md), at smaller budgets and with more seeds.",
        "",
        "| variant | loss | unigram entropy | cosine | HFC/LFC | predicted regimes (8 layers) |",
        "|---|---|---|---|---|---|",
    ]
    by_variant = {row["variant"]: row for row in rows}
    for variant in VARIANTS:
        row = by_variant[variant]
        cells = [f"{row[key]:.3f}" for key in ("loss", "unigram_entropy", "last_cosine", "last_hfc_lfc")]
        lines.append(f"| {variant} | {' | '.join(cells)} | {regimes(rows, variant)} |")
    lines += ["", "| what should be so | holds |", "|---|---|"]
    lines += [f"| {claim} | {'yes' if is_so else 'no'} |" for claim, is_so in holds.items()]
    save(name, title, rows, "\n".join(lines) + "\n", {"theory": holds})
    print("\n".join(lines))
    failed = [claim for claim, is_so in holds.items() if not is_so]
    if failed:
        sys.exit(f"not as it should be: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
