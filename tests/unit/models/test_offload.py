"""Weights that stay in their files: the same numbers, and no more in memory than a block at a time."""

import pytest
import torch
import transformers

import oversmooth as osm
from oversmooth.errors import Conflict, IncompleteWeights, NotSupported, UnknownName
from oversmooth.models import live as offload
from oversmooth.models.live import load_model
from oversmooth.models.open import open_source
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model
from tests.unit.models.stores import checkpoints as made


def assert_same_numbers(found, expected, relative=1e-4):
    for ours, theirs in zip(found.rows(), expected.rows(), strict=True):
        for column, value in ours.items():
            is_number = isinstance(value, float)
            assert value == (pytest.approx(theirs[column], rel=relative, abs=1e-5) if is_number else theirs[column])


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "gpt2", "t5"])
def test_an_offloaded_model_gives_the_numbers_of_the_one_in_memory(name, tmp_path):
    model, inputs = tiny_model(name)
    model.save_pretrained(tmp_path)
    target = open_source(tmp_path, offload=True)
    found, expected = osm.measure(target, [inputs]), osm.measure(tmp_path, [inputs])
    assert_same_numbers(found, expected)
    assert "weights read block by block" in found.provenance.compute_dtype
    assert found.provenance.weights_sha256 == expected.provenance.weights_sha256
    assert_same_numbers(osm.predict(target, [inputs], solve=1), osm.predict(tmp_path, [inputs], solve=1))


def test_nothing_stays_in_memory_and_one_block_at_a_time_is_read(tmp_path):
    model, inputs = tiny_model("llama")
    model.save_pretrained(tmp_path)
    live = load_model(open_source(tmp_path, offload=True), "measure")
    held = []

    def look(*_):
        held.append(sum(not weight.is_meta for layer in live.layers for weight in layer.parameters()))

    for layer in live.layers:
        layer.mlp.register_forward_hook(look)
    live(**inputs)
    in_one_block = len(list(live.layers[0].parameters()))
    assert held == [in_one_block] * len(live.layers)
    assert all(weight.is_meta for weight in live.parameters())


def test_a_model_that_does_not_fit_is_offloaded_by_itself(tmp_path, monkeypatch):
    model, inputs = tiny_model("llama")
    model.save_pretrained(tmp_path)
    assert not offload.is_offloaded(load_model(open_source(tmp_path), "measure"))
    monkeypatch.setattr(offload, "free_memory", lambda: 10_000)
    found = osm.measure(tmp_path, [inputs])
    assert "weights read block by block" in found.provenance.compute_dtype
    assert not offload.is_offloaded(load_model(open_source(tmp_path, offload=False), "measure"))


def test_quantised_weights_are_made_block_by_block(tmp_path):
    model = made.write(tmp_path, made.gptq(4, 16))
    batch = [{"input_ids": torch.arange(24).reshape(2, 12) + 3}]
    found = osm.measure(open_source(tmp_path, offload=True, dtype="float32"), batch)
    assert_same_numbers(found, osm.measure(model, batch))


def test_a_model_runs_in_what_it_is_stored_in_unless_told(tmp_path):
    model, inputs = tiny_model("llama")
    model.bfloat16().save_pretrained(tmp_path)
    assert osm.measure(tmp_path, [inputs]).provenance.compute_dtype == "model bfloat16, metrics float32"
    wider = osm.measure(open_source(tmp_path, dtype="float32"), [inputs])
    assert wider.provenance.compute_dtype == "model float32, metrics float32"
    offloaded = osm.measure(open_source(tmp_path, offload=True), [inputs])
    assert offloaded.provenance.compute_dtype.startswith("model bfloat16 (weights")
    assert_same_numbers(offloaded, osm.measure(tmp_path, [inputs]))
    with pytest.raises(UnknownName, match="int3"):
        open_source(tmp_path, dtype="int3")


def test_the_command_line_takes_both(tmp_path):
    model, _ = tiny_model("vit")
    model.save_pretrained(tmp_path)
    done = oversmooth("measure", tmp_path, "--offload", "--dtype", "bfloat16", "--format", "json", "--max-samples", "2")
    assert done.returncode == 0, done.stderr
    assert "model bfloat16 (weights read block by block)" in done.stdout


def test_weights_that_are_missing_are_named_before_anything_runs(tmp_path):
    from safetensors.torch import load_file, save_file

    model, inputs = tiny_model("llama")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(IncompleteWeights, match=r"layers\.1\.mlp\.up_proj"):
        osm.measure(open_source(tmp_path, offload=True), [inputs])


def test_a_model_that_accelerate_keeps_on_disk_is_measured_where_it_is(tmp_path):
    from transformers import AutoModel

    model, inputs = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    spread = {"embed_tokens": "cpu", "layers.0": "cpu", "layers.1": "disk", "layers.2": "disk"}
    spread |= {"norm": "cpu", "rotary_emb": "cpu"}
    live = AutoModel.from_pretrained(tmp_path / "model", device_map=spread, offload_folder=tmp_path / "weights")
    assert any(weight.is_meta for weight in live.parameters())
    assert_same_numbers(osm.measure(live, [inputs]), osm.measure(model, [inputs]))
    assert_same_numbers(osm.inspect(live), osm.inspect(model))


def test_gguf_files_are_not_offloaded(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"")
    source = open_source(tiny_model("llama")[0])
    import dataclasses

    gguf = dataclasses.replace(source, gguf_file="x.gguf", place=str(tmp_path), module=None, offload=True)
    with pytest.raises(NotSupported, match="--offload"):
        offload.load_offloaded(gguf, None)


# --- spread over devices -------------------------------------------------------------------------------------------


def test_a_model_that_accelerate_places_gives_the_same_numbers(tmp_path, monkeypatch):
    model, inputs = tiny_model("llama")
    model.save_pretrained(tmp_path)
    expected, asked = osm.measure(tmp_path, [inputs]), []
    load = transformers.AutoModel.from_pretrained

    def noted(*words, **more):
        asked.append(more.get("device_map"))
        return load(*words, **more)

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", noted)
    assert_same_numbers(osm.measure(tmp_path, [inputs], device_map="auto"), expected)
    assert asked == ["auto"]


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"offload": True}])
def test_a_model_is_placed_in_one_way(other, tmp_path):
    with pytest.raises(Conflict, match="device_map"):
        open_source(tmp_path, device_map="auto", **other)
    with pytest.raises(UnknownName, match=r"Unknown device_map 'aut'.*Close: auto"):
        open_source(tmp_path, device_map="aut")
