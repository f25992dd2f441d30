"""`python -m tests.fuzz --cases 10000 --seed 0`: every case in turn, a table at the end, exit code 1 where one failed."""

import argparse
import contextlib
import os
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

for name, value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}.items():
    os.environ[name] = value  # before anything imports torch or the hub
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1"

TOLD_EVERY = 500
"""Cases between two lines that say how far the run is."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kind", default="", help="only this kind of case")
    parser.add_argument("--only", type=int, help="repeat the case of this number here, with its traceback")
    asked = parser.parse_args()
    from tests.fuzz.engine import Result, run
    from tests.fuzz.setting import made

    with tempfile.TemporaryDirectory(prefix="fuzz-setting-") as folder:
        setting = made(Path(folder))
        if asked.only is not None:
            print(setting.case(asked.kind, asked.seed, asked.only))
            print(setting.judge(asked.kind, asked.seed, asked.only))
            return 0
        start, results = time.monotonic(), list[Result]()
        judge = partial(setting.judge, asked.kind, asked.seed)
        with contextlib.suppress(KeyboardInterrupt):  # then the table is about what was run until then
            for result in run(judge, list(range(asked.cases)), asked.jobs):
                results.append(result)
                if result.failure:
                    print(f"case {result.index} ({result.kind or '?'}, {result.note}): {result.failure}", flush=True)
                if len(results) % TOLD_EVERY == 0:
                    print(f"{len(results)} of {asked.cases} after {time.monotonic() - start:.0f} seconds", flush=True)
    return _summary(results, asked.seed, time.monotonic() - start)


def _summary(results: list, seed: int, seconds: float) -> int:
    counts = Counter((result.kind or "unknown", result.outcome) for result in results)
    print("\n| kind | accepted | refused | other |\n|---|---|---|---|")
    for kind in sorted({kind for kind, _ in counts}):
        other = sum(count for (name, outcome), count in counts.items() if name == kind) - sum(
            counts[kind, outcome] for outcome in ("accepted", "refused")
        )
        print(f"| {kind} | {counts[kind, 'accepted']} | {counts[kind, 'refused']} | {other} |")
    failures = sum(1 for result in results if result.failure)
    print(f"\n{len(results)} cases with seed {seed}: {failures} failures, {seconds:.0f} seconds.")
    return 1 if failures else 0


raise SystemExit(main())
