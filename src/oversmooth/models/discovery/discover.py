"""`discover`: the value path of any model that runs, as a declaration to keep, edit and pass on."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from oversmooth.errors import NotDiscovered, RefusedArchitecture
from oversmooth.models.discovery.discovery import Discovery
from oversmooth.models.discovery.known import discovered
from oversmooth.models.discovery.on_disk import discovered_on_disk
from oversmooth.models.families import REFUSED
from oversmooth.models.stores.module import describe


def discover(model: nn.Module | str | Path, inputs: Tensor | Mapping[str, Tensor] | None = None) -> Discovery:
    """Finds the value path of every attention in a model by running it, and proves it by running it again.

    `inputs` are one tensor, or tensors by the names of `forward`; made up from the config or the first layer where they
    are not given. What was found stays with the module, so that `inspect`, `measure` and the others use it; `archs` can be
    kept, edited and given to them as `arch=`. Of a checkpoint, a small model with the widths of its config is run. Raises
    `RefusedArchitecture` with the module that stands in the way where the theory covers none of the attention, and
    `NotDiscovered` where nothing was proved.

    >>> import torch, oversmooth as osm
    >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> found = osm.discover(torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    >>> found.archs[0].paths.qkv, found.archs[0].residual
    ('self_attn.in_proj_*', 'post')
    """
    if isinstance(model, nn.Module):
        given = {"": inputs} if isinstance(inputs, Tensor) else inputs
        return discovered(model, describe(model), inputs=given)
    from oversmooth.models.opening import open_source

    config = open_source(model).config
    if (model_type := str(config.get("model_type"))) in REFUSED:
        raise RefusedArchitecture(f"{model} ({model_type})", REFUSED[model_type])
    found = discovered_on_disk(config)
    if found is None:
        words = "its config names no model that transformers or timm can build"
        raise NotDiscovered(str(model), words, "Build the model yourself and give it to osm.discover.")
    return found
