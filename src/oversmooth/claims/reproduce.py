"""`reproduce`: trains what is missing, observes every claim and judges it.

OUT/claims.md, claims.html   one page: verdicts, effects with intervals, what each does not show
OUT/claims.json              protocols, every number that was observed, and the verdicts; two runs of the same code give the
                             same bytes, and judging the numbers again gives the same verdicts
OUT/manifest.json            command, models, versions, hardware, commit, wall time
OUT/runs/                    every training run, with its own manifest
OUT/survey/                  what the weights of all models and runs say, as a table (claims 1 and 2)
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

from oversmooth.claims.claim import (
    LEVEL,
    Claim,
    ClaimResult,
    Compare,
    Compared,
    Effect,
    Observations,
    Tests,
    holm,
    outcome,
    paired_effect,
)
from oversmooth.claims.context import ClaimContext, Row, chosen_rates, rates_table
from oversmooth.claims.experiments import FOLDED, FOLDS, Experiment, runs_of
from oversmooth.claims.pretrained import HUB_MODELS, PRETRAINED_CLAIMS
from oversmooth.claims.trained import TRAINED_CLAIMS
from oversmooth.environment.files import make_folder, write_text_whole
from oversmooth.errors import UnknownName
from oversmooth.models.stores.remote import cached_hub_folder
from oversmooth.recipes.run_folder import MANIFEST, new_session


def judged(claims: Sequence[Claim], observed: Mapping[str, Observations], family: int) -> dict[str, ClaimResult]:
    """The finding of every claim that was observed, with Holm's correction over the tests of all verdicts.

    `family` counts those of all claims, whichever are looked at: more of them cannot make a verdict harder to reach.
    """
    there = [claim for claim in claims if claim.name in observed]
    compared = {claim.name: _compared(claim, observed[claim.name], LEVEL / family) for claim in there}
    tests = {
        (claim.name, verdict): p
        for claim in there
        if claim.tests is not None
        for verdict, p in claim.tests(observed[claim.name], compared[claim.name]).items()
    }
    corrected = dict(zip(tests, holm(list(tests.values()), family), strict=True))
    found = {}
    for claim in there:
        of_claim: Tests = {verdict: p for (name, verdict), p in corrected.items() if name == claim.name}
        numbers = observed[claim.name]
        found[claim.name] = ClaimResult(
            verdict=claim.decide(numbers, compared[claim.name], of_claim),
            compared=tuple(each.row() for each in compared[claim.name]),
            by_model=tuple(claim.tabulate(numbers)),
            against=tuple(row for row in numbers.get("computed", ()) if row["regime"] != "smoothing"),
            left_out=tuple(numbers.get("left_out", ())),
            weights=tuple(numbers.get("weights", ())),
            rates=tuple(rates_table(numbers.get("rates", ()), claim.needs)),
        )
    return found


def _compared(claim: Claim, observed: Observations, level: float) -> list[Compared]:
    units = {experiment.name: experiment.units for experiment, _ in claim.needs}
    found = []
    for compare in claim.compares:
        effect = paired(observed.get("runs", ()), compare)
        found.append(
            Compared(
                compare=replace(compare, is_primary=claim.decides_by(observed, compare)),
                effect=effect,
                outcome="not run" if effect is None else outcome(effect, effect.p, compare.margin),
                planned=units[compare.setting],
                clear_from=None if effect is None else effect.clear_from(level),
            )
        )
    return found


def paired(rows: Sequence[Row], compare: Compare) -> Effect | None:
    """The effect over units that have both numbers; `None` for fewer than two of them."""
    values: dict[str, dict[int, float]] = {compare.of: {}, compare.against: {}}
    for row in rows:
        value = row.get(compare.metric)
        if row["setting"] == compare.setting and row["variant"] in values and value is not None and isfinite(value):
            values[row["variant"]][row["unit"]] = value
    of = values[compare.of]
    against = values[compare.against] if compare.against else dict.fromkeys(of, 0.0)
    units = sorted(of.keys() & against.keys())
    if len(units) < 2:
        return None
    shared = 1 / FOLDS if compare.setting in FOLDED else 0.0
    return paired_effect([of[unit] for unit in units], [against[unit] for unit in units], shared)


# --- the claims, and how they are asked for ---

CLAIMS = (*PRETRAINED_CLAIMS, *TRAINED_CLAIMS)
FAMILY = 2 * sum(claim.tests is not None for claim in CLAIMS)
"""Tests of being confirmed and of being refuted, of all claims: what Holm's correction is over, whichever are looked at."""


def chosen(name: str) -> tuple[Claim, ...]:
    """A claim by name or number; `all` for every one."""
    if name == "all":
        return CLAIMS
    found = tuple(claim for claim in CLAIMS if name in (claim.name, str(claim.number)))
    if not found:
        raise UnknownName("claim", name, ("all", *(claim.name for claim in CLAIMS)))
    return found


Findings = Mapping[str, ClaimResult]


def numbers_of(
    claims: Sequence[Claim], observed: Mapping[str, Observations], findings: Findings
) -> dict[str, dict[str, Any]]:
    """Everything that was found and nothing that differs between two runs: the same code and seeds give the same bytes."""
    return {
        claim.name: {
            **{name: getattr(claim, name) for name in ("number", "written", "statement", "protocol")},
            **asdict(findings[claim.name].verdict),
            "compared": list(findings[claim.name].compared),
            "observed": {name: list(rows) for name, rows in observed[claim.name].items()},
        }
        for claim in claims
    }


