"""The values that flow through the library: frozen, keyword-only, made of plain numbers, torch-free.

Conventions, everywhere: a complex number is a pair `(real, imaginary)`; a number that does not exist is `None`, and a
`Missing` entry beside it says why; nothing is ever NaN. Every top-level result carries a `Provenance`.
"""

from oversmooth.results.analysis import Analysis
from oversmooth.results.base import (
    SCHEMA_VERSION,
    Complex,
    FileFacts,
    Missing,
    Progress,
    Provenance,
    Row,
    SavedResult,
    fields_of,
    no_progress,
)
from oversmooth.results.control import Applied, Control, HeadMove, LayerControl
from oversmooth.results.finetuning import EndOfDepth, FinetuneResult, TaskResult
from oversmooth.results.gate import Breach, GateResult
from oversmooth.results.inspection import HeadSpectrum, Inspection, LayerInspection, NormFacts, Spectrum, StackFacts
from oversmooth.results.layer_prediction import (
    Asymptotic,
    HeadPrediction,
    LayerPrediction,
    Rung,
    SimulatedStep,
    Statement,
    WhatIfPrediction,
)
from oversmooth.results.lengths import LengthChange, LengthCurves, LengthPrediction, LengthValue
from oversmooth.results.measurement import (
    Attribution,
    DataFacts,
    DominatingToken,
    HeadAttention,
    KindChange,
    Measurement,
    Part,
    PlaceValue,
    SpanDistances,
    TextFacts,
)
from oversmooth.results.prediction import Agreement, DepthPrediction, Prediction
from oversmooth.results.verification import LayerCheck, Verification
from oversmooth.results.worth import Ablation, EditCurve, EditPoint, Loss, Predictor, Pruning, Removal, TaskLoss

__all__ = [
    "SCHEMA_VERSION",
    "Ablation",
    "Agreement",
    "Analysis",
    "Applied",
    "Asymptotic",
    "Attribution",
    "Breach",
    "Complex",
    "Control",
    "DataFacts",
    "DepthPrediction",
    "DominatingToken",
    "EditCurve",
    "EditPoint",
    "EndOfDepth",
    "FileFacts",
    "FinetuneResult",
    "GateResult",
    "HeadAttention",
    "HeadMove",
    "HeadPrediction",
    "HeadSpectrum",
    "Inspection",
    "KindChange",
    "LayerCheck",
    "LayerControl",
    "LayerInspection",
    "LayerPrediction",
    "LengthChange",
    "LengthCurves",
    "LengthPrediction",
    "LengthValue",
    "Loss",
    "Measurement",
    "Missing",
    "NormFacts",
    "Part",
    "PlaceValue",
    "Prediction",
    "Predictor",
    "Progress",
    "Provenance",
    "Pruning",
    "Removal",
    "Row",
    "Rung",
    "SavedResult",
    "SimulatedStep",
    "SpanDistances",
    "Spectrum",
    "StackFacts",
    "Statement",
    "TaskLoss",
    "TaskResult",
    "TextFacts",
    "Verification",
    "WhatIfPrediction",
    "fields_of",
    "no_progress",
]
