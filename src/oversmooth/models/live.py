"""Live models: loading one that can be run, and inputs of the right kind and size to run it on."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import MissingDependency, NotLive, OutOfRange
from oversmooth.models.source import Source

EXAMPLE_TOKENS = 12


def load_model(
    source: Source, verb: str, *, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False
) -> nn.Module:
    """The model of a source in eval mode, loaded by transformers or timm; never runs code from the checkpoint unless
    `trust_remote_code` says so."""
    if source.module is not None:
        return source.module
    if source.place is None:
        reason = {
            "gguf": "a GGUF file holds weights for llama.cpp, not for PyTorch",
            "url": "a model behind a URL is read tensor by tensor and never downloaded",
        }.get(source.kind, "there is no config.json beside the weights that says how to build it")
        raise NotLive(source.target, verb, reason)
    if source.place.startswith("timm:") or "architecture" in source.config:
        return _load_timm(source, verb, dtype)
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency("transformers", "hf", f"`{verb}`") from error
    register_own_models()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its report of unused heads is not about us
    transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModel.from_pretrained(
            source.place, dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=source.kind == "folder"
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise NotLive(source.target, verb, str(error).splitlines()[0]) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    return model.eval()


def register_own_models() -> None:
    """Makes transformers' Auto classes know the model types that this package itself defines."""
    from oversmooth.models.crammed_bert import register

    register()


def _load_timm(source: Source, verb: str, dtype: torch.dtype) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingDependency("timm", "timm", "running a timm model") from error
    place = str(source.place)
    name = place.removeprefix("timm:") if place.startswith("timm:") else f"local-dir:{place}"
    try:
        return timm.create_model(name, pretrained=True).to(dtype).eval()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:  # what timm raises of a broken folder
        raise NotLive(source.target, verb, f"timm says {str(error).splitlines()[0]!r}") from error


def move(model: nn.Module, device: str) -> None:
    """Puts the model on a device; a name that is none, or a device that is not there, is an `OutOfRange`."""
    try:
        model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise OutOfRange(
            "device", device, f"cpu, cuda, cuda:1, mps or another that torch has here ({words})"
        ) from error


@contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and the mode of every module back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def example_inputs(model: nn.Module, config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs that the model accepts, by the names of its `forward`; for checks, not for measurements.

    Modules that are not transformers' are called with one positional tensor, under the name `""`.
    """

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def ids(sizes: Mapping[str, Any]) -> Tensor:
        length = min(EXAMPLE_TOKENS, sizes.get("max_position_embeddings") or EXAMPLE_TOKENS)
        return torch.randint(3, int(sizes.get("vocab_size") or 100), (1, length), generator=generator)

    model_type = config["model_type"]
    if model_type == "timm_vit":
        patches: Any = model.patch_embed
        return {"": floats(1, patches.proj.in_channels, *patches.img_size)}
    if model_type in ("torch_encoder", "torch_attention"):
        attention = next(part for part in model.modules() if isinstance(part, nn.MultiheadAttention))
        shape = (1, EXAMPLE_TOKENS) if attention.batch_first else (EXAMPLE_TOKENS, 1)
        return {"": floats(*shape, attention.embed_dim)}
    text, vision = config.get("text_config") or config, config.get("vision_config") or config
    found: dict[str, Tensor] = {}
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_features":
        found["input_features"] = floats(1, config["num_mel_bins"], 2 * config["max_source_positions"])
    elif main == "input_values":
        stride = torch.tensor(config["conv_stride"]).prod().item()
        found["input_values"] = floats(1, int(stride) * (EXAMPLE_TOKENS + 8))
    elif main == "pixel_values" or "vision_config" in config:
        size = vision.get("image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        found["pixel_values"] = floats(1, vision.get("num_channels", 3), height, width)
    if main == "input_ids" or "text_config" in config:
        found["input_ids"] = ids(text)
    if config.get("is_encoder_decoder"):
        found["decoder_input_ids"] = ids({**config, "max_position_embeddings": config.get("max_target_positions")})
    return found


def run(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Calls the model on inputs by name; the name `""` stands for the one positional argument."""
    named = {name: value for name, value in inputs.items() if name}
    return model(inputs[""], **named) if "" in inputs else model(**named)
