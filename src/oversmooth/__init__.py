"""Inspect, measure, predict and control oversmoothing in any Transformer.

import oversmooth as osm

osm.inspect(target)     # weights only: spectra per layer and head, norm signs, excess over chance
osm.discover(model)     # the value path of any module, found by running it
osm.verify(target)      # does the declaration fit this very model?
osm.measure(target)     # metrics per layer and sub-block on real inputs, and who changes them
osm.predict(target)     # exponents, regimes and the ladder of explanation beside the measurement
osm.measure_lengths(target, lengths=(16, 64))   # the same texts cut to several lengths
osm.gate(target, rules={"max_cosine": 0.95})   # does it keep within limits? for CI
osm.open(target)        # loaded once for all of these: model = osm.open(target); model.measure(); model.predict()
osm.analyze(target)     # all of it -> Analysis (.answer .save_html() .to_json() .to_pandas())
osm.compare(a, b)       # two models on the same inputs: tokens of one text, and different texts
osm.example_model()     # the folder of a small trained model to try all this on
osm.load(path)          # a result that was saved with result.save(path)
osm.sharpen(model), osm.smooth(model), osm.constrain(model, low=..., high=...)   # in place, for training
osm.apply(model, "attnscale"), osm.unapply(model)   # published interventions by name
osm.bake(model)         # back to ordinary weights, same outputs
osm.task_loss(target)   # how well it does what it was trained for
osm.ablate(target)      # what removing each sub-block costs, and which cheap number would have told
osm.prune(target, out, budget=0.25)   # an ordinary checkpoint without the blocks that matter least
osm.edit(target, out)   # the same on a checkpoint, without loading the model
osm.edit_curve(target, interval=(-1, 0))   # loss and features over the strength of such an edit: is it worth it?
osm.survey(list, out)   # many models into one table of Parquet files; osm.read_survey(out) -> DataFrame
osm.Monitor(model, batches), osm.SmoothingCallback(batches=...)   # the same during training

Names are imported when they are first used (PEP 562): `import oversmooth` and `oversmooth --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oversmooth.environment.versions import cure_torchvision_on_import

if TYPE_CHECKING:
    from oversmooth.analysis import analyze, compare
    from oversmooth.control.apply import apply, unapply
    from oversmooth.control.constrain import bake, constrain, sharpen, smooth
    from oversmooth.control.edit import edit
    from oversmooth.control.eigenbasis import accumulate
    from oversmooth.errors import OversmoothError
    from oversmooth.handle import open
    from oversmooth.measurement.gate import gate
    from oversmooth.measurement.measure import measure
    from oversmooth.models.example_model import example_model
    from oversmooth.models.verify import discover, verify
    from oversmooth.prediction.lengths import measure_lengths
    from oversmooth.prediction.predict import predict
    from oversmooth.results import (
        Ablation,
        Analysis,
        Control,
        EditCurve,
        GateResult,
        Inspection,
        LengthCurves,
        Measurement,
        Prediction,
        Pruning,
        TaskLoss,
        Verification,
        load,
    )
    from oversmooth.spectra.inspect import inspect
    from oversmooth.surveys.survey import survey
    from oversmooth.surveys.table import read_survey
    from oversmooth.training.callback import SmoothingCallback
    from oversmooth.training.monitor import Monitor
    from oversmooth.worth.ablate import ablate
    from oversmooth.worth.edit_curve import edit_curve
    from oversmooth.worth.prune import prune
    from oversmooth.worth.task_loss import task_loss

    __version__: str

__all__ = [
    "Ablation",
    "Analysis",
    "Control",
    "EditCurve",
    "GateResult",
    "Inspection",
    "LengthCurves",
    "Measurement",
    "Monitor",
    "OversmoothError",
    "Prediction",
    "Pruning",
    "SmoothingCallback",
    "TaskLoss",
    "Verification",
    "ablate",
    "accumulate",
    "analyze",
    "apply",
    "bake",
    "compare",
    "constrain",
    "discover",
    "edit",
    "edit_curve",
    "example_model",
    "gate",
    "inspect",
    "load",
    "measure",
    "measure_lengths",
    "open",
    "predict",
    "prune",
    "read_survey",
    "sharpen",
    "smooth",
    "survey",
    "task_loss",
    "unapply",
    "verify",
]

_HOMES = {
    "OversmoothError": "oversmooth.errors",
    "SmoothingCallback": "oversmooth.training.callback",
    "Monitor": "oversmooth.training.monitor",
    "ablate": "oversmooth.worth.ablate",
    "edit_curve": "oversmooth.worth.edit_curve",
    "prune": "oversmooth.worth.prune",
    "task_loss": "oversmooth.worth.task_loss",
    **dict.fromkeys(("analyze", "compare"), "oversmooth.analysis"),
    "discover": "oversmooth.models.verify",
    "edit": "oversmooth.control.edit",
    "example_model": "oversmooth.models.example_model",
    "gate": "oversmooth.measurement.gate",
    "inspect": "oversmooth.spectra.inspect",
    "measure": "oversmooth.measurement.measure",
    "measure_lengths": "oversmooth.prediction.lengths",
    "open": "oversmooth.handle",
    "predict": "oversmooth.prediction.predict",
    "read_survey": "oversmooth.surveys.table",
    "survey": "oversmooth.surveys.survey",
    "verify": "oversmooth.models.verify",
    **dict.fromkeys(("apply", "unapply"), "oversmooth.control.apply"),
    "accumulate": "oversmooth.control.eigenbasis",
    **dict.fromkeys(("bake", "constrain", "sharpen", "smooth"), "oversmooth.control.constrain"),
    **dict.fromkeys(
        (
            *("Ablation", "Analysis", "Control", "GateResult", "Inspection", "Measurement", "Prediction", "Pruning"),
            *("EditCurve", "LengthCurves", "TaskLoss", "Verification", "load"),
        ),
        "oversmooth.results",
    ),
}
"""The module of every public name; the test of this table compares it with the imports for type checkers above."""

cure_torchvision_on_import()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("oversmooth")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(_HOMES[name]), name)  # asked for once, an ordinary attribute from then on
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
