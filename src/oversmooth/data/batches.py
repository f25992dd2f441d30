"""Batches as a model takes them: named, on its device, checked before it fails on them; and which tokens count."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from oversmooth.errors import RUN_ERRORS, OversmoothError, WrongBatch, first_line
from oversmooth.models.hooks.places import ObserverFailed
from oversmooth.models.inputs import AUDIO, IMAGE, TEXT, image_shape, is_composite, main_input, vocabulary_size
from oversmooth.models.live import call_model
from oversmooth.models.source import Stack
from oversmooth.models.stores.module import device_of

Batch = Tensor | Mapping[str, Any] | Sequence[Tensor]
"""What a caller gives: one tensor, several in the order of `forward`'s arguments, or tensors by the names of these."""
VAR_POSITIONAL, VAR_KEYWORD = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
DECODER_TOKENS = 8
"""Length of the decoder input that an audio model gets when none is given."""


class Inputs(dict[str, Any]):
    """A prepared batch, and which of its tokens count where more than the usual masks says so."""

    def __init__(self, inputs: Mapping[str, Any]):
        super().__init__(inputs)
        self.keep: dict[str, tuple[str, Bool[Tensor, "batch token"]]] = {}
        """By stack: the input that marks its padding, and the tokens that are none."""
        self.given: Bool[Tensor, "batch token"] | None = None
        """What the caller says, for all stacks that have as many tokens."""
        self.seen_shapes: list[tuple[int, ...]] = []

    def require_used(self) -> None:
        """Raises where what the caller said fits no stack."""
        if self.given is not None and tuple(self.given.shape) not in self.seen_shapes:
            found = f"{tuple(self.given.shape)}"
            shapes = " or ".join(map(str, dict.fromkeys(self.seen_shapes)))
            raise WrongBatch(f"a mask of shape {shapes}", found, "Give one entry per token that the blocks see.")


def prepare(
    model: nn.Module, config: Mapping[str, Any], batch: Batch | str, limit: int | None = None
) -> dict[str, Any]:
    """The batch as keyword arguments of the model (the name `""` for the one positional tensor), at most `limit` rows.

    Encoder-decoder models without a decoder input get the encoder's text again, or a short run of token ids for audio.
    Sizes are left to the model: many take images of several. Raises `WrongBatch` for texts, inputs of another kind, and ids
    that the model does not have. Plain numbers and switches (`interpolate_pos_encoding=True`) are passed on as they are.
    """
    device = device_of(model)
    named = _named(model, config, batch)
    dtype = next(model.parameters()).dtype
    inputs = {name: _as_input(name, value, device, dtype) for name, value in named.items()}
    rows = sequences_in(inputs)
    if limit is not None and limit < rows:
        inputs = {name: value[:limit] if _has_rows(value) else value for name, value in inputs.items()}
    _check_ids(model, config, inputs)
    if config.get("is_encoder_decoder") and "decoder_input_ids" not in inputs and _takes(model, "decoder_input_ids"):
        inputs |= _decoder_inputs(config, inputs)
    return inputs


def _takes(model: nn.Module, name: str) -> bool:
    """Whether a model has an argument of a name, or is a wrapper that passes everything on."""
    parameters = signature(model.forward).parameters
    return name in parameters or all(one.kind in (VAR_POSITIONAL, VAR_KEYWORD) for one in parameters.values())


