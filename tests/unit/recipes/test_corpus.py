"""Documents of every format and every defect, and the corpus they become: hashed, resumable, ordered, held out."""

import gzip
import json
import math
from collections import Counter

import numpy
import pytest

from oversmooth.errors import BadValue, UnknownName, UnreadableData
from oversmooth.recipes import corpus as corpus_module
from oversmooth.recipes.corpus import (
    CUT,
    EMPTY,
    NO_JSON,
    NO_TEXT,
    SPECIAL_TOKENS,
    TOO_LONG,
    CorpusSettings,
    Tally,
    corpus_files,
    documents,
    prepare_corpus,
    train_wordpiece,
    unigram_entropy,
    untrained_wordpiece,
)

TEXT = "the cat sat on a mat while seven grey birds sang of rain and quiet rivers under old stone bridges"
WORDS = TEXT.split()


def sentence(number: int, words: int = 8) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(words)) + "."


def text(number: int) -> str:
    """About sixty words, in sentences whose length depends on the number."""
    length = 3 + number % 9
    return " ".join(sentence(number + i, length) for i in range(60 // length))


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text(i), "meta": {}}) + "\n" for i in range(400)))
    return path


def settings(source, **changes) -> CorpusSettings:
    return CorpusSettings(**{"source": str(source), "vocab_size": 200, "length": 16, "trash_cutoff": None} | changes)


# --- documents -------------------------------------------------------------------------------------------------------


