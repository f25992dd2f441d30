"""The table of benchmarks in the README, made from `results/*.json`: a number without a file behind it is not there.

python benchmarks/readme_table.py            print the table
python benchmarks/readme_table.py --check    exit 1 where the README differs from it
python benchmarks/readme_table.py --write    put it between the markers of the README
"""

import argparse
import json
import re
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
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
        link = f"[{path.stem}](benchmarks/results/{path.name})"
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, link)) + " |")
    return "\n".join([*rows, "", f"Measured on: {'; '.join(sorted(machines))}.", ""])


def with_table(text: str, block: str) -> str:
    """The README with the block between its markers, which have to be there once."""
    changed, count = BLOCK.subn(lambda _: block, text)
    if count != 1:
        sys.exit(f"expected one <!-- benchmarks --> ... <!-- /benchmarks --> block in {README.name}, found {count}")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of benchmarks in the README.")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="exit 1 where the README differs")
    mode.add_argument("--write", action="store_true", help="update the README")
    chosen = parser.parse_args()
    if not (chosen.check or chosen.write):
        print(table(), end="")
        return
    text = README.read_text()
    changed = with_table(text, table())
    if chosen.write:
        README.write_text(changed)
    elif changed != text:
        sys.exit("The benchmark table in README.md is out of date: run python benchmarks/readme_table.py --write")


if __name__ == "__main__":
    main()
