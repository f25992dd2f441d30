"""GPTQ and AWQ: integers of 2 to 8 bits in 32-bit words, a scale and a zero for each group of input channels."""

import math

import torch
from torch import Tensor

from oversmooth.models.stores.quantised.bits import scale_blocks, unpack_bits
from oversmooth.models.stores.quantised.packing import PackedWeight, Packing, Settings

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight output channels of an AWQ word lie: channel j in the place AWQ_ORDER[j], counted in 4 bits."""
PARTS = (".qzeros", ".scales", ".g_idx")


def gptq(settings: Settings) -> Packing:
    """`(code - zero) * scale`, packed along the input; `g_idx` says to which group each input channel belongs.

    Files of the format `gptq` store zeros less one, those of `gptq_v2` as they are.
    """
    bits = settings.integer("bits", (2, 3, 4, 8))
    version = settings.word("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    settings.word("pack_dtype", ("int32",), "int32")
    group = settings.group_size()
    overrides = bool(settings.get("dynamic"))

    def dequantise(packed: PackedWeight) -> Tensor:
        return _gptq_weight(packed, bits, group, less_one=version == "gptq", overrides=overrides)

    words = f"GPTQ, {bits} bits" + ("" if group == -1 else f" in groups of {group}")
    return Packing(words=words, marker=".qweight", parts=PARTS, dequantise=dequantise)


def _gptq_weight(packed: PackedWeight, bits: int, group: int, *, less_one: bool, overrides: bool) -> Tensor:
    words = packed.part(".qweight", torch.int32)
    index = packed.part(".g_idx", torch.int32, torch.int64) if packed.has(".g_idx") else None
    if overrides and index is not None:  # modules may differ from the config, and the shapes say how
        bits = words.shape[0] * 32 // max(len(index), 1)
        group = -1 if packed.part(".scales").shape[0] == 1 else math.ceil(len(index) / packed.part(".scales").shape[0])
    rows = words.shape[0] * 32 // bits if index is None else len(index)
    size = rows if group == -1 else group
    if words.ndim != 2 or math.ceil(rows * bits / 32) != words.shape[0]:
        shape = tuple(words.shape)
        raise packed.broken(".qweight", f"{rows} input channels of {bits} bits in 32-bit words", f"the shape {shape}")
    columns, groups = words.shape[1], math.ceil(rows / size)
    why = f"one number per group of {size} of {rows} input channels"
    scales = packed.part(".scales", torch.float16, torch.bfloat16, torch.float32, shape=(groups, columns), why=why)
    packed_zeros = packed.part(".qzeros", torch.int32, shape=(groups, math.ceil(columns * bits / 32)), why=why)
    zeros = unpack_bits(packed_zeros, bits, columns)
    if less_one:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    codes = unpack_bits(words.T.contiguous(), bits, rows).float()
    if index is None or torch.equal(index.long(), torch.arange(rows) // size):
        return scale_blocks(codes, scales.T.float(), (1, size), zeros.T.float())
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise packed.broken(".g_idx", f"groups from 0 to {groups - 1}", f"{int(index.min())} to {int(index.max())}")
    chosen = index.long()
    return codes.sub_(zeros.T[:, chosen].float()).mul_(scales.T[:, chosen].float())


def awq(settings: Settings) -> Packing:
    """`(code - zero) * scale` in 4 bits, packed along the output in an order of its own (the version `gemm`)."""
    settings.integer("bits", (4,), settings.get("w_bit"))
    key = "format" if settings.get("version") is None and settings.get("format") is not None else "version"
    settings.word(key, ("gemm",), "gemm")
    if settings.get("zero_point") is False:
        raise settings.unreadable("zero_point", False, "true")
    group = settings.group_size("q_group_size" if settings.get("group_size") is None else "group_size")

    def dequantise(packed: PackedWeight) -> Tensor:
        words = packed.part(".qweight", torch.int32)
        if words.ndim != 2:
            raise packed.broken(".qweight", "a matrix", f"the shape {tuple(words.shape)}")
        rows, size = words.shape[0], words.shape[0] if group == -1 else group
        groups, why = math.ceil(rows / size), f"one number per group of {size} of {rows} input channels"
        zeros = packed.part(".qzeros", torch.int32, shape=(groups, words.shape[1]), why=why)
        columns = words.shape[1] * 8
        scales = packed.part(".scales", torch.float16, torch.bfloat16, torch.float32, shape=(groups, columns), why=why)
        codes = _awq_codes(words).T.float().contiguous()
        return scale_blocks(codes, scales.T.float(), (1, size), _awq_codes(zeros).T.float())

    words = "AWQ, 4 bits" + ("" if group == -1 else f" in groups of {group}")
    return Packing(words=words, marker=".qweight", parts=PARTS, dequantise=dequantise)


def _awq_codes(words: Tensor) -> Tensor:
    plain = unpack_bits(words, 4, words.shape[1] * 8)
    return plain.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1)
