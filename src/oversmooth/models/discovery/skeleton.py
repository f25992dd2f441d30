"""Discovers checkpoints whose type is not declared, on small random models built from their configs.

The skeleton has the widths and heads of the checkpoint, which make its layout, and two blocks with random weights. What is
discovered has the names of the live model. The names on disk are found by saving the skeleton as transformers saves models
and comparing contents, so renamed, fused and split weights need no table here.
"""

import hashlib
import importlib
import inspect
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from oversmooth.errors import NotDiscovered, first_line
from oversmooth.models.canonical import AttentionWeights, assemble
from oversmooth.models.declaration import NORM_ROLES, Arch, Discovery, Paths, sizes_of
from oversmooth.models.discovery.declare import NUMBER, Irregular, fused_form, relative, spelled, template_of
from oversmooth.models.discovery.watch import discovered, own_stack
from oversmooth.models.identify import BlockNames, TensorNames
from oversmooth.models.live import silenced
from oversmooth.models.stores.module import describe, tensors_of
from oversmooth.models.stores.store import bytes_of

# --- sizes of small models of transformers, by the names that configs have for them ---

DEPTH = 2


def each_named(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


DEPTHS = {
    **each_named(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers depth num_decode_layers encoder_num_hidden_layers decoder_num_hidden_layers "
        "num_blocks text_encoder_layers vision_layers num_transformer_layers n_encoder_layers "
        "n_decoder_layers num_adapter_layers encoder_num_layers decoder_num_layers transformer_layers "
        "num_self_attends_per_block",
        DEPTH,
    ),
    "num_hidden_groups": 1,
    "num_feature_levels": 4,
    "num_kv_shared_layers": 0,
}
"""How deep."""

BREADTHS = {
    **each_named(
        "vocab_size char_vocab_size text_vocab_size audio_vocab_size codebook_size "
        "vocab_size_per_layer_input vocab_size_per_layer decoder_vocab_size semantic_vocab_size "
        "input_vocab_size output_vocab_size encoder_vocab_size target_vocab_size speech_vocab_size",
        256,
    ),
    **each_named("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    **each_named("num_experts_per_tok num_experts_per_token moe_topk top_k_experts moe_k", 2),
    **each_named("n_group topk_group moe_num_groups num_expert_group", 1),
    **each_named(
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner moe_intermediate_size "
        "shared_expert_intermediate_size ffn_hidden_size mlp_hidden_size dim_feedforward "
        "feed_forward_size expert_ffn_hidden_size encoder_intermediate_size decoder_intermediate_size",
        64,
    ),
}
"""Sizes outside of the value path."""

LAYOUT = {**DEPTHS, **BREADTHS}
"""What is changed in a config; widths and heads stay."""
HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("decoder_num_attention_heads", "encoder_num_attention_heads", "num_encoder_attention_heads"),
    *("num_decoder_attention_heads", "attention_heads", "vision_attention_heads", "text_attention_heads"),
    *("num_cross_attention_heads", "num_self_attention_heads", "decoder_num_heads"),
)
VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")

PLACES_OF_ATTENTION: Mapping[str, Any] = {
    **dict.fromkeys(("attn_layer_indices", "hybrid_layer_ids", "full_attn_idxs", "attention_layers_idx"), (1,)),
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "full_attention_interval": 2,
}
"""Which of the two blocks of a hybrid has attention."""
MEANINGS = ("token_id", "token_index", "_id")
"""Endings of fields that name one entry of a vocabulary."""
CLASSES: Mapping[str, str] = {
    "lw_detr_vit": "LwDetrViTBackbone",
    "rf_detr_dinov2": "RfDetrDinov2Backbone",
    "slanet": "SLANetForTableRecognition",
    "slanext": "SLANeXtForTableRecognition",
}
"""The class to run, for types that have several classes of which none is in an auto class."""


# --- a small random model of a config ---


def shrunk(config: Any, table: Mapping[str, Any]) -> Any:
    """The config with every field of the table, at any depth, lowered to its value; lists with an entry per layer fit."""
    has_own_values = _heads(config, VALUE_HEADS) in (0, _heads(config, HEADS))
    for name, part in list(vars(config).items()):
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            shrunk(part, table)
        elif isinstance(part, dict) and "model_type" in part:
            continue
        elif name in table and part is not None:
            if not isinstance(part, bool | str | list | tuple | dict):  # models with one entry per stage are small
                setattr(config, name, min(table[name], part) if isinstance(part, int) else table[name])
        elif name in PLACES_OF_ATTENTION and part is not None:
            place = PLACES_OF_ATTENTION[name]
            setattr(config, name, list(place) if isinstance(place, tuple) else place)
        elif name.endswith(MEANINGS) and isinstance(part, int) and part >= 256:
            setattr(config, name, 255 - sum(map(ord, name)) % 40)
    if has_own_values and _heads(config, VALUE_HEADS):
        for name in VALUE_HEADS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, _heads(config, HEADS))
    depth = getattr(config, "num_hidden_layers", None)
    if isinstance(depth, int):
        for name, value in layer_lists(config, depth).items():
            setattr(config, name, value)
    fit_rotary_sections(config)
    return config


