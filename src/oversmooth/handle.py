"""`open` and `ModelHandle`: a model opened once, with every function that takes a target as a method.

This is the only module that knows all of them; what a handle keeps is in `models/open.py`.
"""

from typing import Unpack

from oversmooth.analysis import analyze
from oversmooth.control.edit import edit
from oversmooth.measurement.gate import gate
from oversmooth.measurement.measure import measure
from oversmooth.models.open import LoadKeywords, OpenedModel, Target, open_model
from oversmooth.models.verify import discover, verify
from oversmooth.prediction.lengths import measure_lengths
from oversmooth.prediction.predict import predict
from oversmooth.spectra.inspect import inspect
from oversmooth.worth.ablate import ablate
from oversmooth.worth.edit_curve import edit_curve
from oversmooth.worth.prune import prune
from oversmooth.worth.task_loss import task_loss


class ModelHandle(OpenedModel):
    """A model that is opened once and asked often. Every function whose first parameter is a target is a method."""

    inspect, verify, discover = inspect, verify, discover
    measure, predict, analyze = measure, predict, analyze
    measure_lengths, gate = measure_lengths, gate
    task_loss, ablate, edit_curve = task_loss, ablate, edit_curve
    edit, prune = edit, prune


def open(target: Target, **load: Unpack[LoadKeywords]) -> ModelHandle:
    """Opens a model, to ask it often: `model.measure(data)` is `osm.measure(model, data)`, and loads it once.

    `load` are the keywords of `LoadOptions`: `device`, `dtype`, `offload`, `base`, `revision` and others. They belong here,
    and are refused by the functions of an opened model. The module is loaded by the first function that runs it and stays
    in memory until `close`, or the end of a `with` block.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> with osm.open(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)) as model:
    ...     rho, fits = model.inspect().layers[0].plain.rho_dc, model.verify().passed
    >>> fits
    True
    """
    if isinstance(target, ModelHandle):
        open_model(target, **load)  # refuses options
        return target
    return ModelHandle(target, **load)
