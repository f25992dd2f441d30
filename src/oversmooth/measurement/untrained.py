"""The mean cosine of the same architecture untrained, on the same inputs; kept on disk, because it never changes."""

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import nn

from oversmooth.data.held import Data
from oversmooth.data.options import DataOptions
from oversmooth.environment.files import cache_folder, write_whole
from oversmooth.errors import OversmoothError
from oversmooth.measurement.observer import MeasurementObserver, Selection
from oversmooth.measurement.passes import open_live, pass_through
from oversmooth.models.fresh import NoFreshCopy, fresh_copy, recipe_of
from oversmooth.models.open import LiveModel, OpenedModel
from oversmooth.results import UntrainedCurve, no_progress
from oversmooth.results.reading import levels_of

Curves = tuple[UntrainedCurve, ...]
PACKAGES = ("oversmooth", "torch", "transformers", "timm")
"""Whose versions decide how fresh weights are drawn and what is measured of them."""


def measure_untrained(
    model: OpenedModel,
    data: Data,
    how: DataOptions,
    *,
    inputs_sha256: str,
    prefix_tokens: str,
) -> tuple[Curves, str]:
    """A curve per stack, or why there is none. `inputs_sha256`: what the trained model was run on."""
    module = model.module(verb="measure")
    kept = _kept_at(module, inputs_sha256, prefix_tokens, how.seed)
    if kept is not None and (found := _read(kept)):
        return found, ""
    try:
        fresh = OpenedModel(fresh_copy(module, how.seed), arch=model.load.arch)
    except NoFreshCopy as error:
        return (), str(error)
    try:
        curves, sha256 = _measured(fresh, model, data, how, prefix_tokens)
    except OversmoothError as error:
        return (), error.problem
    if sha256 != inputs_sha256:
        return (), "the data could not be read a second time"
    if not curves:
        return (), "no sequence has a value at every place"
    if kept is not None:
        _write(kept, curves)
    return curves, ""


def _measured(
    fresh: OpenedModel,
    model: OpenedModel,
    data: Data,
    how: DataOptions,
    prefix_tokens: str,
) -> tuple[Curves, str]:
    """The curves, and the hash of what entered the model."""
    _, loaded = open_live(model, data, "measure", how)  # by the tokenizer or processor of the trained model

    def watch(live: LiveModel) -> AbstractContextManager[MeasurementObserver]:
        return nullcontext(_observer(live, drop_prefix=prefix_tokens == "drop"))

    run = pass_through(fresh.live(), loaded, watch, how.max_samples, no_progress)
    found = run.observer.cosine_chain.attributions(run.observer.stacks)
    curves = tuple(UntrainedCurve(stack=each.stack, seed=how.seed, levels=levels_of(each)) for each in found)
    return curves, run.observer.seen.hash.hexdigest()


def _observer(live: LiveModel, *, drop_prefix: bool) -> MeasurementObserver:
    """One that follows the stream and takes no metrics."""
    return MeasurementObserver(
        model=live.model,
        chosen=Selection(states=(), steps=(), attention=()),
        stacks={stack.label: stack for stack in live.stacks},
        names=frozenset(),
        adds_stream_norms=True,
        drop_prefix=drop_prefix,
    )


# --- kept on disk, by everything that decides the numbers ---


def _kept_at(module: nn.Module, inputs_sha256: str, prefix_tokens: str, seed: int) -> Path | None:
    """Where the curves of this architecture on these inputs are kept; `None` for classes that only the user knows."""
    recipe = recipe_of(module)
    if recipe is None:
        return None
    facts = {
        "model": recipe,
        "dtype": str(next(module.parameters()).dtype),
        "inputs": inputs_sha256,
        "prefix_tokens": prefix_tokens,
        "seed": seed,
        "versions": {name: _version(name) for name in PACKAGES},
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return cache_folder("untrained") / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _read(path: Path) -> Curves:
    """What was kept; nothing where there is no such file, or it is damaged."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return tuple(
            UntrainedCurve(stack=str(each["stack"]), seed=int(each["seed"]), levels=tuple(map(float, each["levels"])))
            for each in held
        )
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def _write(path: Path, curves: Curves) -> None:
    text = json.dumps([{"stack": each.stack, "seed": each.seed, "levels": each.levels} for each in curves])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    except (OSError, OversmoothError):
        return  # a folder that cannot be written to costs time, and nothing else
