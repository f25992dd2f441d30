"""Texts as tokens: all of a text is used, what the tokenizer does not know is counted, and no tokenizer is no empty one."""

import json
import shutil

import numpy
import pytest
import torch

from oversmooth.data.raw import RawData
from oversmooth.data.tokens import TextRows, even_step, find_notation_tokenizer, find_tokenizer, random_ids, read_ids
from oversmooth.errors import BadValue, Conflict, NotSupported, UnknownTokens, UnreadableData, WrongBatch
from oversmooth.measurement.measure import measure
from oversmooth.models.open import open_source
from tests.contract.tiny_models import tiny_model
from tests.real_models import albert, minilm

UNKNOWN = "\ua66e"
"""A letter that MiniLM's tokenizer does not have."""


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm())


@pytest.fixture
def untokenized(tmp_path):
    """MiniLM without the files of its tokenizer."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(minilm() / name, tmp_path)
    return str(tmp_path)


def rows_of(tokenizer, *texts, length=16, allow_unknown=False):
    return TextRows(RawData(iter(texts), sum(map(len, texts))), tokenizer, length, allow_unknown)


def test_a_long_text_is_cut_into_windows_that_hold_all_of_it(tokenizer):
    text = " ".join(f"word{i}" for i in range(60))
    windows = list(rows_of(tokenizer, text))
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [token for ids in windows for token in ids[1:-1]] == whole
    lengths = [len(ids) for ids in windows]
    assert max(lengths) <= 16
    assert max(lengths) - min(lengths) <= len(lengths), "no window is a mere rest"
    assert {(ids[0], ids[-1]) for ids in windows} == {(tokenizer.cls_token_id, tokenizer.sep_token_id)}


def test_a_tokenizer_written_in_python_cuts_windows_too():
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    windows = list(rows_of(tokenizer, "abcdefghij" * 3, length=11))
    bare = tokenizer("abcdefghij" * 3, add_special_tokens=False)["input_ids"]
    assert [token for ids in windows for token in ids[:-1]] == bare
    assert {ids[-1] for ids in windows} == {tokenizer.eos_token_id}
    assert max(map(len, windows)) <= 11


@pytest.mark.parametrize(("tokens", "longest", "step"), [(130, 128, 65), (128, 128, 128), (1, 5, 1), (257, 128, 86)])
def test_windows_are_of_nearly_equal_length(tokens, longest, step):
    assert even_step(tokens, longest) == step


def test_one_long_file_is_used_whole(tmp_path):
    """60 kB whose blank lines hold a space, and one sentence per line, were one sequence of 128 tokens."""
    path = tmp_path / "a.txt"
    path.write_text("\n \n".join(["The quick brown fox jumps over the lazy dog. " * 20] * 3))
    facts = measure(str(minilm()), str(path), metrics="cosine").data
    assert facts.sequences == 6
    assert facts.text.characters == facts.text.characters_used == 3 * (45 * 20 - 1)
    path.write_text("The quick brown fox jumps.\n" * 60)
    assert measure(str(minilm()), str(path), metrics="cosine").data.sequences == 3
    assert measure(str(minilm()), str(path), metrics="cosine", per_line=True, max_samples=7).data.sequences == 7


def test_the_facts_say_how_much_of_a_file_was_used(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(["The quick brown fox jumps."] * 10))
    text = measure(str(minilm()), str(path), metrics="cosine", max_samples=4).data.text
    assert (text.characters, text.characters_used, text.texts) == (260, 4 * 26, 4)
    assert (text.tokens, text.unknown_tokens, text.unknown_share) == (24, 0, 0.0)


def test_of_data_that_were_not_read_to_their_end_the_total_is_missing_with_a_reason(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n' * 5)
    text = measure(str(minilm()), str(tmp_path / "a.jsonl"), metrics="cosine", max_samples=2).data.text
    assert text.characters is None
    assert text.missing[0].field == "characters"


def test_unknown_tokens_are_counted(tokenizer):
    rows = rows_of(tokenizer, f"the {UNKNOWN} fox {UNKNOWN} jumps over the dog")
    list(rows)
    assert (rows.unknown, rows.tokens) == (2, 8)
    torch.testing.assert_close(rows.unknown_share, 0.25)


def test_a_byte_level_tokenizer_knows_everything():
    from transformers import ByT5Tokenizer

    rows = rows_of(ByT5Tokenizer(), UNKNOWN * 5)
    list(rows)
    assert rows.facts().unknown_tokens == 0


@pytest.mark.parametrize(("unknown", "warnings"), [(0, 0), (1, 0), (4, 1)])
def test_a_twentieth_of_unknown_tokens_is_worth_a_warning(unknown, warnings, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" ".join([UNKNOWN] * unknown + ["dog"] * (40 - unknown)))
    assert len(measure(str(minilm()), str(path), metrics="cosine").data.warnings) == warnings


def test_a_fifth_of_unknown_tokens_is_refused_unless_allowed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" ".join([UNKNOWN] * 3 + ["dog"] * 7))
    with pytest.raises(UnknownTokens) as caught:
        measure(str(minilm()), str(path), metrics="cosine")
    for piece in ("3 of 10", "30%", "--ids", "--allow-unknown"):
        assert piece in str(caught.value)
    facts = measure(str(minilm()), str(path), metrics="cosine", allow_unknown=True).data
    torch.testing.assert_close(facts.text.unknown_share, 0.3)
    assert "30% of the tokens are unknown" in facts.warnings[0]


def test_much_unknown_text_is_refused_before_all_of_it_was_run(tokenizer):
    rows = rows_of(tokenizer, *[f"{UNKNOWN} {UNKNOWN} dog"] * 5000)
    with pytest.raises(UnknownTokens):
        list(rows)
    assert rows.read < 2000


def test_a_missing_tokenizer_is_not_an_empty_one(untokenized):
    facts = measure(untokenized, max_samples=2, metrics="cosine").data
    assert facts.origin == "random ids"
    assert "drawn at random from the model's own 30,522" in facts.description
    assert "no tokenizer" in facts.warnings[0]
    assert facts.text is None


def test_a_tokenizer_of_nothing_but_special_tokens_is_missing_too(tmp_path):
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).symlink_to(albert() / name)
    assert measure(str(tmp_path), max_samples=2, metrics="cosine").data.origin == "random ids"


def test_a_model_of_reactions_reads_reactions_and_knows_every_token():
    facts = measure(str(albert()), metrics="cosine").data
    assert facts.origin == "built-in"
    assert "reaction SMILES" in facts.preprocessing
    assert (facts.sequences, facts.text.unknown_tokens) == (16, 0)


def test_reactions_split_into_the_words_of_the_vocabulary():
    found = find_notation_tokenizer(str(albert()))
    words = {number: word for word, number in found.words.items()}
    ids = found("[Na+].ClC(Br)=C>>C%12?")["input_ids"]
    expected = "[CLS] [Na+] . Cl C ( Br ) = C >> C %12 [UNK] [SEP]"
    assert [words[token] for token in ids] == expected.split()


def test_english_for_a_model_of_reactions_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("Water boils at a hundred degrees, they say.")
    with pytest.raises(UnknownTokens, match="unknown"):
        measure(str(albert()), str(tmp_path / "a.txt"))


def test_a_vocabulary_of_words_is_no_notation():
    assert find_notation_tokenizer(str(minilm())) is None


@pytest.fixture
def antibody_model(tmp_path):
    """GPT-2 with the 33 words of a language model of antibodies, in their order."""
    from transformers import GPT2Config, GPT2LMHeadModel

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY", "[CAMEL]", "[HUMAN]", "[MOUSE]"]
    words += ["[RABBIT]", "[RAT]", "[RHESUS]", "[HEAVY]", "[LIGHT]"]
    config = GPT2Config(vocab_size=len(words), n_positions=256, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").write_text("\n".join(words))
    return tmp_path / "model"


def test_a_model_of_antibodies_reads_antibodies_and_knows_every_token(antibody_model):
    facts = measure(str(antibody_model), metrics="cosine").data
    assert facts.origin == "built-in"
    assert "amino acids" in facts.preprocessing
    assert (facts.sequences, facts.text.unknown_tokens) == (16, 0)


def test_antibodies_begin_with_chain_and_species_and_end_where_they_end(antibody_model):
    found = find_notation_tokenizer(str(antibody_model))
    words = {number: word for word, number in found.words.items()}
    ids = found("[HEAVY][HUMAN]EVX")["input_ids"]
    assert [words[token] for token in ids] == ["[HEAVY]", "[HUMAN]", "E", "V", "[UNK]", "[SEP]"]


def test_english_for_a_model_of_antibodies_is_refused(antibody_model, tmp_path):
    (tmp_path / "a.txt").write_text("Water boils at a hundred degrees, they say.")
    with pytest.raises(UnknownTokens, match="unknown"):
        measure(str(antibody_model), str(tmp_path / "a.txt"))


SPECIAL_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert_with_words(folder, words):
    """A small BERT with a list of words beside it and no settings of a tokenizer."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return folder


