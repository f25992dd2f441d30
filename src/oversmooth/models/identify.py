"""Which declaration belongs to a model: by its `model_type`, by its GGUF name, or as a last resort by bare names."""

import re
from collections.abc import Collection
from dataclasses import replace

from oversmooth.environment import plugins
from oversmooth.errors import AdapterMismatch
from oversmooth.models.declaration import NORM_ROLES, Arch, Paths, norm_centres
from oversmooth.models.families import ARCHITECTURES
from oversmooth.models.resolve import resolve


def architectures() -> dict[str, Arch]:
    """The declared families, with what plugins add."""
    return plugins.fill(ARCHITECTURES, "architectures", _accepted)


def _accepted(name: str, value: object) -> Arch:
    if not isinstance(value, Arch):
        raise plugins.expected(name, value, "an oversmooth.models.declaration.Arch")
    taken = {model_type for arch in ARCHITECTURES.values() for model_type in arch.model_types}
    if again := sorted(taken & set(value.model_types)):
        raise plugins.expected(name, again[0], "a family of model types that are not declared yet")
    return replace(value, name=name)


def known_model_types() -> list[str]:
    return sorted({model_type for arch in architectures().values() for model_type in arch.model_types})


def known_gguf_architectures() -> list[str]:
    return sorted({name for arch in architectures().values() for name in arch.gguf})


def declared_for_gguf(architecture: str) -> Arch | None:
    """The declaration behind the name that a GGUF file gives its architecture, in the form GGUF stores it."""
    found = [arch for arch in architectures().values() if architecture in arch.gguf]
    return gguf_form(found[0]) if found else None


def declared_for(model_type: str) -> list[Arch]:
    """The declarations of a model type, one per stack; empty when it is unknown."""
    return [arch for arch in architectures().values() if model_type in arch.model_types]


def candidates_by_name(names: Collection[str]) -> dict[str, list[Arch]]:
    """Families that fit a bare set of names, in words, each with all its stacks; several mean a tie to be refused.

    Of the families that resolve, those that explain the most tensors remain: Gemma 2's names contain LLaMA's, and
    LLaMA would leave two norms unexplained. A family whose meaning depends on a config ties with itself. Families that
    differ in nothing the weights can feel count as one, and none fits that leaves a value projection unexplained.
    """
    fits: dict[str, list[Arch]] = {}
    explained: dict[str, set[str]] = {}
    for arch in architectures().values():
        tensors = _tensors_explained(arch, names)
        for label, variant in _variants(arch).items() if tensors else ():
            fits.setdefault(label, []).append(variant)
            explained.setdefault(label, set()).update(tensors)
    most = max((len(tensors) for tensors in explained.values()), default=0)
    different: dict[tuple[object, ...], str] = {}
    for label, archs in fits.items():
        if len(explained[label]) == most and not _has_other_values(names, explained[label]):
            different.setdefault(tuple(_weight_facts(arch) for arch in archs), label)
    return {label: fits[label] for label in different.values()}


def _tensors_explained(arch: Arch, names: Collection[str]) -> set[str]:
    if arch.needs_config or arch.is_hybrid:
        return set()  # their names are contained in those of others; they need a live model or a config
    try:
        stacks = resolve(arch, names)
    except AdapterMismatch:
        return set()
    blocks = [block for stack in stacks for block in stack.blocks]
    found = {role for block in blocks for role in block.norms}
    if not {role for role in NORM_ROLES if getattr(arch.paths, role)} <= found:
        return set()
    if not norm_centres(arch.norm) and any(norm.bias for block in blocks for norm in block.norms.values()):
        return set()  # RMS norms have no bias
    if arch.paths.attn_gain and not arch.gain_is_optional and not any(block.gain for block in blocks):
        return set()
    return {name for block in blocks for name in block}


def _variants(arch: Arch) -> dict[str, Arch]:
    """The family as its config may make it, where that changes what the weights mean."""
    family = arch.name.partition(".")[0]
    variants = {family: arch}
    for condition in arch.when:
        variant = arch.for_config({condition.key: condition.value})
        if _weight_facts(variant) != _weight_facts(arch):
            variants[f"{family} with {condition.key}={condition.value}"] = variant
    return variants


def _weight_facts(arch: Arch) -> tuple[object, ...]:
    """Everything about a family that changes what its weights mean."""
    paths = replace(arch.paths, final_norm="")
    # A parallel block differs from a sequential one in its feed-forward only.
    residual = "pre" if arch.residual == "parallel" else arch.residual
    return (paths, arch.norm, residual, arch.fused, arch.stored, arch.n_kv, arch.residual_gain)


VALUE_LIKE = re.compile(r"(?:^|\.)(v_proj|value|v_lin|v|qkv|c_attn|query_key_value|qkv_proj|Wqkv|value_proj)\.weight$")
CROSS_LIKE = re.compile(r"cross|encoder_attn|EncDecAttention|multihead_attn|mlp|head\.attention")


def _has_other_values(names: Collection[str], explained: Collection[str]) -> bool:
    """Whether self-attention of some other kind is left over, as in the second tower of a composite model."""
    return any(VALUE_LIKE.search(name) and not CROSS_LIKE.search(name) and name not in explained for name in names)


def gguf_form(arch: Arch) -> Arch:
    """The same family as GGUF files store it: one set of names, fused weights stacked, offsets of norms added."""
    is_post, has_latent = arch.residual == "post", bool(arch.paths.latent)
    return replace(
        arch,
        fused=arch.fused if has_latent else "stacked",
        stored="out_in",
        value_axes="head channel in" if has_latent else arch.value_axes,  # newer files keep values apart from keys
        n_kv=arch.n_kv if has_latent else "config",  # the number is written out, also where there is one
        norm="layer" if norm_centres(arch.norm) else "rms",
        paths=Paths(
            block="blk.{i}",
            v="attn_v_b" if has_latent else "attn_v",
            qkv="attn_kv_b" if has_latent else "attn_qkv",
            latent="attn_kv_a_mqa" if has_latent else "",
            latent_norm="attn_kv_a_norm" if has_latent else "",
            o="attn_output",
            attn_norm="attn_output_norm" if is_post else "attn_norm_2|attn_norm",
            attn_branch_norm="post_attention_norm" if arch.paths.attn_branch_norm else "",
            ffn_norm="layer_output_norm" if is_post else ("ffn_norm" if arch.paths.ffn_norm else ""),
            ffn_branch_norm="post_ffw_norm" if arch.paths.ffn_branch_norm else "",
        ),
    )
