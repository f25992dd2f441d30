"""`prune`: an ordinary checkpoint without some of its blocks, and what that costs.

Blocks are numbered anew, the config counts what is left, everything else stays: plain transformers or timm loads it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from oversmooth.control.checkpoint import Checkpoint, as_safetensors, copy_small_files, local_checkpoint
from oversmooth.control.selection import choose
from oversmooth.data.batches import Batch, run_checked
from oversmooth.data.reading import Reading, ReadingOptions
from oversmooth.errors import BadValue, CannotControl, Conflict, NothingChosen, UnknownName
from oversmooth.measurement.gathering import BLOCK
from oversmooth.measurement.measurement import measure
from oversmooth.measurement.passes import LiveModel, Seen
from oversmooth.models.hooks.removal import removed
from oversmooth.models.live import quiet_eval
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Source, Stack
from oversmooth.models.stores.pickle import PickleStore
from oversmooth.models.stores.safetensors import SafetensorsStore
from oversmooth.output.whole_files import folder_whole, require_free
from oversmooth.results import Progress, no_progress
from oversmooth.results.worth import Loss, Pruning
from oversmooth.worth.ablation import cost_of_blocks
from oversmooth.worth.task_loss import Question, new_judge, open_judged, questions

BY = ("influence", "loss")
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
"""Config keys that count blocks."""
STAGES = ("stage_names", "out_features", "out_indices")
MANIFEST = "pruning.json"


def prune(
    target: str | Path,
    out: str | Path,
    data: Iterable[Batch] | str | None = None,
    *,
    blocks: str | Sequence[int] | None = None,
    budget: float | None = None,
    by: str = "influence",
    max_loss_increase: float | None = None,
    task: str | None = None,
    progress: Progress = no_progress,
    **reading: Unpack[ReadingOptions],
) -> Pruning:
    """Writes a copy of a local checkpoint without the chosen blocks, or without the share `budget` that matters least.

    `by` is `influence` (blocks that turn tokens least) or `loss` (blocks whose removal costs least, each by itself). The loss
    before and after, on the data of `task_loss`, is in the result and in `pruning.json` in the folder. Nothing is written
    where the loss grows by more than `max_loss_increase`. `out` must not exist or be empty.
    """
    _require_choice(blocks, budget, by)
    require_free(Path(out))
    checkpoint = local_checkpoint(str(target), "prune")
    source = open_source(checkpoint.target)
    stack = _prunable(source)
    how = Reading(**reading)
    given = data if data is None or isinstance(data, str) else list(data)
    live, task = open_judged(source, given, task, "prune", how)
    seen = Seen()
    asked = list(questions(live, task, how, seen))
    chosen = _chosen(live, stack, [item.inputs for item in asked], blocks, budget, by, task, asked)
    left = len(stack.names.blocks) - len(chosen)
    if left < 1:
        raise BadValue("The number of blocks that are left", left, "at least 1 (remove fewer)")
    before, after = _losses(live, task, asked, chosen, progress)
    if max_loss_increase is not None and after.loss - before.loss > max_loss_increase:
        grows = f"the loss grows by {after.loss - before.loss:.4g}, more than {max_loss_increase:g}"
        raise CannotControl("prune", str(target), grows, "Remove fewer blocks, or allow more; nothing was written.")
    result = Pruning(
        provenance=provenance_of(
            live.source, live.stacks, live.hashed(), compute_dtype=f"model {live.runs_in()}", seed=how.seed
        ),
        data=seen.facts(live.data),
        task=task,
        removed=tuple(stack.names.blocks[position].index for position in chosen),
        blocks_before=len(stack.names.blocks),
        by=by if blocks is None else "hand",
        before=before,
        after=after,
        out=str(out),
    )
    with folder_whole(Path(out)) as beside:
        _write(checkpoint, source, stack, chosen, beside)
        (beside / MANIFEST).write_text(result.to_json(indent=2) + "\n", encoding="utf-8")
    return result


# --- what to remove -----------------------------------------------------------------------------------------------------


def _require_choice(blocks: object, budget: float | None, by: str) -> None:
    if blocks is not None and budget is not None:
        raise Conflict(["blocks", "budget"])
    if blocks is None and budget is None:
        raise NothingChosen(["blocks", "budget"])
    if budget is not None and not 0 < budget < 1:
        raise BadValue("budget", budget, "a share of the blocks between 0 and 1")
    if by not in BY:
        raise UnknownName("way to choose blocks", by, BY)


def _prunable(source: Source) -> Stack:
    """The one stack of a model whose blocks can be left out; raises what stands in the way."""
    stacks = source.stacks()
    reason = ""
    if len(stacks) > 1:
        reason = f"it has {len(stacks)} stacks, and a config counts the blocks of one"
    elif stacks[0].arch.shared_layers or any(len(passes) > 1 for passes in stacks[0].passes):
        reason = "its blocks share their weights"
    elif stacks[0].names.blocks_in_model != len(stacks[0].names.blocks):
        reason = "blocks of other kinds stand between those with attention"
    elif not all(block.path.endswith(str(block.index)) for block in stacks[0].names.blocks):
        reason = "its blocks have no numbers"
    if reason:
        raise CannotControl("prune", source.target, reason, "Models of one stack of ordinary blocks can be pruned.")
    return stacks[0]


def _chosen(
    live: LiveModel,
    stack: Stack,
    inputs: Sequence[Mapping[str, Any]],
    blocks: str | Sequence[int] | None,
    budget: float | None,
    by: str,
    task: str,
    asked: Sequence[Question],
) -> list[int]:
    """Positions of the blocks to remove, in order."""
    if blocks is not None:
        return sorted({each.position for each in choose([stack], blocks)})
    count = round((budget or 0.0) * len(stack.names.blocks))
    if count < 1:
        raise BadValue("budget", budget, f"enough for one of {len(stack.names.blocks)} blocks")
    if by == "influence":
        values = measure(live.model, inputs, metrics="influence").values
        price = {value.depth - 1: value.mean or 0.0 for value in values if value.place == BLOCK}
    else:
        price = cost_of_blocks(live, task, asked)
    return sorted(sorted(price, key=lambda position: price[position])[:count])


def _losses(
    live: LiveModel, task: str, asked: Sequence[Question], chosen: Sequence[int], progress: Progress
) -> tuple[Loss, Loss]:
    """Of the whole model, and of the live model without the chosen blocks."""
    whole, pruned = new_judge(task, live), new_judge(task, live)
    (stack,) = live.stacks
    with quiet_eval(live.model):
        for number, item in enumerate(asked):
            whole.add(run_checked(live.model, live.config, item.inputs), item.inputs, item.answers)
            with ExitStack() as without:
                for position in chosen:
                    without.enter_context(removed(stack, live.store, position, "block"))
                pruned.add(run_checked(live.model, live.config, item.inputs), item.inputs, item.answers)
            progress(number + 1, len(asked))
    return whole.result(whole), pruned.result(whole)


# --- the checkpoint -----------------------------------------------------------------------------------------------------


def _write(checkpoint: Checkpoint, source: Source, stack: Stack, chosen: Sequence[int], to: Path) -> None:
    """The files of the smaller model: weights file by file, the config, and everything small beside them."""
    from safetensors.torch import save_file

    store = source.store
    if not isinstance(store, SafetensorsStore | PickleStore):
        reason = "its weights are packed"
        raise CannotControl("prune", checkpoint.target, reason, "Start from the original checkpoint.")
    copy_small_files(checkpoint.folder, to)
    names = _new_names(stack, chosen, store.names)
    files = dict.fromkeys(store.file_of(name) for name in names)
    where: dict[str, str] = {}
    for file in files:
        tensors = {new: store.read(old).clone() for old, new in names.items() if store.file_of(old) == file}
        save_file(tensors, to / as_safetensors(file), metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, as_safetensors(file))
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": where}
        (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = to / "config.json"
    body = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(_smaller(body, stack, chosen), indent=2) + "\n", encoding="utf-8")


def _new_names(stack: Stack, chosen: Sequence[int], names: Iterable[str]) -> dict[str, str]:
    """Old to new name of every tensor that stays."""
    renamed: dict[str, str | None] = {}
    number = 0
    for position, block in enumerate(stack.names.blocks):
        base = block.path.removesuffix(str(block.index))
        renamed[f"{block.path}."] = None if position in chosen else f"{base}{number}."
        number += position not in chosen
    found: dict[str, str] = {}
    for name in names:
        path = next((path for path in renamed if name.startswith(path)), None)
        new = name if path is None else renamed[path] and f"{renamed[path]}{name.removeprefix(path)}"
        if new:
            found[name] = new
    return found


def _smaller(config: Mapping[str, Any], stack: Stack, chosen: Sequence[int]) -> dict[str, Any]:
    """The config with its counts of blocks, and its lists of one entry per block, as they are now."""
    old = len(stack.names.blocks)
    kept = [position for position in range(old) if position not in chosen]
    new = dict(config)
    if "architecture" in config:  # timm builds the model from its name and these
        return {**new, "model_args": {**dict(config.get("model_args") or {}), "depth": len(kept)}}
    for key in STAGES:  # names of stages of a backbone, which transformers makes anew from the count
        new.pop(key, None)
    for key, value in config.items():
        if key in COUNTS and value == old:
            new[key] = len(kept)
        elif isinstance(value, list) and len(value) == old and key.endswith(("layer_types", "_layers", "types")):
            new[key] = [value[position] for position in kept]
    return new
