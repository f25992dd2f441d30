"""`oversmooth predict` as a user runs it: the real MiniLM and ALBERT, against independent solvers, and bad input."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from oversmooth import predict
from oversmooth.data.samples import sample_texts
from oversmooth.results import Prediction
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model
from tests.real_models import albert, minilm

SEEN = (1.36, 1.85, 2.08, 2.26, 1.70, 1.35)
"""`rho_ac` per layer of MiniLM on another text of about the same length: values of this kind, not these digits."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """About ninety tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(sample_texts()[16].replace("\n\n", "\n"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def predicted(text, tmp_path_factory):
    rows = tmp_path_factory.mktemp("predicted") / "rows.csv"
    changes = ("--what-if", "no_skip", "--what-if", "interval:-1,-0.05", "--what-if", "flip_norms")
    done = oversmooth(
        *("predict", minilm(), "--data", text, "--simulate", 200, *changes, "--format", "json", "-o", rows),
    )
    assert done.returncode == 0, done.stderr
    return rows, Prediction.from_dict(json.loads(done.stdout))


def test_all_six_layers_of_minilm_smooth(predicted):
    _, found = predicted
    assert 80 <= found.data.tokens <= 110
    assert [layer.regime for layer in found.layers] == ["smoothing"] * 6
    assert [layer.plain.rho_ac for layer in found.layers] == pytest.approx(SEEN, rel=0.2)
    assert [layer.plain.rho_dc for layer in found.layers] == pytest.approx(
        [2.238, 2.075, 2.655, 2.510, 2.115, 2.535], abs=1e-3
    )
    assert all(layer.plain.residual < 1e-3 for layer in found.layers)
    assert all(layer.plain.applications <= 150 for layer in found.layers)


def test_rung_5_is_the_measurement(predicted):
    _, found = predicted
    for layer in found.layers:
        assert layer.identity_error < 1e-3
        assert layer.rungs[5].mean == pytest.approx(layer.measured, abs=1e-3)
        assert layer.explained_from == 0
    assert found.agreements[5].rank_correlation == pytest.approx(1.0)


def test_simulation_ends_with_all_tokens_parallel(predicted):
    _, found = predicted
    for layer in found.layers:
        assert [step.step for step in layer.simulation] == [0, 1, 2, 5, 10, 20, 50, 100, 200]
        assert layer.simulation[-1].cosine > 0.999
        assert layer.simulation[-1].effective_rank == pytest.approx(1.0, abs=1e-3)


def test_without_a_skip_connection_one_pass_smooths_more_and_a_negative_interval_sharpens(predicted):
    _, found = predicted
    for layer in found.layers:
        no_skip, interval, flipped = layer.what_ifs
        assert no_skip.regime == "smoothing"
        assert no_skip.rungs[5].mean < layer.rungs[5].mean
        assert interval.regime == "sharpening"
        assert "modulus" in flipped.not_applicable


def test_the_verdict_says_how_each_part_is_known(predicted):
    _, found = predicted
    assert {statement.basis for statement in found.verdict} == {"computed at measured attention", "observed"}
    assert "6 of 6 layers, with one sequence and so no interval" in found.verdict[0].text
    assert "6 would smooth" in found.verdict[1].text
    assert [layer.direction for layer in found.layers] == ["smoothing"] * 6
    assert found.depths[0].exponent < 0


def test_the_rows_of_the_csv_are_those_of_the_result(predicted):
    path, found = predicted
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["plain_rho_ac"]) for row in rows] == [layer.plain.rho_ac for layer in found.layers]
    assert [float(row["rung_5"]) for row in rows] == [layer.rungs[5].mean for layer in found.layers]


