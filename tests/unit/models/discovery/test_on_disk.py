"""Checkpoints of model types that nobody declared: their layout is found on a skeleton, their tensors are read from disk."""

from pathlib import Path

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import UnknownArchitecture
from oversmooth.models.discovery.skeleton import built
from oversmooth.models.identify import declared_for

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def saved(folder: Path, model_type: str, **changes: object) -> tuple[torch.nn.Module, str]:
    """A random checkpoint of five layers, and the model that it was saved from."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**{**SIZES, **changes})
    model = built(config, AutoModelForCausalLM._model_mapping[type(config)])
    model.save_pretrained(folder)  # type: ignore[operator]
    return model, str(folder)


@pytest.mark.parametrize("model_type", ["arcee", "olmo", "glm"])
def test_an_undeclared_checkpoint_is_read_like_the_live_model(model_type: str, tmp_path: Path) -> None:
    assert not declared_for(model_type)
    model, folder = saved(tmp_path, model_type)
    from_disk, live = osm.inspect(folder), osm.inspect(model)
    assert len(from_disk.layers) == 5
    assert from_disk.provenance.discovery_error is not None
    assert from_disk.provenance.discovery_error < 1e-5
    assert [layer.plain for layer in from_disk.layers] == [layer.plain for layer in live.layers]
    assert [layer.folded for layer in from_disk.layers] == [layer.folded for layer in live.layers]


def test_an_undeclared_checkpoint_can_be_verified_and_run(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "arcee")
    assert osm.verify(folder).passed
    ids = torch.randint(3, 99, (2, 10))
    found = osm.predict(folder, [{"input_ids": ids}], solve=1, heads=False)
    assert max(layer.identity_error for layer in found.layers) < 1e-3


def test_a_gated_checkpoint_is_inspected_at_gain_one_and_says_so(tmp_path: Path) -> None:
    model, folder = saved(tmp_path, "afmoe", num_experts=2, num_experts_per_tok=1)
    found = osm.inspect(folder)
    assert "gates at gain one" in found.stacks[0].form
    live = osm.inspect(model)
    assert [layer.plain.rho_dc for layer in found.layers] == [layer.plain.rho_dc for layer in live.layers]


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("arcee", ('"hidden_size": 32', '"hidden_size": -32'), "no small model can be built from its config"),
        ("arcee", ('"arcee"', '"longformer"'), "global tokens have value weights of their own"),
    ],
)
def test_discover_says_why_a_checkpoint_is_not_built(
    model_type: str, change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    _, folder = saved(tmp_path, model_type)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(*change))
    with pytest.raises(osm.OversmoothError, match=words):
        osm.discover(folder)


def test_a_type_that_no_library_can_build_is_unknown(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "arcee")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"arcee"', '"nobody-knows"'))
    with pytest.raises(UnknownArchitecture, match="nobody-knows"):
        osm.inspect(folder)