def _as_input(name: str, value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        tensor = torch.as_tensor(value).to(device)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        found = f"{name or 'an input'} of type {type(value).__name__} ({first_line(error)})"
        raise WrongBatch("tensors, arrays or lists of equal length", found, "Pad sequences to one length.") from error
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def sequences_in(inputs: Mapping[str, Any]) -> int:
    """How many sequences a prepared batch holds."""
    return min((len(value) for value in inputs.values() if _has_rows(value)), default=0)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _named(model: nn.Module, config: Mapping[str, Any], batch: Batch | str) -> dict[str, Any]:
    if isinstance(batch, str):
        expected = "a tokenizer's output, a dict of tensors or one tensor"
        advice = "Write texts to a file, one a line, and give its name as the data; or call the tokenizer yourself."
        raise WrongBatch(expected, f"the text {batch[:40]!r}", advice)
    parameters = signature(model.forward).parameters
    takes = [name for name, parameter in parameters.items() if parameter.kind not in (VAR_POSITIONAL, VAR_KEYWORD)]
    if not takes and isinstance(batch, Mapping):
        takes = list(batch)  # a wrapper that passes everything on
    is_transformers = hasattr(model, "main_input_name")
    if isinstance(batch, tuple | list) and len(batch) and all(isinstance(part, Tensor) for part in batch):
        batch = _by_position(batch, takes, is_transformers=is_transformers)
    main = main_input(model) if is_transformers else ""
    if isinstance(batch, Mapping):
        if not is_transformers:
            tensors = [name for name in batch if name in (*takes, IMAGE, TEXT, "inputs", "image", "")]
            if not tensors:
                raise WrongBatch(f"one of {', '.join(takes)}", f"the names {', '.join(batch)}", "Rename the tensors.")
            first = takes[0] if takes[0] in tensors else tensors[0]
            return {"": batch[first], **{name: batch[name] for name in tensors if name in takes and name != first}}
        known = {name: value for name, value in batch.items() if name in takes and name != "labels"}
        if main not in known and not {"inputs_embeds", *(IMAGE, TEXT, *AUDIO)} & known.keys():
            raise WrongBatch(f"an input named {main!r}", f"the names {', '.join(batch)}", _kind_advice(main))
        if main not in known and "inputs_embeds" not in known and not is_composite(config):
            raise WrongBatch(f"an input named {main!r}", f"the names {', '.join(known)}", _kind_advice(main))
        return known
    if not is_transformers:
        return {"": batch}
    if not isinstance(batch, Tensor):
        raise WrongBatch("a dict of tensors or one tensor", f"a {type(batch).__name__}", _kind_advice(main))
    kind = _kind_of(batch)
    if kind != main and not (kind == "inputs_embeds" and main in (TEXT, *AUDIO)):
        raise WrongBatch(f"{main!r}", f"a tensor of shape {tuple(batch.shape)}, {batch.dtype}", _kind_advice(main))
    return {main if main in AUDIO else kind: batch}


def _by_position(batch: Sequence[Tensor], takes: Sequence[str], *, is_transformers: bool) -> Mapping[str, Tensor]:
    """Tensors by the names of the arguments that they would be."""
    if is_transformers or len(batch) > len(takes):
        expected = "a dict of tensors" if is_transformers else f"at most {len(takes)} tensors ({', '.join(takes)})"
        raise WrongBatch(expected, f"{len(batch)} tensors without names", "Give a dict with the names of the inputs.")
    return dict(zip(takes, batch, strict=False))


def _kind_of(tensor: Tensor) -> str:
    if not tensor.is_floating_point():
        return TEXT
    return IMAGE if tensor.ndim == 4 else "inputs_embeds"


def _kind_advice(main: str) -> str:
    kinds = {IMAGE: "images", TEXT: "text", **dict.fromkeys(AUDIO, "audio")}
    if main not in kinds:
        return f"Give batches yourself, as dicts that hold {main!r} and what else the model takes."
    wanted = kinds[main]
    return f"This model takes {wanted}: give it {wanted}, or leave the data out to use the built-in samples."


def _check_ids(model: nn.Module, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    size, ids = vocabulary_size(model, config), inputs.get(TEXT)
    if not size or ids is None or not ids.numel():
        return
    if int(ids.max()) >= size or int(ids.min()) < 0:
        found = f"ids from {int(ids.min())} to {int(ids.max())}"
        raise WrongBatch(f"token ids below {size}", found, "Use the tokenizer that belongs to this model.")


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


def run_checked(model: nn.Module, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    """Runs the model. What it cannot take becomes a `WrongBatch` with its own words; what an observer raises stays."""
    try:
        return call_model(model, inputs)
    except ObserverFailed as failed:  # not the model, nor the data: the error itself, with where it happened
        error = failed.__cause__
        assert error is not None, "an observer fails with an error"
        if not isinstance(error, OversmoothError):
            error.add_note(f"Raised while looking at depth {failed.place.depth}, {failed.place.name}.")
        raise error from error.__cause__
    except RUN_ERRORS as error:
        shapes = ", ".join(f"{name or 'input'} {_shape(value)}" for name, value in inputs.items())
        found = f"{shapes}; the model says: {first_line(error)}"
        raise WrongBatch("inputs that the model accepts", found, _size_advice(model, config, inputs)) from error


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else repr(value)


def _size_advice(model: nn.Module, config: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """What images the model was built for, where it got others."""
    images = inputs.get(IMAGE, inputs.get("") if config.get("model_type") == "timm_vit" else None)
    if images is None:
        return ""
    shape = image_shape(model, config)
    if tuple(images.shape[1:]) == shape:
        return ""
    advice = f"It was built for images of shape (batch, {shape[0]}, {shape[1]}, {shape[2]}): resize them"
    if "interpolate_pos_encoding" in signature(model.forward).parameters:
        advice += ", or add interpolate_pos_encoding=True to the batch"
    return f"{advice}."


def hash_inputs(digest: Any, inputs: Mapping[str, Any]) -> None:
    """Takes everything that enters the model into a hash, names and shapes included."""
    for name, value in sorted(inputs.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}\n".encode())


def keep_mask(
    model: nn.Module,
    inputs: Mapping[str, Any],
    stack: Stack,
    h: Float[Tensor, "batch token d_model"],
    drop_prefix: int,
) -> Bool[Tensor, "batch token"]:
    """Tokens of a stack that are measured: no padding, and without the first `drop_prefix` ones."""
    keep = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
    own = ""
    if isinstance(inputs, Inputs):
        inputs.seen_shapes.append(tuple(keep.shape))
        if inputs.given is not None:
            if inputs.given.shape == keep.shape:
                keep &= inputs.given.to(keep.device)
            keep[:, :drop_prefix] = False
            return keep
        own, marked = inputs.keep.get(stack.label, ("", keep))
        keep &= _fitting(marked, keep)
    if "src_key_padding_mask" in inputs and own != "src_key_padding_mask":
        keep &= ~inputs["src_key_padding_mask"].bool()
    name = "decoder_attention_mask" if stack.arch.stack == "decoder" else "attention_mask"
    mask = inputs.get(name) if name != own else None
    if mask is not None and stack.arch.kind == "text":
        keep &= _fitting(mask, keep).bool()
    downsample = getattr(model, "_get_feature_vector_attention_mask", None)
    if mask is not None and stack.arch.kind == "audio" and downsample is not None:
        keep &= downsample(h.shape[1], mask).bool()
    keep[:, :drop_prefix] = False
    return keep


def _fitting(mask: Tensor, keep: Bool[Tensor, "batch token"]) -> Tensor:
    if tuple(mask.shape) != tuple(keep.shape):
        raise WrongBatch(f"an attention mask of shape {tuple(keep.shape)}", f"{tuple(mask.shape)}", "Check the mask.")
    return mask.to(keep.device)
