"""Claims 1 to 4: what pretrained models do, and what their weights say; plain numbers, layer by layer and input by input."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.data.batches import Batch, prepare, run_checked
from oversmooth.measurement.metrics import cosine
from oversmooth.measurement.passes import LiveModel
from oversmooth.models.hooks.observing import observed
from oversmooth.models.hooks.places import Place, on_stream
from oversmooth.models.live import quiet_eval
from oversmooth.models.source import Stack
from oversmooth.results import Analysis, LayerPrediction
from oversmooth.results.inspection import LayerInspection
from oversmooth.results.layer_prediction import WhatIfPrediction
from oversmooth.training.reproduce.at_hand import weights_at_hand
from oversmooth.training.reproduce.claim import Observations, Row
from oversmooth.training.reproduce.experiments import DEEP, MINI_BERT, POSITIVE, Experiment, runs_of
from oversmooth.training.reproduce.materials import Materials
from oversmooth.training.reproduce.skips import Removed, why_not, without_skips
from oversmooth.training.reproduce.trained import training_numbers

TRAINED = (DEEP, MINI_BERT[-1])
"""Unconstrained models that were trained here, judged apart from the pretrained ones."""
REMOVED: tuple[Removed | None, ...] = (None, "attention", "block")


# --- claim 1 --------------------------------------------------------------------------------------------------------


def similarity_over_depth(materials: Materials) -> Observations:
    """Mean cosine at the embedding and after the last layer, of every model on every input."""
    rows = []
    for name, found in materials.live_models():
        for order, batch in enumerate(found.batches):
            first, last = _ends(found.live, batch)
            rows.append({"model": name, "input": order, "cosine_embedding": first, "cosine_last": last})
    return {"inputs": rows, "left_out": materials.left_out(), "weights": weights_at_hand(materials)}


def _ends(live: LiveModel, batch: Batch) -> tuple[float | None, float | None]:
    """Mean cosine of one input's tokens at the embedding and where the last block leaves them, in the first stack."""
    stack = live.stacks[0]
    seen: dict[int, float | None] = {}

    def observe(place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        if place.stack == stack.label:  # places come in order: the last of a depth is what leaves the block
            found = cosine(h, torch.ones(h.shape[:2], dtype=torch.bool))
            seen[place.depth] = round(found.values.item(), 6) if found.defined.all() else None

    def wants(name: str, of: Stack) -> bool:
        return on_stream(name, of.arch.residual) and name != "final_norm"

    with quiet_eval(live.model), observed(live.stacks, live.store, observe, wants) as restart:
        restart()
        run_checked(live.model, live.config, prepare(live.model, live.config, batch))
    return seen[0], seen[max(seen)]


# --- claim 2 --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Named:
    model: str
    kind: str
    analysis: Analysis


def dominating_eigenvalue(materials: Materials) -> Observations:
    """Every rung of every layer beside what was measured across its attention; shared weights count once."""
    rows = []
    for named in _models(materials):
        for layer, passes in _by_weights(named.analysis).items():
            rungs = [_mean(each.rungs[rung].mean for each in passes) for rung in range(len(passes[0].rungs))]
            rows.append(
                {
                    "model": named.model,
                    "kind": named.kind,
                    "layer": layer,
                    "measured": _mean(each.measured for each in passes),
                    **{f"rung_{number}": value for number, value in enumerate(rungs)},
                }
            )
    missing = _missing(materials)
    return {"layers": rows, "left_out": materials.left_out(), "missing": missing, "weights": weights_at_hand(materials)}


def _by_weights(analysis: Analysis) -> dict[str, list[LayerPrediction]]:
    """The passes of every layer, by the weights that act in them."""
    found: dict[str, list[LayerPrediction]] = {}
    for layer in analysis.prediction.layers if analysis.prediction is not None else ():
        found.setdefault(f"{layer.stack} {layer.layer}".strip(), []).append(layer)
    return found


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None and math.isfinite(value)]
    return round(sum(found) / len(found), 6) if found else None


