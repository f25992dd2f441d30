"""Inspect, measure, predict and control oversmoothing in any Transformer.

import oversmooth as osm

osm.inspect(target)     # weights only: spectra per layer and head, norm signs, tendency
osm.discover(model)     # the value path of any module, found by running it
osm.verify(target)      # does the declaration fit this very model?
osm.measure(target)     # metrics per layer and sub-block on real inputs, and who changes them
osm.predict(target)     # exponents, regimes and the ladder of explanation beside the measurement
osm.analyze(target)     # all of it -> Analysis (.save_html() .to_json() .to_pandas())
osm.sharpen(model), osm.smooth(model), osm.constrain(model, low=..., high=...)   # in place, for training
osm.apply(model, "attnscale"), osm.unapply(model)   # published interventions by name
osm.bake(model)         # back to ordinary weights, same outputs
osm.edit(target, out)   # the same on a checkpoint, without loading the model
osm.Monitor(model, batches), osm.SmoothingCallback(batches=...)   # the same during training
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from oversmooth.environment.torchvision import cure_torchvision_on_import
from oversmooth.errors import OversmoothError

if TYPE_CHECKING:
    from oversmooth.analysis import analyze
    from oversmooth.control.constrain import bake, constrain, sharpen, smooth
    from oversmooth.control.edit import edit
    from oversmooth.control.interventions import apply, unapply
    from oversmooth.measurement.measurement import measure
    from oversmooth.models.discovery.discover import discover
    from oversmooth.models.verify import verify
    from oversmooth.prediction.prediction import predict
    from oversmooth.results import Analysis, Control, Inspection, Measurement, Prediction, Verification
    from oversmooth.spectra.inspection import inspect
    from oversmooth.training.callback import smoothing_callback as SmoothingCallback  # noqa: N812 - it makes one
    from oversmooth.training.monitor import Monitor

cure_torchvision_on_import()
__version__ = metadata.version("oversmooth")
__all__ = [
    "Analysis",
    "Control",
    "Inspection",
    "Measurement",
    "Monitor",
    "OversmoothError",
    "Prediction",
    "SmoothingCallback",
    "Verification",
    "analyze",
    "apply",
    "bake",
    "constrain",
    "discover",
    "edit",
    "inspect",
    "measure",
    "predict",
    "sharpen",
    "smooth",
    "unapply",
    "verify",
]

_RESULTS = ("Analysis", "Control", "Inspection", "Measurement", "Prediction", "Verification")
_HOMES = {
    **dict.fromkeys(("bake", "constrain", "sharpen", "smooth"), "oversmooth.control.constrain"),
    **dict.fromkeys(("apply", "unapply"), "oversmooth.control.interventions"),
    **dict.fromkeys(_RESULTS, "oversmooth.results"),
    "analyze": "oversmooth.analysis",
    "discover": "oversmooth.models.discovery.discover",
    "edit": "oversmooth.control.edit",
    "inspect": "oversmooth.spectra.inspection",
    "measure": "oversmooth.measurement.measurement",
    "Monitor": "oversmooth.training.monitor",
    "predict": "oversmooth.prediction.prediction",
    "SmoothingCallback": "oversmooth.training.callback",
    "verify": "oversmooth.models.verify",
}
"""Where each public name lives; it is imported when it is first used, so that a command can answer Ctrl-C at once."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return getattr(home, "smoothing_callback" if name == "SmoothingCallback" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
