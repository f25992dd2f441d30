"""SuperGLUE: official formats, official metrics against hand-worked examples, submissions, marked words as tokens."""

import json

import numpy
import pytest
import torch

from oversmooth.errors import BadValue, UnknownName, UnreadableData
from oversmooth.recipes import superglue_tasks as reading
from oversmooth.recipes.superglue import Classifier, chosen_setting, chosen_tasks, learning_rate
from oversmooth.recipes.superglue_scoring import (
    accuracy,
    exact_groups,
    f1,
    macro_f1,
    matthews,
    overall,
    parity,
    plain,
    scored,
    submission_lines,
    task_score,
    word_f1,
)
from oversmooth.recipes.superglue_tasks import (
    MAIN,
    TASKS,
    Collate,
    EncodedExamples,
    Example,
    Row,
    read_splits,
    word_span,
)
from tests.real_data import real_data
from tests.superglue_files import FOLDERS, write_superglue

# --- metrics, worked by hand -----------------------------------------------------------------------------------------


def test_accuracy_and_f1_of_one_label():
    golds, guesses = [1, 1, 0, 0, 1], [1, 0, 1, 0, 1]
    assert accuracy(golds, guesses) == 3 / 5
    assert f1(golds, guesses, positive=1) == 4 / 6  # two hits, three golds, three guesses
    assert f1([0, 0], [0, 0], positive=1) == 0.0


def test_macro_f1_weighs_every_label_alike():
    # label 0: 2 hits, 3 golds, 3 guesses, 4/6; label 1: 1 hit, 1 gold, 2 guesses, 2/3; label 2: no hit
    golds, guesses = [0, 0, 0, 1, 2], [0, 0, 1, 1, 0]
    assert macro_f1(golds, guesses) == pytest.approx((4 / 6 + 2 / 3 + 0) / 3)


@pytest.mark.parametrize("seed", range(5))
def test_metrics_agree_with_scikit_learn(seed):
    from sklearn import metrics

    draw = numpy.random.default_rng(seed)
    golds, guesses = (draw.integers(0, 3, 40).tolist() for _ in range(2))
    assert macro_f1(golds, guesses) == pytest.approx(metrics.f1_score(golds, guesses, average="macro"))
    golds, guesses = (draw.integers(0, 2, 40).tolist() for _ in range(2))
    assert matthews(golds, guesses) == pytest.approx(metrics.matthews_corrcoef(golds, guesses))
    assert f1(golds, guesses, 1) == pytest.approx(metrics.f1_score(golds, guesses))


def test_matthews_of_a_table_and_of_a_constant():
    # 6 true positives, 1 false negative, 2 false positives, 3 true negatives: (6*3 - 2*1) / sqrt(8 * 7 * 5 * 4)
    golds, guesses = [1] * 7 + [0] * 5, [1] * 6 + [0] + [1] * 2 + [0] * 3
    assert matthews(golds, guesses) == pytest.approx(16 / (8 * 7 * 5 * 4) ** 0.5)
    assert matthews([1, 0], [1, 1]) == 0.0
    assert matthews([1, 0], [0, 1]) == -1.0


def test_a_question_of_multirc_counts_as_exact_when_all_its_answers_are_right():
    golds, guesses = [1, 0, 1, 1, 0], [1, 0, 1, 0, 0]
    assert exact_groups(golds, guesses, [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0)]) == 2 / 3


def test_pairs_that_differ_in_gender_only_are_alike_or_not():
    assert parity([1, 1, 0, 1, 0, 0], [7, 7, 8, 8, 9, 9]) == 2 / 3


def test_answers_are_compared_without_case_articles_and_punctuation():
    assert plain("The U.S. Army!") == "us army"
    assert word_f1("the New York Times", "New York") == pytest.approx(4 / 5)
    assert word_f1("York", "Boston") == 0.0
    assert word_f1("a b c", "b b") == pytest.approx(1 / 2)  # "a" is an article: one word shared of two and two


