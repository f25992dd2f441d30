"""A checkpoint loaded and run as somebody without this package would: by plain transformers or timm.

This file imports nothing of this package. `oversmooth.control.readback` calls its functions on the original, and starts it
as a script, in a process of its own, on folders that are about to be handed over:

    python -P plain_load.py < names of folders that hold a request, one per line

Starting it takes seconds, because transformers is imported. So it stays for a while for further requests, and answers each
in a fork of its own, which starts as fresh as a new process would.
"""

import json
import os
import select
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

REQUEST, INPUTS, ANSWER = "request.json", "inputs.pt", "answer.pt"
PACKAGE = "oversmooth"
IDLE_SECONDS = 60
"""How long the process waits for another request."""


def load(
    folder: str, *, trusts_own_code: bool = False, offload: str | None = None, memory: int = 0
) -> tuple[nn.Module, dict[str, list[str]]]:
    """The model in eval mode and the dtype it is stored in, with the names that were missing, unexpected or of another
    shape. What is missing is set to zero, not left random. With a folder `offload`, it is the bare model in float32, and
    weights beyond `memory` stay on disk."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if "architecture" in config and "model_type" not in config:
        return _load_timm(folder)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    placed: dict[str, Any] = {}
    if offload is not None:
        placed = {"device_map": "auto", "max_memory": {"cpu": memory}, "offload_folder": offload}
        placed |= {"dtype": torch.float32}
    kind = _class_for(config, transformers) if offload is None else transformers.AutoModel
    model, report = kind.from_pretrained(
        folder,
        **{"dtype": "auto", **placed},
        trust_remote_code=trusts_own_code,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report
    )
    gaps = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "mismatched": sorted(str(item[0]) for item in report["mismatched_keys"]),
    }
    _set_to_zero(model, gaps["missing"])
    for part in {
        id(part): part for part in (model.config, getattr(model.config, "text_config", None)) if part
    }.values():
        for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
            if getattr(part, name, False):
                setattr(part, name, False)  # the outputs that every model has
    return model.eval(), gaps


def _class_for(config: Mapping[str, Any], transformers: Any) -> Any:
    """The class that the checkpoint names, so that every tensor in it has its place; the bare model where it names none."""
    for name in config.get("architectures") or ():
        if hasattr(transformers, str(name)):
            return getattr(transformers, str(name))
        for auto, place in (config.get("auto_map") or {}).items():
            if str(place).endswith(f".{name}") and hasattr(transformers, auto):
                return getattr(transformers, auto)
    return transformers.AutoModel


def _load_timm(folder: str) -> tuple[nn.Module, dict[str, list[str]]]:
    import timm
    from safetensors.torch import load_file

    model = timm.create_model(f"local-dir:{folder}", pretrained=True)  # strictly, but for a classifier of another size
    gaps: dict[str, list[str]] = {"missing": [], "unexpected": [], "mismatched": []}
    weights = Path(folder) / "model.safetensors"
    stored = load_file(weights) if weights.is_file() else {}
    state = model.state_dict()
    gaps["mismatched"] = [name for name, value in stored.items() if name in state and state[name].shape != value.shape]
    return model.eval(), gaps


@torch.no_grad()
def _set_to_zero(model: nn.Module, names: Sequence[str]) -> None:
    state = model.state_dict()
    for name in names:
        if name in state and state[name].device.type != "meta":
            state[name].zero_()


@torch.no_grad()
def run(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """The output on inputs by name; the name `""` stands for the one positional argument."""
    torch.manual_seed(0)  # a few models shuffle their tokens
    named = {name: value for name, value in inputs.items() if name}
    return model(inputs[""], **named) if "" in inputs else model(**named)


def tensors_of(output: Any) -> list[Tensor]:
    """Every float tensor of an output, in order; caches of keys and values are none of its parts."""
    if isinstance(output, Tensor):
        return [output.detach().float().cpu()] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


@torch.no_grad()
def losses(model: nn.Module, questions: Sequence[tuple[dict[str, Any], Tensor | None]], how: Mapping[str, Any]) -> Any:
    """Sum and number of cross-entropies over questions; of similarities, one embedding per input."""
    total, count, embeddings = 0.0, 0, []
    for inputs, answers in questions:
        if answers is None:
            base = getattr(model, "base_model", model)
            embeddings.append(_embedding(run(base, inputs), inputs, how["takes_first"]))
            continue
        output = run(model, inputs)
        logits = (output if isinstance(output, Tensor) else output.logits).float()
        if how["shift"]:
            logits, answers = logits[:, :-1], answers[:, 1:]
        flat = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), answers.flatten(), reduction="none", ignore_index=-100
        )
        total, count = total + flat.double().sum().item(), count + int((answers != -100).sum())
    return {"total": total, "count": count, "embeddings": embeddings}


def _embedding(output: Any, inputs: Mapping[str, Any], takes_first: bool) -> Tensor:
    h = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
    h = output[0] if h is None else h
    if h.ndim == 3:
        mask = inputs.get("attention_mask")
        weights = torch.ones(h.shape[:2]) if mask is None else mask.float()
        h = h[:, 0] if takes_first else (h * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
    return torch.nn.functional.normalize(h.float(), dim=-1)


# --- as a script ------------------------------------------------------------------------------------------------------


def declare_operators() -> None:
    """The operators that a torchvision of another build looks up while it is imported, and this torch does not have.

    transformers and timm import torchvision, and fall with it; `oversmooth.environment.versions` tells the whole story.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]  # half-imported
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


_declared: list[object] = []
"""The declarations live as long as their library."""


def answer(request: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What the folder gives: gaps, loss in the dtype it is stored in, outputs in float32."""
    torch.set_num_threads(request["threads"])
    model, gaps = load(
        request["folder"],
        trusts_own_code=request["trusts_own_code"],
        offload=request["offload"],
        memory=request["memory"],
    )
    found: dict[str, Any] = {"gaps": gaps, "losses": None}
    if request["judging"] is not None:
        found["losses"] = losses(model, given["questions"], request["judging"])
    if request["offload"] is None:
        model.float()
    found["outputs"] = [tensors_of(run(model, inputs)) for inputs in given["inputs"]]
    return found


def handle(place: Path) -> int:
    """Writes the answer to the request in a folder."""
    request = json.loads((place / REQUEST).read_text(encoding="utf-8"))
    given = torch.load(place / INPUTS, weights_only=True)
    try:
        found = answer(request, given)
    except Exception as error:  # whatever the libraries raise is why the folder cannot be loaded
        found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    found["imported"] = PACKAGE in sys.modules
    torch.save(found, place / ANSWER)
    return 0


def handle_in_a_fork(place: Path) -> int:
    """The exit code; negative where a signal ended the fork, such as that of a system without memory."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = handle(place)
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def serve() -> None:
    """Answers requests until the input ends, or until there was none for a while."""
    declare_operators()
    is_linux = sys.platform == "linux"  # elsewhere a process with torch in it cannot be forked safely
    while True:
        if is_linux and not select.select([sys.stdin], [], [], IDLE_SECONDS)[0]:
            return
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        place = Path(json.loads(line))
        if is_linux:
            with suppress(Exception):  # said by the request itself, which imports it again
                __import__(json.loads((place / REQUEST).read_text(encoding="utf-8"))["library"])  # once for all forks
        code = handle_in_a_fork(place) if is_linux else handle(place)
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
