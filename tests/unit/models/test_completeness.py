"""Nothing is ever measured on weights that were not in the file."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from oversmooth.errors import IncompleteWeights
from oversmooth.measurement.measure import measure
from oversmooth.models.live import load_model
from oversmooth.models.open import open_source
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model

TIMM = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}


@pytest.fixture
def bert(tmp_path):
    model, _ = tiny_model("bert")
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def vit(tmp_path):
    import timm

    model = timm.create_model("vit_tiny_patch16_224", **TIMM)
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": TIMM, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def loaded(folder):
    return load_model(open_source(str(folder)), "measure")


def test_a_deleted_tensor_is_named(bert):
    name = "encoder.layer.1.intermediate.dense.weight"
    rewrite(bert, lambda tensors: tensors.pop(name))
    with pytest.raises(IncompleteWeights, match=name.replace(".", r"\.")):
        loaded(bert)


def test_a_renamed_tensor_is_named_under_both_names(bert):
    rewrite(bert, lambda t: t.update({"embeddings.words.weight": t.pop("embeddings.word_embeddings.weight")}))
    with pytest.raises(IncompleteWeights) as caught:
        loaded(bert)
    assert "embeddings.word_embeddings.weight" in str(caught.value)
    assert "embeddings.words.weight" in str(caught.value)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(bert):
    def shorten(tensors):
        tensors["encoder.layer.0.output.dense.bias"] = torch.zeros(31)

    rewrite(bert, shorten)
    with pytest.raises(IncompleteWeights, match=r"encoder\.layer\.0\.output\.dense\.bias.*\(31,\).*\(32,\)"):
        loaded(bert)


def test_more_layers_in_the_config_than_in_the_file_are_refused(bert):
    set_config(bert, num_hidden_layers=9)
    done = oversmooth("measure", bert)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    with pytest.raises(IncompleteWeights, match=r"encoder\.layer\.8\.|and \d+ more"):
        loaded(bert)


def test_fewer_layers_in_the_config_than_in_the_file_are_refused(bert):
    set_config(bert, num_hidden_layers=1)
    done = oversmooth("measure", bert)
    assert done.returncode == 2
    assert "number of layers" in done.stderr


def test_a_pooler_that_is_not_on_the_path_may_be_missing(bert):
    whole = loaded(bert)
    rewrite(bert, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("pooler.")])
    without = loaded(bert)
    ids = torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(without(ids).last_hidden_state, whole(ids).last_hidden_state)


def test_a_base_model_is_read_from_a_checkpoint_with_a_head(tmp_path):
    from transformers import BertForMaskedLM

    model, _ = tiny_model("bert")
    BertForMaskedLM(model.config).save_pretrained(tmp_path)
    assert measure(str(tmp_path), [torch.tensor([[1, 2, 3]])]).data.sequences == 1


def test_a_timm_folder_with_a_deleted_tensor_is_refused(vit):
    loaded(vit)
    rewrite(vit, lambda tensors: tensors.pop("blocks.2.mlp.fc1.weight"))
    with pytest.raises(IncompleteWeights, match=r"blocks\.2\.mlp\.fc1\.weight"):
        loaded(vit)


def test_a_timm_folder_is_checked_also_where_timm_would_load_it_loosely(vit):
    """timm drops a classifier of another size, and with it its own check for everything else."""
    set_config(vit, num_classes=7, pretrained_cfg={"num_classes": 5, "classifier": "head"})
    rewrite(vit, lambda tensors: tensors.pop("pos_embed"))
    with pytest.raises(IncompleteWeights, match="pos_embed"):
        loaded(vit)


def test_a_timm_folder_may_lack_its_classifier(vit):
    whole = loaded(vit)
    rewrite(vit, lambda tensors: [tensors.pop(name) for name in ("head.weight", "head.bias")])
    images = torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(loaded(vit).forward_features(images), whole.forward_features(images))


def test_the_answer_is_the_same_from_run_to_run(bert):
    batches = [torch.tensor([[1, 2, 3, 4]])]
    assert measure(str(bert), batches).to_json() == measure(str(bert), batches).to_json()