@pytest.fixture
def protein_model(tmp_path):
    """A BERT of proteins, as AntiBERTy is saved: letters of amino acids, and no markers of chain and species."""
    return bert_with_words(tmp_path / "proteins", [*SPECIAL_WORDS, *"LAGVESIKRDTPNQFYMHCW"])


def test_a_bert_of_amino_acids_reads_proteins_and_knows_every_token(protein_model):
    facts = measure(str(protein_model), metrics="cosine").data
    assert facts.origin == "built-in"
    assert "amino acids" in facts.preprocessing
    assert (facts.sequences, facts.text.unknown_tokens) == (16, 0)


@pytest.mark.parametrize("text", ["EVQLVESGGG", "E V Q L V E S G G G"])
def test_proteins_split_into_letters_with_and_without_spaces(protein_model, text):
    found = find_notation_tokenizer(str(protein_model))
    words = {number: word for word, number in found.words.items()}
    assert [words[token] for token in found(text)["input_ids"]] == ["[CLS]", *"EVQLVESGGG", "[SEP]"]


def test_capital_words_stay_capital_where_nothing_says_how_to_split(tmp_path):
    folder = bert_with_words(tmp_path / "cased", [*SPECIAL_WORDS, "Water", "water", "boils", "##s"])
    (tmp_path / "a.txt").write_text("Water boils waters Water\n\nWater boils")
    facts = measure(str(folder), str(tmp_path / "a.txt"), metrics="cosine").data
    assert facts.text.unknown_tokens == 0
    found, _ = find_tokenizer(open_source(str(folder)))
    assert found("Water water", add_special_tokens=False)["input_ids"] == [5, 6]


