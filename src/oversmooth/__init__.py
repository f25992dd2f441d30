"""Inspect, measure, predict and control oversmoothing in any Transformer.

import oversmooth as osm

osm.inspect(target)     # weights only: spectra per layer and head, norm signs, tendency
osm.verify(target)      # does the declaration fit this very model?
osm.measure(target)     # metrics per layer and sub-block on real inputs, and who changes them
"""

from importlib import metadata

from oversmooth.errors import OversmoothError
from oversmooth.inspection import inspect
from oversmooth.measure import measure
from oversmooth.models.verify import verify
from oversmooth.results import Inspection, Measurement, Verification

__version__ = metadata.version("oversmooth")
__all__ = ["Inspection", "Measurement", "OversmoothError", "Verification", "inspect", "measure", "verify"]
