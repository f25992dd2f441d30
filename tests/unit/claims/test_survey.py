"""The survey: plain numbers of real models; shared layers once, unknown tokens refused."""

import json

import pytest
import torch

from oversmooth import analyze, measure
from oversmooth.claims import pretrained as survey
from oversmooth.claims.context import INPUTS, ClaimContext
from oversmooth.models.example_model import example_model
from tests.contract.tiny_models import tiny_model


class Given(ClaimContext):
    """Analyses that the test made; nothing was trained."""

    def __init__(self, analyses, out):
        super().__init__(out=out, targets=(), is_quick=True)
        self.analyses = analyses

    def surveyed(self):
        return self.analyses


@pytest.fixture(autouse=True)
def nothing_trained(monkeypatch):
    monkeypatch.setattr(survey, "TRAINED", ())
    monkeypatch.setattr(survey, "training_numbers", lambda materials, needs: [])


def analysed(case: str):
    model, inputs = tiny_model(case)
    return analyze(model, [inputs], what_ifs=("no_skip", "positive_norms"))


def reader(folder):
    """A small BERT that reads MiniLM's tokens, saved as a checkpoint."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    tokenizer = AutoTokenizer.from_pretrained(example_model())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_layers_that_share_weights_count_once(tmp_path):
    shared, plain = analysed("albert"), analysed("bert")
    found = survey.dominating_eigenvalue(Given([("albert", shared), ("bert", plain)], tmp_path))
    names = [row["model"] for row in found["layers"]]
    weights = {layer.layer for layer in shared.prediction.layers}
    assert names.count("albert") == len(weights) < len(shared.prediction.layers)
    assert names.count("bert") == len(plain.prediction.layers)
    assert all(row["kind"] == "pretrained" and row["measured"] is not None for row in found["layers"])
    json.dumps(found)


def test_without_its_skip_every_pass_of_every_layer_is_computed(tmp_path):
    found = survey.without_skip(Given([("gpt2", analysed("gpt2"))], tmp_path))
    assert {row["regime"] for row in found["computed"]} == {"smoothing"}


def test_negative_norm_weights_are_counted_and_turned_positive(tmp_path):
    model, inputs = tiny_model("llama")
    with torch.no_grad():
        model.layers[0].input_layernorm.weight[:4] *= -1
    found = survey.sign_of_norms(Given([("llama", analyze(model, [inputs], what_ifs=("positive_norms",)))], tmp_path))
    shares = [row["negative_share"] for row in found["layers"]]
    assert shares[0] == pytest.approx(4 / len(model.layers[0].input_layernorm.weight))
    assert set(shares[1:]) == {0.0}
    assert found["layers"][0]["exponent"] != found["layers"][0]["exponent_positive"]
    assert found["layers"][1]["exponent"] == pytest.approx(found["layers"][1]["exponent_positive"], abs=1e-4)


def test_similarity_and_real_passes_are_taken_input_by_input(tmp_path):
    materials = ClaimContext(out=tmp_path / "out", targets=(str(reader(tmp_path / "reader")),))
    found = survey.similarity_over_depth(materials)
    assert len(found["inputs"]) == INPUTS
    assert all(-1 <= row["cosine_last"] <= 1 for row in found["inputs"])
    assert not found["left_out"]
    ((_, model),) = materials.live_models()
    curve = measure(model.live.model, [model.batches[0]], metrics="cosine").curve("cosine")
    expected = [round(curve[end].mean, 6) for end in (0, -1)]
    row = found["inputs"][0]
    assert [row["cosine_embedding"], row["cosine_last"]] == pytest.approx(expected, abs=2e-6)
    passes = survey.without_skip(materials)["passes"]
    assert [row["removed"] for row in passes[:3]] == ["none", "attention", "block"]
    assert passes[0]["cosine_last"] == found["inputs"][0]["cosine_last"]
    assert passes[0]["cosine_last"] not in (passes[1]["cosine_last"], passes[2]["cosine_last"])


def test_a_model_whose_tokenizer_does_not_know_our_texts_is_left_out_with_the_reason(tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path / "foreign"
    BertModel(BertConfig(vocab_size=8, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)).save_pretrained(
        folder
    )
    (folder / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "C", "O")))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    materials = ClaimContext(out=tmp_path / "out", targets=(str(folder),))
    assert materials.surveyed() == materials.live_models() == []
    (left_out,) = materials.left_out()
    assert "does not know" in left_out["reason"]
