"""Tiny quantised checkpoints, written by the library of a format where it is installed, or from its definition."""

import json
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Written = tuple[dict[str, Tensor], Tensor]
"""The tensors that stand for a weight, by what follows the module's path, and the weight as the reference reads it."""


@dataclass(frozen=True)
class Format:
    """A packing: its `quantization_config`, and how a weight is written."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]


def tiny_llama() -> nn.Module:
    """Width 64, 4 heads over 2 value heads, 2 layers: every packing's blocks fit into it several times."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(**sizes, intermediate_size=96, vocab_size=99)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.1 if weight.ndim == 2 else 1 + 0.1 * torch.randn_like(weight))
    return model


def write(folder: Path, packing: Format) -> nn.Module:
    """Writes the tiny model with the projections of its attention packed; returns it with the weights as stored."""
    model = tiny_llama()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "self_attn" in name:
                parts, stored = packing.write(weight.detach().clone())
                weight.copy_(stored)
                tensors |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
            else:
                tensors[name] = weight.detach().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {**model.config.to_dict(), "quantization_config": packing.config}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Rows of unsigned integers as 32-bit words, lowest bits first, computed with Python's integers."""
    rows = []
    for row in codes.tolist():
        number = sum(int(code) << (bits * place) for place, code in enumerate(row))
        words = [(number >> shift) & 0xFFFFFFFF for shift in range(0, len(row) * bits, 32)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def _grouped(weight: Tensor, bits: int, group: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, in), zeros and scales (out, groups) with a scale in half precision."""
    scales = torch.stack([weight[:, group == g].abs().amax(1) for g in range(count)], 1) / (2 ** (bits - 1))
    scales = scales.half().clamp(min=1e-3)
    zeros = torch.randint(1, 2**bits, scales.shape, generator=torch.Generator().manual_seed(1))
    codes = (weight / scales.float()[:, group] + zeros[:, group]).round().clamp(0, 2**bits - 1).long()
    return codes, zeros, scales


def gptq(bits: int, group_size: int, version: str = "gptq", act_order: bool = False) -> Format:
    """Words along the input, zeros along the output; `(code - zero) * scale` with the group that g_idx names."""

    def write_weight(weight: Tensor) -> Written:
        size = weight.shape[1] if group_size == -1 else group_size
        group = torch.arange(weight.shape[1]) // size
        if act_order:
            group = group[torch.randperm(len(group), generator=torch.Generator().manual_seed(2))]
        codes, zeros, scales = _grouped(weight, bits, group, weight.shape[1] // size)
        stored = (codes - zeros[:, group]).float() * scales.float()[:, group]
        kept = zeros - 1 if version == "gptq" else zeros
        parts = {
            ".qweight": pack_bits(codes, bits).T,
            ".qzeros": pack_bits(kept.T, bits),
            ".scales": scales.T,
            ".g_idx": group.int(),
        }
        return parts, stored

    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "checkpoint_format": version}
    return Format({**config, "desc_act": act_order, "sym": False}, write_weight)


def awq(group_size: int) -> Format:
    """Eight output channels per word in the order 0 2 4 6 1 3 5 7, lowest bits first."""

    def interleaved(codes: Tensor) -> Tensor:
        return codes.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)

    def write_weight(weight: Tensor) -> Written:
        size = weight.shape[1] if group_size == -1 else group_size
        group = torch.arange(weight.shape[1]) // size
        codes, zeros, scales = _grouped(weight, 4, group, weight.shape[1] // size)
        stored = (codes - zeros[:, group]).float() * scales.float()[:, group]
        parts = {
            ".qweight": pack_bits(interleaved(codes.T), 4),
            ".qzeros": pack_bits(interleaved(zeros.T), 4),
            ".scales": scales.T,
        }
        return parts, stored

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Format(config, write_weight)


def float8(block: list[int] | None, exponents_only: bool = False) -> Format:
    """`fp8`, written and read by transformers' own conversions."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    class Quantizer:
        quantization_config = FineGrainedFP8Config(weight_block_size=(block[0], block[1]) if block else None)

    Quantizer.quantization_config.scale_fmt = "ue8m0" if exponents_only else "float"

    def write_weight(weight: Tensor) -> Written:
        written = Fp8Quantize(Quantizer)._quantize_one("m.weight", weight)
        stored = Fp8Dequantize(Quantizer)._dequantize_one(
            written["m.weight"], written["m.weight_scale_inv"], torch.float32
        )
        return {name.removeprefix("m"): tensor for name, tensor in written.items()}, stored

    return Format({"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic"}, write_weight)


def float8_with(scale_shape: str, config: dict[str, Any]) -> Format:
    """float8 with one scale per row or per tensor under the name `weight_scale`."""

    def write_weight(weight: Tensor) -> Written:
        scale = weight.abs().amax(1, keepdim=True) / 448 if scale_shape == "row" else weight.abs().amax() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {".weight": codes, ".weight_scale": scale, ".input_scale": torch.ones(())}, codes.float() * scale

    return Format(config, write_weight)


def modelopt_nvfp4() -> Format:
    """Codes of E2M1 with a float8 scale per 16 inputs, and one float32 scale for the whole weight."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def write_weight(weight: Tensor) -> Written:
        overall = weight.abs().max() / (6 * 448)
        blocks = weight.unflatten(1, (-1, 16))
        scales = (blocks.abs().amax(-1) / 6 / overall).to(torch.float8_e4m3fn)
        factor = (scales.float() * overall)[..., None]
        nearest = ((blocks / factor).abs()[..., None] - numbers).abs().argmin(-1)
        codes = (nearest + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
        signed = torch.cat((numbers, -numbers))
        stored = (signed[codes.long()].unflatten(1, (-1, 16)) * factor).flatten(1)
        packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return {".weight": packed, ".weight_scale": scales, ".weight_scale_2": overall}, stored

    return Format({"quant_method": "modelopt", "quant_algo": "NVFP4"}, write_weight)


def bitsandbytes_4bit(kind: str, double: bool, blocksize: int = 64) -> Format:
    """Written and read by bitsandbytes on the CPU."""
    from bitsandbytes import functional

    def write_weight(weight: Tensor) -> Written:
        packed, state = functional.quantize_4bit(
            weight, blocksize=blocksize, compress_statistics=double, quant_type=kind
        )
        # As one row: on processors with AVX-512 its kernel takes the wrong block where a row is narrower than one.
        in_one_row = copy(state)
        in_one_row.shape = torch.Size([weight.numel()])
        stored = functional.dequantize_4bit(packed, in_one_row).reshape(weight.shape)
        return {".weight": packed, **{f".weight.{n}": part for n, part in state.as_dict(packed=True).items()}}, stored

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return Format({**config, "bnb_4bit_use_double_quant": double}, write_weight)


def bitsandbytes_8bit() -> Format:
    from bitsandbytes import functional

    def write_weight(weight: Tensor) -> Written:
        codes, largest, _ = functional.int8_vectorwise_quant(weight)
        stored = functional.int8_vectorwise_dequant(codes, largest)
        return {".weight": codes, ".SCB": largest, ".weight_format": torch.zeros((), dtype=torch.uint8)}, stored

    return Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, write_weight)


def compressed(stored_as: str, **weights: Any) -> Format:
    """Written and read by compressed-tensors; scales are float32, so that the library reads in float32 too."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(stored_as)

    def write_weight(weight: Tensor) -> Written:
        blocks = _blocks(weight, weights)
        state = {"weight": weight}
        overall = None
        if weights["strategy"] == "tensor_group":
            overall = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
            state["weight_global_scale"] = overall
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments, global_scale=overall)
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        if weights["strategy"] == "tensor":
            state |= {"weight_scale": scale.reshape(1), "weight_zero_point": zero.reshape(1)}
        packed = compressor.compress(state, scheme)
        stored = compressor.decompress(dict(packed), scheme)["weight"]
        if overall is not None:  # the library rounds its last step to bfloat16; here the same step in float32
            codes = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, dtype=torch.float32)
            exact = dequantize(codes, packed["weight_scale"].float(), args=arguments, global_scale=overall)
            assert torch.equal(exact.bfloat16(), stored)
            stored = exact
        return {f".{name}": part for name, part in packed.items()}, stored.float()

    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": stored_as, "config_groups": {"group_0": group}}
    return Format({**config, "version": "0.20.0", "ignore": ["lm_head"]}, write_weight)


def _blocks(weight: Tensor, weights: dict[str, Any]) -> Tensor:
    """The weight as (rows of blocks, rows, columns of blocks, columns)."""
    rows, columns = weight.shape
    size = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(weights.get("block_structure") or (1, 1)),
    }.get(weights["strategy"], (1, weights.get("group_size") or columns))
    return weight.reshape(rows // size[0], size[0], columns // size[1], size[1])
