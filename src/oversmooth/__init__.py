"""Inspect, measure, predict and control oversmoothing in any Transformer.

import oversmooth as osm

osm.inspect(target)     # weights only: spectra per layer and head, norm signs, tendency
osm.verify(target)      # does the declaration fit this very model?
osm.measure(target)     # metrics per layer and sub-block on real inputs, and who changes them
osm.analyze(target)     # all of it -> Analysis (.save_html() .to_json() .to_pandas())
osm.Monitor(model, batches), osm.SmoothingCallback(batches=...)   # the same during training
"""

from importlib import metadata

from oversmooth.analyze import analyze
from oversmooth.errors import OversmoothError
from oversmooth.inspection import inspect
from oversmooth.measure import measure
from oversmooth.models.verify import verify
from oversmooth.monitor import Monitor
from oversmooth.results import Analysis, Inspection, Measurement, Verification
from oversmooth.trainer_callback import smoothing_callback as SmoothingCallback  # noqa: N812 - it makes one

__version__ = metadata.version("oversmooth")
__all__ = [
    "Analysis",
    "Inspection",
    "Measurement",
    "Monitor",
    "OversmoothError",
    "SmoothingCallback",
    "Verification",
    "analyze",
    "inspect",
    "measure",
    "verify",
]
