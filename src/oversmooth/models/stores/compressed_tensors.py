"""compressed-tensors (vLLM, llm-compressor): integers and floats of 4 and 8 bits, plain or packed, per config group."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from oversmooth.errors import PackedWeights
from oversmooth.models.stores.packed import FLOAT8, MX_BLOCK, UNUSED, nv_weight
from oversmooth.models.stores.packing import (
    PackedWeight,
    Packing,
    Settings,
    grid,
    powers_of_two,
    scale_blocks,
    unpack_bits,
    unpack_fp4,
)
from oversmooth.models.stores.patterns import Unmatchable, matches

PACKED_PARTS = (
    *(".weight_shape", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
    *(".input_global_scale", ".input_zero_point", ".output_zero_point", *UNUSED),
)
FORMATS = (
    *("int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
"""Formats that are read; `dense` packs nothing, and `mixed-precision` names a format for each group."""


def compressed_tensors(settings: Settings) -> tuple[Packing, ...]:
    """The packings of a config: weights under `weight_packed`, and those that keep their name beside a scale."""
    if settings.get("transform_config"):
        raise settings.unreadable("transform_config", "set", "none: weights that are not rotated")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise settings.unreadable("sparsity_config.format", sparsity.get("format"), "dense")
    overall = settings.word("format", (*FORMATS, "mixed-precision", "dense"), "dense")
    if overall == "dense":
        return ()
    found = settings.get("config_groups")
    names = list(found) if isinstance(found, Mapping) else []
    groups = [_group(settings.fields("config_groups"), name, overall) for name in names]
    if not groups:
        raise settings.unreadable("config_groups", settings.get("config_groups"), "at least one group")

    def dequantise(packed: PackedWeight) -> Tensor:
        return _group_of(packed, groups).dequantise(packed)

    words = f"compressed-tensors, {', '.join(sorted({group.format for group in groups}))}"
    return tuple(
        Packing(words=words, marker=marker, parts=PACKED_PARTS, dequantise=dequantise)
        for marker in (".weight_packed", ".weight_scale")
    )


class _Group:
    """Modules that are packed alike, and how."""

    def __init__(self, settings: Settings, targets: list[str], stored_as: str):
        self.targets = targets
        self.format = stored_as
        self.weights = settings.fields("weights")
        self.bits = self.weights.integer("num_bits")
        kind = self.weights.word("type", ("int", "float"), "int")
        self.strategy = self.weights.word("strategy", ("tensor", "channel", "group", "block", "tensor_group"))
        self.group = self.weights.group_size() if self.strategy in ("group", "tensor_group") else -1
        self.block = self.weights.block("block_structure") if self.strategy == "block" else None
        if self.strategy == "block" and self.block is None:
            raise self.weights.unreadable("block_structure", None, "two positive numbers")
        readers: Mapping[str, Callable[[PackedWeight], Tensor]] = {
            "pack-quantized": self._packed_integers,
            "nvfp4-pack-quantized": self._nvfp4,
            "mxfp4-pack-quantized": self._mxfp4,
        }
        self.dequantise = readers.get(stored_as, self._plain)
        allowed = {"pack-quantized": (1, 2, 4, 8), "nvfp4-pack-quantized": (4,), "mxfp4-pack-quantized": (4,)}
        self.weights.integer("num_bits", allowed.get(stored_as, (8,) if kind == "float" else range(1, 9)))

    def _block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the weight that share one scale."""
        if self.strategy == "tensor":
            return shape
        if self.block is not None:
            return self.block
        return 1, shape[1] if self.strategy == "channel" or self.group == -1 else self.group

    def _scaled(self, packed: PackedWeight, codes: Tensor, zero: Tensor | None) -> Tensor:
        shape = (codes.shape[0], codes.shape[1])
        block = self._block(shape)
        blocks = grid(shape, block)
        why = f"one scale per block of {block[0]} x {block[1]} of a weight of {shape[0]} x {shape[1]}"
        if self.format == "mxfp8-quantized":
            scales = powers_of_two(packed.part(".weight_scale", torch.uint8, shape=blocks, why=why))
        else:
            scales = packed.scale(".weight_scale", blocks, why)
        if packed.has(".weight_g_idx"):
            return self._in_order_of_activations(packed, codes, scales, zero)
        return scale_blocks(codes, scales, block, zero)

    def _in_order_of_activations(
        self, packed: PackedWeight, codes: Tensor, scales: Tensor, zero: Tensor | None
    ) -> Tensor:
        why = "the group of each input channel"
        index = packed.part(".weight_g_idx", torch.int32, torch.int64, shape=(codes.shape[1],), why=why).long()
        if not index.numel() or int(index.min()) < 0 or int(index.max()) >= scales.shape[1]:
            raise packed.broken(".weight_g_idx", f"groups from 0 to {scales.shape[1] - 1}", "others")
        if zero is not None:
            codes.sub_(zero[:, index])
        return codes.mul_(scales[:, index])

    def _plain(self, packed: PackedWeight) -> Tensor:
        codes = packed.matrix(".weight", torch.int8, *FLOAT8)
        zero = None
        if packed.has(".weight_zero_point"):
            shape = (codes.shape[0], codes.shape[1])
            blocks = grid(shape, self._block(shape))
            found = packed.part(".weight_zero_point")
            if found.numel() != math.prod(blocks):
                raise packed.broken(".weight_zero_point", f"the shape {blocks}", f"the shape {tuple(found.shape)}")
            zero = found.float().reshape(blocks)
        return self._scaled(packed, codes.float(), zero)

    def _packed_integers(self, packed: PackedWeight) -> Tensor:
        words = packed.matrix(".weight_packed", torch.int32)
        rows, columns = self._shape(packed)
        expected = (rows, math.ceil(columns * self.bits / 32))
        if tuple(words.shape) != expected:
            raise packed.broken(".weight_packed", f"the shape {expected}", f"the shape {tuple(words.shape)}")
        offset = 1 << (self.bits - 1)  # codes are signed, and stored with this added
        codes = unpack_bits(words, self.bits, columns).float() - offset
        zero = None
        if packed.has(".weight_zero_point"):  # packed along the rows
            groups = grid((rows, columns), self._block((rows, columns)))[1]
            shape = (math.ceil(rows * self.bits / 32), groups)
            found = packed.part(".weight_zero_point", torch.int32, shape=shape, why="one zero per group, packed")
            zero = unpack_bits(found.T.contiguous(), self.bits, rows).T.float() - offset
        return self._scaled(packed, codes, zero)

    def _shape(self, packed: PackedWeight) -> tuple[int, int]:
        found = packed.part(".weight_shape").tolist()
        if not (isinstance(found, list) and len(found) == 2 and all(isinstance(n, int) and n > 0 for n in found)):
            raise packed.broken(".weight_shape", "rows and columns", repr(found))
        return found[0], found[1]

    def _nvfp4(self, packed: PackedWeight) -> Tensor:
        divisor = packed.scale(".weight_global_scale", (1, 1), "one number for the whole weight")
        return nv_weight(packed, ".weight_packed", lambda scales: scales / divisor, self.weights.group_size())

    def _mxfp4(self, packed: PackedWeight) -> Tensor:
        values = unpack_fp4(packed.matrix(".weight_packed", torch.uint8))
        shape = (values.shape[0], values.shape[1])
        why = f"one exponent per {MX_BLOCK} of {shape[1]} inputs"
        exponents = packed.part(".weight_scale", torch.uint8, shape=grid(shape, (1, MX_BLOCK)), why=why)
        return scale_blocks(values, powers_of_two(exponents), (1, MX_BLOCK))


def _group(groups: Settings, name: str, overall: str) -> _Group:
    settings = groups.fields(name)
    stored_as = settings.word("format", FORMATS, None) if settings.get("format") else overall
    if stored_as == "mixed-precision":
        raise settings.unreadable("format", None, "the format of the group")
    targets = settings.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise settings.unreadable("targets", targets, "a list of names")
    return _Group(settings, targets, stored_as)


def _group_of(packed: PackedWeight, groups: list[_Group]) -> _Group:
    """The group whose target names the module, or fits it as a pattern, or else names the class of all linear layers."""
    by_class = [group for group in groups if "Linear" in group.targets]
    for group in groups:
        for target in group.targets:
            pattern = target.removeprefix("re:") if target.startswith("re:") else None
            try:
                fits = matches(pattern, packed.path) if pattern else target == packed.path
            except Unmatchable as error:
                found = f"compressed-tensors with the pattern {target[:80]!r}: {error}"
                raise PackedWeights(packed.where, found) from error
            if fits:
                return group
    if by_class:
        return by_class[0]
    raise PackedWeights(packed.where, f"compressed-tensors: no group of the config is for {packed.path}")