def test_record_takes_the_best_entity_and_the_best_of_the_right_answers():
    rows = (Row(first="q"),)
    golds = ("New York City", "Boston")
    examples = [
        Example(idx=(5, 0), rows=rows, label=0, group=(5,), text="New York", golds=golds),
        Example(idx=(5, 1), rows=rows, label=1, group=(5,), text="Boston", golds=golds),
        Example(idx=(6, 0), rows=rows, label=1, group=(6,), text="Rome", golds=("Rome",)),
        Example(idx=(6, 1), rows=rows, label=0, group=(6,), text="Paris", golds=("Rome",)),
    ]
    scores = numpy.asarray([[0.0, 2.0], [0.0, 1.0], [3.0, 1.0], [3.0, 0.0]])  # New York, Rome
    assert scored(TASKS["record"], examples, scores) == {"f1": (4 / 5 + 1) / 2, "em": 1 / 2}
    lines = list(submission_lines(TASKS["record"], examples, scores))
    assert lines == [{"idx": 5, "label": "New York"}, {"idx": 6, "label": "Rome"}]


def test_the_score_averages_two_metrics_first_and_is_the_mean_of_all_eight():
    assert task_score(TASKS["cb"], {"accuracy": 0.8, "macro_f1": 0.6}) == pytest.approx(0.7)
    scores = {name: i / 10 for i, name in enumerate(MAIN)}
    assert overall(scores) == pytest.approx(0.35)
    assert overall({"boolq": 0.9}) is None
    assert overall(scores | {"axb": -1.0}) == pytest.approx(0.35)


# --- formats ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_superglue(tmp_path_factory.mktemp("data") / "superglue")


EXPECTED = {"multirc": 6, "record": 3}
"""Examples of one record, where there is more than one."""


@pytest.mark.parametrize("name", TASKS)
def test_every_set_is_read_with_its_official_splits(root, name):
    splits = read_splits(TASKS[name], str(root))
    per_record = EXPECTED.get(name, 1)
    counts = {split: len(found.examples) for split, found in splits.items()}
    if TASKS[name].trained_on:
        assert counts == {"validation": 12}
    else:
        assert counts == {"train": 24 * per_record, "validation": 12 * per_record, "test": 6 * per_record}
        assert not splits["test"].is_labelled
        assert splits["train"].sha256 != splits["validation"].sha256
    assert splits["validation"].is_labelled
    assert {len(e.rows) for e in splits["validation"].examples} == {TASKS[name].choices}
    assert {len(row.spans) for e in splits["validation"].examples for row in e.rows} == {TASKS[name].spans}


def only(name, record):
    return list(TASKS[name].read(record))


def test_a_record_of_each_format_becomes_what_the_model_is_shown():
    (boolq,) = only("boolq", {"question": "is it", "passage": "It is.", "idx": 4, "label": False})
    assert (boolq.idx, boolq.rows[0].first, boolq.rows[0].second, boolq.label) == ((4,), "is it", "It is.", 0)
    (cb,) = only("cb", {"premise": "p", "hypothesis": "h", "label": "neutral", "idx": 1})
    assert cb.label == 2
    copa = {"premise": "It rained.", "choice1": "Wet.", "choice2": "Dry.", "question": "cause", "label": 1, "idx": 0}
    (choice,) = only("copa", copa)
    assert [(row.first, row.second) for row in choice.rows] == [
        ("It rained because", "Wet."),
        ("It rained because", "Dry."),
    ]
    assert choice.label == 1
    (axb,) = only("axb", {"sentence1": "a", "sentence2": "b", "label": "not_entailment", "idx": 3, "logic": ""})
    assert (axb.rows[0].first, axb.label) == ("a", 1)


