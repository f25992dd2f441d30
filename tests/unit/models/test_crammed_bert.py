"""The crammed BERT against closed forms, against the dense computation, and as an ordinary checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import oversmooth as osm
from oversmooth.models.live import register_own_models

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def code():
    from oversmooth.models import crammed_bert

    register_own_models()
    return crammed_bert


def masked_lm(code, seed=0, **changes):
    torch.manual_seed(seed)
    return code.CrammedBertForMaskedLM(code.CrammedBertConfig(**TINY | changes)).eval()


def ids(batch=2, tokens=10, seed=0):
    return torch.randint(5, 99, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def test_the_published_model_has_the_published_sizes(code):
    with torch.device("meta"):
        model = code.CrammedBertForMaskedLM(code.CrammedBertConfig())
    # embedding 32768 x 768, one scale; per layer qkv 3 d^2, output d^2, in 768 x 3072, out 1536 x 768, two norms; two more
    d, layer = 768, 4 * 768**2 + 768 * 3072 + 1536 * 768 + 2 * 768
    assert sum(p.numel() for p in model.parameters()) == 32768 * d + 1 + 16 * layer + 2 * d
    assert model.config.num_attention_heads == 12
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {1e-12}


def test_there_are_no_biases_and_the_decoder_is_the_embedding(code):
    model = masked_lm(code)
    assert [name for name, _ in model.named_parameters() if "bias" in name] == []
    assert model.decoder.weight is model.encoder.embeddings.word_embeddings.weight


def test_weights_start_normal_with_deviation_two_hundredths_and_norms_at_one(code):
    model = masked_lm(code, vocab_size=5000, hidden_size=64)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
        elif "norm" in name:
            torch.testing.assert_close(weight, torch.ones_like(weight))
    assert model.encoder.embeddings.positions.scale.item() == pytest.approx(64**-0.5)


def test_positions_are_sines_and_cosines_of_falling_frequency(code):
    table = code.sinusoids(7, 4)
    position = torch.arange(7.0)
    for column, expected in enumerate((position.sin(), position.cos(), (position / 100).sin(), (position / 100).cos())):
        torch.testing.assert_close(table[:, column], expected)
    assert code.sinusoids(3, 5).shape == (3, 5)


def test_the_block_is_the_pre_norm_gated_formula(code):
    model = masked_lm(code)
    layer = model.encoder.layers[0]
    x = torch.randn(2, 6, 32)
    h = F.layer_norm(x, (32,), eps=1e-12)
    q, k, v = (h @ w.T for w in layer.attention.qkv.weight.chunk(3))
    heads = [t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v)]
    mixed = (heads[0] @ heads[1].mT / 8**0.5).softmax(-1) @ heads[2]
    y = x + mixed.transpose(1, 2).flatten(2) @ layer.attention.output.weight.T
    a, b = (F.layer_norm(y, (32,), eps=1e-12) @ layer.ffn.dense_in.weight.T).chunk(2, -1)
    expected = y + (F.gelu(a) * b) @ layer.ffn.dense_out.weight.T
    torch.testing.assert_close(layer(x, None)[0], expected, rtol=1e-5, atol=1e-6)


def test_the_sparse_loss_is_the_dense_cross_entropy_over_labelled_tokens(code):
    model, inputs = masked_lm(code), ids()
    labels = torch.full_like(inputs, -100)
    labels[0, 3], labels[1, 7], labels[1, 9] = 11, 12, 13
    sparse = model(input_ids=inputs, labels=labels)
    dense = model(input_ids=inputs).logits
    expected = F.cross_entropy(dense.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(sparse.loss, expected)
    torch.testing.assert_close(sparse.logits, dense[[0, 1, 1], [3, 7, 9]])
    counted = model(input_ids=inputs, labels=labels, num_items_in_batch=torch.tensor(6)).loss
    torch.testing.assert_close(counted, expected / 2)


def test_a_batch_without_labelled_tokens_costs_nothing_and_is_no_nan(code):
    model, inputs = masked_lm(code), ids()
    assert model(input_ids=inputs, labels=torch.full_like(inputs, -100)).loss.item() == 0.0


def test_padding_does_not_change_what_the_other_tokens_see(code):
    model, inputs = masked_lm(code), ids(1, 10)
    padded = torch.cat([inputs, torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = (padded != 0).long()
    alone = model.encoder(inputs).last_hidden_state
    torch.testing.assert_close(model.encoder(padded, mask).last_hidden_state[:, :10], alone, rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    classifier = code.CrammedBertForSequenceClassification(code.CrammedBertConfig(**TINY, num_labels=3)).eval()
    torch.testing.assert_close(classifier(padded, mask).logits, classifier(inputs).logits, rtol=1e-5, atol=1e-5)
    loss = classifier(padded, mask, labels=torch.tensor([2])).loss
    torch.testing.assert_close(loss, -classifier(padded, mask).logits.log_softmax(-1)[0, 2])


def test_eager_and_fused_attention_agree_and_eager_shows_its_probabilities(code):
    model, inputs = masked_lm(code), ids()
    fused = model(input_ids=inputs).logits
    model.set_attn_implementation("eager")
    output = model(input_ids=inputs, output_attentions=True)
    torch.testing.assert_close(output.logits, fused, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.attentions[2].sum(-1), torch.ones(2, 4, 10))


def test_a_saved_model_is_an_ordinary_checkpoint_for_every_verb(code, tmp_path):
    from transformers import AutoModel, AutoModelForMaskedLM

    model = masked_lm(code)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "crammed-bert"
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(ids()).logits, model(ids()).logits)
    torch.testing.assert_close(AutoModel.from_pretrained(tmp_path)(ids())[0], model.encoder(ids())[0])
    assert len(osm.inspect(tmp_path).layers) == 3
    assert osm.verify(tmp_path).passed
    assert osm.predict(tmp_path, [{"input_ids": ids()}]).layers


ELSEWHERE = """
import sys, torch, torchvision_cure
from transformers import AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "oversmooth" not in sys.modules
print(model(torch.arange(5, 15)[None]).logits.double().sum().item())
"""


def test_plain_transformers_opens_it_where_this_package_is_not_installed(code, tmp_path):
    from oversmooth.environment import versions as torchvision_compat

    model = masked_lm(code)
    model.save_pretrained(tmp_path / "model")
    cure = Path(torchvision_compat.__file__).read_text() + "\n\ncure_torchvision_on_import()\n"
    (tmp_path / "torchvision_cure.py").write_text(cure)
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    run = subprocess.run(
        [sys.executable, tmp_path / "elsewhere.py", tmp_path / "model"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "HF_HOME": str(tmp_path / "home")},
    )
    assert run.returncode == 0, run.stderr
    expected = model(torch.arange(5, 15)[None]).logits.double().sum().item()
    assert float(run.stdout) == pytest.approx(expected, rel=1e-4)


def test_a_call_without_inputs_says_what_to_give(code):
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        masked_lm(code).encoder()


def test_loading_another_model_does_not_import_it():
    code = (
        "import sys\n"
        "from oversmooth.models.live import load_model\n"
        "from oversmooth.models.example_model import example_model\n"
        "from oversmooth.models.open import open_source\n"
        "load_model(open_source(example_model()), 'run')\n"
        "print('oversmooth.models.crammed_bert' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