def test_the_radius_is_that_of_an_independent_solver_on_the_real_model(predicted, text):
    """scipy's ARPACK on the operator written down with Kronecker's order, from transformers' own attention."""
    from scipy.sparse.linalg import LinearOperator, eigs
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(minilm(), attn_implementation="eager", dtype=torch.float64).eval()
    encoded = AutoTokenizer.from_pretrained(minilm())(text.read_text(encoding="utf-8").strip(), return_tensors="pt")
    with torch.no_grad():
        attentions = model(**encoded, output_attentions=True).attentions
    _, found = predicted
    for layer in (0, 3):
        a = attentions[layer][0].numpy()
        block = model.encoder.layer[layer].attention
        value, output = (part.weight.detach().numpy() for part in (block.self.value, block.output.dense))
        n, d = a.shape[-1], value.shape[1]
        assert n == found.data.tokens

        def step(vector, a=a, value=value, output=output, n=n, d=d):
            x = vector.reshape(n, d)
            mixed = (a @ (x @ value.T).reshape(n, 12, 32).swapaxes(0, 1)).swapaxes(0, 1).reshape(n, d)
            y = x + mixed @ output.T
            return (y - y.mean(0)).ravel()

        start = np.random.default_rng(0).normal(size=(n, d))
        start = (start - start.mean(0)).ravel()
        values = eigs(
            LinearOperator((n * d, n * d), matvec=step, dtype=float), k=2, v0=start, tol=1e-4, return_eigenvectors=False
        )
        assert found.layers[layer].plain.rho_ac == pytest.approx(abs(values).max(), rel=2e-3)


def test_albert_is_predicted_for_every_pass_of_its_shared_layer():
    found = predict(albert(), max_samples=2, solve=1, heads=False)
    assert [layer.depth for layer in found.layers] == list(range(1, 13))
    assert {layer.layer for layer in found.layers} == {0}
    assert all(layer.identity_error < 1e-3 for layer in found.layers)
    assert found.depths[0].layers == 12


def test_the_table_shows_the_theorem_the_ladder_and_the_verdict(text):
    done = oversmooth("predict", minilm(), "--data", text, "--heads", "--what-if", "no_biases", "--simulate", 5)
    assert done.returncode == 0, done.stderr
    for piece in (
        *(
            "iterated at fixed attention",
            "if repeated",
            "one pass",
            "rho_ac",
            "0 asymptotic",
            "5 token scale",
            "measured",
            "without norm",
            "sign right",
            "rank corr.",
        ),
        *("one head at a time", "dobrushin", "what if", "no_biases", "repeated at fixed attention", "Verdict"),
    ):
        assert piece in done.stdout, piece


@pytest.mark.skipif("OVERSMOOTH_DATA" not in os.environ, reason="OVERSMOOTH_DATA is not set")
def test_real_text_gives_the_same_picture():
    path = Path(os.environ["OVERSMOOTH_DATA"]) / "text" / "tinyshakespeare.txt"
    found = predict(minilm(), str(path), max_samples=8, solve=2, heads=False)
    assert [layer.regime for layer in found.layers] == ["smoothing"] * 6
    assert all(layer.identity_error < 1e-3 for layer in found.layers)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "pieces"),
    [
        (("--what-if", "no_skipp"), ("no_skip", "Known")),
        (("--what-if", "neutreno"), ("not supported as a what-if", "osm.apply")),
        (("--what-if", "scale"), ("scale:FACTOR",)),
        (("--precision", "float16"), ("float32, float64",)),
        (("--data", "nowhere.txt"), ("nowhere.txt",)),
        (("-o", "no/such/folder/rows.csv"), ("cannot be written",)),
        (("--device", "abacus"), ("device",)),
    ],
)
def test_bad_input_ends_in_one_message_and_exit_code_2(arguments, pieces):
    done = oversmooth("predict", minilm(), *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for piece in pieces:
        assert piece in done.stderr, done.stderr


def test_a_file_that_cannot_be_run_says_what_still_works(tmp_path):
    from safetensors.torch import save_file

    model, _ = tiny_model("bert")
    path = tmp_path / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, path)
    done = oversmooth("predict", path)
    assert done.returncode == 2
    assert "oversmooth inspect" in done.stderr
