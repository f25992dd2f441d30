"""The paper's claims at CPU scale, kept: verdicts, numbers, the manifest of every run, and their table in the docs.

python benchmarks/claims_table.py            runs `oversmooth reproduce all`, an hour and a half on two quiet cores
python benchmarks/claims_table.py FOLDER     keeps what such a run left in FOLDER
python benchmarks/claims_table.py --judge    judges what is kept again, after a change of rules
python benchmarks/claims_table.py --check    exit 1 where docs/reproducibility.md differs from what is kept
python benchmarks/claims_table.py --write    put the table between its markers there

Weights, checkpoints and analyses of the runs are not kept: their manifests hold the commands that give the same bits.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from training_tables import NO_DIFFERENCE

from oversmooth.claims.claim import Claim
from oversmooth.claims.experiments import Rates, runs_of, settings_of
from oversmooth.claims.reproduce import CLAIMS, FAMILY, judged, numbers_of
from oversmooth.output.claims_page import counted, markdown_of
from oversmooth.recipes.run_folder import first_difference

BESIDE = ("cifar10", "mini_bert")
KEPT = harness.RESULTS / "claims"
PAGE = harness.ROOT / "docs" / "reproducibility.md"
BLOCK = re.compile(r"(?<=<!-- claims -->\n).*?(?=<!-- /claims -->)", re.DOTALL)


def keep(folder: Path) -> None:
    """Replaces what was kept before; all numbers are judged again by the code at hand.

    Runs that the folder lacks keep their numbers and manifests where today's plan has the same settings for them: the same
    settings give the same bits, so that a change of some experiments does not ask for all of them again.
    """
    observed = _observed(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["scale"] != "cpu":
        sys.exit(f"{folder} holds results of scale {manifest['scale']!r}; only those of scale 'cpu' are kept.")
    runs = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/manifest.json"))}
    runs = {name: run for name, run in runs.items() if run["finished"]}
    claims = [claim for claim in CLAIMS if claim.name in observed]
    if KEPT.exists():
        runs |= _still_planned(claims, observed, manifest["rates"], set(runs))
    manifest["command"] = manifest["command"].replace(str(folder), folder.name)
    KEPT.mkdir(parents=True, exist_ok=True)
    _write_judged(claims, observed, manifest)
    lines = [f"{json.dumps(name)}:{json.dumps(run, separators=(',', ':'))}" for name, run in sorted(runs.items())]
    (KEPT / "runs.json").write_text("{" + ",\n".join(lines) + "}\n")


def judge_again() -> None:
    """The kept numbers by today's rules."""
    observed = _observed(KEPT)
    manifest = json.loads((KEPT / "manifest.json").read_text())
    _write_judged([claim for claim in CLAIMS if claim.name in observed], observed, manifest)


def _observed(folder: Path) -> dict[str, Any]:
    return {name: found["observed"] for name, found in json.loads((folder / "claims.json").read_text()).items()}


def _write_judged(claims: Sequence[Claim], observed: dict[str, Any], manifest: dict[str, Any]) -> None:
    findings = judged(claims, observed, FAMILY)
    manifest["judgements"] = {name: finding.verdict.judgement for name, finding in findings.items()}
    (KEPT / "claims.json").write_text(json.dumps(numbers_of(claims, observed, findings), indent=1) + "\n")
    (KEPT / "claims.md").write_text(markdown_of(claims, findings, manifest["scale"] != "cpu"))
    (KEPT / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _still_planned(
    claims: Sequence[Claim], observed: dict[str, Any], rates: Rates, there: set[str]
) -> dict[str, dict[str, Any]]:
    """Manifests of kept runs that are planned as they were and are not `there`; their rows join those observed."""
    old_runs = json.loads((KEPT / "runs.json").read_text())
    old = _observed(KEPT)
    taken = {}
    for claim in claims:
        planned = [
            (experiment, run) for experiment, variants in claim.needs for run in runs_of(experiment, variants, rates)
        ]
        known = {_key(row): row for row in old.get(claim.name, {}).get("runs", ())}
        known = {key: row for key, row in known.items() if _name(*key) not in there}
        rows = {_key(row): row for row in observed[claim.name].get("runs", ())}
        for experiment, run in planned:
            key, name = (experiment.name, run.variant, run.seed), Path(run.folder).name
            if key in known and name in old_runs and not first_difference(settings_of(old_runs[name]), run.settings):
                rows[key], taken[name] = known[key], old_runs[name]
        if "runs" in observed[claim.name]:
            order = [(experiment.name, run.variant, run.seed) for experiment, run in planned]
            observed[claim.name]["runs"] = [rows[key] for key in dict.fromkeys(order) if key in rows]
    return taken


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["setting"], row["variant"], row["unit"]


def _name(setting: str, variant: str, unit: int) -> str:
    return f"{setting}-{variant}-seed{unit}"


def beside() -> list[str]:
    """The comparisons of the kept tables that have commands of their own, a row each; no verdict rests on them."""
    rows = []
    for name in BESIDE:
        path = harness.RESULTS / f"{name}.json"
        for each in json.loads(path.read_text()).get("comparisons", ()) if path.exists() else ():
            cells = (each["comparison"], each["effect"], each["margin"], each["outcome"])
            rows.append(f"| [{name}](../benchmarks/results/{name}.md) | {' | '.join(map(str, cells))} |")
    head = [
        "",
        "Beside them, with commands and protocols of their own, Holm's correction over the rows of a table:",
        "",
    ]
    names = ["| table | comparison | effect [95%] | margin | outcome |", "|---|---|---|---|---|"]
    return [*head, *names, *rows, "", NO_DIFFERENCE]


def block() -> str:
    """One row per claim, in the words of the verdicts themselves, and what stands beside them."""
    claims = json.loads((KEPT / "claims.json").read_text())
    manifest = json.loads((KEPT / "manifest.json").read_text())
    lines = [counted([found["judgement"] for found in claims.values()]), ""]
    lines += ["| claim | verdict | found |", "|---|---|---|"]
    for found in claims.values():
        lines.append(f"| {found['number']}. {found['statement']} | **{found['judgement']}** | {found['brief']} |")
    scale, day = manifest["scale"], manifest["started"][:10]
    runs = len(json.loads((KEPT / "runs.json").read_text()))
    lines += [
        "",
        f"Scale: {scale}; run on {day}. [The page](../benchmarks/results/claims/claims.md) has protocols and effects; all",
        f"{runs} runs are kept with their [manifests](../benchmarks/results/claims/runs.json).",
    ]
    return "\n".join(lines + beside()) + "\n"


def main() -> None:
    words = sys.argv[1:]
    if words in (["--check"], ["--write"]):
        text = PAGE.read_text()
        changed, count = BLOCK.subn(lambda _: block(), text)
        assert count == 1, "the page has one <!-- claims --> ... <!-- /claims --> block"
        if words == ["--write"]:
            PAGE.write_text(changed)
        elif changed != text:
            sys.exit(
                "The claims in docs/reproducibility.md are out of date: run python benchmarks/claims_table.py --write"
            )
    elif words == ["--judge"]:
        judge_again()
    elif words:
        keep(Path(words[0]))
    else:
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "reproduction"
            subprocess.run([sys.executable, "-m", "oversmooth", "reproduce", "all", "--output", str(out)], check=True)
            keep(out)


if __name__ == "__main__":
    main()
