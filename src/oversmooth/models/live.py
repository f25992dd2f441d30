"""Live models: loading one that can be run, with no weight left random, and running it."""

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oversmooth.errors import DeviceUnavailable, MissingDependency, NotLive, OversmoothError, first_line, whole_message
from oversmooth.models.completeness import load_completely, require_complete
from oversmooth.models.from_store import config_of, is_made_by_us, load_from_store, unnamed_type
from oversmooth.models.offload import load_offloaded, must_offload
from oversmooth.models.source import Source


def load_model(source: Source, verb: str, *, trust_remote_code: bool = False) -> nn.Module:
    """The model of a source in eval mode, loaded by transformers or timm; never runs code from the checkpoint unless
    `trust_remote_code` says so. One that does not fit into memory keeps its weights in its files."""
    if source.module is not None:
        return source.module
    if source.place is None:
        reason = "there is no config.json beside the weights that says how to build it"
        if source.kind == "url":
            reason = "a model behind a URL is read tensor by tensor and never downloaded"
        raise NotLive(source.target, verb, reason)
    if source.gguf_file and len(source.store.files()) > 1:
        reason = "transformers runs whole GGUF files; join the parts: llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        raise NotLive(source.target, verb, reason)
    if source.place.startswith("timm:") or "architecture" in source.config:
        return _load_timm(source, verb)
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency("transformers", "hf", f"`{verb}`") from error
    register_own_models()
    try:
        with silenced(transformers):
            if source.offload or (source.offload is None and must_offload(source, source.dtype)):
                return load_offloaded(source, source.dtype, trust_remote_code=trust_remote_code)
            model, loaded = _built_by_transformers(source, transformers, trust_remote_code)
    except OversmoothError:
        raise
    except Exception as error:  # transformers, huggingface_hub and torch raise errors without a common base
        raise NotLive(source.target, verb, whole_message(error)) from error
    mismatched = [(name, tuple(file), tuple(model)) for name, file, model in loaded["mismatched_keys"]]
    require_complete(source.target, loaded["missing_keys"], mismatched, loaded["unexpected_keys"])
    return model.eval()


def _built_by_transformers(
    source: Source, transformers: Any, trust_remote_code: bool
) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model, and the report of what was missing or did not fit, which is read where it matters."""
    if is_made_by_us(source):
        return load_from_store(source, source.dtype or torch.float32, trust_remote_code=trust_remote_code)
    stored = torch.float32 if source.gguf_file else "auto"
    config = {"config": config_of(source)} if unnamed_type(source) else {}
    found: tuple[nn.Module, Mapping[str, Any]] = transformers.AutoModel.from_pretrained(
        source.place,
        dtype=source.dtype or stored,
        trust_remote_code=trust_remote_code,
        **source.origin(),
        **config,
        ignore_mismatched_sizes=True,  # they are refused by our own check, by name
        output_loading_info=True,
    )
    return found


@contextmanager
def silenced(transformers: Any) -> Iterator[None]:
    """No log lines and no bars of transformers, whose loading of GGUF draws one whatever it is told."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def register_own_models() -> None:
    """Makes transformers' Auto classes know the model types that this package itself defines."""
    from oversmooth.models.crammed_bert import register

    register()


def _load_timm(source: Source, verb: str) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingDependency("timm", "timm", "running a timm model") from error
    try:
        return _built_by_timm(source, timm).to(source.dtype).eval()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:  # what timm raises of a broken folder
        raise NotLive(source.target, verb, f"timm says {whole_message(error)!r}") from error


def _built_by_timm(source: Source, timm: Any) -> nn.Module:
    place = str(source.place)
    if place.startswith("timm:"):
        return timm.create_model(place.removeprefix("timm:"), pretrained=True)  # loaded strictly
    # A folder is loaded by ourselves: timm gives up its check when the classifier has another size.
    model: nn.Module = timm.create_model(f"local-dir:{place}", pretrained=False)
    state = timm.models.load_state_dict(str(Path(place) / source.store.files()[0].name))
    rename = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    load_completely(model, rename(state, model) if rename else state, source.target)
    return model


def move(model: nn.Module, device: str) -> None:
    """Puts the model on a device; a name that is none, or a device that is not there, is `DeviceUnavailable`."""
    try:
        model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise DeviceUnavailable(device, first_line(error)) from error


@contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and the mode of every module back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _uncompiled(model):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Compiled parts run as they were written: compiled code does not see hooks that were added later."""
    parts = [part for part in model.modules() if hasattr(part, "_orig_mod") or part._compiled_call_impl is not None]
    return torch.compiler.set_stance("force_eager") if parts else nullcontext()


def call_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Calls the model on inputs by name; the name `""` stands for the one positional argument."""
    named = {name: value for name, value in inputs.items() if name}
    return model(inputs[""], **named) if "" in inputs else model(**named)
