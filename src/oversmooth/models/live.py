"""Loads models that run: by transformers, by timm or from our stores, whole or block by block, with task heads.

transformers and timm fill what a file does not hold with random numbers and say so in a log line. A measurement of random
weights looks like any other, so here it is an error. Only parts behind the measured features may be missing, because base
models are often loaded from checkpoints with another pooler or head.
"""

import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oversmooth.errors import (
    DeviceUnavailable,
    IncompleteWeights,
    MissingDependency,
    NotLive,
    NotSupported,
    OversmoothError,
    UnknownName,
    first_line,
    whole_message,
)
from oversmooth.models import plain_load
from oversmooth.models.families import CRAMMED_BERT
from oversmooth.models.source import Source
from oversmooth.models.stores.adapters import AdaptedStore
from oversmooth.models.stores.module import KEPT
from oversmooth.models.stores.quantised import QuantisedStore

# --- weights that come from one of our stores: dequantised, or changed by an adapter ---


def _load_from_store(source: Source, dtype: torch.dtype) -> tuple[nn.Module, Mapping[str, Any]]:
    """The model and transformers' report of what was missing or did not fit.

    transformers builds the model and renames its tensors as always; only the numbers come from elsewhere. So a GPTQ or AWQ
    checkpoint runs without a GPU and without the library that packed it.
    """
    import transformers

    config = config_of(source)
    with torch.device("meta"):
        kind = type(transformers.AutoModel.from_config(config, trust_remote_code=source.trust_remote_code))
    tensors = {name: source.store.read(name) for name in source.store.names}
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict={n: tensor.to(dtype) if tensor.is_floating_point() else tensor for n, tensor in tensors.items()},
        dtype=dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    model.config.name_or_path = source.place  # where its tokenizer is
    return model, report


def config_of(source: Source) -> Any:
    """The config that transformers builds the model from, without what it says of packed weights: ours are plain numbers."""
    import transformers

    model_type = unnamed_type(source)
    if model_type:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(dict(source.config))
    else:
        trusted = source.trust_remote_code
        config = transformers.AutoConfig.from_pretrained(source.place, trust_remote_code=trusted, **source.origin())
    for part in (config, *(part for part in vars(config).values() if hasattr(part, "model_type"))):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def unnamed_type(source: Source) -> str | None:
    """The model type of a checkpoint whose config does not name one: as its user, its class or its tensors say.

    `None` if the config does, or if nothing settles it. Sizes are not guessed: a config that does not state the
    heads is not run.
    """
    import transformers

    if source.gguf_file or source.kind == "gguf":
        return None
    written, _ = transformers.PretrainedConfig.get_config_dict(source.place, **source.origin())
    if "model_type" in written:
        return None
    classes = [getattr(transformers, name, None) for name in written.get("architectures") or ()]
    named = [model_class.config_class.model_type for model_class in classes if model_class is not None]
    stacks = source.stacks()
    types = [source.config.get("model_type"), *named, *(kind for stack in stacks for kind in stack.arch.model_types)]
    found = next((kind for kind in types if kind in transformers.CONFIG_MAPPING), None)
    return found if all(stack.sizes.n_heads for stack in stacks) else None


# --- whether every weight that a run depends on came from the checkpoint ---

