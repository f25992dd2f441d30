"""Writes the survey that pages read known ranges from: tendency and exponent of every layer of the models at hand.

The embedded MiniLM, and below OVERSMOOTH_MODELS every folder with a config.json, run on the package's own samples, and every
GGUF file, whose weights are only inspected. Run it again after a change of what a tendency or an exponent is, or with more
models: `survey_reference.py [NAME ...]` renews the models of these names, or all of them, and keeps the rest.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import json
import sys
from pathlib import Path

import harness

import oversmooth
from oversmooth.environment.versions import commit, versions
from oversmooth.models.open import minilm_folder
from oversmooth.results import wording as reference

OUT = Path(reference.__file__).with_name("reference.json")
DIGITS = 5
SEQUENCES = 2


def surveyed(name: str, target: str) -> dict[str, object]:
    """One model: where it comes from, and its numbers layer by layer."""
    inspection = oversmooth.inspect(target)
    found = {
        "model": name,
        "residual": inspection.stacks[0].residual,
        "weights_sha256": inspection.provenance.weights_sha256,
        "data": "",
        "tendency": [round(layer.tendency, DIGITS) for layer in inspection.layers if layer.tendency is not None],
        "exponent": [],
    }
    if target.endswith(".gguf"):
        return found
    prediction = oversmooth.predict(target, max_samples=SEQUENCES, solve=SEQUENCES, heads=False)
    exponents = [layer.rungs[0].mean for layer in prediction.layers]
    return {
        **found,
        "data": f"{prediction.data.sequences} sequences of {prediction.data.description}",
        "exponent": [round(value, DIGITS) for value in exponents if value is not None],
    }


def targets() -> dict[str, str]:
    """Models by name."""
    root = Path(os.environ["OVERSMOOTH_MODELS"])
    folders = {path.parent.name: str(path.parent) for path in sorted(root.glob("*/config.json"))}
    return {
        "all-MiniLM-L6-v2": str(minilm_folder()),
        **folders,
        **{path.stem: str(path) for path in sorted(root.glob("*/*.gguf"))},
    }


def main() -> None:
    harness.fix()
    known = targets()
    kept = {model["model"]: model for model in json.loads(OUT.read_text(encoding="utf-8"))["models"]}
    for name in sys.argv[1:] or list(known):
        kept[name] = surveyed(name, known[name])
    survey = {"models": [kept[name] for name in sorted(kept)], "versions": dict(versions()), "commit": commit()}
    OUT.write_text(json.dumps(survey, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