def _models(materials: Materials) -> Iterator[_Named]:
    for name, analysis in materials.surveyed():
        yield _Named(name, "pretrained", analysis)
    for experiment in (each.for_scale(materials.is_quick) for each in TRAINED):
        yield from _unconstrained(materials, experiment)


def _missing(materials: Materials) -> list[Row]:
    """Models that were to be trained here and are not there."""
    found = []
    for experiment in (each.for_scale(materials.is_quick) for each in TRAINED):
        there = {run.folder for run in materials.there(runs_of(experiment, ("vanilla",), materials.rates))}
        found += [{"run": run.folder} for run in runs_of(experiment, ("vanilla",)) if run.folder not in there]
    return found


def _unconstrained(materials: Materials, experiment: Experiment) -> Iterator[_Named]:
    for planned in materials.there(runs_of(experiment, ("vanilla",), materials.rates)):
        run = materials.trained(planned)
        yield _Named(f"{experiment.name} {planned.seed}", "trained", run.analysis)


# --- claim 3 --------------------------------------------------------------------------------------------------------


def without_skip(materials: Materials) -> Observations:
    """The theorem's operator without its skip, layer by layer; and real forward passes without skips, model by model."""
    computed = []
    for named in _models(materials):
        for layer, passes in _by_weights(named.analysis).items():
            changed = [found for each in passes for found in each.what_ifs if found.name == "no_skip"]
            regimes = {found.regime for found in changed if not found.not_applicable}
            if regimes:
                regime = regimes.pop() if len(regimes) == 1 else "mixed"  # shared weights can act in several places
                exponent = _mean(_exponent(found) for found in changed if not found.not_applicable)
                computed.append(
                    {"model": named.model, "kind": named.kind, "layer": layer, "regime": regime, "exponent": exponent}
                )
    passes_rows: list[Row] = []
    refused: list[Row] = []
    for name, model in materials.live_models():
        if reason := why_not(model.live.stacks):
            refused.append({"model": name, "reason": reason})
            continue
        for order, batch in enumerate(model.batches[:4]):
            for removed in REMOVED:
                last = _last_cosine(model.live, batch, removed)
                passes_rows.append({"model": name, "input": order, "removed": removed or "none", "cosine_last": last})
    left_out = [*materials.left_out(), *refused]
    return {"computed": computed, "passes": passes_rows, "left_out": left_out, "missing": _missing(materials)}


def _last_cosine(live: LiveModel, batch: Batch, removed: Removed | None) -> float | None:
    """After the last layer; `None` where nothing finite is left of the features."""
    if removed is None:
        return _ends(live, batch)[1]
    with without_skips(live.stacks, live.store, removed):
        return _ends(live, batch)[1]


# --- claim 4 --------------------------------------------------------------------------------------------------------


def sign_of_norms(materials: Materials) -> Observations:
    """Negative norm weights that are there, and the exponent of each layer with them turned positive."""
    rows = []
    for named in _models(materials):
        negative = {f"{each.stack} {each.layer}".strip(): each for each in named.analysis.inspection.layers}
        for layer, passes in _by_weights(named.analysis).items():
            change = next(each for each in passes[0].what_ifs if each.name == "positive_norms")
            exponent = _mean([passes[0].rungs[0].mean])
            if change.not_applicable or exponent is None:
                continue
            rows.append(
                {
                    "model": named.model,
                    "kind": named.kind,
                    "layer": layer,
                    "negative_share": _negative_share(negative[layer]),
                    "exponent": exponent,
                    "exponent_positive": _exponent(change),
                    "regime": passes[0].regime,
                    "regime_positive": change.regime,
                }
            )
    trained = training_numbers(materials, ((POSITIVE, ("sharpen",)), (DEEP, ("sharpen",))))
    return {"layers": rows, "trained": trained, "missing": _missing(materials)}


def _negative_share(layer: LayerInspection) -> float:
    norms = [norm for norm in layer.norms if norm.role == "attn_norm"]
    return round(norms[0].negative_share, 6) if norms else 0.0


def _exponent(changed: WhatIfPrediction) -> float | None:
    """Averaged over sequences as that of the layer as it is: rung 0."""
    return _mean([changed.rungs[0].mean]) if changed.rungs else None