def test_built_in_texts_that_the_tokenizer_does_not_know_give_way_to_random_ids(tmp_path):
    """A list of words must not end in less than no list, which gives random ids."""
    folder = bert_with_words(tmp_path / "odd", [*SPECIAL_WORDS, "qqq", "www", "zzz"])
    facts = measure(str(folder), metrics="cosine").data
    assert facts.origin == "random ids"
    assert "does not know the built-in texts (for example '" in facts.warnings[0]
    assert measure(str(folder), metrics="cosine", allow_unknown=True).data.origin == "built-in"


def test_the_refusal_of_unknown_text_shows_a_few_unknown_words(protein_model, tmp_path):
    (tmp_path / "a.txt").write_text("zebra evqlvesggg")
    with pytest.raises(UnknownTokens) as caught:
        measure(str(protein_model), str(tmp_path / "a.txt"))
    assert "For example: 'z', 'e', 'b', 'r', 'a'." in str(caught.value)
    (tmp_path / "b.txt").write_text(" ".join(["dog", UNKNOWN * 40, UNKNOWN * 2]))
    with pytest.raises(UnknownTokens) as caught:
        measure(str(minilm()), str(tmp_path / "b.txt"))
    assert f"For example: '{UNKNOWN * 20}...', '{UNKNOWN * 2}'." in str(caught.value)


def test_another_tokenizer_is_used_where_it_is_given(untokenized, tmp_path):
    (tmp_path / "a.txt").write_text("One two three.\n\nFour five.")
    own = measure(str(minilm()), str(tmp_path / "a.txt"), metrics="cosine")
    given = measure(untokenized, str(tmp_path / "a.txt"), metrics="cosine", tokenizer=str(minilm()))
    assert given.data.sha256 == own.data.sha256
    assert given.data.preprocessing.startswith(f"the tokenizer of {minilm()}")


