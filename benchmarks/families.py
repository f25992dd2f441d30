"""Which models are covered: discovery over every model type of transformers and every family of timm.

The aim: of all model types that can be built small and have softmax self-attention, at least 98 in 100 are found and proved
(equal-token identity below 1e-4 in float32) or refused for a reason of mathematics. The table says how far that is true:
what could not be built or run here is counted as such, with the reason.

Writes `src/oversmooth/models/families_table.json`, which `oversmooth list` and the docs show. Goes on where it was
stopped: rows of the same versions are kept. Names of types, libraries or states on the command line are examined again.
Every model runs in a process of its own with limits on time and memory; what meets a limit is reported as such.
Run: make families
"""

import importlib
import inspect
import json
import logging
import multiprocessing
import re
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import oversmooth  # isort: skip  (first: it lets timm import beside a torchvision of another build)
import timm
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from oversmooth.environment.files import write_whole
from oversmooth.errors import NotDiscovered, OversmoothError, RefusedArchitecture, first_line
from oversmooth.models.declaration import Discovery
from oversmooth.models.discovery.skeleton import NoModelClass, randomise
from oversmooth.models.discovery.watch import cannot_attend, discovered
from oversmooth.models.families import REFUSED
from oversmooth.models.identify import known_model_types
from oversmooth.models.stores.module import describe

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.small_skeletons import small_skeletons

TABLE = Path(oversmooth.__file__).parent / "models/families_table.json"
CPU_SECONDS = 60
WALL_SECONDS = 240
BYTES = 8 << 30
"""Memory of the process that builds and runs a model."""
SMALL_WORDS = ("test", "femto", "pico", "nano", "xxs", "xxt", "tiny", "xs", "small", "_s", "_t", "mini", "base", "_b")
SMALLER: dict[str, dict[str, Any]] = {
    "aimv2_1b_patch14_224": {"depth": 2},
    "gemma4_vit_167m": {"depth": 2},
    "samvit_base_patch16": {  # its third block attends globally
        "depth": 3,
        "img_size": 256,
        "pretrained_cfg_overlay": {"input_size": (3, 256, 256)},
    },
}
"""Models that are too large for the limits as they are."""
NO_SOFTMAX = "none of its modules computes attention"
ATTENTION_WORDS = ("softmax", "scaled_dot_product_attention")


class OutOfTime(Exception):
    """A model that takes too long."""


FOLDERS = re.compile(r" from '[^']*'")
"""Where this machine keeps a module, in the words of an error."""


def examined(ways: Iterator[Callable[[], nn.Module]]) -> dict[str, Any]:
    """What is known after trying to build and watch a model in several ways."""
    failure = ""
    built, is_part = False, False
    best: Discovery | None = None
    for build in ways:
        try:
            model = build()
            built, is_part = True, type(model).forward is nn.Module.forward
            if cannot_attend(model):
                return {"state": "no attention", "kind": "no attention", "reason": NO_SOFTMAX}
            found = discovered(model, describe(model))
            best = found if best is None or _not_run(found) < _not_run(best) else best
            if not _not_run(best):
                break
        except RefusedArchitecture as refusal:
            if best is not None:
                break
            state = "no attention" if refusal.kind.startswith("no ") else "refused"
            return {"state": state, "kind": refusal.kind, "reason": refusal.reason}
        except NotDiscovered as error:
            failure = failure or error.found
        except NoModelClass as error:
            return {"state": "part", "reason": first_line(error)}
        except OutOfTime:
            failure = failure or f"more than {CPU_SECONDS} s"
            break
        except OversmoothError as error:
            failure = failure or error.problem
        except Exception as error:
            failure = failure or f"{type(error).__name__}: {first_line(error)}"
    if best is not None:
        return covered(best)
    if is_part or "required positional argument" in failure:
        words = failure if not is_part else "it has no forward pass of its own"
        return {"state": "part", "reason": f"it is fed by other parts of its model: {words}"[:300]}
    return {"state": "not run" if built else "not built", "reason": FOLDERS.sub("", failure)[:300]}


def _not_run(found: Discovery) -> int:
    """Towers that did not run on what they were fed."""
    return sum(1 for one in found.left_out if one.kind == "not run")