def _heads(config: Any, names: Sequence[str]) -> int:
    """How many heads a config says, under any of these names; 0 where it says none."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)


def fit_rotary_sections(config: Any) -> None:
    """Positions in time, height and width share the channels of a head."""
    named = getattr(config, "rope_parameters", None)
    if not isinstance(named, dict):
        return
    for rotary in (named, *(part for part in named.values() if isinstance(part, dict))):
        if "mrope_section" not in (*rotary, *getattr(config, "ignore_keys_at_rope_validation", ())):
            continue
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        half = int(width * (rotary.get("partial_rotary_factor") or 1)) // 2
        if sum(rotary.get("mrope_section") or ()) != half:
            rotary["mrope_section"] = [half // 3, half // 3, half - 2 * (half // 3)]


def layer_lists(config: Any, depth: int) -> dict[str, list[Any]]:
    """The lists with an entry per layer, cut to a depth; the last kinds of layer remain."""
    found = {}
    for name, value in vars(config).items():
        is_per_layer = "layer" in name or name.endswith(("_types", "_pattern", "_window"))
        if is_per_layer and isinstance(value, list) and len(value) > depth and not name.startswith(("out_", "_")):
            kinds = list(dict.fromkeys(map(str, value)))
            chosen = [next(part for part in value if str(part) == kind) for kind in kinds][-depth:]
            found[name] = (chosen * depth)[:depth]
    return found


def built(config: Any, model_class: Any = None) -> nn.Module:
    """The model of a config with random weights, every one of them different from every other."""
    torch.manual_seed(0)
    model: nn.Module = model_of(config) if model_class is None else model_class(config)
    randomise(model)
    return model.eval()


def model_of(config: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_config(config) if type(config) in AutoModel._model_mapping else _class_of(config)(config)


def _class_of(config: Any) -> Any:
    """The model class of a part of a composite model, which no auto class knows."""
    from transformers import PreTrainedModel

    try:
        module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError as error:
        raise NoModelClass(f"transformers has no model of its own for a {type(config).__name__}") from error
    found: list[Any] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and _takes(value, type(config))
    ]
    found = [value for value in found if not value.__name__.endswith("PreTrainedModel")]
    if config.model_type in CLASSES:
        return getattr(module, CLASSES[config.model_type])
    if not found:
        raise NoModelClass(f"no model class takes a {type(config).__name__}: it is a part of other models")
    return min(found, key=lambda value: ("For" in value.__name__, len(value.__name__)))


class NoModelClass(ValueError):
    """A config without a model of its own."""


def _takes(model_class: Any, config_class: type) -> bool:
    """Whether a model is built from a config of a class, by its own word or by the annotation of its `__init__`."""
    annotated = inspect.signature(model_class.__init__).parameters.get("config")
    said = "" if annotated is None else annotated.annotation
    return getattr(model_class, "config_class", None) is config_class or said in (config_class, config_class.__name__)


def randomise(model: nn.Module) -> None:
    """Moves every norm, gain and bias away from one and zero, and gives matrices the size of trained ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter)
            if parameter.ndim >= 2:
                parameter.copy_(noise / max(parameter[0].numel(), 1) ** 0.5)
            else:
                parameter.add_(0.1 * noise)


# --- checkpoints of model types that nobody declared: watched on a skeleton built from the config ---


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
    model: Any = _skeleton(config)
    if model is None:
        return None
    found = discovered(model, describe(model))
    tensors = {name: getattr(owner, attribute).detach() for name, (owner, attribute) in tensors_of(model).items()}
    saved = tensors
    if "architecture" not in config:
        with tempfile.TemporaryDirectory() as folder, silenced():
            model.save_pretrained(folder, max_shard_size="500GB")
            files = [load_file(file) for file in Path(folder).glob("*.safetensors")]
        saved = {name: value for tensors_in_file in files for name, value in tensors_in_file.items()}
    return replace(found, archs=tuple(_renamed(arch, tensors, saved) for arch in found.archs))


def _skeleton(config: Mapping[str, Any]) -> nn.Module | None:
    """A model with the widths of a config, a few blocks deep, as the class that the checkpoint was saved from."""
    name = str(config.get("model_type") or config.get("architecture") or "the model")
    try:
        if "architecture" in config:
            return _timm_skeleton(config)
        import transformers

        if config.get("model_type") not in transformers.CONFIG_MAPPING:
            return None
        with silenced():
            settled = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
            named = [getattr(transformers, name, None) for name in config.get("architectures") or ()]
            return built(shrunk(settled, LAYOUT), named[0] if named else None)
    except ImportError:
        return None
    except MemoryError:
        raise
    except Exception as error:  # model classes, and the checks of transformers' configs, raise whatever they like
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


