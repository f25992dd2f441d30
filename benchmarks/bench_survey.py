"""Claims for `oversmooth survey --engine ray` against a hub on loopback whose every answer takes 100 ms:

1. two workers survey at least 1.6 times the models per minute of one, on two cores;
2. the memory of a worker stays flat: after 1,000 models it is at most 1.1 times what it was after 100.

The hub has small checkpoints of ten families (`tests/small_checkpoints.py`), every file behind a redirect to storage; what
a survey waits for is the network, as in life. The rate counts from the first request that the hub sees to the last, so that
the start of Ray, which is paid once, does not count. One worker and two take turns, and the best rate of each counts. All
runs have to give the same table. For memory, answers come at once, so that 1,000 models take minutes; resident memory of the
larger worker is read whenever a model is finished, for as long as there are workers.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT))
from tests.hub_judgement import Sender
from tests.loopback_hub import Hub, environment_of, serving
from tests.small_checkpoints import repositories

LATENCY, MODELS, ROUNDS, MANY = 0.1, 60, 2, 1000
SPEED_CLAIM, GROWTH_CLAIM = 1.6, 1.1


def measure(listing: Path, out: Path, workers: int) -> None:
    """In a process of its own, for which the hub is the loopback one: prints memory of the workers and what was found."""
    import psutil

    import oversmooth as osm

    memory: list[int] = []

    def note(counts: Any) -> None:
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has ended
                if "MapWorker" in " ".join(child.cmdline()):
                    found.append(child.memory_info().rss)
        memory.extend([max(found)] if found else [])  # copies are reported when the workers are gone

    osm.survey(listing, out, engine="ray", workers=workers, requests_per_second=None, progress=note)
    rows = osm.read_survey(out, "layer").sort_values(["target", "layer"])
    print(json.dumps({"memory": memory, "radii": rows.rho_dc.tolist()}))


class TimedHub(Hub):
    """Knows when it was asked."""

    def admit(self, sender: Sender | None) -> bool:
        self.times = [*getattr(self, "times", [])[:1], time.monotonic()]
        return super().admit(sender)


def run(hub: TimedHub, place: Path, workers: int) -> dict[str, Any]:
    listing = place / "list.txt"
    listing.write_text("\n".join(f"hf://{name}" for name in hub.repositories))
    with serving(hub) as url, tempfile.TemporaryDirectory(dir=place) as out:
        words = [sys.executable, __file__, "measure", str(listing), f"{out}/table", str(workers)]
        environment = {**os.environ, **environment_of(url, place / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["per_minute"] = 60 * len(hub.repositories) / (hub.times[-1] - hub.times[0])
    return found


def main() -> None:
    harness.fix()
    rates: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(prefix="oversmooth-bench-") as name:
        place = Path(name)
        files, kinds = repositories(MODELS)
        tables = []
        for _ in range(ROUNDS):
            for workers in rates:
                found = run(TimedHub(files, gated=kinds["gated"], latency=LATENCY), place, workers)
                rates[workers].append(found["per_minute"])
                tables.append(found["radii"])
        assert all(table == tables[0] for table in tables), "the tables differ"
        files, kinds = repositories(MANY)
        memory = run(TimedHub(files, gated=kinds["gated"]), place, 2)["memory"]
    ratio = max(rates[2]) / max(rates[1])
    growth = memory[-1] / memory[99]
    numbers = {
        "latency_seconds": LATENCY,
        "models": MODELS,
        "models_per_minute": {f"{workers} workers": found for workers, found in rates.items()},
        "worker_bytes_after_models": {str(count): memory[count - 1] for count in (100, 200, 400, 600, 800)},
        "worker_bytes_at_the_end": memory[-1],
    }
    harness.write(
        "survey_workers",
        claim=f"`survey --engine ray`, two workers at 100 ms latency: at least {SPEED_CLAIM:g} times the models per minute",
        ours=f"{max(rates[2]):.0f} models a minute",
        alternative=f"one worker: {max(rates[1]):.0f}",
        ratio=ratio,
        numbers=numbers,
    )
    harness.write(
        "survey_memory",
        claim=f"`survey`: memory of a worker after {MANY} models at most {GROWTH_CLAIM:g} times that after 100",
        ours=f"{memory[-1] / 2**20:.0f} MiB",
        alternative=f"after 100 models: {memory[99] / 2**20:.0f} MiB",
        ratio=growth,
        numbers=numbers,
    )
    print(f"{ratio:.2f} times the models per minute; memory grows {growth:.3f} times")
    assert ratio >= SPEED_CLAIM, f"claimed {SPEED_CLAIM:g}, measured {ratio:.2f}"
    assert growth <= GROWTH_CLAIM, f"claimed {GROWTH_CLAIM:g}, measured {growth:.3f}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
