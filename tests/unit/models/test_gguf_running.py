"""GGUF files that run: the same numbers as the live model, through transformers' own loading; split files as one."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize

import oversmooth as osm
from oversmooth.errors import BrokenFile, NotLive
from tests.real_models import real_model
from tests.unit.models.stores.checkpoints import tiny_llama

F32, Q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
NAMES = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_proj": "attn_q"} | {
    "self_attn.k_proj": "attn_k",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _stored(model, name, weight):
    """A tensor under llama.cpp's name; rows of queries and keys are interleaved as its rotary embedding wants them."""
    if name == "embed_tokens.weight":
        return "token_embd.weight", weight
    if name == "norm.weight":
        return "output_norm.weight", weight
    _, block, path = name.removesuffix(".weight").split(".", 2)
    heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(path)
    if heads:
        weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    return f"blk.{block}.{NAMES[path]}.weight", weight


def _parts(path, model, count=1):
    """The model as one GGUF file or as several; returns their paths."""
    tensors = [_stored(model, name, weight.detach().numpy()) for name, weight in model.named_parameters()]
    paths = [path] if count == 1 else [path.with_name(f"m-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    for number, part in enumerate(paths):
        writer = gguf.GGUFWriter(part, "llama")
        if number == 0:
            writer.add_block_count(2)
            writer.add_embedding_length(64)
            writer.add_feed_forward_length(96)
            writer.add_head_count(4)
            writer.add_head_count_kv(2)
            writer.add_context_length(128)
            writer.add_vocab_size(99)
            writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
            writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
            writer.add_token_list([f"t{i}" for i in range(99)])
        if count > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", len(tensors))
        for name, weight in tensors[number::count]:
            kind = F32 if weight.ndim == 1 or "attn" not in name else Q8_0
            writer.add_tensor(name, quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def _rounded(model):
    """The model with the weights that Q8_0 keeps."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "self_attn" in name:
                packed = quantize(weight.numpy(), Q8_0)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, Q8_0)))
    return model


BATCH = [{"input_ids": torch.arange(24).reshape(2, 12) + 3}]


def test_a_gguf_file_runs_and_gives_the_numbers_of_the_live_model(tmp_path):
    model = _rounded(tiny_llama())
    (path,) = _parts(tmp_path / "m.gguf", model)
    found, expected = osm.measure(path, BATCH), osm.measure(model, BATCH)
    for ours, theirs in zip(found.values, expected.values, strict=True):
        assert ours.mean == pytest.approx(theirs.mean, rel=1e-5, abs=1e-6)
    predicted, live = osm.predict(path, BATCH, solve=1), osm.predict(model, BATCH, solve=1)
    for ours, theirs in zip(predicted.layers, live.layers, strict=True):
        assert ours.identity_error < 1e-3
        assert ours.rungs[-1].mean == pytest.approx(theirs.rungs[-1].mean, rel=1e-4, abs=1e-6)


def test_a_live_model_that_transformers_dequantised_from_gguf_is_an_ordinary_model(tmp_path):
    from transformers import AutoModel

    (path,) = _parts(tmp_path / "m.gguf", tiny_llama())
    model = AutoModel.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    assert model.config.quantization_config is not None
    assert [layer.plain for layer in osm.inspect(model).layers] == [layer.plain for layer in osm.inspect(path).layers]
    assert osm.measure(model, BATCH).values == osm.measure(path, BATCH).values


def test_all_parts_of_an_analysis_are_there(tmp_path):
    (path,) = _parts(tmp_path / "m.gguf", tiny_llama())
    found = osm.analyze(path, BATCH, what_ifs=(), solve=1)
    assert found.missing == ()
    assert found.verification.passed
    assert found.measurement is not None
    assert found.prediction is not None


def test_an_architecture_that_transformers_cannot_build_gives_the_weights_and_the_reason(tmp_path):
    (path,) = _parts(tmp_path / "m.gguf", tiny_llama())
    content = path.read_bytes().replace(b"llama.", b"olmo2.").replace(b"llama", b"olmo2")
    path.write_bytes(content)
    with pytest.raises(NotLive, match="architecture olmo2 is not supported"):
        osm.measure(path, BATCH)


def test_a_split_model_is_read_as_one_from_any_of_its_parts(tmp_path):
    model = tiny_llama()
    parts = _parts(tmp_path / "m.gguf", model, count=3)
    whole = osm.inspect(_parts(tmp_path / "whole.gguf", model)[0])
    for part in parts:
        found = osm.inspect(part)
        assert found.layers == whole.layers
        assert len(found.provenance.files) == 3
    with pytest.raises(NotLive, match="llama-gguf-split --merge"):
        osm.measure(parts[0], BATCH)


def test_a_missing_part_is_named(tmp_path):
    parts = _parts(tmp_path / "m.gguf", tiny_llama(), count=3)
    parts[1].unlink()
    with pytest.raises(BrokenFile, match=r"all 3 parts beside it, found no m-00002-of-00003\.gguf"):
        osm.inspect(parts[0])


def test_parts_of_two_different_splits_are_refused(tmp_path):
    parts = _parts(tmp_path / "m.gguf", tiny_llama(), count=2)
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(BrokenFile, match=r"metadata split\.(no|tensors\.count) = "):
        osm.inspect(parts[0])


@pytest.mark.slow
def test_smollm2_as_gguf_has_a_whole_report_and_the_numbers_of_the_model_loaded_by_hand():
    from transformers import AutoModel, AutoTokenizer

    path = real_model("smollm2-135m-instruct") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    found = osm.analyze(path, max_samples=2, what_ifs=(), solve=1)
    assert found.missing == ()
    assert found.verification.passed
    assert len(found.prediction.layers) == 30
    assert max(layer.identity_error for layer in found.prediction.layers) < 1e-3
    options = {"gguf_file": path.name, "local_files_only": True}
    model = AutoModel.from_pretrained(path.parent, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **options)
    from oversmooth.data.samples import sample_texts

    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = sample_texts()[:2]
    batch = dict(tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))
    by_hand = osm.measure(model, [batch])
    for ours, theirs in zip(found.measurement.values, by_hand.values, strict=True):
        assert ours.mean == pytest.approx(theirs.mean, rel=1e-5, abs=1e-6)