# --- `reproduce`: trains what is missing, observes, judges and writes what was found ---

MODELS_VARIABLE = "OVERSMOOTH_MODELS"
"""A folder of more pretrained models, for the survey: every folder in it that has a config.json or one GGUF file."""


Pages = Callable[[Sequence[Claim], "Findings", Mapping[str, str], bool], Mapping[str, str]]
"""Makes the pages of judged claims: texts by file name."""


def reproduce(
    claims: tuple[Claim, ...], materials: ClaimContext, pages: Pages, command: str = ""
) -> dict[str, ClaimResult]:
    """Observes and judges every claim, and writes after each observation, so that a stopped run leaves its part.

    Other claims that the folder holds keep their numbers and are judged with these; what they came to is not returned.
    """
    began = time.perf_counter()
    manifest = _new_manifest(claims, materials, command)
    make_folder(materials.out)
    materials.require_targets()
    observed = _kept(claims, materials)
    earlier = materials.earlier(MANIFEST) if observed else {}
    all_claims = [claim.for_scale(materials.is_quick) for claim in CLAIMS]
    _train([claim.for_scale(materials.is_quick) for claim in claims], materials)
    findings: dict[str, ClaimResult] = {}
    for claim in claims:
        observed[claim.name] = claim.observe(materials)
        done = [each for each in all_claims if each.name in observed]
        findings = judged(done, observed, FAMILY)
        manifest |= {
            "seconds": round(time.perf_counter() - began, 1),
            "judgements": {each.name: findings[each.name].verdict.judgement for each in done},
            "models": earlier.get("models", {}) | materials.hashes(),
            "rates": {**earlier.get("rates", {}), **materials.rates},
        }
        texts = {
            **pages(done, findings, _facts(manifest), materials.is_quick),
            "claims.json": json.dumps(numbers_of(done, observed, findings), indent=1, allow_nan=False) + "\n",
            MANIFEST: json.dumps(manifest, indent=1, allow_nan=False) + "\n",
        }
        for name, text in texts.items():  # all of them could be made, so that none is left beside older ones
            write_text_whole(materials.out / name, text)
    return {claim.name: findings[claim.name] for claim in claims}


def _kept(claims: Sequence[Claim], materials: ClaimContext) -> dict[str, Observations]:
    """What an earlier run in this folder observed for claims that are not asked for now."""
    asked = {claim.name for claim in claims}
    known = {claim.name for claim in CLAIMS} - asked
    return {name: found["observed"] for name, found in materials.earlier("claims.json").items() if name in known}


def _train(claims: Sequence[Claim], materials: ClaimContext) -> None:
    """First the runs that choose learning rates, then all others together."""
    needs = [need for claim in claims for need in claim.needs]
    tuned: dict[Experiment, dict[str, None]] = {}
    for experiment, variants in needs:
        if experiment.tuned_by is not None:
            tuned.setdefault(experiment.tuned_by, {}).update(dict.fromkeys(variants))
    materials.rates = chosen_rates(materials, {tuning: tuple(variants) for tuning, variants in tuned.items()})
    materials.train([run for experiment, variants in needs for run in runs_of(experiment, variants, materials.rates)])


def _new_manifest(claims: tuple[Claim, ...], materials: ClaimContext, command: str) -> dict[str, Any]:
    found = new_session(from_step=0, processes=1)
    return {
        "command": command,
        "scale": materials.scale,
        "claims": [claim.name for claim in claims],
        **found.model_dump(include={"started", "hardware", "versions", "other_than_pinned", "commit"}),
    }


def _facts(manifest: dict[str, Any]) -> dict[str, str]:
    """The line below the title."""
    versions = (f"{name} {manifest['versions'].get(name, '-')}" for name in ("torch", "transformers", "timm"))
    return {
        "command": manifest["command"],
        "scale": manifest["scale"],
        "commit": (manifest["commit"] or "not from a clone")[:12],
        "versions": ", ".join(versions),
    }


def found_models() -> tuple[str, ...]:
    """Pretrained models at hand: installed as packages, below the folder that `OVERSMOOTH_MODELS` names, and those of the
    list of `--scale full` that the hub's cache holds."""
    from importlib.util import find_spec

    from oversmooth.models.example_model import local_minilm

    found = [folder for folder in (local_minilm(),) if folder]
    spec = find_spec("rxnmapper")
    if spec is not None and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations))) / "models" / "transformers"
        found += sorted(path for path in folder.glob("*") if (path / "config.json").is_file())
    if named := os.environ.get(MODELS_VARIABLE):
        found += sorted(path for folder in Path(named).glob("*") for path in _models_in(folder))
    return (*map(str, found), *(name for name in HUB_MODELS if cached_hub_folder(name)))


def _models_in(folder: Path) -> list[Path]:
    if (folder / "config.json").is_file():
        return [folder]
    files = list(folder.glob("*.gguf"))
    return files if len(files) == 1 else []  # several are parts, or one model packed several times
