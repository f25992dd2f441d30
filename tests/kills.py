"""`python -m tests.kills --count 100 --seed 0`: verbs are killed at random moments and run again.

A case draws a verb, a signal (SIGKILL or SIGTERM) and a moment: a time, or the n-th time that the process touches a file
of its output. Then it looks at what is there, runs the verb again, and looks again:

- what stands at the final path before the second run is whole, or is not there;
- the second run has the results of a run that nothing happened to;
- nothing else is left behind, and no process.

Verbs run in forks of a process that has imported everything, so that a case takes seconds; those on ray start afresh.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

for _name, _value in {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}.items():
    os.environ[_name] = _value  # before anything imports torch or the hub

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
MARK = "OVERSMOOTH_KILLED_CASE"
"""A variable of the environment, by which processes that outlive a case are found."""
TOUCHES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "os.chmod")
PATIENCE, PROCESSOR_PATIENCE, WALL_PATIENCE = 15.0, 15.0, 120.0
"""Seconds that processes have to notice that the one they work for is gone: by the clock, and on a busy machine until they
have had so many of a processor, or so many more have passed by the clock."""
TRAINING = (
    *("model.depth=2", "model.width=16", "model.heads=2", "training.epochs=1.5", "training.batch=96"),
    *("training.warmup_epochs=0.5", "watch.log_every=0.07", "watch.save_every=0.36", "watch.evaluate_every=0.71"),
    *("watch.monitor_every=0.5", "watch.probe_images=8"),
)
"""Two narrow layers and 21 steps, saved every 5."""
MODELS = 6
"""Of a survey."""


@dataclass(frozen=True)
class Verb:
    """A command, what it leaves when nothing happens to it, and what may be seen of it before its end."""

    words: tuple[str, ...]
    """`{out}` is the folder of the case, `{models}` that of the models."""
    resumes: tuple[str, ...] = ()
    """What the second run has beside them."""
    grows: bool = False
    """Whether the output is a folder that is continued; otherwise it is there as a whole or not at all."""
    forks: bool = True


def _survey(engine: str) -> tuple[str, ...]:
    return ("survey", "{models}/many", "--output", "{out}/table", "--engine", engine, "--workers", "2")


_PRUNE = ("prune", "{models}/gpt2", "--output", "{out}/model", "--budget", "0.34", "--ids", "{models}/ids.txt")
_REPORT = ("report", "{models}/bert", "-o", "{out}/report.html", "-o", "{out}/analysis.json", "--max-samples", "2")
_TRAIN = ("train", "digits", "--variant", "sharpen", "--output", "{out}/run")
VERBS = {
    "edit": Verb(("edit", "{models}/bert", "--sharpen", "--output", "{out}/model")),
    "prune": Verb(_PRUNE),
    "report": Verb((*_REPORT, "--solve", "1")),
    "train": Verb((*_TRAIN, *(word for text in TRAINING for word in ("--set", text))), ("--resume",), grows=True),
    "survey on processes": Verb(_survey("process"), grows=True),
    "survey on ray": Verb(_survey("ray"), grows=True, forks=False),
}
COMMANDS = ("edit", "prune", "report", "train", "survey")
"""Modules of the verbs."""
WEIGHTS = {"edit": 22, "prune": 20, "report": 18, "train": 22, "survey on processes": 13, "survey on ray": 5}
"""Of a hundred cases; ray takes longest to start."""


@dataclass(frozen=True)
class Moment:
    """When a process dies: after so many seconds, or the n-th time it touches a file of its output."""

    signal: signal.Signals
    seconds: float | None = None
    touches: int | None = None

    def __str__(self) -> str:
        when = f"after {self.seconds:.2f} s" if self.seconds is not None else f"at file operation {self.touches}"
        return f"{self.signal.name} {when}"


@dataclass
class Case:
    number: int
    verb: str
    moment: Moment
    outcome: str = ""
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Calm:
    """A run that nothing happened to."""

    seconds: float
    touches: int
    left: dict[str, str]


# --- models ---------------------------------------------------------------------------------------------------------


def make_models(folder: Path) -> Path:
    """A BERT and a GPT-2 with a head, ids for it, and a folder of small checkpoints for surveys."""
    import torch
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    from tests.small_checkpoints import FAMILIES, checkpoint

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=99, **small)).save_pretrained(folder / "bert")
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=64)).save_pretrained(
        folder / "gpt2"
    )
    rows = torch.randint(3, 99, (4, 12)).tolist()
    (folder / "ids.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows))
    for number in range(MODELS):
        family = sorted(FAMILIES)[number]
        target = folder / "many" / family
        target.mkdir(parents=True)
        for name, content in checkpoint(family, number).items():
            (target / name).write_bytes(content)
    return folder


# --- one run --------------------------------------------------------------------------------------------------------


def run(verb: Verb, out: Path, models: Path, *more: str, moment: Moment | None = None) -> tuple[int, int, str]:
    """How a run of the verb ended (code, or minus the signal), how often it touched files, and what it said."""
    words = [word.format(out=out, models=models) for word in (*verb.words, *more)]
    log, count = out.with_suffix(".log"), out.with_suffix(".count")
    environment = {**os.environ, MARK: str(out)}
    if verb.forks:
        pid = os.fork()
        if pid == 0:
            _child(words, log, count, out, environment, moment)
    else:
        command = [sys.executable, "-m", "oversmooth", *words]
        with log.open("wb") as stream:
            pid = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True).pid
    if moment is not None and moment.seconds is not None:
        time.sleep(moment.seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, moment.signal)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    touched = int(count.read_text() or 0) if count.exists() else 0
    return code, touched, log.read_text(errors="replace")


def _child(
    words: list[str], log: Path, count: Path, out: Path, environment: dict[str, str], moment: Moment | None
) -> None:
    """The verb in this process, which never comes back."""
    code = 70
    try:
        os.setsid()
        os.environ.update(environment)
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(stream, number)
        touched = _watched(out, moment)
        from oversmooth.cli import main

        sys.argv = ["oversmooth", *words]
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        sys.stdout.flush()
        count.write_text(str(touched[0]))
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _watched(out: Path, moment: Moment | None) -> list[int]:
    """Counts from now on how often this process touches a file below a folder, and kills it when it is due."""
    touched, own = [0], os.getpid()

    def see(event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in TOUCHES) or str(out) not in str(arguments[0]) or os.getpid() != own:
            return
        touched[0] += 1
        if moment is not None and touched[0] == moment.touches:
            os.kill(own, moment.signal)

    sys.addaudithook(see)
    return touched


# --- what is there --------------------------------------------------------------------------------------------------

COSTS = re.compile(r"second|runtime|started|sessions|^command$|^cost$")
"""Fields that are not the same in two runs, whatever happens to them."""


def left_in(out: Path) -> dict[str, str]:
    """Every file of a case with a fingerprint of what is in it; a survey is one table, however it is parted."""
    found = {str(path.relative_to(out)): "" for path in sorted(out.rglob("*")) if path.is_file()}
    marks = {name: _mark(out / name) for name in found if not _is_part(name)}
    return marks | ({"table/*.parquet": _table(out / "table")} if any(map(_is_part, found)) else {})


def _is_part(name: str) -> bool:
    return name.startswith("table/") and name.endswith(".parquet") and ".partial" not in name


def _mark(path: Path) -> str:
    content = path.read_bytes()
    if path.name == "parts.json":  # names and hashes of the parts, which `_table` checks when it reads them
        return "list of parts"
    if path.suffix == ".json":
        content = json.dumps(_plain(json.loads(content)), sort_keys=True).encode()
    elif path.name == "metrics.jsonl":
        content = b"\n".join(json.dumps(_plain(json.loads(line))).encode() for line in content.splitlines())
    return hashlib.sha256(content).hexdigest()[:16]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if not COSTS.search(str(key))}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _table(folder: Path) -> str:
    import oversmooth as osm
    from oversmooth.surveys.rows import EFFORT

    rows = osm.read_survey(folder).drop(columns=[column.name for column in EFFORT])
    rows = rows.sort_values(["target", "level", "stack", "layer", "head"], ignore_index=True)
    return f"{len(rows)} rows {hashlib.sha256(rows.to_csv().encode()).hexdigest()[:16]}"


def unfinished(verb: Verb, out: Path, calm: Calm) -> list[str]:
    """What stands at a final path before the second run and is not whole."""
    names = {
        str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file() and ".partial" not in str(path)
    }
    found = []
    for name, path in names.items():
        try:
            _readable(path)
        except Exception as error:  # whatever its reader raises of half a file
            found.append(f"{name} is not whole: {type(error).__name__}: {str(error)[:100]}")
        if not verb.grows and name in calm.left and _mark(path) != calm.left[name]:
            found.append(f"{name} is not that of a whole run")
    missing = [name for name in calm.left if name not in names]
    if not verb.grows and (out / "model").is_dir() and missing:
        found.append(f"the folder is there without {', '.join(missing)}")
    return found


def _readable(path: Path) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        load_file(path)
    elif path.suffix == ".json":
        json.loads(path.read_bytes())
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.read_table(path)
    elif path.suffix in (".pt", ".pth"):
        import torch

        torch.load(path, weights_only=False)  # our own files
    elif path.suffix == ".html" and "</html>" not in path.read_text(encoding="utf-8"):
        raise ValueError("no end")


def processes_of(out: Path) -> list[int]:
    """Processes that were started for a case and still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                is_mine = f"{MARK}={out}".encode() in (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] if is_mine and state != "Z" else []
    return found


