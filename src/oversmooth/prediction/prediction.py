"""`predict`: run a live model on batches; what the theory says about every layer, beside what is measured there."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

import torch

from oversmooth.data.batches import Batch
from oversmooth.data.reading import Reading, ReadingOptions
from oversmooth.errors import BadValue, UnknownName
from oversmooth.measurement.passes import LiveModel, open_live, pass_through
from oversmooth.models.hooks.attention_maps import attention_watched
from oversmooth.models.opening import open_source
from oversmooth.models.provenance import provenance_of
from oversmooth.models.source import Declaration, Target
from oversmooth.prediction.collecting import PredictionObserver
from oversmooth.prediction.summary import mean_and_error
from oversmooth.prediction.theory.depth import DepthGrowth
from oversmooth.prediction.theory.what_if import what_if
from oversmooth.prediction.verdicts import agreements, stack_verdict
from oversmooth.results import Missing, Progress, no_progress
from oversmooth.results.layer_prediction import LayerPrediction, Statement
from oversmooth.results.prediction import Agreement, DepthPrediction, Prediction

DTYPES = {"float32": torch.float32, "float64": torch.float64}
SOLVED = 4
"""Sequences whose eigenvalue problems are solved unless asked otherwise: each costs about as much as fifty passes."""


def predict(
    target: Target,
    data: Iterable[Batch] | str | None = None,
    *,
    what_ifs: Sequence[str] = (),
    solve_what_ifs: bool = True,
    simulate: int = 0,
    solve: int = SOLVED,
    heads: bool = True,
    precision: str = "float32",
    base: str | None = None,
    dtype: str | None = None,
    offload: bool | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    arch: Declaration | None = None,
    progress: Progress = no_progress,
    **reading: Unpack[ReadingOptions],
) -> Prediction:
    """Exponents, regimes and the ladder of explanation for every layer, beside what is measured there.

    Takes the same targets and data as `measure`; prefix tokens always count, because attention sees them. The
    eigenvalue problems are solved for the first `solve` sequences, the rest of the ladder for all. `what_ifs` are names
    such as `no_skip`, `no_biases`, `scale:0.5`, `interval:-1,0`, `attnscale:0.3`; without `solve_what_ifs`, those that
    are eigenvalue problems of their own have rungs 1 to 5 only. `simulate` iterates every layer so many times on the
    first sequence. `precision` is that of the theory, `dtype` what the model runs in. Ctrl-C returns what was found so
    far, marked partial.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    >>> found = osm.predict(model, [torch.randn(2, 10, 32)])
    >>> [rung.name for rung in found.layers[0].rungs]
    ['asymptotic', 'typical', 'features', 'coupling', 'biases', 'token scale']
    """
    if precision not in DTYPES:
        raise UnknownName("precision", precision, tuple(DTYPES))
    for name, value, least in (("solve", solve, 1), ("simulate", simulate, 0)):
        if value < least:
            raise BadValue(name, value, f"at least {least}")
    changes = [what_if(text) for text in what_ifs]
    how = Reading(**reading)
    live = open_live(
        open_source(target, base=base, dtype=dtype, offload=offload),
        data,
        "predict",
        reading=how,
        device=device,
        trust_remote_code=trust_remote_code,
        arch=arch,
    )
    observer = PredictionObserver(
        model=live.model,
        store=live.store,
        stacks={stack.label: stack for stack in live.stacks},
        changes=changes,
        solve=solve,
        simulate=simulate,
        with_heads=heads,
        solve_changes=solve_what_ifs,
        dtype=DTYPES[precision],
    )
    with attention_watched(live.stacks, live.store) as observer.maps_of:
        is_partial = pass_through(live, observer, how.max_samples, progress)
    return _result(observer, live, seed=how.seed, is_partial=is_partial)


def _result(observer: PredictionObserver, live: LiveModel, *, seed: int, is_partial: bool) -> Prediction:
    dtype = str(observer.dtype).removeprefix("torch.")
    precision = f"model {live.runs_in()}, theory {dtype}, eigenvalues float64"
    layers = observer.layers()
    depths = tuple(_depth(label, found) for label, found in observer.growth.items())
    by_stack = {stack.label: [layer for layer in layers if layer.stack == stack.label] for stack in live.stacks}
    found = {label: agreements(label, members) for label, members in by_stack.items() if members}
    return Prediction(
        provenance=provenance_of(live.source, live.stacks, live.hashed(), compute_dtype=precision, seed=seed),
        data=observer.seen.facts(live.data),
        is_partial=is_partial,
        solved=min(observer.solve, observer.seen.sequences),
        layers=layers,
        agreements=tuple(item for items in found.values() for item in items),
        depths=depths,
        verdict=_verdict(by_stack, found, depths),
        problems=tuple(observer.problems.values()),
    )


def _verdict(
    by_stack: Mapping[str, Sequence[LayerPrediction]],
    found: Mapping[str, Sequence[Agreement]],
    depths: Sequence[DepthPrediction],
) -> tuple[Statement, ...]:
    by_label = {depth.stack: depth for depth in depths}
    return tuple(
        statement
        for label, items in found.items()
        for statement in stack_verdict(label, by_stack[label], items, by_label.get(label))
    )


def _depth(label: str, found: Sequence[DepthGrowth | None]) -> DepthPrediction:
    known = [growth for growth in found if growth is not None]
    exponent, error, count = mean_and_error(growth.exponent for growth in known)
    log_dc, _, _ = mean_and_error(growth.log_dc for growth in known)
    log_ac, _, _ = mean_and_error(growth.log_ac for growth in known)
    leading, _, _ = mean_and_error((growth.leading_ac - growth.leading_dc) / growth.layers for growth in known)
    names = ("exponent", "log_growth_dc", "log_growth_ac", "leading_exponent") if not known else ()
    missing = [Missing(field=name, reason="nothing is left of a part of the features") for name in names]
    if error is None:
        missing.append(Missing(field="standard_error", reason="fewer than two sequences were solved"))
    return DepthPrediction(
        stack=label,
        layers=known[0].layers if known else 0,
        sequences=count,
        exponent=exponent,
        standard_error=error,
        log_growth_dc=log_dc,
        log_growth_ac=log_ac,
        leading_exponent=leading,
        missing=tuple(missing),
    )
