"""Batches as a model takes them: named, on its device, checked before it fails on them; and which tokens count."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.errors import OversmoothError, WrongBatch, first_line
from oversmooth.models.hooks.places import ObserverFailed
from oversmooth.models.inputs import AUDIO, IMAGE, TEXT, is_composite
from oversmooth.models.live import run
from oversmooth.models.source import Stack

Batch = Tensor | Mapping[str, Any]
"""What a caller gives: one tensor, or tensors by the names of the model's `forward`."""
DECODER_TOKENS = 8
"""Length of the decoder input that an audio model gets when none is given."""


def prepare(model: nn.Module, config: Mapping[str, Any], batch: Batch, limit: int | None = None) -> dict[str, Tensor]:
    """The batch as keyword arguments of the model (the name `""` for the one positional tensor), at most `limit` rows.

    Encoder-decoder models without a decoder input get the encoder's text again, or a short run of token ids for audio.
    Raises `WrongBatch` where the model would fail or give nonsense: ids out of range, another image size, another kind.
    """
    device = next(model.parameters()).device
    named = _named(model, config, batch)
    inputs = {name: torch.as_tensor(value).to(device) for name, value in named.items()}
    rows = min(len(value) for value in inputs.values() if value.ndim)
    if limit is not None and limit < rows:
        inputs = {name: value[:limit] if value.ndim else value for name, value in inputs.items()}
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    _check_ids(model, inputs)
    _check_images(model, config, inputs)
    if config.get("is_encoder_decoder") and "decoder_input_ids" not in inputs:
        inputs |= _decoder_inputs(config, inputs)
    return inputs


def _named(model: nn.Module, config: Mapping[str, Any], batch: Batch) -> dict[str, Any]:
    takes = inspect.signature(model.forward).parameters
    is_transformers = hasattr(model, "main_input_name")
    main = getattr(model, "main_input_name", "")
    if isinstance(batch, Mapping):
        if not is_transformers:
            tensors = [name for name in batch if name in (*takes, IMAGE, TEXT, "inputs", "image", "")]
            if not tensors:
                raise WrongBatch(f"one of {', '.join(takes)}", f"the names {', '.join(batch)}", "Rename the tensors.")
            first, *rest = tensors
            return {"": batch[first], **{name: batch[name] for name in rest if name in takes}}
        known = {name: value for name, value in batch.items() if name in takes and name != "labels"}
        if main not in known and not {"inputs_embeds", *(IMAGE, TEXT, *AUDIO)} & known.keys():
            raise WrongBatch(f"an input named {main!r}", f"the names {', '.join(batch)}", _kind_advice(main))
        if main not in known and "inputs_embeds" not in known and not is_composite(config):
            raise WrongBatch(f"an input named {main!r}", f"the names {', '.join(known)}", _kind_advice(main))
        return known
    if not is_transformers:
        return {"": batch}
    kind = _kind_of(batch)
    if kind != main and not (kind == "inputs_embeds" and main in (TEXT, *AUDIO)):
        raise WrongBatch(f"{main!r}", f"a tensor of shape {tuple(batch.shape)}, {batch.dtype}", _kind_advice(main))
    return {main if main in AUDIO else kind: batch}


def _kind_of(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return TEXT
    return IMAGE if tensor.ndim == 4 else "inputs_embeds"


def _kind_advice(main: str) -> str:
    wanted = {IMAGE: "images", TEXT: "text"}.get(main, "audio")
    return f"This model takes {wanted}: give it {wanted}, or leave the data out to use the built-in samples."


def _check_ids(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    find = getattr(model, "get_input_embeddings", None)
    if TEXT not in inputs or find is None:
        return
    try:
        embedding = find()
    except NotImplementedError:  # composite models have one per part
        return
    size = getattr(embedding, "num_embeddings", None)
    ids = inputs[TEXT]
    if size and ids.numel() and (int(ids.max()) >= size or int(ids.min()) < 0):
        found = f"ids from {int(ids.min())} to {int(ids.max())}"
        raise WrongBatch(f"token ids below {size}", found, "Use the tokenizer that belongs to this model.")


def _check_images(model: nn.Module, config: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> None:
    images = inputs.get(IMAGE, inputs.get("") if config.get("model_type") == "timm_vit" else None)
    if images is None:
        return
    embed = getattr(model, "patch_embed", None)
    if embed is not None:
        size, channels = tuple(embed.img_size), embed.proj.in_channels
    else:
        vision = config.get("vision_config") or config
        declared = vision.get("image_size")
        if declared is None:
            return
        size = (declared, declared) if isinstance(declared, int) else tuple(declared)
        channels = vision.get("num_channels", 3)
    if images.ndim != 4 or images.shape[1] != channels or tuple(images.shape[2:]) != size:
        expected = f"images of shape (batch, {channels}, {size[0]}, {size[1]})"
        raise WrongBatch(expected, f"shape {tuple(images.shape)}", "Resize them, or give image files and let us do it.")


def _decoder_inputs(config: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if TEXT in inputs:
        found = {"decoder_input_ids": inputs[TEXT]}
        if "attention_mask" in inputs:
            found["decoder_attention_mask"] = inputs["attention_mask"]
        return found
    rows = len(next(iter(inputs.values())))
    ids = torch.arange(DECODER_TOKENS) % int(config.get("vocab_size") or DECODER_TOKENS)
    ids[0] = int(config.get("decoder_start_token_id") or 0)
    return {"decoder_input_ids": ids.expand(rows, -1).to(next(iter(inputs.values())).device)}


def run_checked(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Runs the model; what it cannot take becomes a `WrongBatch` with its own words."""
    try:
        return run(model, inputs)
    except ObserverFailed as failed:  # not the model, nor the data: the error itself, with where it happened
        error = failed.__cause__
        assert error is not None, "an observer fails with an error"
        if not isinstance(error, OversmoothError):
            error.add_note(f"Raised while looking at depth {failed.place.depth}, {failed.place.name}.")
        raise error from error.__cause__
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{name or 'input'} {tuple(value.shape)}" for name, value in inputs.items())
        words = first_line(error)
        raise WrongBatch("inputs that the model accepts", f"{shapes}; the model says: {words}", "") from error


def keep_mask(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    stack: Stack,
    h: Float[Tensor, "batch token d_model"],
    drop_prefix: int,
) -> Bool[Tensor, "batch token"]:
    """Tokens of a stack that are measured: no padding, and without the first `drop_prefix` ones."""
    keep = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
    if "src_key_padding_mask" in inputs:
        keep &= ~inputs["src_key_padding_mask"].bool()
    mask = inputs.get("decoder_attention_mask" if stack.arch.stack == "decoder" else "attention_mask")
    if mask is not None and stack.arch.kind == "text":
        if tuple(mask.shape) != tuple(keep.shape):
            raise WrongBatch(
                f"an attention mask of shape {tuple(keep.shape)}", f"{tuple(mask.shape)}", "Check the mask."
            )
        keep &= mask.bool()
    downsample = getattr(model, "_get_feature_vector_attention_mask", None)
    if mask is not None and stack.arch.kind == "audio" and downsample is not None:
        keep &= downsample(h.shape[1], mask).bool()
    keep[:, :drop_prefix] = False
    return keep
