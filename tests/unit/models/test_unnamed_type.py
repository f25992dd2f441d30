"""A config that names no model type: the family that the weights show is run, not only inspected."""

import json
from pathlib import Path

import oversmooth as osm  # isort: skip  (first: it lets transformers import beside a torchvision of another build)
import pytest
import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from oversmooth.errors import NotLive

BERT = BertConfig(
    hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=99, pad_token_id=0
)
IDS = torch.arange(3, 23).reshape(2, 10)


def without(folder: Path, *names: str) -> str:
    """The folder with these fields taken out of its config."""
    file = folder / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in names}
    file.write_text(json.dumps(config))
    return str(folder)


def test_it_is_measured_like_the_same_model_with_a_name(tmp_path: Path) -> None:
    model = BertModel(BERT).eval()
    model.save_pretrained(tmp_path)
    named = osm.measure(model, [{"input_ids": IDS}])
    unnamed = osm.measure(without(tmp_path, "model_type", "architectures"), [{"input_ids": IDS}])
    assert unnamed.values == named.values


def test_where_several_families_fit_the_user_says_which(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=99)).save_pretrained(tmp_path)
    folder = without(tmp_path, "model_type", "architectures")
    with pytest.raises(osm.OversmoothError, match="gpt2, gpt_bigcode"):
        osm.verify(folder)
    assert osm.verify(folder, model_type="gpt2").passed


def test_heads_are_not_guessed(tmp_path: Path) -> None:
    BertModel(BERT).save_pretrained(tmp_path)
    with pytest.raises(NotLive):
        osm.verify(without(tmp_path, "model_type", "architectures", "num_attention_heads"))
