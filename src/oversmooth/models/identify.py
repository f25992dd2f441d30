"""Finds the family of a checkpoint, from its model type or its tensor names, and resolves its tensors.

A safetensors header and `named_parameters()` are both sets of names, so one `resolve` serves files and live models.
Prefixes such as `model.` or `bert.` are found, never declared.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from oversmooth.environment import plugins
from oversmooth.errors import AdapterMismatch, UnknownArchitecture, some_of
from oversmooth.models.declaration import NORM_ROLES, Arch, Paths, norm_centres
from oversmooth.models.families import ARCHITECTURES

# --- where the tensors of a declared family are among a set of names ---


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Weight and (where it exists) bias of one module."""

    weight: str
    """Empty where the module has no tensors, as some norms."""
    bias: str | None
    module: str = ""
    """Path of a module without tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """The concrete tensor names of one block."""

    index: int
    path: str
    value: TensorNames
    is_fused: bool
    output: TensorNames
    norms: Mapping[str, TensorNames]
    gain: str | None
    latent: TensorNames | None = None
    """The projection to the latent that values are made from, if there is one."""
    position: int = 0
    """Its position among the blocks with attention."""

    def __iter__(self) -> Iterator[str]:
        """Every tensor that an analysis of this block reads."""
        latent = () if self.latent is None else (self.latent,)
        for pair in (*latent, self.value, self.output, *self.norms.values()):
            yield from (name for name in (pair.weight, pair.bias) if name)
        if self.gain:
            yield self.gain


@dataclass(frozen=True, slots=True, kw_only=True)
class StackNames:
    """One stack of blocks found among the names."""

    prefix: str
    blocks: tuple[BlockNames, ...]
    blocks_in_model: int
    final_norm: TensorNames | None = None

    def paths_of_all(self, template: str) -> dict[int, str]:
        """Paths of all numbered blocks, also of those without softmax attention; empty where blocks have no numbers."""
        one = self.blocks[0]
        for form in _alternates(template):
            own = form.replace("{i}", str(one.index))
            if "{i}" in form and one.path.endswith(own):
                stem = one.path.removesuffix(own)
                return {i: stem + form.replace("{i}", str(i)) for i in range(self.blocks_in_model)}
        return {}


BLOCK_NUMBER = r"(?P<i>0|[1-9][0-9]{0,17})"
"""Without leading zeros, so no two names mean the same block."""
OF_INDEX = re.compile(r"\{(\d*)i([+-]\d+)?\}")
"""A number that follows from that of the block."""


def _alternates(path: str) -> list[str]:
    return [alternate for alternate in path.split("|") if alternate]


def _tensor(path: str, what: str) -> str:
    if path.endswith("]"):
        module, _, listed = path[:-1].rpartition("[")
        weight, _, bias = listed.partition(",")
        return module + (weight if what == "weight" else bias)
    return path.replace("*", what) if "*" in path else f"{path}.{what}"


def _find(block: str, paths: str, names: Collection[str], index: int = 0) -> TensorNames | None:
    """The first alternate that is there, and before it one whose bias is there too: some blocks have one, others none."""
    found: TensorNames | None = None
    for path in _alternates(paths):
        weight, bias = (inside(block, _tensor(path, what), index) for what in ("weight", "bias"))
        if weight in names and bias in names:
            return TensorNames(weight, bias)
        if weight in names:
            found = found or TensorNames(weight, None)
    return found


def inside(block: str, path: str, index: int) -> str:
    """A path below a block; with `^` one outside of it, with `{i}`, `{i+1}` or `{3i+1}` for the number of the block."""
    if path.startswith("^"):
        return OF_INDEX.sub(lambda match: str(int(match[1] or 1) * index + int(match[2] or 0)), path[1:])
    return f"{block}.{path}".strip(".")


def _block_pattern(block: str) -> str:
    return r"(?P<prefix>(?:.*\.)?)(?P<block>" + re.escape(block).replace(r"\{i\}", BLOCK_NUMBER) + ")"


def resolve(arch: Arch, names: Collection[str]) -> tuple[StackNames, ...]:
    """The stacks of this family among the names, one per prefix; empty when there is none.

    A block is found by its output projection; its value projection must be there too. Blocks must be numbered from 0
    without gaps unless the family is a hybrid: a gap means a shard is missing.
    """
    if "{i}" not in arch.paths.block:
        return _listed(arch, names)
    without_values: list[str] = []
    for block in _alternates(arch.paths.block):
        stacks = []
        for prefix, blocks in _blocks_by_prefix(arch, block, names).items():
            resolved = [_resolve_block(arch, i, path, names) for i, path in sorted(blocks.items())]
            kept = [block for block in resolved if block is not None]
            if len(kept) < len(resolved) and not (arch.is_hybrid and kept):
                without_values += [path for _, path in sorted(blocks.items()) if path not in {b.path for b in kept}]
            else:
                stacks.append(
                    StackNames(
                        prefix=prefix,
                        blocks=_numbered(kept),
                        blocks_in_model=_count(block, prefix, names),
                        final_norm=_find(prefix.removesuffix("."), arch.paths.final_norm, names),
                    )
                )
        for stack in stacks:
            _require_all_blocks(arch, stack)
        if stacks:
            return tuple(stacks)
    if without_values:
        path = _alternates(arch.paths.v or arch.paths.qkv)[0]
        expected = f"values beside every output projection, such as {without_values[0]}.{_tensor(path, 'weight')}"
        raise AdapterMismatch(arch.name, expected, f"none in {some_of(without_values)}")
    return ()


def _blocks_by_prefix(arch: Arch, block: str, names: Collection[str]) -> dict[str, dict[int, str]]:
    """Paths of the blocks that have an output projection, by prefix and number."""
    found: dict[str, dict[int, str]] = {}
    outputs = "|".join(re.escape(_tensor(path, "weight")) for path in _alternates(arch.paths.o))
    pattern = re.compile(_block_pattern(block) + rf"\.(?:{outputs})")
    for name in names:
        if match := pattern.fullmatch(name):
            found.setdefault(match["prefix"], {})[int(match["i"])] = match["prefix"] + match["block"]
    return found


def _require_all_blocks(arch: Arch, stack: StackNames) -> None:
    known = {block.index for block in stack.blocks}
    if not arch.is_hybrid and len(stack.blocks) != stack.blocks_in_model:
        absent = islice((i for i in range(stack.blocks_in_model) if i not in known), 8)
        raise AdapterMismatch(
            arch.name,
            f"attention weights in all {stack.blocks_in_model} blocks",
            f"none in blocks {', '.join(map(str, absent))} (a missing shard, or a hybrid model)",
        )


def _listed(arch: Arch, names: Collection[str]) -> tuple[StackNames, ...]:
    """The one stack of a declaration that lists its blocks by name."""
    paths = arch.paths.block.split(",")
    found = [block for i, path in enumerate(paths) if (block := _resolve_block(arch, i, path, names)) is not None]
    if len(found) < len(paths):
        return ()
    final = _find("", arch.paths.final_norm, names)
    return (StackNames(prefix="", blocks=_numbered(found), blocks_in_model=len(found), final_norm=final),)


def _numbered(blocks: Sequence[BlockNames]) -> tuple[BlockNames, ...]:
    return tuple(replace(block, position=position) for position, block in enumerate(blocks))


def _count(block: str, prefix: str, names: Collection[str]) -> int:
    pattern = re.compile(_block_pattern(block) + r"\..*")
    matches = (pattern.fullmatch(name) for name in names if name.startswith(prefix))
    return 1 + max(int(match["i"]) for match in matches if match and match["prefix"] == prefix)


def _resolve_block(arch: Arch, index: int, path: str, names: Collection[str]) -> BlockNames | None:
    paths = arch.paths
    separate, output = _find(path, paths.v, names, index), _find(path, paths.o, names, index)
    value = separate or _find(path, paths.qkv, names, index)
    if value is None or output is None:
        return None
    own_bias = inside(path, paths.v_bias, index) if paths.v_bias else ""
    if value.bias is None and own_bias in names:
        value = replace(value, bias=own_bias)
    norms = {role: found for role in NORM_ROLES if (found := _find(path, getattr(paths, role), names, index))}
    for role in arch.norms_without_weight:
        norms[role] = TensorNames("", None, module=inside(path, getattr(paths, role), index))
    gains = [f"{path}.{gain}" for gain in _alternates(paths.attn_gain) if f"{path}.{gain}" in names]
    return BlockNames(
        index=index,
        path=path,
        value=value,
        is_fused=separate is None,
        output=output,
        norms=norms,
        gain=gains[0] if gains else None,
        latent=_find(path, paths.latent, names, index),
    )


def without_extra(names: StackNames, depth: int | None, extra: int | None) -> StackNames:
    """Drops blocks behind the last one that predict further tokens: they are not on the stream."""
    if not extra or depth is None or names.blocks_in_model != depth + extra:
        return names
    kept = tuple(block for block in names.blocks if block.index < depth)
    return replace(names, blocks=kept, blocks_in_model=depth)


# --- which declaration belongs to a model: by its `model_type`, by its GGUF name ---


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


def declared_for_gguf(architecture: str) -> Arch:
    """The declaration behind the name that a GGUF file gives its architecture, in the form GGUF stores it."""
    found = [arch for arch in architectures().values() if architecture in arch.gguf]
    if not found:
        known = sorted({name for arch in architectures().values() for name in arch.gguf})
        raise UnknownArchitecture(architecture, known)
    return gguf_form(found[0])


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
        others = (name for name in names if VALUE_LIKE.search(name) and name not in explained[label])
        # Left over self-attention of some other kind is that of the second tower of a composite model.
        if len(explained[label]) == most and all(CROSS_LIKE.search(name) for name in others):
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


def gguf_form(arch: Arch) -> Arch:
    """The same family as GGUF files store it: one set of names, fused weights stacked, offsets of norms added."""
    is_post, has_latent = arch.residual == "post", bool(arch.paths.latent)
    return replace(
        arch,
        fused=arch.fused if has_latent else "stacked",
        stored="out_in",
        value_axes="head channel in" if has_latent else arch.value_axes,  # newer files keep values apart from keys
        n_kv=arch.n_kv if has_latent else "config",  # GGUF always states the number
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