def _renamed(arch: Arch, live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> Arch:
    """The declaration in the names on disk."""
    by_content = {_content(tensor): name for name, tensor in reversed(list(saved.items()))}

    def on_disk(name: str | None) -> str:
        return "" if not name else by_content.get(_content(live[name]), "")

    def pair(names: TensorNames) -> TensorNames:
        return TensorNames(on_disk(names.weight), on_disk(names.bias) or None, names.module)

    stack = own_stack(arch, live.keys())
    found = [
        replace(
            block,
            value=pair(block.value),
            output=pair(block.output),
            latent=None if block.latent is None else pair(block.latent),
            norms={role: pair(names) for role, names in block.norms.items() if names.weight},
            gain=on_disk(block.gain),
        )
        for block in stack.blocks
    ]
    if not all(block.output.weight for block in found):
        name = stack.blocks[0].output.weight
        raise NotDiscovered(arch.name, f"{name} is stored in another form", "Declare it by hand.")
    if not all(block.value.weight for block in found):
        weights = [assemble(arch, sizes_of({}, arch), block, live.__getitem__, 1.0) for block in stack.blocks]
        arch, found = _regrouped(arch, found, weights, saved)
    paths = _paths(_template(arch, found), found, arch.paths)
    final = stack.final_norm
    if final is not None and on_disk(final.weight):
        paths = replace(paths, final_norm=spelled("", 0, on_disk(final.weight), on_disk(final.bias)))
    if isinstance(arch.n_heads, tuple):
        raise NotDiscovered(arch.name, "its blocks have different numbers of heads", "Load the model and inspect that.")
    return replace(arch, paths=paths, passes=())


def _regrouped(
    arch: Arch, found: Sequence[BlockNames], weights: Sequence[AttentionWeights], saved: Mapping[str, Tensor]
) -> tuple[Arch, list[BlockNames]]:
    """Values that are stored together with queries and keys on disk and apart in memory, or the other way round."""
    form, blocks = None, []
    for block, canonical in zip(found, weights, strict=True):
        values = canonical.w_v.flatten(0, 1)
        matrices = {name: tensor for name, tensor in saved.items() if tensor.shape[1:] == values[0].shape}
        holder = next((name for name, tensor in matrices.items() if (tensor == values[0]).all(1).any()), None)
        if holder is None:
            raise NotDiscovered(arch.name, f"the values of block {block.index} are in no tensor on disk", "Declare it.")
        where = {_content(row): index for index, row in enumerate(saved[holder])}
        rows = torch.tensor([where.get(_content(row), -1) for row in values])
        try:
            form = fused_form(rows.reshape(canonical.n_kv, canonical.d_head), canonical.n_heads, len(saved[holder]))
        except Irregular as error:
            raise NotDiscovered(arch.name, f"on disk {error}", "Declare it by hand.") from error
        blocks.append(replace(block, value=TensorNames(holder, None), is_fused=form is not None))
    if form is None:
        return replace(arch, n_kv="shape", d_head="config"), blocks
    return replace(arch, fused=form, n_kv=weights[0].n_kv, d_head=weights[0].d_head), blocks


def _template(arch: Arch, blocks: Sequence[BlockNames]) -> str:
    """The path of blocks on disk: the number that is the block's in every name."""
    name = blocks[0].output.weight
    for place in range(len(NUMBER.findall(name))):
        if all(NUMBER.findall(block.output.weight)[place] == str(block.index) for block in blocks):
            return template_of(name, place)
    raise NotDiscovered(arch.name, f"blocks on disk have no numbers of their own ({name})", "Declare it by hand.")


def _paths(template: str, found: Sequence[BlockNames], live: Paths) -> Paths:
    def common(pairs: Sequence[tuple[BlockNames, TensorNames]]) -> str:
        paths = [
            spelled(template.replace("{i}", str(block.index)), block.index, names.weight, names.bias or "")
            for block, names in pairs
            if names.weight
        ]
        return "|".join(dict.fromkeys(paths))

    value = common([(block, block.value) for block in found])
    latents = [(block, block.latent) for block in found if block.latent is not None]
    gains = [
        relative(template.replace("{i}", str(block.index)), block.index, block.gain) for block in found if block.gain
    ]
    return Paths(
        block=template,
        o=common([(block, block.output) for block in found]),
        latent=common(latents),
        v="" if found[0].is_fused else value,
        qkv=value if found[0].is_fused else "",
        attn_gain=gains[0] if gains else "",
        **{
            role: common([(block, block.norms[role]) for block in found if role in block.norms])
            or (getattr(live, role) if role in NORM_ROLES and not any(role in block.norms for block in found) else "")
            for role in NORM_ROLES
        },
    )


def _content(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {hashlib.sha1(bytes_of(tensor), usedforsecurity=False).hexdigest()}"