def test_multirc_has_an_example_for_every_answer_of_every_question():
    answers = [{"text": "yes", "idx": 7, "label": 1}, {"text": "no", "idx": 8, "label": 0}]
    record = {"idx": 2, "passage": {"text": "Text.", "questions": [{"question": "Q?", "answers": answers, "idx": 5}]}}
    found = only("multirc", record)
    assert [(e.idx, e.group, e.rows[0].first, e.label) for e in found] == [
        ((2, 5, 7), (2, 5), "Q? yes", 1),
        ((2, 5, 8), (2, 5), "Q? no", 0),
    ]


def test_record_puts_every_entity_into_the_place_of_the_query():
    text = "Ann met Bob.\n@highlight\nAnn won"
    entities = [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 24, "end": 26}]
    query = {"query": "@placeholder was glad", "idx": 9, "answers": [{"start": 0, "end": 2, "text": "Ann"}]}
    found = only("record", {"passage": {"text": text, "entities": entities}, "qas": [query], "idx": 1})
    assert [(e.text, e.rows[0].first, e.label) for e in found] == [
        ("Ann", "Ann was glad", 1),
        ("Bob", "Bob was glad", 0),
    ]
    assert found[0].rows[0].second == "Ann met Bob. Ann won"


@pytest.mark.parametrize(
    ("text", "word", "phrase", "expected"),
    [
        ("Mark told Pete lies about himself", 0, "Mark", "Mark"),
        ("The dog saw the dog run", 4, "the dog", "the dog"),  # off by one: the nearest occurrence
        ("She said she left", 2, "she", "she"),
        ("A  double  space here", 3, "here", "here"),
        ("no such phrase", 1, "zebra", "such"),
        ("short", 9, "zebra", "short"),
    ],
)
def test_the_words_of_wsc_are_found_where_they_are(text, word, phrase, expected):
    start, end = word_span(text, word, phrase)
    assert text[start:end].lower() == expected.lower()
    if phrase == "she":
        assert start == 9


def test_a_broken_line_and_a_record_of_another_format_are_named(tmp_path):
    write_superglue(tmp_path, names=("boolq", "copa"))
    path = tmp_path / "BoolQ" / "val.jsonl"
    path.write_text(path.read_text() + '{"question": "cut\n')
    with pytest.raises(UnreadableData, match=r"val.jsonl.*line 13"):
        read_splits(TASKS["boolq"], str(tmp_path))
    (tmp_path / "COPA").rename(tmp_path / "CB")
    with pytest.raises(UnreadableData, match=r"records of CB.*train.jsonl, line 1: KeyError"):
        read_splits(TASKS["cb"], str(tmp_path))


def test_missing_folders_and_missing_labels_are_named(tmp_path):
    write_superglue(tmp_path, names=("rte",))
    with pytest.raises(UnreadableData, match=r"a folder WiC with train.jsonl, val.jsonl, test.jsonl, found RTE"):
        read_splits(TASKS["wic"], str(tmp_path))
    (tmp_path / "RTE" / "val.jsonl").unlink()
    with pytest.raises(UnreadableData, match="a labelled split 'validation' of RTE, found only train, test"):
        read_splits(TASKS["rte"], str(tmp_path))
    with pytest.raises(UnreadableData, match="the folders of the official archive, or a dataset of the hub"):
        read_splits(TASKS["rte"], "no/such-dataset")


def hub_rows(name, record):
    """A record as the dataset on the hub has it."""
    if name == "multirc":
        return [
            {
                "paragraph": record["passage"]["text"],
                "question": q["question"],
                "answer": a["text"],
                "idx": {"paragraph": record["idx"], "question": q["idx"], "answer": a["idx"]},
                "label": a["label"],
            }
            for q in record["passage"]["questions"]
            for a in q["answers"]
        ]
    if name == "record":
        text, query = record["passage"]["text"], record["qas"][0]
        entities = [text[e["start"] : e["end"] + 1] for e in record["passage"]["entities"]]
        idx = {"passage": record["idx"], "query": query["idx"]}
        answers = [a["text"] for a in query["answers"]]
        return [{"passage": text, "query": query["query"], "entities": entities, "answers": answers, "idx": idx}]
    row = {key: value for key, value in record.items() if key not in ("target", "pair_id", "version")}
    row |= record.get("target", {})
    labels = [str(label).lower() for label in TASKS[name].labels]
    row["label"] = labels.index(str(record["label"]).lower()) if labels else record["label"]
    return [row]