Mismatch = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name, shape in the file, shape in the model."""
BEHIND_THE_FEATURES = frozenset(
    {
        *("pooler", "head", "head_dist", "fc_norm", "attn_pool", "lm_head", "classifier"),  # read the last features
        *("logit_scale", "logit_bias", "visual_projection", "text_projection"),  # compare two towers
        *("mask_token", "masked_spec_embed"),  # stand for masked inputs, in training only
    }
)
"""Parts of a name that mark weights which no measured feature depends on."""


def require_complete(
    target: str, missing: Iterable[str], mismatched: Iterable[Mismatch], unexpected: Iterable[str]
) -> None:
    """Raises `IncompleteWeights` if a weight that features depend on is missing or has another shape."""
    absent = [name for name in missing if not BEHIND_THE_FEATURES & set(name.split("."))]
    misfits = [item for item in mismatched if not BEHIND_THE_FEATURES & set(item[0].split("."))]
    if absent or misfits:
        raise IncompleteWeights(target, sorted(absent), sorted(misfits), sorted(unexpected))


def load_completely(model: nn.Module, state: Mapping[str, Tensor], target: str) -> None:
    """`load_state_dict` that leaves nothing random but what lies behind the features."""
    wanted = model.state_dict()
    fitting = {name: state[name] for name in wanted if name in state and state[name].shape == wanted[name].shape}
    mismatched = [
        (name, tuple(state[name].shape), tuple(wanted[name].shape))
        for name in wanted
        if name in state and name not in fitting
    ]
    missing = [name for name in wanted if name not in state]
    require_complete(target, missing, mismatched, [name for name in state if name not in wanted])
    with torch.no_grad():
        model.load_state_dict(fitting, strict=False)


# --- models larger than memory: a block reads its weights before it runs, through the store, and forgets them afterwards ---

SEQUENCES_AT_ONCE = 64
"""Sequences per pass of an offloaded model, where fewer were asked for: every pass reads the whole file."""
WEIGHT_FILE = re.compile(r"\.safetensors$|^pytorch_model.*\.bin$")
SHARE_OF_MEMORY = 0.8
"""Of the free memory that weights may fill; the rest is for activations and for what is computed from them."""


def is_offloaded(model: nn.Module) -> bool:
    """Whether the weights of a model are read block by block."""
    return any(KEPT in module.__dict__ for module in model.modules())


def must_offload(source: Source, dtype: torch.dtype | None) -> bool:
    """Whether the weights would not fit into the memory that is free now; `dtype` as for `load_offloaded`."""
    folder, free = Path(source.place or ""), free_memory()
    if free is None or source.gguf_file or not source.place or not folder.is_dir():
        return False
    stored = sum(file.stat().st_size for file in folder.iterdir() if WEIGHT_FILE.search(file.name))
    wider = dtype.itemsize / 2 if dtype is not None else 1  # most checkpoints of that size have two bytes per number
    return stored * max(wider, 1) > SHARE_OF_MEMORY * free


def free_memory() -> int | None:
    """Bytes that programs can have without swapping; `None` where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def load_offloaded(source: Source, dtype: torch.dtype | None) -> nn.Module:
    """The model without weights in memory, in eval mode; missing weights raise before anything runs."""
    import accelerate
    import transformers

    if source.gguf_file:
        raise NotSupported("--offload", "for GGUF files", "transformers dequantises them as a whole", "Leave it out.")
    config, trusted = config_of(source), source.trust_remote_code
    kind = dtype or getattr(config, "dtype", None)
    if not isinstance(kind, torch.dtype):
        name = next((name for name in source.store.names if name.endswith("weight")), None)
        kind = source.store.read(name).dtype if name else torch.float32
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModel.from_config(config, dtype=kind, trust_remote_code=trusted).eval()
    model.config.name_or_path = source.place
    names = _names_in_files(model, source)
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = names[f"{path}.{attribute}" if path else attribute]
            module.__dict__.setdefault(KEPT, {})[attribute] = _reader(source, name, parameter)
    for unit, members in _units(model):
        unit.register_forward_pre_hook(partial(_load, members))
        unit.register_forward_hook(partial(_forget, members), always_call=True)
    return model


def _names_in_files(model: Any, source: Source) -> Mapping[str, str]:
    """Name in the model to name in the files, by the renaming that transformers does when it loads.

    Weights behind the features that the files do not hold map to an empty name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    wanted = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    found: dict[str, str] = {}
    for name in source.store.names:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if converted is not None and renamed in wanted:
            reason = f"transformers joins or cuts {name!r} when it loads it"
            raise NotSupported("Offloading", f"for {source.target}", reason, "Run it with --no-offload.")
        found[renamed] = name
    for name, same in model.all_tied_weights_keys.items():  # stored once, as T5's embeddings are
        if name not in found and same in found:
            found[name] = found[same]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    missing = [name for name in parameters if name not in found]
    require_complete(source.target, missing, (), [found[name] for name in found if name not in wanted])
    return found | dict.fromkeys(missing, "")


def _reader(source: Source, name: str, like: Tensor) -> Callable[[], Tensor]:
    shape, dtype = tuple(like.shape), like.dtype

    def read() -> Tensor:
        if not name:  # behind the features that are measured: the check has let it pass
            return torch.zeros(shape, dtype=dtype)
        tensor = source.store.read(name)
        if tuple(tensor.shape) != shape:
            require_complete(source.target, (), [(name, tuple(tensor.shape), shape)], ())
        return tensor.to(dtype).reshape(shape)

    return read


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules whose weights are read at once, with their members: blocks of a list as a whole, other modules alone."""
    blocks: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{block}.") for block in blocks):
            continue
        parent = path.rpartition(".")[0]
        if parent and isinstance(model.get_submodule(parent), nn.ModuleList):
            blocks.append(path)
            yield module, list(module.modules())
        elif KEPT in module.__dict__:
            yield module, [module]


