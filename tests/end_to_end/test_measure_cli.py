"""`oversmooth measure` as a user runs it, on the real MiniLM, against an independent plain implementation."""

import csv
import json

import pytest
import torch

from oversmooth.data.samples import sample_texts
from oversmooth.results import Measurement
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model
from tests.real_models import albert, minilm


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    text = folder / "texts.txt"
    text.write_text("\n\n".join(t.replace("\n\n", "\n") for t in sample_texts()), encoding="utf-8")
    outputs = ["-o", folder / "rows.csv", "-o", folder / "rows.parquet"]
    done = oversmooth("measure", minilm(), "--data", text, "--max-tokens", 512, "--format", "json", *outputs)
    assert done.returncode == 0, done.stderr
    return folder, text, Measurement.from_dict(json.loads(done.stdout))


def plain_reference(text):
    """Mean cosine and HFC/LFC over depth from `output_hidden_states`, one text at a time, by definition."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    model = AutoModel.from_pretrained(minilm()).eval()
    cosines, ratios = [], []
    for paragraph in [part for part in text.read_text(encoding="utf-8").split("\n\n") if part.strip()]:
        encoded = tokenizer(paragraph.strip(), return_tensors="pt")
        with torch.no_grad():
            states = model(**encoded, output_hidden_states=True).hidden_states
        for row, h in enumerate(states):
            x = h[0].double()
            unit = x / x.norm(dim=1, keepdim=True)
            pairs = (unit @ unit.T)[~torch.eye(len(x), dtype=torch.bool)]
            mean = x.mean(0, keepdim=True)
            cosines.append((row, pairs.mean()))
            ratios.append((row, (x - mean).norm() / (mean.norm() * len(x) ** 0.5)))

    def by_depth(pairs):
        return [torch.stack([v for r, v in pairs if r == depth]).mean().item() for depth in range(7)]

    return by_depth(cosines), by_depth(ratios)


def test_the_curves_agree_with_an_independent_implementation(measured):
    _, text, result = measured
    cosine, ratio = plain_reference(text)
    torch.testing.assert_close([v.mean for v in result.curve("cosine")], cosine, rtol=0, atol=1e-5)
    torch.testing.assert_close([v.mean for v in result.curve("hfc_lfc")], ratio, rtol=1e-5, atol=1e-5)


def test_minilm_smooths_over_depth(measured):
    _, _, result = measured
    cosine = [v.mean for v in result.curve("cosine")]
    ratio = [v.mean for v in result.curve("hfc_lfc")]
    assert cosine[0] < 0.15
    assert 0.25 < cosine[-1] < 0.5
    assert ratio[0] > 2.5
    assert ratio[-1] < 2.2


def test_csv_and_parquet_hold_the_same_rows(measured):
    import pandas

    folder, _, result = measured
    with (folder / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result.values)
    assert float(rows[3]["mean"]) == result.values[3].mean
    frame, own = pandas.read_parquet(folder / "rows.parquet"), result.to_pandas()
    assert list(frame.columns) == list(rows[0])
    # A column of layers has empty cells: whole numbers in the file, floats with NaN in a plain DataFrame.
    assert [None if pandas.isna(layer) else layer for layer in frame["layer"]] == [v.layer for v in result.values]
    pandas.testing.assert_frame_equal(frame[list(own.columns)].drop(columns="layer"), own.drop(columns="layer"))
    assert set(frame["model"]) == {result.provenance.target}
    assert set(frame["weights_sha256"]) == {result.provenance.weights_sha256}
    assert set(frame["data_sha256"]) == {result.data.sha256}


def test_the_table_has_a_row_per_layer_and_the_answer_comes_last():
    done = oversmooth("measure")
    assert done.returncode == 0, done.stderr
    for word in ("input", "mean cosine", "attention", "its norm", "feed-fwd", "token_norm"):
        assert word in done.stdout
    last = done.stdout.rpartition("all-MiniLM-L6-v2  ")[2]
    for word in (
        "Tokens stay distinct: this model does not oversmooth.",
        "How sure",
        "oversmooth gate all-MiniLM-L6-v2 --max-cosine",
    ):
        assert word in last
    assert "\x1b" not in done.stdout


def test_with_null_the_same_architecture_untrained_stands_beside_it():
    done = oversmooth("measure", "--max-samples", 4, "--null")
    assert done.returncode == 0, done.stderr
    assert "untrained" in done.stdout
    done = oversmooth(
        "measure", "--max-samples", 4, "--null", "--pairs", "--format", "json", "--metrics", "cosine,between"
    )
    found = Measurement.from_dict(json.loads(done.stdout))
    assert len(found.untrained[0].levels) == len(found.pairs) == 7
    assert found.answer.between is not None


def test_shared_layers_show_one_row_per_pass():
    done = oversmooth("measure", albert(), "--format", "json", "--max-samples", 2, "--metrics", "cosine")
    assert done.returncode == 0, done.stderr
    assert len(Measurement.from_dict(json.loads(done.stdout)).curve("cosine")) == 13


def test_a_vision_model_is_measured_on_generated_images_without_its_prefix(tmp_path):
    model, _ = tiny_model("vit")
    model.save_pretrained(tmp_path)
    done = oversmooth(
        "measure", tmp_path, "--prefix-tokens", "drop", "--metrics", "cosine,high_frequency", "--format", "json"
    )
    assert done.returncode == 0, done.stderr
    result = Measurement.from_dict(json.loads(done.stdout))
    assert (result.prefix_tokens, result.data.tokens) == ("dropped", 256)


def wrong_tokenizer(folder):
    """A model with a small vocabulary beside the tokenizer of another."""
    import shutil

    model, _ = tiny_model("bert")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        shutil.copy(minilm() / name, folder / name)
    return [folder]


def empty_file(folder):
    (folder / "empty.txt").write_text("")
    return [minilm(), "--data", folder / "empty.txt"]


def one_token_texts(folder):
    model, _ = tiny_model("vit")
    model.save_pretrained(folder / "model")
    from PIL import Image

    (folder / "images").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "images" / "x.png")
    return [folder / "model", "--data", folder / "images", "--metrics", "high_frequency"]


def image_model_with_text(folder):
    model, _ = tiny_model("vit")
    model.save_pretrained(folder)
    (folder / "x.txt").write_text("some text")
    return [folder, "--data", folder / "x.txt"]


@pytest.mark.parametrize(
    ("make", "pieces"),
    [
        (wrong_tokenizer, ("token ids below 99", "Use the tokenizer that belongs")),
        (empty_file, ("nothing to measure", "it is empty")),
        (one_token_texts, ("must be a square", "17")),
        (image_model_with_text, ("images", "text file")),
        (lambda folder: [minilm(), "--data", folder / "absent"], ("expected a file or a folder", "none of that name")),
        (lambda folder: [minilm(), "--metrics", "cosin"], ("Close: cosine",)),
        (lambda folder: [minilm(), "--at", "everywhere"], ("Unknown place",)),
        (lambda folder: [minilm(), "--device", "gpu9"], ("device",)),
        (lambda folder: [minilm(), "-o", folder / "no" / "x.csv", "--max-samples", 2], ("x.csv",)),
        (lambda folder: [minilm(), "-o", folder / "no" / "x.parquet", "--max-samples", 2], ("x.parquet",)),
        (lambda folder: [folder / "absent"], ("Nothing was found",)),
    ],
)
def test_bad_input_gives_a_message_and_exit_code_2(make, pieces, tmp_path):
    done = oversmooth("measure", *make(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for piece in pieces:
        assert piece in done.stderr
