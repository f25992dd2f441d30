"""Checkpoints of model types that nobody declared: watched on a skeleton built from the config, then read from disk.

The skeleton has the widths of the checkpoint and two blocks with random weights. Its declaration is in the names of the
live model; the names on disk are found by saving the skeleton as transformers saves models and comparing contents, so that
renames, fused and split weights need no knowledge of ours.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from oversmooth.errors import NotDiscovered, first_line
from oversmooth.models.canonical import AttentionWeights, assemble
from oversmooth.models.declaration import NORM_ROLES, Arch, Paths
from oversmooth.models.discovery.discovery import Discovery, own_stack
from oversmooth.models.discovery.known import discovered
from oversmooth.models.discovery.layout import Irregular, fused_form
from oversmooth.models.discovery.skeleton import layout_skeleton, randomise
from oversmooth.models.discovery.spelling import NUMBER, relative, spelled, template_of
from oversmooth.models.resolve import BlockNames, TensorNames
from oversmooth.models.sizes import sizes_of
from oversmooth.models.stores.module import describe, tensors_of

BUILD_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError, OSError, IndexError),
    *(AssertionError, ArithmeticError),
)
"""What model classes raise of a config that they cannot use."""


def discovered_on_disk(config: Mapping[str, Any]) -> Discovery | None:
    """The declaration of a checkpoint in its own names; `None` where no library can build a model of its config."""
    try:
        settled = json.dumps(config, sort_keys=True)
    except (TypeError, ValueError):
        return None
    return _discovered(settled)


@lru_cache(maxsize=8)
def _discovered(settled: str) -> Discovery | None:
    config = json.loads(settled)
    model = _skeleton(config)
    if model is None:
        return None
    found = discovered(model, describe(model))
    tensors = {name: getattr(owner, attribute).detach() for name, (owner, attribute) in tensors_of(model).items()}
    saved = tensors if "architecture" in config else _saved(model)
    return replace(found, archs=tuple(_renamed(arch, tensors, saved) for arch in found.archs))


def _skeleton(config: Mapping[str, Any]) -> nn.Module | None:
    name = str(config.get("model_type") or config.get("architecture") or "the model")
    try:
        if "architecture" in config:
            return _timm_skeleton(config)
        from transformers import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            return None
        with _quiet_transformers():
            return layout_skeleton(config)
    except ImportError:
        return None
    except BUILD_ERRORS as error:
        words = f"no small model can be built from its config: {first_line(error)}"
        raise NotDiscovered(name, words, "Load the model and give it to osm.discover.") from error


def _timm_skeleton(config: Mapping[str, Any]) -> nn.Module | None:
    import timm

    name, arguments = str(config["architecture"]).split(".")[0], dict(config.get("model_args") or {})
    if not timm.is_model(name):
        return None
    try:
        model = timm.create_model(name, **{**arguments, "depth": 2})
    except TypeError:  # not every family has one depth
        model = timm.create_model(name, **arguments)
    randomise(model)
    return model.eval()


def _saved(model: Any) -> dict[str, Tensor]:
    """The tensors of a model by the names that it has on disk."""
    with tempfile.TemporaryDirectory() as folder, _quiet_transformers():
        model.save_pretrained(folder, max_shard_size="500GB")
        return {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its bars and remarks would be about a model that nobody asked for."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def _renamed(arch: Arch, live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> Arch:
    """The declaration in the names on disk."""
    by_content = {_content(tensor): name for name, tensor in reversed(list(saved.items()))}

    def on_disk(name: str | None) -> str:
        return "" if not name else by_content.get(_content(live[name]), "")

    blocks = own_stack(arch, live.keys()).blocks
    found = [_Block(block, on_disk) for block in blocks]
    if not all(block.output.weight for block in found):
        raise NotDiscovered(arch.name, f"{blocks[0].output.weight} is stored in another form", "Declare it by hand.")
    if not all(block.value.weight for block in found):
        weights = [assemble(arch, sizes_of({}, arch), block, live.__getitem__, 1.0) for block in blocks]
        arch, found = _regrouped(arch, found, weights, saved)
    template = _template(arch, [(block.index, block.output.weight) for block in found])
    paths = _paths(template, found, arch.paths)
    final = own_stack(arch, live.keys()).final_norm
    if final is not None and on_disk(final.weight):
        paths = replace(paths, final_norm=spelled("", 0, on_disk(final.weight), on_disk(final.bias)))
    return replace(arch, paths=paths, passes=(), n_heads=_one(arch))


def _one(arch: Arch) -> int | tuple[int, ...]:
    heads = arch.n_heads
    assert heads != "config", "a discovered declaration knows its heads"
    if isinstance(heads, tuple):
        raise NotDiscovered(arch.name, "its blocks have different numbers of heads", "Load the model and inspect that.")
    return heads


class _Block:
    """The names on disk of one block."""

    def __init__(self, block: BlockNames, on_disk: Any):
        def pair(names: TensorNames) -> TensorNames:
            return TensorNames(on_disk(names.weight), on_disk(names.bias) or None, names.module)

        self.index, self.is_fused = block.index, block.is_fused
        self.value, self.output = pair(block.value), pair(block.output)
        self.latent = None if block.latent is None else pair(block.latent)
        self.norms = {role: pair(names) for role, names in block.norms.items() if names.weight}
        self.gain = on_disk(block.gain)


def _regrouped(
    arch: Arch, found: Sequence[_Block], weights: Sequence[AttentionWeights], saved: Mapping[str, Tensor]
) -> tuple[Arch, list[_Block]]:
    """Values that are stored together with queries and keys on disk and apart in memory, or the other way round."""
    form = None
    for block, canonical in zip(found, weights, strict=True):
        values = canonical.w_v.flatten(0, 1)
        holder = next((name for name, tensor in saved.items() if _holds(tensor, values[0])), None)
        if holder is None:
            raise NotDiscovered(arch.name, f"the values of block {block.index} are in no tensor on disk", "Declare it.")
        rows = _rows(saved[holder], values)
        try:
            form = fused_form(rows.reshape(canonical.n_kv, canonical.d_head), canonical.n_heads, len(saved[holder]))
        except Irregular as error:
            raise NotDiscovered(arch.name, f"on disk {error}", "Declare it by hand.") from error
        block.value, block.is_fused = TensorNames(holder, None), form is not None
    if form is None:
        return replace(arch, n_kv="shape", d_head="config"), list(found)
    return replace(arch, fused=form, n_kv=weights[0].n_kv, d_head=weights[0].d_head), list(found)


def _holds(tensor: Tensor, row: Tensor) -> bool:
    return tensor.ndim == 2 and tensor.shape[1] == len(row) and bool((tensor == row).all(1).any())


def _rows(tensor: Tensor, values: Tensor) -> Tensor:
    where = {_content(row): index for index, row in enumerate(tensor)}
    return torch.tensor([where.get(_content(row), -1) for row in values])


def _template(arch: Arch, outputs: Sequence[tuple[int, str]]) -> str:
    """The path of blocks on disk: the number that is the block's in every name."""
    index, name = outputs[0]
    for place, number in enumerate(NUMBER.findall(name)):
        if all(NUMBER.findall(other)[place] == str(i) for i, other in outputs) and number == str(index):
            return template_of(name, place)
    raise NotDiscovered(arch.name, f"blocks on disk have no numbers of their own ({name})", "Declare it by hand.")