def write(path, texts):
    """The texts in the format that the ending of the path asks for."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if path.name.endswith(".jsonl"):
        path.write_bytes(lines)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        import pyarrow

        half = lines.index(b"\n") + 1  # two frames, as concatenated archives have
        codec = pyarrow.Codec("zstd")
        path.write_bytes(b"".join(codec.compress(part, asbytes=True) for part in (lines[:half], lines[half:])))
    elif path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts, "other": list(range(len(texts)))}), path)
    else:
        path.write_text("\n\n".join(texts))
    return path


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.jsonl.zst", "c.parquet", "c.txt"])
def test_every_format_gives_the_same_documents_and_can_be_taken_up_anywhere(name, tmp_path):
    texts = [text(i) for i in range(150)]
    path = write(tmp_path / name, texts)
    tally, seen = Tally(), []
    assert list(documents(str(path), tally, report=lambda done, total: seen.append((done, total)))) == texts
    assert (tally.records, tally.skipped) == (150, Counter())
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert seen == sorted(seen)
    assert list(documents(str(path), Tally(), skip=97)) == texts[97:]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name, part in (("b.txt", ["two"]), ("a.jsonl", ["one"]), ("c.parquet", ["three"])):
        write(tmp_path / name, part)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert list(documents(str(tmp_path), Tally())) == ["one", "two", "three"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnreadableData, match=r"files that end in .jsonl"):
        corpus_files(str(tmp_path / "empty"))


def test_defects_are_passed_over_counted_and_named_with_file_and_line(tmp_path):
    path = tmp_path / "defects.jsonl"
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut off',
        b'{"text": ""}',
        b'{"text": "  \\n "}',
        b"",
        b'{"title": "no text here"}',
        b'["a list"]',
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": "not \xff utf-8"}',
        b"[" * 100_000,
        b'{"text": "half a pair \\ud83d of surrogates"}',
        '{"text": "\u4f60\u597d, \u043f\u0440\u0438\u0432\u0435\u0442, \u0645\u0631\u062d\u0628\u0627, \U0001f600"}'.encode(),
        b'{"text": "good again"}',
    ]
    path.write_bytes(b"\n".join(lines))
    tally = Tally()
    found = list(documents(str(path), tally))
    assert found == ["good", "half a pair ? of surrogates", "你好, привет, مرحبا, 😀", "good again"]
    assert tally.skipped == {NO_JSON: 3, EMPTY: 3, NO_TEXT: 4}
    assert tally.records == len(lines)
    assert any(line.startswith(f"{path}, line 2: not JSON (") for line in tally.named)
    assert f"{path}, line 6: no text (found title)" in tally.named
    assert f"{path}, line 8: no text (a int under 'text')" in tally.named


def test_a_line_longer_than_the_limit_is_passed_over_and_the_next_one_read(tmp_path):
    path = write(tmp_path / "long.jsonl", ["before", "x" * 5000, "after"])
    tally = Tally()
    assert list(documents(str(path), tally, max_record_bytes=1000)) == ["before", "after"]
    assert tally.skipped == {TOO_LONG: 1}
    assert tally.named == [f"{path}, line 2: {TOO_LONG} (5,013 bytes; at most 1,000)"]


def test_a_paragraph_longer_than_the_limit_is_cut_and_nothing_is_lost(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("short\n\n" + "x" * 2500 + "\nend\n\nlast")
    tally = Tally()
    found = list(documents(str(path), tally, max_record_bytes=1000))
    assert [len(part) for part in found] == [5, 1000, 1000, 504, 4]
    assert tally.skipped[CUT] == 2
    assert "line 3: cut in pieces (after 1,000 bytes)" in tally.named[0]


@pytest.mark.parametrize("name", ["c.jsonl.zst", "c.jsonl.gz"])
def test_a_damaged_archive_says_which_file_and_after_which_line(name, tmp_path):
    path = write(tmp_path / name, [text(i) for i in range(500)])
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UnreadableData, match=rf"{name}.*damaged data after line \d+"):
        list(documents(str(path), Tally()))


def test_a_table_without_text_and_a_file_that_is_no_table_are_refused(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"words": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UnreadableData, match="a column 'text', found the columns words"):
        list(documents(str(tmp_path / "a.parquet"), Tally()))
    (tmp_path / "b.parquet").write_bytes(b"nonsense" * 10)
    with pytest.raises(UnreadableData, match="expected a Parquet file"):
        list(documents(str(tmp_path / "b.parquet"), Tally()))


def test_a_hub_id_is_streamed_and_counted_by_row(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_list([{"text": t} for t in ("one", "", "three", "four")]).to_iterable_dataset()
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **kw: asked.update(name=name, **kw) or rows)
    tally = Tally()
    assert list(documents("someone/pile:validation", tally)) == ["one", "three", "four"]
    assert asked == {"name": "someone/pile", "split": "validation", "streaming": True}
    assert tally.named == ["someone/pile:validation, row 2: empty"]
    assert list(documents("someone/pile", Tally(), skip=3)) == ["four"]


def test_what_is_neither_here_nor_on_the_hub_is_named():
    with pytest.raises(UnreadableData, match=r"'no/such-corpus'.*a file, a folder or a dataset of the hub"):
        list(documents("no/such-corpus", Tally()))


# --- vocabulary ------------------------------------------------------------------------------------------------------


def test_normalisation_lowers_strips_accents_and_keeps_or_drops_other_scripts():
    kept = untrained_wordpiece(english_keyboard=False).normalizer
    assert kept.normalize_str("Élan ``vital'' Привет") == 'elan "vital" привет'
    plain = untrained_wordpiece(english_keyboard=True).normalizer
    assert plain.normalize_str("Élan 你好 x") == "elan  x"


def test_the_same_texts_give_the_same_vocabulary_with_the_padding_at_zero():
    texts = [text(i) for i in range(100)]
    one, two = (train_wordpiece(lambda: texts, 150, english_keyboard=True) for _ in range(2))
    assert one.to_str() == two.to_str()
    assert [one.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert one.get_vocab_size() <= 150
    assert one.encode("The cat", "a mat").tokens[::3] == ["[CLS]", "[SEP]", "[SEP]"]


# --- the corpus ------------------------------------------------------------------------------------------------------


def test_the_sequences_are_the_documents_joined_by_separators(jsonl, tmp_path):
    corpus = prepare_corpus(settings(jsonl, validation_fraction=0.0, order="as-read"), tmp_path / "cache")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(corpus.tokenizer)
    expected = [
        token
        for i in range(400)
        for token in [*tokenizer(text(i), add_special_tokens=False)["input_ids"], tokenizer.sep_token_id]
    ]
    sequences = corpus.sequences("train")
    assert sequences.shape == (len(expected) // 16, 16)
    assert sequences.flatten().tolist() == expected[: sequences.size]
    assert corpus.order() is None
    assert tokenizer.model_max_length == 16


def test_documents_with_many_tokens_per_character_are_dropped_and_counted(jsonl, tmp_path):
    trash = [" ".join(f"{i % 10} {chr(97 + i % 26)}" for i in range(100)) for _ in range(7)]
    with jsonl.open("a") as file:
        file.writelines(json.dumps({"text": t}) + "\n" for t in trash)
    corpus = prepare_corpus(settings(jsonl, trash_cutoff=0.4), tmp_path / "cache")
    assert corpus.facts["skipped"] == {"too many tokens per character": 7}
    assert corpus.facts["documents"] == 407


def test_the_curriculum_reads_the_most_full_stops_first_and_equal_ones_in_order(jsonl, tmp_path):
    corpus = prepare_corpus(settings(jsonl), tmp_path / "cache")
    from tokenizers import Tokenizer

    stop = Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json")).token_to_id(".")
    stops = (corpus.sequences("train") == stop).sum(1)
    expected = sorted(range(len(stops)), key=lambda i: (-stops[i], i))
    assert corpus.order().tolist() == expected
    assert len(set(stops.tolist())) > 2


def test_held_out_documents_are_in_neither_more_nor_less_than_one_split(jsonl, tmp_path):
    everything = prepare_corpus(settings(jsonl, validation_fraction=0.0), tmp_path / "cache").facts["sequences"]
    split = prepare_corpus(settings(jsonl, validation_fraction=0.25), tmp_path / "cache")
    train, validation = (len(split.sequences(name)) for name in ("train", "validation"))
    assert abs(train + validation - everything["train"]) <= 1
    assert validation / (train + validation) == pytest.approx(0.25, abs=0.04)


def test_the_cache_is_found_by_content_and_settings_and_not_by_place(jsonl, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = prepare_corpus(settings(jsonl), cache)
    moved = jsonl.rename(tmp_path / "elsewhere.jsonl")
    monkeypatch.setattr(corpus_module, "_make", lambda *a: pytest.fail("made again"))
    assert prepare_corpus(settings(moved), cache).folder == first.folder
    monkeypatch.undo()
    assert prepare_corpus(settings(moved, length=32), cache).folder != first.folder
    content = moved.read_text().replace("cat", "dog", 1)
    moved.write_text(content)
    assert prepare_corpus(settings(moved), cache).folder != first.folder


@pytest.mark.parametrize("stop_after", [1, 37, 200, 399])
def test_interrupted_work_is_taken_up_and_ends_in_the_same_bytes(jsonl, tmp_path, monkeypatch, stop_after):
    with jsonl.open("a") as file:
        file.write('{"text": "cut off\n')
    whole = prepare_corpus(settings(jsonl), tmp_path / "whole")
    monkeypatch.setattr(corpus_module, "BATCH_DOCUMENTS", 8)
    monkeypatch.setattr(corpus_module, "CHECKPOINT_BATCHES", 3)

    class Killed(BaseException):
        pass

    read = corpus_module.documents

    def dying(source, tally, **options):
        for number, found in enumerate(read(source, tally, **options)):
            if number == stop_after:
                raise Killed
            yield found

    calls = iter([read, read, dying, read])  # alphabet, vocabulary, packing, packing again
    monkeypatch.setattr(corpus_module, "documents", lambda *a, **k: next(calls)(*a, **k))
    with pytest.raises(Killed):
        prepare_corpus(settings(jsonl), tmp_path / "cache")
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert not (folder / "corpus.json").exists()
    assert (folder / "checkpoint.json").exists() == (stop_after >= 24)
    again = prepare_corpus(settings(jsonl), tmp_path / "cache")
    for name in ("train.bin", "validation.bin", "order.bin"):
        assert (again.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert again.facts == whole.facts


def test_limits_on_documents_and_sequences_are_kept(jsonl, tmp_path):
    few = prepare_corpus(settings(jsonl, max_documents=50), tmp_path / "cache")
    assert few.facts["documents"] == 50
    short = prepare_corpus(settings(jsonl, max_sequences=33), tmp_path / "cache")
    assert len(short.sequences("train")) == 33
    assert (short.folder / "train.bin").stat().st_size == 33 * 16 * 2


def test_a_document_longer_than_a_batch_is_tokenized_in_pieces_cut_at_spaces(monkeypatch):
    tokenizer = train_wordpiece(lambda: [text(i) for i in range(50)], 150, english_keyboard=True)
    long, short = " ".join(text(i) for i in range(20)), text(3)
    whole = [tokenizer.encode(t, add_special_tokens=False).ids for t in (long, short)]
    monkeypatch.setattr(corpus_module, "BATCH_CHARACTERS", 500)
    found = [item for batch in corpus_module.batches_of_texts(tokenizer, iter([short, long, short])) for item in batch]
    assert [tokens.tolist() for tokens, _ in found] == [whole[1], whole[0], whole[1]]
    assert [characters for _, characters in found] == [len(short), len(long), len(short)]


def test_the_unigram_entropy_is_that_of_the_frequencies(tmp_path):
    tokens = numpy.asarray([3, 5, 5, 6, 7, 3, 0, 0], numpy.uint16)  # halves and quarters; specials do not count
    tokens.tofile(tmp_path / "t.bin")
    assert unigram_entropy(tmp_path / "t.bin", 9) == pytest.approx(1.5 * math.log(2))
    numpy.asarray([8, 8], numpy.uint16).tofile(tmp_path / "t.bin")
    assert unigram_entropy(tmp_path / "t.bin", 9) == 0.0


def test_a_source_without_text_is_refused_with_what_was_found(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": ""}\n{"broken\n')
    with pytest.raises(
        UnreadableData, match=r"one sequence of 16 tokens.*2 records that give none \(1 empty, 1 not JSON"
    ):
        prepare_corpus(settings(path), tmp_path / "cache")


@pytest.mark.parametrize(
    "wrong", [{"order": "random"}, {"vocab_size": 70000}, {"length": 1}, {"validation_fraction": 1.0}]
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises((BadValue, UnknownName), match=next(iter(wrong))):
        settings("x", **wrong)
