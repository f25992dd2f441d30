"""What removing each sub-block costs on real models and on random ones of the same sizes, and which cheap number tells.

    python benchmarks/ablation_tables.py minilm|minilm-random|smollm2|smollm2-random|dinov2|dinov2-random

MiniLM comes from the package index; the others are looked for where `OVERSMOOTH_MODELS` points, photographs where
`OVERSMOOTH_DATA` does. Each run writes `results/ablation_NAME.json` with the whole ablation and how it came about.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import harness

from oversmooth.models.example_model import example_model
from oversmooth.models.open import open_source
from oversmooth.worth.ablate import ablate

MODELS = Path(os.environ.get("OVERSMOOTH_MODELS", "models"))
DATA = Path(os.environ.get("OVERSMOOTH_DATA", "data"))
SIZES = {"minilm": (32, 64), "smollm2": (8, 48), "dinov2": (16, 64)}
"""Sequences, and tokens of each at most."""
PICTURES = {"size": 256, "crop": 224, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""As DINOv2 was evaluated; its config alone would mean 518 pixels, which is 1370 tokens."""


def folder_of(name: str) -> Path:
    return {
        "minilm": example_model,
        "smollm2": lambda: MODELS / "smollm2-135m-instruct",
        "dinov2": lambda: MODELS / "dinov2-small",
    }[name]()


def main(which: str) -> None:
    from transformers import AutoConfig, AutoModel

    harness.fix()
    name, _, is_random = which.partition("-")
    folder = folder_of(name)
    packed = next((file.name for file in folder.glob("*.gguf")), None)
    config = AutoConfig.from_pretrained(folder, **({"gguf_file": packed} if packed else {})) if is_random else None
    # DINOv2 is stored in float16, which a CPU computes slowly and similarities need not.
    target = AutoModel.from_config(config).float().eval() if is_random else open_source(folder, dtype="float32")
    samples, tokens = SIZES[name]
    data = str(DATA / "images") if name == "dinov2" else None
    start = time.perf_counter()
    how = PICTURES if data else {"max_tokens": tokens}
    found = ablate(target, data, max_samples=samples, batch_size=8, **how)
    seconds = time.perf_counter() - start
    result = found.to_dict()
    result["provenance"]["target"] = which
    result["provenance"]["files"] = []
    if data:
        result["data"]["description"] = "photographs"
    path = harness.write(
        f"ablation_{which}",
        claim="",
        ours="",
        alternative="",
        ratio=found.passes,
        numbers={"seconds": seconds, "passes": found.passes, "ablation": result},
    )
    body = json.loads(path.read_text())
    for key in ("claim", "ours", "alternative", "ratio"):  # a table, not a claim about speed
        del body[key]
    path.write_text(json.dumps({"what": f"what removing each sub-block of {which} costs", **body}, indent=2) + "\n")
    print(json.dumps([[p.part, p.name, p.rank_correlation, p.interval] for p in found.predictors], indent=0), path)


if __name__ == "__main__":
    main(sys.argv[1])
