"""Every declared family goes through `edit` and `prune`, and plain transformers or timm reads back what they wrote."""

import json
import random

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import CannotControl
from tests.contract.tiny_models import TIMM, TINY, marked, tiny_model

SAMPLE = frozenset(random.Random(33).sample(sorted((*TINY, *TIMM)), 3)) | {"gpt2"}
FAMILIES = marked((*TINY, *TIMM), SAMPLE)
NOT_PRUNED = {
    **dict.fromkeys(("albert",), "share their weights"),
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "marian", "whisper", "clip", "siglip"), "stacks"),
    "gemma3-multimodal": "stacks",
    "jamba": "blocks of other kinds",
}
"""Families that `prune` refuses, and what it says."""


def saved(case: str, folder):
    """A tiny model as its library saves it, and data that it runs on."""
    model, inputs = tiny_model(case)
    if case in TIMM:
        from timm.models import save_for_hf

        sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
        more = {name: value for name, value in TIMM[case].items() if name != "architecture"}
        save_for_hf(model, folder, model_args={**sizes, **more})
        return model, {"x": torch.cat([inputs[""] + shift for shift in range(4)]), "labels": torch.arange(4)}
    model.save_pretrained(folder)
    data = {name: value.repeat(4, *[1] * (value.ndim - 1)) for name, value in inputs.items()}
    for shift in range(4):
        for value in data.values():
            value[shift] = value[shift].roll(shift, -1)
    return model, data


@pytest.mark.parametrize("case", FAMILIES)
def test_an_edited_checkpoint_is_read_back_as_the_edited_live_model(case, tmp_path):
    saved(case, tmp_path / "whole")
    result = osm.edit(tmp_path / "whole", tmp_path / "out", scale_h=-0.5)
    assert result.read_back is not None
    assert (result.read_back.inputs, result.read_back.not_checked) == (2, "")
    assert result.read_back.largest_difference <= 1e-5


@pytest.mark.parametrize("case", FAMILIES)
def test_a_pruned_checkpoint_is_read_back_as_the_live_model_without_the_block(case, tmp_path):
    _, data = saved(case, tmp_path / "whole")
    if case in NOT_PRUNED:
        with pytest.raises(CannotControl, match=NOT_PRUNED[case]):
            osm.prune(tmp_path / "whole", tmp_path / "out", [data], blocks="1")
        return
    result = osm.prune(tmp_path / "whole", tmp_path / "out", [data], blocks="1")
    assert result.read_back is not None
    assert (result.read_back.inputs, result.read_back.not_checked) == (2, "")
    assert result.read_back.largest_difference <= 1e-5
    assert result.read_back.loss == pytest.approx(result.after.loss, rel=1e-4, abs=1e-4)


def test_an_original_that_the_plain_library_gives_other_shapes_is_edited_and_not_compared(tmp_path):
    saved("t5", tmp_path / "whole")
    place = tmp_path / "whole" / "config.json"
    config = json.loads(place.read_text())
    del config["d_kv"]  # then transformers takes 64, whatever the weights are
    place.write_text(json.dumps(config))
    result = osm.edit(tmp_path / "whole", tmp_path / "out", interval=(0.0, 1.0))
    assert result.read_back is not None
    assert "another shape than the original" in result.read_back.not_checked
