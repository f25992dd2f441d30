"""Where the tensors of a declared family are among a set of names.

A safetensors header and `named_parameters()` are both sets of names, so one `resolve` serves files and live models
alike; prefixes such as `model.` or `bert.` are found, never declared.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from oversmooth.errors import AdapterMismatch, some_of
from oversmooth.models.declaration import NORM_ROLES, Arch


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
    """The projection to the latent that values are made from, where there is one."""
    position: int = 0
    """Where it stands among the blocks with attention."""

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
"""Written in one way only, so that no two names mean the same block."""


def _alternates(path: str) -> list[str]:
    return [alternate for alternate in path.split("|") if alternate]


def _tensor(path: str, what: str) -> str:
    if path.endswith("]"):
        module, _, listed = path[:-1].rpartition("[")
        weight, _, bias = listed.partition(",")
        return module + (weight if what == "weight" else bias)
    return path.replace("*", what) if "*" in path else f"{path}.{what}"


def _find(block: str, paths: str, names: Collection[str], index: int = 0) -> TensorNames | None:
    for path in _alternates(paths):
        weight, bias = (inside(block, _tensor(path, what), index) for what in ("weight", "bias"))
        if weight in names:
            return TensorNames(weight, bias if bias in names else None)
    return None


def inside(block: str, path: str, index: int) -> str:
    """A path below a block; one that begins with `^` lies outside of it, `{i}` being the block's number."""
    if path.startswith("^"):
        return path[1:].replace("{i}", str(index))
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
    separate, fused = _find(path, paths.v, names, index), _find(path, paths.qkv, names, index)
    output = _find(path, paths.o, names, index)
    value = separate or fused
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
    """Blocks behind the last one that predict further tokens, as some checkpoints carry them, are not on the stream."""
    if not extra or depth is None or names.blocks_in_model != depth + extra:
        return names
    kept = tuple(block for block in names.blocks if block.index < depth)
    return replace(names, blocks=kept, blocks_in_model=depth)