@pytest.mark.parametrize("name", TASKS)
def test_the_hub_gives_the_same_examples_as_the_official_files(root, name, monkeypatch):
    import datasets

    file = f"{FOLDERS[name]}.jsonl" if TASKS[name].trained_on else "val.jsonl"
    records = [json.loads(line) for line in (root / FOLDERS[name] / file).read_text().splitlines()]
    rows = [row for record in records for row in hub_rows(name, record)]
    split = "test" if TASKS[name].trained_on else "validation"
    loaded = {split: rows} | ({} if TASKS[name].trained_on else {"train": rows})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *words: asked.append(words) or loaded)
    official = read_splits(TASKS[name], str(root))["validation"].examples
    hub = read_splits(TASKS[name], None)["validation"].examples
    assert asked == [(reading.HUB, TASKS[name].hub)]
    assert [e.rows for e in hub] == [e.rows for e in official]
    assert [(e.idx, e.label, e.golds) for e in hub] == [(e.idx, e.label, e.golds) for e in official]
    if name == "axg":
        assert [e.pair for e in hub] == [i // 2 for i in range(12)]


# --- submissions -----------------------------------------------------------------------------------------------------


def test_submissions_are_written_as_the_server_takes_them(root):
    first = {}
    for name, task in TASKS.items():
        examples = read_splits(task, str(root))["validation"].examples
        scores = numpy.zeros((len(examples), task.choices if task.choices > 1 else task.outputs))
        scores[:, 1] = 1.0
        lines = list(submission_lines(task, examples, scores))
        assert len(lines) == 12
        first[name] = lines[0]
    question = {"idx": 0, "answers": [{"idx": i, "label": 1} for i in range(3)]}
    other = {"idx": 1, "answers": [{"idx": i, "label": 1} for i in range(3, 6)]}
    entity = first.pop("record")
    assert entity["idx"] == 0
    assert isinstance(entity["label"], str)
    assert first == {
        "boolq": {"idx": 0, "label": "true"},
        "cb": {"idx": 0, "label": "contradiction"},
        "copa": {"idx": 0, "label": 1},
        "multirc": {"idx": 0, "passage": {"questions": [question, other]}},
        "rte": {"idx": 0, "label": "not_entailment"},
        "wic": {"idx": 0, "label": "true"},
        "wsc": {"idx": 0, "label": "True"},
        "axb": {"idx": 0, "label": "not_entailment"},
        "axg": {"idx": 0, "label": "not_entailment"},
    }


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    from oversmooth.recipes.corpus import save_tokenizer, train_wordpiece
    from tests.superglue_files import BAD, FILLER, GOOD, NAMES

    texts = [" ".join([*GOOD, *BAD, *FILLER, *NAMES, "is it good because so and . ?"])] * 3
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_wordpiece(lambda: texts, 200, english_keyboard=True), folder, 64)
    return AutoTokenizer.from_pretrained(folder)


def test_marked_words_are_the_tokens_that_overlap_them(tokenizer):
    row = Row(first="happy river stone", second="a glad house", spans=((0, 6, 11), (1, 2, 6)))
    item = EncodedExamples([Example(idx=(0,), rows=(row,), label=1)], tokenizer, 32)[0]
    (encoded,) = item["rows"]
    words = [tokenizer.decode([encoded["input_ids"][i] for i in span]) for span in encoded["spans"]]
    assert words == ["river", "glad"]


