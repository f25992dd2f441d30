"""`reproduce`: checks claims and writes what was found; nothing is printed here.

OUT/claims.md, claims.html   the judgements and the tables that they rest on
OUT/claims.json              the same as data; two runs of the same code give the same bytes
OUT/manifest.json            command, seeds, models, versions, hardware, commit, wall time
OUT/runs/                    every training run, with its own manifest
"""

import json
import time
from pathlib import Path
from typing import Any

from oversmooth.output.report.render import render
from oversmooth.output.whole_files import make_folder, write_whole
from oversmooth.training.recipes.manifest import new_session
from oversmooth.training.reproduce.claim import Claim, Finding
from oversmooth.training.reproduce.pages import markdown_of, numbers_of, page_of
from oversmooth.training.reproduce.workshop import Workshop


def reproduce(claims: tuple[Claim, ...], workshop: Workshop, command: str = "") -> list[tuple[Claim, Finding]]:
    """Checks every claim and writes after each, so that a stopped run leaves its part."""
    began = time.perf_counter()
    manifest = _new_manifest(claims, workshop, command)
    make_folder(workshop.out)
    workshop.require_targets()
    checked: list[tuple[Claim, Finding]] = []
    workshop.train([wanted for claim in claims for wanted in claim.needs(workshop.seeds)])
    for claim in claims:
        checked.append((claim, claim.check(workshop)))
        manifest["seconds"] = round(time.perf_counter() - began, 1)
        manifest["judgements"] = {each.name: finding.judgement for each, finding in checked}
        manifest["models"] = workshop.hashes()
        _write(workshop.out / "claims.md", markdown_of(checked))
        _write(workshop.out / "claims.html", render(page_of(checked, _facts(manifest))))
        _write(workshop.out / "claims.json", json.dumps(numbers_of(checked), indent=1) + "\n")
        _write(workshop.out / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    return checked


def _new_manifest(claims: tuple[Claim, ...], workshop: Workshop, command: str) -> dict[str, Any]:
    found = new_session(from_step=0, processes=1)
    return {
        "command": command,
        "scale": "cpu",
        "claims": [claim.name for claim in claims],
        "seeds": list(workshop.seeds),
        **found.model_dump(include={"started", "hardware", "versions", "other_than_pinned", "commit"}),
    }


def _facts(manifest: dict[str, Any]) -> dict[str, str]:
    """The line below the title."""
    return {
        "command": manifest["command"],
        "seeds": ", ".join(map(str, manifest["seeds"])),
        "commit": (manifest["commit"] or "not from a clone")[:12],
        "versions": ", ".join(
            f"{name} {manifest['versions'].get(name, '-')}" for name in ("torch", "transformers", "timm")
        ),
    }


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def found_models() -> tuple[str, ...]:
    """Folders of the pretrained models that are installed as packages."""
    from importlib.util import find_spec

    from oversmooth.models.embedded import minilm_folder

    found: list[Path] = [minilm_folder()]
    spec = find_spec("rxnmapper")
    if spec is not None and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations))) / "models" / "transformers"
        found += sorted(path for path in folder.glob("*") if (path / "config.json").is_file())
    return tuple(str(path) for path in found)