def _load(members: Sequence[nn.Module], *_: object) -> None:
    for module in members:
        for attribute, read in module.__dict__.get(KEPT, {}).items():
            module._parameters[attribute] = nn.Parameter(read(), requires_grad=False)


def _forget(members: Sequence[nn.Module], *_: object) -> None:
    for module in members:
        for attribute in module.__dict__.get(KEPT, {}):
            if (held := module._parameters[attribute]) is not None:
                module._parameters[attribute] = nn.Parameter(torch.empty_like(held, device="meta"), requires_grad=False)


# --- live models: loading one that can be run, with no weight left random, and running it ---


def load_model(source: Source, verb: str) -> nn.Module:
    """The model of a source in eval mode, loaded by transformers or timm; its own code runs only with `trust_remote_code`.

    One that does not fit into memory keeps its weights in its files.
    """
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
    if source.is_timm:
        require_one_device(source, "timm loads a model onto one device")
        return _load_timm(source, verb)
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency("transformers", "hf", f"`{verb}`") from error
    register_own_models(source.config)
    try:
        with silenced():
            offload = source.offload if source.device_map is None else False
            if offload or (offload is None and must_offload(source, source.dtype)):
                return load_offloaded(source, source.dtype)
            if isinstance(source.store, QuantisedStore | AdaptedStore):
                require_one_device(source, "its weights are read by oversmooth")
                model, loaded = _load_from_store(source, source.dtype or torch.float32)
            else:
                named = {"config": config_of(source)} if unnamed_type(source) else {}
                more = {**named, "ignore_mismatched_sizes": True}  # they are refused by our own check, by name
                model, loaded = _from_pretrained(transformers.AutoModel, source, **more)
    except OversmoothError:
        raise
    except Exception as error:  # transformers, huggingface_hub and torch raise errors without a common base
        raise NotLive(source.target, verb, whole_message(error)) from error
    mismatched = [(name, tuple(file), tuple(model)) for name, file, model in loaded["mismatched_keys"]]
    require_complete(source.target, loaded["missing_keys"], mismatched, loaded["unexpected_keys"])
    return model.eval()


def require_one_device(source: Source, reason: str) -> None:
    if source.device_map is not None:
        raise NotSupported("device_map", f"for {source.target}", reason, "Give --device instead.")


def _from_pretrained(auto_class: Any, source: Source, **more: Any) -> tuple[Any, Mapping[str, Any]]:
    """The model, and the report of what was missing or did not fit."""
    stored = torch.float32 if source.gguf_file else "auto"
    if source.device_map is not None:
        more["device_map"] = source.device_map
    found: tuple[Any, Mapping[str, Any]] = auto_class.from_pretrained(
        source.place,
        dtype=source.dtype or stored,
        trust_remote_code=source.trust_remote_code,
        **source.origin(),
        **more,
        output_loading_info=True,
    )
    return found


@contextmanager
def silenced() -> Iterator[None]:
    """No log lines and no progress bars of transformers, whose loading of GGUF draws one whatever it is told."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def load_plainly(folder: str, config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, list[str]]]:
    """The model of a folder with the class that its config names, loaded as a user of transformers or timm would."""
    register_own_models(config)
    with silenced():
        return plain_load.load(folder)


def written_out_config(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with everything that transformers makes of it, such as the kind of every layer; itself where it cannot."""
    if "model_type" not in config:
        return dict(config)
    import transformers

    register_own_models(config)
    try:
        with silenced():
            made = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # a type that only the checkpoint's own code knows: its config is all there is
        return dict(config)
    return {**made.to_dict(), **config}


