"""`reproduce`: checks claims and writes what was found; nothing is printed here."""

from pathlib import Path

from oversmooth.report.render import render
from oversmooth.reproduce.claim import Claim, Finding
from oversmooth.reproduce.pages import markdown_of, page_of
from oversmooth.reproduce.workshop import Workshop
from oversmooth.writing import write_whole


def reproduce(claims: tuple[Claim, ...], workshop: Workshop, command: str = "") -> list[tuple[Claim, Finding]]:
    """Checks every claim and writes `claims.md` and `claims.html` after each, so that a stopped run leaves its part."""
    workshop.out.mkdir(parents=True, exist_ok=True)
    checked: list[tuple[Claim, Finding]] = []
    workshop.train([wanted for claim in claims for wanted in claim.needs(workshop.seeds)])
    for claim in claims:
        checked.append((claim, claim.check(workshop)))
        _write(workshop.out / "claims.md", markdown_of(checked))
        _write(workshop.out / "claims.html", render(page_of(checked, command)))
    return checked


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
