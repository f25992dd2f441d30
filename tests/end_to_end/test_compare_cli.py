"""`oversmooth compare`: every target is checked before any work, and what each was run on is said."""

import pytest
import torch

from oversmooth import analysis
from tests.command_line import oversmooth

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three", "four", "five", "six"]
"""Eleven of them."""


def bert(folder, seed, *, has_words, words=11):
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=words, **sizes)).save_pretrained(folder)
    if has_words:
        (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder


@pytest.fixture
def base(tmp_path):
    return bert(tmp_path / "base", 0, has_words=True)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data.txt").write_text("one two three\n\nfour five six one\n\ntwo two three five")
    return tmp_path / "data.txt"


def test_a_checkpoint_without_a_tokenizer_takes_that_of_the_other_which_is_said(base, data, tmp_path):
    trained = bert(tmp_path / "checkpoint-3", 1, has_words=False)
    page = tmp_path / "page.md"
    done = oversmooth("compare", base, trained, "--data", data, "-o", page)
    assert done.returncode == 0, done.stderr
    assert f"{trained} has no tokenizer of its own: that of {base} is used." in done.stderr
    assert done.stdout.splitlines()[-1].startswith("On these inputs tokens end")
    assert "too few to say which model is better" in done.stdout
    assert "random" not in done.stdout
    assert "The output of checkpoint-3 is" in page.read_text()  # both were run on the same tokens


def test_the_first_model_may_be_the_one_without_a_tokenizer(base, data, tmp_path):
    trained = bert(tmp_path / "checkpoint-3", 1, has_words=False)
    done = oversmooth("compare", trained, base, "--loss", "--data", data, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert f"{trained} has no tokenizer of its own: that of {base} is used." in done.stderr


def test_where_no_other_fits_the_target_is_named_before_any_work(base, data, tmp_path, monkeypatch):
    other = bert(tmp_path / "other", 1, has_words=False, words=20)
    monkeypatch.setattr(analysis, "analyze", lambda *words, **more: pytest.fail("work was begun"))
    done = oversmooth("compare", base, other, "--data", data, "-o", tmp_path / "page.html")
    assert done.returncode == 2
    assert f"a tokenizer beside {other}" in done.stderr
    assert "--tokenizer" in done.stderr


def test_a_tokenizer_is_given_for_models_that_have_none(base, data, tmp_path):
    pair = [bert(tmp_path / name, seed, has_words=False) for seed, name in enumerate(("a", "b"))]
    done = oversmooth("compare", *pair, "--data", data, "--tokenizer", base, "-o", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "random" not in done.stdout
    done = oversmooth("compare", *pair, "--data", data, "--tokenizer", tmp_path / "no", "-o", tmp_path / "page.html")
    assert (done.returncode, "holds a tokenizer" in done.stderr) == (2, True)


def test_models_without_any_tokenizer_are_compared_on_random_ids_and_it_is_said(tmp_path):
    pair = [bert(tmp_path / name, seed, has_words=False) for seed, name in enumerate(("a", "b"))]
    page = tmp_path / "page.md"
    done = oversmooth("compare", *pair, "-o", page)
    assert done.stdout.splitlines()[-1].startswith("On random token ids: "), done.stderr
    assert page.read_text().count("drawn at random") >= 2
