"""`reproduce`: trains what is missing, observes, judges and writes what was found; nothing is printed here.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oversmooth.models.stores.remote import cached_hub_folder
from oversmooth.output.report.render import render
from oversmooth.output.whole_files import make_folder, write_whole
from oversmooth.training.recipes.manifest import NAME as MANIFEST
from oversmooth.training.recipes.manifest import new_session
from oversmooth.training.reproduce.claim import Claim, Finding, Observations
from oversmooth.training.reproduce.claims import CLAIMS, FAMILY, HUB_MODELS
from oversmooth.training.reproduce.experiments import Experiment, runs_of
from oversmooth.training.reproduce.judging import judged
from oversmooth.training.reproduce.materials import Materials
from oversmooth.training.reproduce.pages import markdown_of, numbers_of, page_of
from oversmooth.training.reproduce.tuning import chosen_rates

MODELS_VARIABLE = "OVERSMOOTH_MODELS"
"""A folder of more pretrained models, for the survey: every folder in it that has a config.json or one GGUF file."""


def reproduce(claims: tuple[Claim, ...], materials: Materials, command: str = "") -> dict[str, Finding]:
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
    findings: dict[str, Finding] = {}
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
            "claims.md": markdown_of(done, findings, materials.is_quick),
            "claims.html": render(page_of(done, findings, _facts(manifest), materials.is_quick)),
            "claims.json": json.dumps(numbers_of(done, observed, findings), indent=1, allow_nan=False) + "\n",
            MANIFEST: json.dumps(manifest, indent=1, allow_nan=False) + "\n",
        }
        for name, text in texts.items():  # all of them could be made, so that none is left beside older ones
            _write(materials.out / name, text)
    return {claim.name: findings[claim.name] for claim in claims}


def _kept(claims: Sequence[Claim], materials: Materials) -> dict[str, Observations]:
    """What an earlier run in this folder observed for claims that are not asked for now."""
    asked = {claim.name for claim in claims}
    known = {claim.name for claim in CLAIMS} - asked
    return {name: found["observed"] for name, found in materials.earlier("claims.json").items() if name in known}


def _train(claims: Sequence[Claim], materials: Materials) -> None:
    """First the runs that choose learning rates, then all others together."""
    needs = [need for claim in claims for need in claim.needs]
    tuned: dict[Experiment, dict[str, None]] = {}
    for experiment, variants in needs:
        if experiment.tuned_by is not None:
            tuned.setdefault(experiment.tuned_by, {}).update(dict.fromkeys(variants))
    materials.rates = chosen_rates(materials, {tuning: tuple(variants) for tuning, variants in tuned.items()})
    materials.train([run for experiment, variants in needs for run in runs_of(experiment, variants, materials.rates)])


def _new_manifest(claims: tuple[Claim, ...], materials: Materials, command: str) -> dict[str, Any]:
    found = new_session(from_step=0, processes=1)
    return {
        "command": command,
        "scale": materials.scale,
        "claims": [claim.name for claim in claims],
        **found.model_dump(include={"started", "hardware", "versions", "other_than_pinned", "commit"}),
    }


def _facts(manifest: dict[str, Any]) -> dict[str, str]:
    """The line below the title."""
    return {
        "command": manifest["command"],
        "scale": manifest["scale"],
        "commit": (manifest["commit"] or "not from a clone")[:12],
        "versions": ", ".join(
            f"{name} {manifest['versions'].get(name, '-')}" for name in ("torch", "transformers", "timm")
        ),
    }


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def found_models() -> tuple[str, ...]:
    """Pretrained models at hand: installed as packages, below the folder that `OVERSMOOTH_MODELS` names, and those of the
    list of `--scale full` that the hub's cache holds."""
    from importlib.util import find_spec

    from oversmooth.models.embedded import minilm_folder

    found: list[Path] = [minilm_folder()]
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
