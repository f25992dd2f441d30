"""Models that are quantised in memory, read through what their own classes dequantise."""

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn

import oversmooth as osm
from oversmooth.errors import PackedWeights
from tests.unit.models.stores.checkpoints import tiny_llama


def _replaced(make):
    """The tiny model with quantised projections, and the same model with what they stand for."""
    quantised, plain = tiny_llama(), tiny_llama()
    for ours, theirs in zip(quantised.layers, plain.layers, strict=True):
        for name in ("v_proj", "o_proj"):
            made, values = make(getattr(ours.self_attn, name))
            setattr(ours.self_attn, name, made)
            with torch.no_grad():
                getattr(theirs.self_attn, name).weight.copy_(values)
    return quantised, plain


def four_bits(linear: nn.Linear):
    made = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    made.load_state_dict(linear.state_dict())
    made = made.to("cpu")
    made.support_avx512bf16_for_cpu = False  # that kernel multiplies in bfloat16, whatever the dtype asked for
    assert made.weight.dtype == torch.uint8
    return made, bitsandbytes.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)


def eight_bits(linear: nn.Linear):
    made = bitsandbytes.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    codes, largest, _ = bitsandbytes.functional.int8_vectorwise_quant(linear.weight.detach().half())
    made.weight = bitsandbytes.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, SCB=largest)
    return made, bitsandbytes.functional.int8_vectorwise_dequant(codes, largest)


class Halved(Tensor):
    """A tensor that stands for twice its numbers, as torchao's classes stand for theirs."""

    def dequantize(self):
        return 2 * self.as_subclass(Tensor)


def a_class_that_dequantises(linear: nn.Linear):
    values = linear.weight.detach().clone()
    made = nn.Linear(linear.in_features, linear.out_features, bias=False)
    del made.weight
    made.register_parameter("weight", nn.Parameter((values / 2).as_subclass(Halved), requires_grad=False))
    assert type(made.weight).__name__ == "Halved"
    return made, values


@pytest.mark.parametrize("make", [four_bits, eight_bits, a_class_that_dequantises])
def test_a_quantised_live_model_has_the_spectra_of_what_it_stands_for(make):
    quantised, plain = _replaced(make)
    assert osm.inspect(quantised).layers == osm.inspect(plain).layers


def test_a_four_bit_model_runs_and_its_features_are_those_of_what_it_stands_for():
    quantised, plain = _replaced(four_bits)
    batch = [{"input_ids": torch.arange(24).reshape(2, 12) + 3}]
    for ours, theirs in zip(osm.measure(quantised, batch).values, osm.measure(plain, batch).values, strict=True):
        assert ours.mean == pytest.approx(theirs.mean, rel=1e-3, abs=1e-4)


def test_eight_bits_without_scales_are_refused():
    quantised, _ = _replaced(eight_bits)
    quantised.layers[0].self_attn.v_proj.weight.SCB = None
    with pytest.raises(PackedWeights, match="without their scales"):
        osm.inspect(quantised)