def covered(found: Discovery) -> dict[str, Any]:
    left_out = {one.kind + ": " + re.sub(r"[.]\d+", ".#", one.reason) for one in found.left_out}
    return {
        "state": "discovered",
        "error": float(f"{found.largest_error:.1e}"),
        "stacks": {arch.stack or "blocks": arch.paths.block for arch in found.archs},
        "residual": sorted({arch.residual for arch in found.archs}),
        "left_out": sorted(left_out)[:6],
    }


def timm_families() -> dict[str, str]:
    """One small model for every family of timm whose code has a softmax, by module and beginning of the name."""
    chosen: dict[str, str] = {}
    for module in timm.list_modules():
        source = inspect.getsource(importlib.import_module(f"timm.models.{module}"))
        if not any(word in source for word in ATTENTION_WORDS):
            continue
        names = timm.list_models(module=module)
        for family in dict.fromkeys(re.split(r"[_\d]", name)[0] + _variant(name) for name in names):
            members = [name for name in names if re.split(r"[_\d]", name)[0] + _variant(name) == family]
            chosen[f"{module}/{family}"] = min(members, key=_size)
    return chosen


def _variant(name: str) -> str:
    found = re.search(r"parallel|diff|relpos|v2|v3|so150m|rope|gap|clip|msn|dinov2|dinov3|siglip|xcit|_reg", name)
    return f" {found[0].strip('_')}" if found else ""


def _size(name: str) -> tuple[int, int]:
    return (next((place for place, word in enumerate(SMALL_WORDS) if word in name), len(SMALL_WORDS)), len(name))


def timm_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **SMALLER.get(name, {}))
    randomise(model)
    return model.eval()


Ways = Callable[[], Iterator[Callable[[], nn.Module]]]


def work() -> Iterator[tuple[str, str, Ways]]:
    for model_type in CONFIG_MAPPING_NAMES:
        yield "transformers", model_type, lambda model_type=model_type: small_skeletons(model_type)
    for family, name in timm_families().items():
        yield "timm", f"{family}: {name}", lambda name=name: iter([lambda: timm_model(name)])


def examined_apart(ways: Ways) -> dict[str, Any]:
    """The row of a model, from a process of its own that may fail without harm."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_examine_within_limits, args=(ways, send))
    process.start()
    send.close()
    try:
        has_answer = receive.poll(WALL_SECONDS)
        row: dict[str, Any] = (
            receive.recv() if has_answer else {"state": "not run", "reason": f"more than {WALL_SECONDS} s"}
        )
        process.kill()
    except EOFError:
        row = {"state": "not run", "reason": f"the process was ended: more than {CPU_SECONDS} s or {BYTES >> 30} GiB"}
    process.join()
    return row


def _examine_within_limits(ways: Ways, send: Connection) -> None:
    def stop(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGXCPU, stop)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 10))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    try:
        row = examined(ways())
    except OutOfTime:
        row = {"state": "not run", "reason": f"more than {CPU_SECONDS} s"}
    except MemoryError:
        row = {"state": "not run", "reason": f"more than {BYTES >> 30} GiB"}
    send.send(row)


def main(only: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity(60)
    torch.set_num_threads(1)
    versions = {"transformers": transformers.__version__, "timm": timm.__version__}
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rows = table["rows"] if table.get("versions") == versions else {"transformers": {}, "timm": {}}
    declared = set(known_model_types())
    for library, name, ways in work():
        state = rows[library].get(name, {}).get("state")
        if (state and not only) or (only and not any(word in (name, library, state) for word in only)):
            continue
        row = examined_apart(ways)
        if row["state"] == "discovered" and name in REFUSED:  # for what is not seen of it on such inputs
            row = {"state": "refused", "kind": "known", "reason": REFUSED[name]}
        if library == "transformers" and name in declared:
            row["declared"] = True
        rows[library][name] = row
        print(name, row["state"], row.get("kind", ""), str(row.get("error", row.get("reason")))[:150], flush=True)
        text = json.dumps({"versions": versions, "rows": rows}, indent=1, sort_keys=True) + "\n"
        write_whole(TABLE, lambda path, text=text: path.write_text(text))


if __name__ == "__main__":
    main(sys.argv[1:])