def _paths(template: str, found: Sequence[_Block], live: Paths) -> Paths:
    def common(pairs: Sequence[tuple[_Block, TensorNames]]) -> str:
        paths = [
            spelled(template.replace("{i}", str(block.index)), block.index, names.weight, names.bias or "")
            for block, names in pairs
            if names.weight
        ]
        return "|".join(dict.fromkeys(paths))

    value = common([(block, block.value) for block in found])
    latents = [(block, block.latent) for block in found if block.latent is not None]
    gains = [block for block in found if block.gain]
    first = template.replace("{i}", str(gains[0].index)) if gains else ""
    return Paths(
        block=template,
        o=common([(block, block.output) for block in found]),
        latent=common(latents),
        v="" if found[0].is_fused else value,
        qkv=value if found[0].is_fused else "",
        attn_gain=relative(first, gains[0].index, gains[0].gain) if gains else "",
        **{
            role: common([(block, block.norms[role]) for block in found if role in block.norms])
            or (getattr(live, role) if role in NORM_ROLES and not any(role in block.norms for block in found) else "")
            for role in NORM_ROLES
        },
    )


def _content(tensor: Tensor) -> str:
    plain = tensor.detach().contiguous().reshape(-1)
    return (
        f"{tuple(tensor.shape)} {hashlib.sha1(plain.view(torch.uint8).numpy().data, usedforsecurity=False).hexdigest()}"
    )
