"""Each packing, bit for bit: what is read is what the format's own library reads, and its spectra are the model's."""

import pytest
import torch

import oversmooth as osm
from oversmooth.models.open import open_source
from oversmooth.models.stores.packing import unpack_bits
from tests.unit.models.stores import checkpoints as made
from tests.unit.models.stores.checkpoints import pack_bits, write

FORMATS = {
    "float8 in blocks": lambda: made.float8([16, 16]),
    "float8 in blocks, exponents of two": lambda: made.float8([16, 16], exponents_only=True),
    "float8, one scale": lambda: made.float8(None),
    "float8, one scale per row": lambda: made.float8_with("row", {"quant_method": "fbgemm_fp8"}),
    "float8 of modelopt": lambda: made.float8_with("tensor", {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "NVFP4 of modelopt": made.modelopt_nvfp4,
    "GPTQ 4 bits": lambda: made.gptq(4, 16),
    "GPTQ 3 bits": lambda: made.gptq(3, 32),
    "GPTQ 2 bits, whole rows": lambda: made.gptq(2, -1),
    "GPTQ 8 bits, version 2": lambda: made.gptq(8, 16, "gptq_v2"),
    "GPTQ 4 bits in order of activations": lambda: made.gptq(4, 16, act_order=True),
    "AWQ": lambda: made.awq(16),
    "AWQ, whole rows": lambda: made.awq(-1),
    "bitsandbytes NF4": lambda: made.bitsandbytes_4bit("nf4", double=False),
    "bitsandbytes NF4, double": lambda: made.bitsandbytes_4bit("nf4", double=True),
    "bitsandbytes FP4, double": lambda: made.bitsandbytes_4bit("fp4", double=True, blocksize=128),
    "bitsandbytes 8 bits": made.bitsandbytes_8bit,
    "int-quantized, channel": lambda: made.compressed(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True
    ),
    "int-quantized, asymmetric tensor": lambda: made.compressed(
        "int-quantized", num_bits=8, type="int", strategy="tensor", symmetric=False
    ),
    "pack-quantized, 4 bits in groups": lambda: made.compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=True
    ),
    "pack-quantized, asymmetric": lambda: made.compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False
    ),
    "pack-quantized, 8 bits per channel": lambda: made.compressed(
        "pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True
    ),
    "float-quantized, channel": lambda: made.compressed(
        "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True
    ),
    "float-quantized, block": lambda: made.compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 16], symmetric=True
    ),
    "nvfp4-pack-quantized": lambda: made.compressed(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    ),
    "mxfp4-pack-quantized": lambda: made.compressed(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_are_read_bit_for_bit_and_their_spectra_are_those_of_the_dequantised_model(name, tmp_path):
    model = write(tmp_path, FORMATS[name]())
    store = open_source(tmp_path).store
    for weight, live in model.named_parameters():
        assert torch.equal(store.read(weight), live.detach()), weight
    of_file, of_model = osm.inspect(tmp_path), osm.inspect(model)
    assert of_file.layers == of_model.layers
    assert any(dtype.startswith("float32 from ") for dtype in of_file.provenance.weight_dtypes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_any_size_are_unpacked_as_pythons_integers_pack_them(bits):
    codes = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    torch.testing.assert_close(unpack_bits(pack_bits(codes, bits), bits, 64).long(), codes)


def test_experts_of_gpt_oss_are_dequantised_as_transformers_does():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from oversmooth.models.stores.packed import mxfp4
    from oversmooth.models.stores.packing import PackedWeight, Settings

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "experts.up_blocks": torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8, generator=generator),
        "experts.up_scales": torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8, generator=generator),
    }
    packed = PackedWeight("here", "experts.up", tensors, tensors.__getitem__)
    found = mxfp4(Settings("here", "mxfp4", {})).dequantise(packed)
    expected = convert_moe_packed_tensors(*tensors.values(), dtype=torch.float32)
    assert torch.equal(found, expected)


def test_half_precision_scales_give_what_the_library_rounds():
    """compressed-tensors computes in the dtype of its scales; rounding our float32 gives its numbers exactly."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    from oversmooth.models.stores.compressed_tensors import compressed_tensors
    from oversmooth.models.stores.packing import PackedWeight, Settings

    packing = made.compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=True)
    parts, _ = packing.write(made.tiny_llama().layers[0].self_attn.v_proj.weight.detach().clone())
    parts[".weight_scale"] = parts[".weight_scale"].bfloat16()
    weights = QuantizationArgs(**packing.config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    rounded = compressor.decompress({name[1:]: part for name, part in parts.items()}, scheme)["weight"]
    tensors = {f"m{name}": part for name, part in parts.items()}
    read = compressed_tensors(Settings("here", "compressed-tensors", packing.config))[0].dequantise
    found = read(PackedWeight("here", "m", tensors, tensors.__getitem__))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(found.bfloat16(), rounded)
    assert not torch.equal(found, rounded.float())


@pytest.mark.parametrize("name", ["GPTQ 4 bits in order of activations", "AWQ", "float8 in blocks", "bitsandbytes NF4"])
def test_a_quantised_checkpoint_runs_with_the_weights_that_were_read(name, tmp_path):
    model = write(tmp_path, FORMATS[name]())
    batch = [{"input_ids": torch.arange(24).reshape(2, 12) + 3}]
    assert osm.measure(tmp_path, batch).values == osm.measure(model, batch).values
    assert osm.verify(tmp_path).passed