def is_our_own_code(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the code that a checkpoint brings along is that of this package, byte for byte, and may be run."""
    files = {f"{str(place).rpartition('--')[2].split('.')[0]}.py" for place in (config.get("auto_map") or {}).values()}
    ours = Path(__file__).with_name("crammed_bert.py")
    code = folder / ours.name
    return files == {ours.name} and code.is_file() and code.read_bytes() == ours.read_bytes()


def register_own_models(config: Mapping[str, Any] | None = None) -> None:
    """Makes transformers' Auto classes know the model type that this package defines; nothing for configs of others.

    The module of that model imports half of transformers.
    """
    if config is None or config.get("model_type") in CRAMMED_BERT.model_types:
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
    """Moves a model that we loaded to a device; raises `DeviceUnavailable` for unknown or missing devices."""
    target = _device(device)
    try:
        model.to(target)
    except (RuntimeError, AssertionError) as error:
        raise DeviceUnavailable(device, first_line(error)) from error


def require_on(model: nn.Module, device: str) -> None:
    """Raises unless a model of the user's own is on that device already: it is never moved."""
    target = _device(device)
    places = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    elsewhere = [place for place in places if place.type != target.type or target.index not in (None, place.index)]
    if elsewhere:
        raise NotSupported(
            f"device={device!r}",
            "for a live model on another device",
            f"it is on {elsewhere[0]}, and a model of your own is not moved",
            f"Move it yourself first: model.to({device!r}).",
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(name, first_line(error)) from error
    if device.type == "meta":
        raise DeviceUnavailable(name, "tensors there have no numbers")
    return device


@contextmanager
def quiet_eval(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; afterwards every module has its own mode again.

    Compiled parts run as they were written: compiled code does not see hooks that were added later.
    """
    is_compiled = any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in model.modules())
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def call_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Calls the model on inputs by name; the name `""` stands for the one positional argument."""
    named = {name: value for name, value in inputs.items() if name}
    return model(inputs[""], **named) if "" in inputs else model(**named)


# --- models with the head that a task needs ---

TASKS = {
    "causal-lm": ("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
    "masked-lm": ("AutoModelForMaskedLM", ("ForMaskedLM",)),
    "classification": (
        "AutoModelForImageClassification|AutoModelForSequenceClassification",
        ("ForImageClassification", "ForSequenceClassification"),
    ),
    "similarity": ("", ()),
}
"""Each task, the classes of transformers that load a model with its head, and how names of such classes end."""


def task_of(source: Source) -> str:
    """The task that the model has a head for; `similarity` if it has none."""
    named = source.config.get("architectures") or () if source.module is None else (type(source.module).__name__,)
    names = [str(name) for name in named]
    for task, (_, endings) in TASKS.items():
        if endings and any(name.endswith(endings) for name in names):
            return task
    if source.gguf_file and any(stack.arch.is_causal for stack in source.stacks()):
        return "causal-lm"
    if source.module is None:
        return "classification" if source.is_timm else "similarity"
    classes = getattr(source.module, "num_classes", 0)
    return "classification" if isinstance(classes, int) and classes > 0 else "similarity"


def head_for(source: Source, task: str | None) -> str:
    """The task to evaluate: the requested one, or that of the model's head; raises if it has no such head."""
    if task is not None and task not in TASKS:
        raise UnknownName("task", task, tuple(TASKS))
    found = task_of(source)
    if task not in (None, found, "similarity"):
        has = "no head" if found == "similarity" else f"a head for {found}"
        raise NotSupported(f"the task {task!r}", f"for {source.target}", f"its checkpoint has {has}")
    return task or found


def load_with_head(source: Source, verb: str, *, task: str) -> nn.Module:
    """The model of a source with the head of a task, in eval mode."""
    import transformers

    register_own_models(source.config)
    classes = TASKS[task][0].split("|")
    names = [str(name) for name in source.config.get("architectures") or ()]
    wanted = classes[-1] if any(name.endswith("ForSequenceClassification") for name in names) else classes[0]
    try:
        with silenced():
            model, loaded = _from_pretrained(getattr(transformers, wanted), source)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise NotLive(source.target, verb, first_line(error)) from error
    require_complete(source.target, loaded["missing_keys"], [], loaded["unexpected_keys"])
    found: nn.Module = model.eval()
    return found