def test_a_marked_word_that_was_cut_off_marks_nothing_and_is_no_nan(tokenizer):
    row = Row(first="happy " * 30 + "river", spans=((0, 180, 185), (0, 0, 5)))
    examples = EncodedExamples([Example(idx=(0,), rows=(row,), label=1)], tokenizer, 8)
    batch = Collate(0)([examples[0]])
    assert batch["input_ids"].shape == (1, 8)
    assert batch["span_mask"][0].sum(-1).tolist() == [0.0, 1.0]
    model = Classifier(tiny_encoder(), outputs=2, spans=2).eval()
    assert torch.isfinite(model(**batch)["loss"])


def tiny_encoder(seed=0):
    from oversmooth.models.crammed_bert import CrammedBertConfig, CrammedBertModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 200, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return CrammedBertModel(CrammedBertConfig(**sizes, intermediate_size=32, max_position_embeddings=64))


@pytest.mark.parametrize("name", TASKS)
def test_padding_and_company_do_not_change_what_an_example_gets(root, tokenizer, name):
    task = TASKS[name]
    examples = EncodedExamples(read_splits(task, str(root))["validation"].examples[:5], tokenizer, 64)
    torch.manual_seed(0)
    model = Classifier(tiny_encoder(), outputs=task.outputs, spans=task.spans).eval()
    collate = Collate(tokenizer.pad_token_id)
    together = model(**collate([examples[i] for i in range(5)]))["logits"]
    alone = torch.cat([model(**collate([examples[i]]))["logits"] for i in range(5)])
    assert together.shape == (5, task.choices if task.choices > 1 else len(task.labels))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


# --- settings --------------------------------------------------------------------------------------------------------


def test_the_two_settings_are_the_published_ones():
    recipe = chosen_setting("superglue", [])
    assert (recipe.training.epochs, recipe.training.batch, recipe.optimizer.learning_rate) == (10, 16, 1e-5)
    assert (recipe.optimizer.betas, recipe.optimizer.epsilon, recipe.optimizer.weight_decay) == ((0.9, 0.98), 1e-6, 0.0)
    glue = chosen_setting("glue", [])
    assert (glue.training.epochs, glue.optimizer.learning_rate) == (5, 4e-5)
    assert chosen_setting("glue", ["training.epochs=2"]).training.epochs == 2
    with pytest.raises(UnknownName, match=r"Unknown setting 'supergleu'. Close: superglue"):
        chosen_setting("supergleu", [])


def test_the_rate_warms_up_over_a_tenth_and_falls_as_half_a_cosine():
    recipe = chosen_setting("superglue", [])
    rates = [learning_rate(recipe, step, 100) for step in range(101)]
    assert rates[0] == 0.0
    assert rates[5] == pytest.approx(5e-6)
    assert rates[10] == pytest.approx(1e-5)
    assert rates[55] == pytest.approx(5e-6)
    assert rates[100] == pytest.approx(0.0, abs=1e-12)


def test_tasks_are_chosen_by_name_and_diagnostic_sets_bring_their_task():
    assert chosen_tasks("superglue") == list(TASKS)
    assert chosen_tasks("WiC, boolq") == ["boolq", "wic"]
    assert chosen_tasks("AX-g") == ["rte", "axg"]
    with pytest.raises(UnknownName, match=r"Unknown task 'bolq'. Close: boolq"):
        chosen_tasks("bolq")
    with pytest.raises(BadValue, match="--tasks"):
        chosen_tasks(",")


# --- real examples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAIN)
def test_real_examples_are_read_and_their_marked_words_found(name):
    data = real_data("superglue")
    examples = read_splits(TASKS[name], str(data))["validation"].examples
    assert len(examples) >= 32
    assert len({example.label for example in examples}) > 1
    if name == "wsc":
        path = data / "WSC" / "val.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record, example in zip(records, examples, strict=True):
            for number, (_, start, end) in enumerate(example.rows[0].spans, start=1):
                assert record["text"][start:end].lower() == record["target"][f"span{number}_text"].lower().strip()
    if name == "record":
        assert all(example.text for example in examples)
        right = {e.group for e in examples if e.label == 1}
        assert right == {e.group for e in examples}