def processor_seconds(pid: int) -> float:
    """What a process has computed so far; zero where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def outlive(out: Path) -> list[int]:
    """Those that are still there after a while; they are ended, because the next case wants the cores."""
    began, first = time.monotonic(), dict[int, float]()
    while found := processes_of(out):
        passed, used = time.monotonic() - began, {pid: processor_seconds(pid) for pid in found}
        first |= {pid: seconds for pid, seconds in used.items() if pid not in first}
        is_slow = all(seconds - first[pid] < PROCESSOR_PATIENCE for pid, seconds in used.items())
        if passed > (WALL_PATIENCE if is_slow else PATIENCE):
            break
        time.sleep(0.1)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


# --- cases ----------------------------------------------------------------------------------------------------------


class Harness:
    """Kills and their judgement, in one folder."""

    def __init__(self, folder: Path, calm_runs: int = 2):
        self.folder = folder
        self.calm_runs = calm_runs
        _import_all()
        self.models = make_models(folder / "models")
        self.calm: dict[str, Calm] = {}

    def calm_run(self, name: str) -> Calm:
        """What a verb leaves when nothing happens to it; run twice, because what differs by itself shows nothing."""
        if name not in self.calm:
            left: list[dict[str, str]] = []
            for _ in range(self.calm_runs):
                out, began = self._fresh(), time.monotonic()
                code, touches, said = run(VERBS[name], out, self.models)
                if code != 0:
                    raise AssertionError(f"{name} does not run undisturbed (code {code}): {said[-2000:]}")
                seconds = time.monotonic() - began
                left.append(left_in(out))
            if left[0] != left[-1]:
                differ = {key for key in left[0] | left[-1] if left[0].get(key) != left[-1].get(key)}
                raise AssertionError(f"two undisturbed runs of {name} differ in {sorted(differ)}")
            self.calm[name] = Calm(seconds, touches, left[-1])
        return self.calm[name]

    def case(self, number: int, seed: int, names: tuple[str, ...] = tuple(VERBS)) -> Case:
        """One kill, judged."""
        draw = random.Random(f"{seed}-{number}")
        name = draw.choices(names, [WEIGHTS[each] for each in names])[0]
        calm, chosen = self.calm_run(name), draw.choice(SIGNALS)
        at_file = draw.random() < 0.6 and calm.touches > 0
        moment = Moment(chosen, touches=draw.randint(1, calm.touches)) if at_file else None
        moment = moment or Moment(chosen, seconds=draw.uniform(0, calm.seconds))
        found = Case(number, name, moment)
        self._judge(found, calm)
        return found

    def _judge(self, case: Case, calm: Calm) -> None:
        verb, out = VERBS[case.verb], self._fresh()
        code, _, said = run(verb, out, self.models, moment=case.moment)
        codes = (
            -case.moment.signal,
            case.moment.signal,
        )  # ray ends a process that it was asked to end by its own means
        case.outcome = "killed" if code in codes else f"ended with {code}"
        if code not in (0, *codes) or "Traceback" in said:
            case.failures.append(f"the killed run ended with {code}: {said[-300:]}")
        if alive := outlive(out):
            case.failures.append(f"{len(alive)} processes outlived it")
        case.failures += unfinished(verb, out, calm)
        is_there = not verb.grows and calm.left.keys() <= left_in_names(out)
        if not is_there:
            code, _, said = run(verb, out, self.models, *verb.resumes)
            if code != 0:
                case.failures.append(f"the second run ended with {code}: {said[-300:]}")
                return
        left = left_in(out)
        case.failures += [f"left behind: {name}" for name in sorted(left.keys() - calm.left.keys())]
        case.failures += [f"not there: {name}" for name in sorted(calm.left.keys() - left.keys())]
        both = sorted(left.keys() & calm.left.keys())
        case.failures += [f"another result: {name}" for name in both if left[name] != calm.left[name]]

    def _fresh(self) -> Path:
        """An empty folder, always under the same name, because results name it."""
        out = self.folder / "case"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        return out


def left_in_names(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


def _import_all() -> None:
    """What verbs need, before they are forked."""
    from importlib import import_module

    import torch

    # oversmooth first: with it, transformers can be imported beside a torchvision of another build
    for name in ("oversmooth.commands.verbs", *(f"oversmooth.commands.{verb}" for verb in COMMANDS), "transformers"):
        import_module(name)
    torch.set_num_threads(1)


def cases(numbers: Iterable[int], seed: int, folder: Path, names: tuple[str, ...] = tuple(VERBS)) -> Iterator[Case]:
    """Kills, one behind the other."""
    harness = Harness(folder)
    return (harness.case(number, seed, names) for number in numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="only the case of this number")
    parser.add_argument("--verbs", default=",".join(VERBS), help="only these, with commas between them")
    asked = parser.parse_args()
    began, done = time.monotonic(), list[Case]()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        chosen = range(asked.count) if asked.only is None else (asked.only,)
        for case in cases(chosen, asked.seed, Path(folder), tuple(asked.verbs.split(","))):
            done.append(case)
            if case.failures:
                print(
                    f"{case.number}: {case.verb}, {case.moment}, {case.outcome}: {'; '.join(case.failures)}", flush=True
                )
    print(_summary(done, asked.seed, time.monotonic() - began))
    return 1 if any(case.failures for case in done) else 0


def _summary(done: list[Case], seed: int, seconds: float) -> str:
    rows = ["", "| verb | kills | killed before the end | failures |", "|---|---|---|---|"]
    for verb in dict.fromkeys(case.verb for case in done):
        own = [case for case in done if case.verb == verb]
        killed = sum(case.outcome == "killed" for case in own)
        rows.append(f"| {verb} | {len(own)} | {killed} | {sum(bool(case.failures) for case in own)} |")
    failures = sum(bool(case.failures) for case in done)
    return "\n".join([*rows, "", f"{len(done)} kills with seed {seed}: {failures} failures, {seconds:.0f} seconds."])


if __name__ == "__main__":
    raise SystemExit(main())
