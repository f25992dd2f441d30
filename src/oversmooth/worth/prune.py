"""`prune`: an ordinary checkpoint without some of its blocks, and what that costs.

Blocks are numbered anew, the config counts what is left, and what it says of single blocks follows them; everything else
stays. Plain transformers or timm loads the folder before it is handed over, and has to find the same outputs and loss.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from oversmooth.control.edit import (
    Checkpoint,
    as_safetensors,
    copy_small_files,
    hashes,
    local_checkpoint,
    save_signed,
    sign,
)
from oversmooth.control.readback import StatedLoss, original_changed, require_read_back
from oversmooth.control.selection import choose
from oversmooth.data.held import Data, reusable
from oversmooth.data.load import RunKeywords, opened
from oversmooth.data.options import DataOptions
from oversmooth.environment.files import folder_whole, require_free
from oversmooth.errors import BadValue, CannotControl, Conflict, MissingValue, UnknownName
from oversmooth.measurement.measure import measure
from oversmooth.measurement.passes import Processed
from oversmooth.measurement.steps import BLOCK
from oversmooth.models.hooks.removal import removed
from oversmooth.models.live import quiet_eval, written_out_config
from oversmooth.models.open import LiveModel, OpenedModel
from oversmooth.models.source import Source, Stack
from oversmooth.models.stores.module import ModuleStore
from oversmooth.models.stores.safetensors import SafetensorsStore
from oversmooth.models.stores.torch_pickle import PickleStore
from oversmooth.results import Progress, guarded, no_progress
from oversmooth.results.changes import Loss, Pruning
from oversmooth.worth.ablate import cost_of_blocks
from oversmooth.worth.task_loss import LossMeter, Question, Similarities, answer, new_judge, open_judged, questions

BY = ("influence", "loss")
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
"""Config keys that count blocks."""
STAGES = ("stage_names", "out_features", "out_indices")
MANIFEST = "pruning.json"


def prune(
    target: str | Path | OpenedModel,
    out: str | Path,
    data: Data = None,
    *,
    blocks: str | Sequence[int] | None = None,
    budget: float | None = None,
    by: str = "influence",
    max_loss_increase: float | None = None,
    task: str | None = None,
    progress: Progress = no_progress,
    **options: Unpack[RunKeywords],
) -> Pruning:
    """Writes a copy of a local checkpoint without the chosen blocks, or without the share `budget` that matters least.

    `by` is `influence` (blocks that turn tokens least) or `loss` (blocks whose removal costs least, each by itself). The loss
    before and after, on the data of `task_loss`, is in the result and in `pruning.json` in the folder. Nothing is written
    where the loss grows by more than `max_loss_increase`. `out` must not exist or be empty.
    """
    choice = _Choice(blocks=blocks, budget=budget, by=by, max_loss_increase=max_loss_increase)
    require_free(Path(out))
    checkpoint = local_checkpoint(target, "prune")
    given = reusable(data)
    is_open = isinstance(target, OpenedModel) and target.source.place == str(checkpoint.folder)
    model, how = opened(target if is_open else checkpoint.target, options, given)
    source = model.source
    stack = _prunable(source)
    _require_unpacked(source, checkpoint)
    with model.alone:
        result, chosen, loss = _judged(model, stack, given, task, how, choice, progress, str(out))
    if not is_open:
        model.close()  # the original is loaded again below, by the plain library
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    smaller = _smaller(config, written_out_config(checkpoint.folder, config), stack, chosen)
    reference = original_changed(source, partial(_without_in, chosen))  # the model that was judged is gone by now
    words = f"blocks {', '.join(map(str, result.removed))} of {result.blocks_before} removed, chosen by {result.by}"
    with folder_whole(Path(out)) as beside:
        left_out = _write(checkpoint, source, stack, chosen, beside, smaller, words)
        suspects = index_settings(smaller)
        read_back = require_read_back(beside, reference, "prune", str(out), settings=suspects, loss=loss)
        result = replace(result, read_back=read_back, left_out=left_out)
        original = {"name": Path(checkpoint.target).name, "sha256": hashes(checkpoint.folder, source.store)}
        names = ("removed", "blocks_before", "task", "before", "after", "read_back", "left_out")
        facts = asdict(result)
        sign(beside, "prune", words, original, {name: facts[name] for name in names})
        (beside / MANIFEST).write_text(result.to_json(indent=2) + "\n", encoding="utf-8")
    return result


def _judged(
    model: OpenedModel,
    stack: Stack,
    given: Any,
    task: str | None,
    how: DataOptions,
    choice: "_Choice",
    progress: Progress,
    out: str,
) -> tuple[Pruning, list[int], StatedLoss]:
    """What is removed and what that costs, with the questions that were asked."""
    source = model.source
    live, loaded, task = open_judged(model, given, task, "prune", how)
    seen = Processed()
    asked = list(questions(live, loaded, task, how, seen))
    chosen = _chosen(live, stack, choice, task, asked)
    left = len(stack.names.blocks) - len(chosen)
    if left < 1:
        raise BadValue("The number of blocks that are left", left, "at least 1 (remove fewer)")
    _require_place(source, stack, chosen)
    before, after, whole = _losses(live, task, asked, chosen, progress)
    most = choice.max_loss_increase
    if most is not None and after.loss - before.loss > most:
        grows = f"the loss grows by {after.loss - before.loss:.4g}, more than {most:g}"
        raise CannotControl("prune", source.target, grows, "Remove fewer blocks, or allow more; nothing was written.")
    result = Pruning(
        provenance=live.provenance(seed=how.seed),
        data=seen.facts(loaded),
        task=task,
        removed=tuple(stack.names.blocks[position].index for position in chosen),
        blocks_before=len(stack.names.blocks),
        by=choice.by if choice.blocks is None else "hand",
        before=before,
        after=after,
        out=out,
    )
    return result, chosen, _stated(live, task, asked, after, whole)


def _stated(live: LiveModel, task: str, asked: Sequence[Question], after: Loss, whole: LossMeter) -> StatedLoss:
    takes_first = any(stack.prefix_tokens for stack in live.stacks)

    def of_embeddings(embeddings: Sequence[torch.Tensor]) -> float:
        return Similarities(takes_first=takes_first, _embeddings=list(embeddings)).result(whole).loss

    def on_host(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}

    return StatedLoss(
        loss=after.loss,
        questions=[(on_host(item.inputs), item.answers) for item in asked],
        shift=task == "causal-lm",
        takes_first=takes_first,
        is_half=next(live.model.parameters()).dtype in (torch.float16, torch.bfloat16),
        of_embeddings=of_embeddings,
    )


@contextmanager
def _without(stack: Stack, store: ModuleStore, chosen: Sequence[int]) -> Iterator[None]:
    """The live model without these blocks, while the context lasts."""
    with ExitStack() as without:
        for position in chosen:
            without.enter_context(removed(stack, store, position, "block"))
        yield


def _without_in(chosen: Sequence[int], live: Source) -> AbstractContextManager[None]:
    assert isinstance(live.store, ModuleStore)
    (stack,) = live.stacks()
    return _without(stack, live.store, chosen)


# --- what to remove -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """Which blocks to remove, and what that may cost; the fields are keywords of `prune`."""

    blocks: str | Sequence[int] | None
    budget: float | None
    by: str
    max_loss_increase: float | None

    def __post_init__(self) -> None:
        if self.blocks is not None and self.budget is not None:
            raise Conflict(["blocks", "budget"])
        if self.blocks is None and self.budget is None:
            raise MissingValue("blocks or budget")
        if self.budget is not None and not 0 < self.budget < 1:
            raise BadValue("budget", self.budget, "a share of the blocks between 0 and 1")
        if self.by not in BY:
            raise UnknownName("way to choose blocks", self.by, BY)


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


def _chosen(live: LiveModel, stack: Stack, choice: _Choice, task: str, asked: Sequence[Question]) -> list[int]:
    """Positions of the blocks to remove, in order."""
    if choice.blocks is not None:
        return sorted({each.position for each in choose([stack], choice.blocks)})
    count = round((choice.budget or 0.0) * len(stack.names.blocks))
    if count < 1:
        raise BadValue("budget", choice.budget, f"enough for one of {len(stack.names.blocks)} blocks")
    if choice.by == "influence":
        values = measure(live.running, [item.inputs for item in asked], metrics="influence").values
        price = {value.depth - 1: value.mean or 0.0 for value in values if value.place == BLOCK}
    else:
        price = cost_of_blocks(live, task, asked)
    return sorted(sorted(price, key=lambda position: price[position])[:count])


def _losses(
    live: LiveModel, task: str, asked: Sequence[Question], chosen: Sequence[int], progress: Progress
) -> tuple[Loss, Loss, LossMeter]:
    """Of the whole model, and of the live model without the chosen blocks; and what judged the whole one."""
    whole, pruned = new_judge(task, live), new_judge(task, live)
    (stack,) = live.stacks
    with quiet_eval(live.model):
        for number, item in enumerate(asked):
            answer(live, whole, item)
            with _without(stack, live.store, chosen):
                answer(live, pruned, item)
            guarded(progress)(number + 1, len(asked))
    return whole.result(whole), pruned.result(whole), whole


# --- the checkpoint -----------------------------------------------------------------------------------------------------


def _require_unpacked(source: Source, checkpoint: Checkpoint) -> None:
    if not isinstance(source.store, SafetensorsStore | PickleStore):
        reason = "its weights are packed"
        raise CannotControl("prune", checkpoint.target, reason, "Start from the original checkpoint.")
    if not (checkpoint.folder / "config.json").is_file():
        reason = "there is no config.json, which counts its blocks"
        raise CannotControl("prune", checkpoint.target, reason, "Give the folder of a whole checkpoint.")


def _write(
    checkpoint: Checkpoint,
    source: Source,
    stack: Stack,
    chosen: Sequence[int],
    to: Path,
    config: Mapping[str, Any],
    words: str,
) -> tuple[str, ...]:
    """The files of the smaller model: weights file by file, the config, and everything small beside them."""
    store = source.store
    assert isinstance(store, SafetensorsStore | PickleStore), "packed weights were refused"
    left_out = copy_small_files(checkpoint.folder, to)
    names = _new_names(stack, chosen, store.names)
    files = dict.fromkeys(store.file_of(name) for name in names)
    where: dict[str, str] = {}
    for file in files:
        tensors = {new: store.read(old).clone() for old, new in names.items() if store.file_of(old) == file}
        save_signed(tensors, to / as_safetensors(file), words)
        where |= dict.fromkeys(tensors, as_safetensors(file))
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": where}
        (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return left_out


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


# --- settings that depend on the number of a block ----------------------------------------------------------------------

INDICES = re.compile(r"(mlp_only_layers|moe_layers|.*(indices|indexes|idxs|layer_ids|attn_layers|attention_layers))")
"""Lists of the numbers of some blocks."""
PER_BLOCK = re.compile(r".*(types?|layers?|block|blocks|pattern|per_layer|map)(_\w+)?")
"""Lists with one entry per block, among those that the plain library makes itself where a config does not have them."""
OTHER_LISTS = re.compile(
    r"(architectures|.*(dim|dims|kernel|kernels|stride|strides|sizes|token_id|token_ids|section|mean|std))"
)
"""Lists that have nothing to do with blocks, whatever their length."""
FIRST = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
"""How many of the first blocks are of another kind than the rest."""
PERIODS: Mapping[str, tuple[str, ...]] = {
    "decoder_sparse_step": (),
    "encoder_sparse_step": (),
    "moe_layer_freq": (),
    "interleave_moe_layer_step": ("moe_layers",),
    "no_rope_layer_interval": ("no_rope_layers",),
    "sliding_window_pattern": ("layer_types",),
    "_sliding_window_pattern": ("layer_types",),
    "full_attention_interval": ("layer_types",),
    "global_attn_every_n_layers": ("layer_types",),
    "attn_layer_period": ("layers_block_type", "layer_types"),
    "expert_layer_period": ("layers_num_experts",),
    "cross_attention_frequency": (),
}
"""Every how many blocks one is of another kind, and the lists that say it instead where a config has them."""
NUMBERED = ("scale_attn_by_inverse_layer_idx",)
"""What makes a block compute with its own number."""


def index_settings(config: Mapping[str, Any]) -> list[str]:
    """Names in a config that may say something about blocks by their numbers, and are set."""
    known = {*NUMBERED, *FIRST, *PERIODS, "num_kv_shared_layers", "hybrid_override_pattern", "attention_types"}
    lists = [key for key, value in config.items() if isinstance(value, list) and _may_be_per_block(key)]
    return sorted([key for key in known if config.get(key)] + [key for key in lists if key not in known])


def _may_be_per_block(key: str) -> bool:
    return bool(INDICES.fullmatch(key) or PER_BLOCK.fullmatch(key)) and not OTHER_LISTS.fullmatch(key)


def _require_place(source: Source, stack: Stack, chosen: Sequence[int]) -> None:
    """Refuses, by name, settings that no other number expresses once blocks have moved; before anything takes long."""
    kept = _Kept.of(len(stack.names.blocks), chosen)
    for key in NUMBERED:
        if source.config.get(key) and kept.moves:
            reason = f"its config sets {key}, so blocks compute with their own numbers, which would change"
            raise CannotControl("prune", source.target, reason, "Remove only the last blocks, which moves no other.")


@dataclass(frozen=True, slots=True)
class _Kept:
    """Positions of the blocks that stay, in order."""

    positions: tuple[int, ...]
    before: int

    @classmethod
    def of(cls, count: int, chosen: Sequence[int]) -> "_Kept":
        return cls(tuple(position for position in range(count) if position not in chosen), count)

    @property
    def moves(self) -> bool:
        return any(new != old for new, old in enumerate(self.positions))

    def entries(self, values: Sequence[Any]) -> list[Any]:
        return [values[position] for position in self.positions]

    def numbers(self, indices: Iterable[int]) -> list[int]:
        return [self.positions.index(old) for old in indices if old in self.positions]


def _smaller(
    config: Mapping[str, Any], written_out: Mapping[str, Any], stack: Stack, chosen: Sequence[int]
) -> dict[str, Any]:
    """The config of the blocks that stay. `written_out` is the same with what the plain library makes of it."""
    kept = _Kept.of(len(stack.names.blocks), chosen)
    new = dict(config)
    if "architecture" in config:  # timm builds the model from its name and these
        return {**new, "model_args": {**dict(config.get("model_args") or {}), "depth": len(kept.positions)}}
    for key in STAGES:  # names of stages of a backbone, which transformers makes anew from the count
        new.pop(key, None)
    counts = [key for key in COUNTS if written_out.get(key) == kept.before and isinstance(written_out[key], int)]
    if not counts:
        reason = f"none of {', '.join(COUNTS)} in its config counts its {kept.before} blocks"
        raise CannotControl("prune", stack.arch.name, reason, "Models whose config counts their blocks can be pruned.")
    new |= dict.fromkeys(counts, len(kept.positions))
    for key in sorted({*config, *(key for key in written_out if _may_be_per_block(key))} - set(STAGES) - set(counts)):
        value = config.get(key, written_out.get(key))
        if key in config or isinstance(value, list):
            new |= _of_kept(key, value, kept)
    return _sparse_steps(new, written_out, kept)


def _of_kept(key: str, value: Any, kept: _Kept) -> dict[str, Any]:
    """A setting as it is for the blocks that stay; nothing where it does not speak of blocks."""
    if key == "attention_types" and isinstance(value, list):  # GPT-Neo: kinds, and how often they are repeated
        kinds = [kind for group, times in value for _ in range(times) for kind in group]
        return {key: [[kept.entries(kinds), 1]]} if len(kinds) == kept.before else {}
    if key == "hybrid_override_pattern" and isinstance(value, str) and len(value) == kept.before:
        return {key: "".join(kept.entries(value))}
    if key in FIRST and type(value) is int:
        return {key: sum(position < value for position in kept.positions)}
    if key == "num_kv_shared_layers" and isinstance(value, int):
        return {key: sum(position >= kept.before - value for position in kept.positions)}
    if not isinstance(value, list) or OTHER_LISTS.fullmatch(key):
        return {}
    are_numbers = all(type(item) is int for item in value)
    if INDICES.fullmatch(key) and are_numbers and len(set(value)) == len(value):
        return {key: kept.numbers(value)}
    return {key: kept.entries(value)} if len(value) == kept.before else {}


def _sparse_steps(config: dict[str, Any], before: Mapping[str, Any], kept: _Kept) -> dict[str, Any]:
    """Settings that count in steps: as lists where these exist, as they are where blocks move by whole steps, or refused."""
    new = dict(config)
    step = before.get("decoder_sparse_step")
    if isinstance(step, int) and step > 1 and isinstance(before.get("mlp_only_layers"), list):
        dense = [old for old in range(kept.before) if old in before["mlp_only_layers"] or (old + 1) % step]
        new |= {"decoder_sparse_step": 1, "mlp_only_layers": kept.numbers(dense)}
    for key, lists in PERIODS.items():
        period = new.get(key, before.get(key))
        if type(period) is not int or period <= 1 or any(new.get(name) for name in lists):
            continue
        if any((old - now) % period for now, old in enumerate(kept.positions)):
            reason = f"its config says {key} = {period}, and the blocks behind the removed would change their kind"
            advice = f"Remove blocks in groups of {period}, or only the last."
            raise CannotControl("prune", "this model", reason, advice)
    return new
