"""Claim: a corpus of 2 GB becomes tokens on the disk in less than 1 GB of memory, all of Python and torch included.

The file is generated: words of a Zipf-like vocabulary in documents of very different length, a block of them repeated; one
of 20 MB on one line, one line too long to be read, and a broken one. The peak is that of the whole process, for a small
file and for the large one: it must not grow with the corpus.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import harness

LARGE, SMALL, LIMIT = 2 * 10**9, 10**8, 10**9
MAKE = """
import json, sys
from pathlib import Path
from oversmooth.recipes.corpus import CorpusSettings, prepare_corpus
settings = CorpusSettings(source=sys.argv[1], vocab_size=8192, trash_cutoff=0.5, tokenizer_documents=20_000)
print(json.dumps(prepare_corpus(settings, Path(sys.argv[2])).facts))
"""


def write_corpus(path: Path, size: int) -> None:
    """The odd documents once, then one block of ordinary ones over and over until the size is reached."""
    draw = random.Random(harness.SEED)
    words = ["".join(draw.choices("etaoinshrdlucmfwypvbgk", k=draw.randint(2, 9))) for _ in range(5_000)]
    weights = [1 / (rank + 2) for rank in range(len(words))]
    block, at = [], 0
    text = draw.choices(words, weights, k=3_000_000)
    while at < len(text):
        length = int(min(20_000, draw.paretovariate(0.8) * 50))
        block.append(json.dumps({"text": " ".join(text[at : at + length]) + "."}) + "\n")
        at += length
    ordinary = "".join(block).encode()
    with path.open("wb") as file:
        file.write(json.dumps({"text": " ".join(text)}).encode() + b"\n")  # about 20 MB on one line
        file.write(json.dumps({"text": "x" * 40_000_000}).encode() + b"\n")
        file.write(b'{"text": "cut off\n')
        while file.tell() < size:
            file.write(ordinary)


def main() -> None:
    harness.fix()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, size in (("small", SMALL), ("large", LARGE)):
            path = folder / f"{label}.jsonl"
            write_corpus(path, size)
            command = [sys.executable, "-c", MAKE, str(path), str(folder / "cache")]
            text, seconds, peak = harness.run_measured(command)
            facts = json.loads(text)
            assert facts["skipped"]["not JSON"] == 1
            assert facts["skipped"]["too long for one line"] == 1
            found[label] = {
                "bytes": path.stat().st_size,
                "seconds": round(seconds, 1),
                "peak_bytes": peak,
                "sequences": facts["sequences"]["train"],
            }
            print(label, found[label], flush=True)
            path.unlink()
    large, small = found["large"], found["small"]
    assert large["sequences"] > 10 * small["sequences"], "all of the large file was read"
    harness.write(
        "corpus_memory",
        claim="a corpus of 2 GB is packed in less than 1 GB of memory",
        ours=f"peak {large['peak_bytes'] / 1e6:.0f} MB, {large['bytes'] / large['seconds'] / 1e6:.1f} MB/s",
        alternative=f"a file of 0.1 GB: peak {small['peak_bytes'] / 1e6:.0f} MB",
        ratio=large["peak_bytes"] / small["peak_bytes"],
        numbers=found,
    )
    assert large["peak_bytes"] < LIMIT, large


if __name__ == "__main__":
    main()