def test_a_tokenizer_that_is_none_or_does_not_fit_is_refused(untokenized, protein_model, tmp_path):
    (tmp_path / "a.txt").write_text("One two three.")
    with pytest.raises(BadValue, match="holds a tokenizer"):
        measure(untokenized, str(tmp_path / "a.txt"), tokenizer=str(tmp_path / "nowhere"))
    with pytest.raises(WrongBatch, match="ids below 25, found one with ids up to 30,521"):
        measure(str(protein_model), str(tmp_path / "a.txt"), tokenizer=str(minilm()))
    with pytest.raises(Conflict):
        measure(untokenized, tokenizer=str(minilm()), ids="ids.txt")
    with pytest.raises(Conflict):
        measure(tiny_model("bert")[0], [tiny_model("bert")[1]], tokenizer=str(minilm()))


def test_text_without_a_tokenizer_is_refused_with_what_to_give(untokenized, tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    with pytest.raises(WrongBatch, match="--ids") as caught:
        measure(untokenized, str(tmp_path / "a.txt"))
    assert f"a tokenizer beside {untokenized}" in caught.value.problem
    assert "--tokenizer" in caught.value.next_step


def test_random_ids_are_seeded_and_hold_no_special_ones():
    config = {"pad_token_id": 0, "eos_token_id": 3}
    drawn = random_ids(5, config, count=3, length=50, seed=1)
    assert drawn == random_ids(5, config, count=3, length=50, seed=1)
    assert drawn != random_ids(5, config, count=3, length=50, seed=2)
    assert {token for row in drawn for token in row} == {1, 2, 4}


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".npy"])
def test_token_ids_are_read_from_files(ending, tmp_path):
    path = tmp_path / f"ids{ending}"
    if ending == ".txt":
        path.write_text("5 6 7\n\n8, 9 10\n")
    elif ending == ".jsonl":
        path.write_text(json.dumps([5, 6, 7]) + "\n" + json.dumps({"input_ids": [8, 9, 10]}) + "\n")
    else:
        numpy.save(path, numpy.array([[5, 6, 7], [8, 9, 10]]))
    assert list(read_ids(str(path), 128)) == [[5, 6, 7], [8, 9, 10]]
    assert list(read_ids(str(path), 2)) == [[5, 6], [7], [8, 9], [10]]


def test_a_model_is_measured_on_given_ids(tmp_path):
    model, _ = tiny_model("bert")
    (tmp_path / "ids.txt").write_text("5 6 7\n8 9 10 11\n")
    facts = measure(model, ids=str(tmp_path / "ids.txt"), metrics="cosine").data
    assert (facts.sequences, facts.tokens, facts.origin) == (2, 7, "given")
    assert "ids.txt" in facts.description


@pytest.mark.parametrize(
    ("name", "content", "piece"),
    [
        ("a.txt", b"1 two 3", "line 1"),
        ("a.jsonl", b'{"input_ids": "no"}', "a JSON list of token ids"),
        ("a.jsonl", b"[1, true]", "a JSON list of token ids"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.npy", b"\x93NUMPY", "npy"),
        ("a.txt", b"\xff\xfe", "token ids"),
    ],
)
def test_broken_files_of_ids_are_refused(name, content, piece, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableData, match=piece):
        list(read_ids(str(tmp_path / name), 8))


def test_arrays_of_other_things_are_no_ids(tmp_path):
    numpy.save(tmp_path / "a.npy", numpy.zeros((2, 3)))
    with pytest.raises(UnreadableData, match="array of integers, found 2-D, float64"):
        list(read_ids(str(tmp_path / "a.npy"), 8))


def test_ids_and_data_are_not_given_together(tmp_path):
    model, inputs = tiny_model("bert")
    with pytest.raises(Conflict):
        measure(model, "some.txt", ids="ids.txt")
    with pytest.raises(Conflict):
        measure(model, [inputs], ids="ids.txt")
    with pytest.raises(NotSupported, match="takes image"):
        measure(tiny_model("vit")[0], ids="ids.txt")
