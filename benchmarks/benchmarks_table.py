"""The table of benchmarks in the docs, made from `results/*.json`: a number without a file behind it is not there.

python benchmarks/benchmarks_table.py            print the table
python benchmarks/benchmarks_table.py --check    exit 1 where docs/benchmarks.md differs from it
python benchmarks/benchmarks_table.py --write    put it between the markers of that page
"""

import argparse
import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(?<=<!-- benchmarks -->\n).*?(?=<!-- /benchmarks -->)", re.DOTALL)
COLUMNS = ("claim", "ours", "alternative", "ratio", "file")


def table(results: Path = RESULTS) -> str:
    """One row per result file, sorted by name, and below it the machine that was measured on."""
    rows = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    machines = set()
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text())
        if "claim" not in result:  # tables of training runs have pages of their own
            continue
        machines.add(f"{result['machine']}, {result['threads']} threads")
        cells = [result["claim"], result["ours"], result["alternative"], f"{result['ratio']:.3g}"]
        link = f"[{path.stem}](../benchmarks/results/{path.name})"
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, link)) + " |")
    return "\n".join([*rows, "", f"Measured on: {'; '.join(sorted(machines))}.", ""])


def with_table(text: str, block: str) -> str:
    """The page with the block between its markers, which have to be there once."""
    changed, count = BLOCK.subn(lambda _: block, text)
    if count != 1:
        sys.exit(f"expected one <!-- benchmarks --> ... <!-- /benchmarks --> block in {PAGE.name}, found {count}")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of benchmarks in the docs.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 where the page differs")
    mode.add_argument("--write", action="store_true", help="update the page")
    chosen = parser.parse_args()
    if not (chosen.check or chosen.write):
        print(table(), end="")
        return
    text = PAGE.read_text()
    changed = with_table(text, table())
    if chosen.write:
        PAGE.write_text(changed)
    elif changed != text:
        sys.exit(
            "The benchmark table in docs/benchmarks.md is out of date: run python benchmarks/benchmarks_table.py --write"
        )


if __name__ == "__main__":
    main()
