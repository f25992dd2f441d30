"""The commands as a user runs them: results on stdout, errors as one message with exit code 2, real models."""

import csv
import json
import os
import re
import struct
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import oversmooth as osm
from oversmooth import cli
from oversmooth.models.discovery import proof
from oversmooth.models.families import ARCHITECTURES, REFUSED
from oversmooth.results import Inspection, Verification
from oversmooth.results.wording import weights_words
from tests.contract.tiny_models import tiny_model
from tests.real_models import albert, minilm

ANSI = re.compile(r"\x1b\[")


@pytest.fixture
def oversmooth(monkeypatch, capsys):
    """Runs the entry point in this process: arguments in, `(exit code, stdout, stderr)` out."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["oversmooth", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        output = capsys.readouterr()
        return caught.value.code or 0, output.out, output.err

    return run


def in_a_shell(*arguments, **options):
    command = [sys.executable, "-c", "from oversmooth.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def folder(tmp_path):
    """A tiny saved BERT."""
    path = tmp_path / "model"
    tiny_model("bert")[0].save_pretrained(path)
    return path


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


# --- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_prints_one_row_per_layer_with_the_librarys_numbers(oversmooth, folder):
    code, out, err = oversmooth("inspect", folder)
    assert (code, err) == (0, "")
    result = osm.inspect(folder)
    lines = out.splitlines()
    assert lines[0] == result.provenance.name
    assert lines[1] == "bert, 3 layers, width 32, 4 heads of 8, post-norm (layer)"
    for layer in result.layers:
        (row,) = [line for line in lines if line.split()[:1] == [str(layer.layer)]]
        assert row.split()[1] == f"{layer.plain.rho_dc:.3f}"
        assert row.split()[2] == f"{layer.null.rho_dc:.3f}"


def test_the_last_line_says_what_the_value_maps_prefer(oversmooth, folder, tmp_path):
    assert weights_words(osm.inspect(folder)) in " ".join(oversmooth("inspect", folder)[1].split())
    assert oversmooth("edit", folder, "--sharpen", "--output", tmp_path / "sharp")[0] == 0
    last = oversmooth("inspect", tmp_path / "sharp")[1].strip().splitlines()[-1]
    assert last.startswith("All 3 value maps prefer sharpening (positivity -1.00 or below).")


def test_json_is_the_only_thing_on_stdout_and_restores_the_result(oversmooth, folder):
    code, out, err = oversmooth("inspect", folder, "--format", "json")
    assert (code, err) == (0, "")
    assert Inspection.from_dict(json.loads(out)) == osm.inspect(folder)


def test_csv_has_the_rows_of_the_layers(oversmooth, folder, tmp_path):
    code, out, _ = oversmooth("inspect", folder, "-o", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    expected = osm.inspect(folder).rows()
    assert code == 0
    assert "rho_dc" in out
    assert list(rows[0])[: len(expected[0]) + 1] == ["model", *expected[0]]
    assert [float(row["rho_dc"]) for row in rows] == [row["rho_dc"] for row in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.csv"]


def test_csv_has_the_rows_of_the_heads_when_heads_are_asked_for(oversmooth, folder, tmp_path):
    oversmooth("inspect", folder, "--heads", "-o", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [(int(row["layer"]), int(row["head"])) for row in rows] == [(i, h) for i in range(3) for h in range(4)]


def test_csv_replaces_an_older_file(oversmooth, folder, tmp_path):
    (tmp_path / "out.csv").write_text("old")
    oversmooth("inspect", folder, "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().startswith("model,stack,layer")


def test_heads_prints_a_second_table_with_a_row_per_head(oversmooth, folder):
    _, without, _ = oversmooth("inspect", folder)
    _, out, _ = oversmooth("inspect", folder, "--heads")
    assert "kv_head" in out
    assert "kv_head" not in without
    assert len(out.splitlines()) >= len(without.splitlines()) + 12


def test_full_computes_every_eigenvalue_of_a_wide_layer(oversmooth, folder, monkeypatch):
    monkeypatch.setattr("oversmooth.spectra.spectrum.DENSE_UP_TO", 16)
    _, extremes, _ = oversmooth("inspect", folder, "--format", "json")
    _, full, _ = oversmooth("inspect", folder, "--format", "json", "--spectrum", "full")
    extremes, full = json.loads(extremes)["layers"][0]["plain"], json.loads(full)["layers"][0]["plain"]
    assert (extremes["route"], extremes["eigenvalues"]) == ("krylov", None)
    assert (full["route"], len(full["eigenvalues"])) == ("dense", 32)
    assert extremes["rho_dc"] == pytest.approx(full["rho_dc"], rel=1e-4)


def test_extremes_are_computed_in_float32_where_not_all_eigenvalues_are(oversmooth, folder, monkeypatch):
    _, small, _ = oversmooth("inspect", folder, "--format", "json", "--spectrum", "extremes")
    for room in ("spectrum", "inspect"):
        monkeypatch.setattr(f"oversmooth.spectra.{room}.DENSE_WITHOUT_ASKING", 16)
    _, large, _ = oversmooth("inspect", folder, "--format", "json", "--spectrum", "extremes")
    small, large = json.loads(small), json.loads(large)
    assert [found["provenance"]["compute_dtype"] for found in (small, large)] == ["float64", "float32"]
    assert [found["layers"][0]["plain"]["route"] for found in (small, large)] == ["dense", "krylov"]


def test_precision_is_what_the_eigenvalues_are_computed_in(oversmooth, folder):
    _, out, _ = oversmooth("inspect", folder, "--format", "json", "--precision", "float32")
    assert json.loads(out)["provenance"]["compute_dtype"] == "float32"


def test_a_bare_file_is_read_with_what_the_options_say(oversmooth, tmp_path):
    tiny_model("llama")[0].save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    options = ("--model-type", "llama", "--n-heads", 4, "--n-kv", 2)
    code, out, _ = oversmooth("inspect", tmp_path / "model.safetensors", *options)
    assert code == 0
    assert "llama, 3 layers, width 32, 4 heads of 8, 2 value heads" in out


def test_stacks_are_told_apart_in_the_table(oversmooth, tmp_path):
    tiny_model("t5")[0].save_pretrained(tmp_path)
    _, out, _ = oversmooth("inspect", tmp_path)
    assert "encoder: t5.encoder, 3 layers" in out
    assert "decoder: t5.decoder, 2 layers" in out
    assert len([line for line in out.splitlines() if line.startswith("decoder ")]) == 2


def test_hybrids_say_how_many_blocks_have_attention(oversmooth, tmp_path):
    tiny_model("jamba")[0].save_pretrained(tmp_path)
    _, out, _ = oversmooth("inspect", tmp_path)
    assert "2 of 4 blocks (the others have no softmax attention)" in out


def test_a_layer_with_nan_is_unreadable_by_name_and_the_others_continue(oversmooth, folder):
    name = "encoder.layer.1.attention.self.value.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, :2] = torch.tensor([float("nan"), float("inf")])
    save_file(tensors, folder / "model.safetensors")
    code, out, _ = oversmooth("inspect", folder)
    assert code == 0
    assert f"layer 1 unreadable: {name} holds 2 values that are NaN or infinite" in out
    _, out, _ = oversmooth("inspect", folder, "--format", "json")
    layers = Inspection.from_dict(json.loads(out)).layers
    assert [layer.plain is None for layer in layers] == [False, True, False]


@pytest.mark.parametrize(
    "tensor", ["output.dense.weight", "output.dense.bias", "output.LayerNorm.weight", "self.value.bias"]
)
def test_every_tensor_that_is_read_is_checked_for_nan(tensor, oversmooth, folder):
    name = f"encoder.layer.0.attention.{tensor}"
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert f"layer 0 unreadable: {name} holds 1 values" in oversmooth("inspect", folder)[1]


# --- what is printed where ------------------------------------------------------------------------------------------


def test_a_pipe_gets_whole_tables_without_colours(folder):
    run = in_a_shell("inspect", folder)
    assert run.returncode == 0
    assert not ANSI.search(run.stdout)
    assert "|bias|" in run.stdout
    assert run.stderr == ""


def test_a_hostile_file_name_is_printed_literally(oversmooth, folder, tmp_path):
    hostile = tmp_path / "[red]x[" / "red] [link=file:x]y"
    hostile.parent.mkdir()
    folder.rename(hostile)
    code, out, _ = oversmooth("inspect", hostile)
    assert code == 0
    assert out.splitlines()[0] == hostile.name
    (hostile / "model.safetensors").write_bytes(b"")
    code, _, err = oversmooth("inspect", hostile)
    assert code == 2
    assert str(hostile) in err


def test_a_file_name_beyond_the_encoding_of_the_terminal_is_no_reason_to_stop(folder, tmp_path):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    folder.rename(odd)
    run = in_a_shell("inspect", odd, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert run.returncode == 0
    assert "rho_dc" in run.stdout
    assert "Traceback" not in run.stderr


def test_a_reader_that_goes_away_is_no_traceback(folder):
    command = f'"{sys.executable}" -c "from oversmooth.cli import main; main()" inspect "{folder}" | true'
    run = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert run.stderr == ""


def test_the_version_is_the_packages(oversmooth):
    assert oversmooth("--version")[:2] == (0, f"oversmooth {metadata.version('oversmooth')}\n")


def test_architectures_lists_every_family_and_every_refusal(oversmooth):
    code, out, _ = oversmooth("list", "architectures")
    words = set(re.split(r"[\s,:]+", out))
    assert code == 0
    assert set(ARCHITECTURES) <= words
    assert {model_type for arch in ARCHITECTURES.values() for model_type in arch.model_types} <= words
    assert set(REFUSED) <= words
    assert "linear or recurrent attention" in out


def test_architectures_as_json_are_each_once_with_their_reason(oversmooth):
    listed = json.loads(oversmooth("list", "architectures", "--format", "json")[1])
    declared = [row["model"] for row in listed if row["state"] == "declared" and row["library"] == "transformers"]
    assert len(declared) == len(set(declared))
    assert {model_type for arch in ARCHITECTURES.values() for model_type in arch.model_types} <= set(declared)
    assert all(row["why"] for row in listed if row["model"] in REFUSED)


@pytest.mark.parametrize("kind", ["architectures", "metrics", "interventions", "recipes", "what-ifs"])
def test_every_kind_is_listed_and_searched(oversmooth, kind):
    rows = json.loads(oversmooth("list", kind, "--format", "json")[1])
    counted = {row["list"]: row["entries"] for row in json.loads(oversmooth("list", "--format", "json")[1])}
    assert len(rows) == counted[kind] > 5
    word = str(next(iter(rows[-1].values())))
    found = json.loads(oversmooth("list", kind, word.upper(), "--format", "json")[1])
    assert rows[-1] in found
    assert len(found) <= len(rows)
    assert oversmooth("list", kind, "no such thing")[1] == f"No {kind} with 'no such thing'.\n"


def test_an_unknown_kind_is_refused_with_the_known_ones(oversmooth):
    code, _, err = oversmooth("list", "metric")
    assert code == 2
    assert "metrics" in err


def test_a_declaration_is_printed_as_code(oversmooth, folder):
    code, out, _ = oversmooth("verify", folder, "--print-declaration")
    assert code == 0
    assert out.startswith("# ")
    assert "Arch(" in out


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_prints_the_error_of_every_layer_and_exits_with_0(oversmooth, folder):
    code, out, _ = oversmooth("verify", folder)
    assert code == 0
    assert "The declaration bert fits this model" in out
    assert len([line for line in out.splitlines() if re.match(r"\s+\d ", line)]) == 3


def test_verify_exits_with_1_when_the_declaration_does_not_fit(oversmooth, folder, monkeypatch):
    expected = proof.EqualTokenCheck.expected
    monkeypatch.setattr(proof.EqualTokenCheck, "expected", lambda check, **how: 1.01 * expected(check, **how))
    code, out, _ = oversmooth("verify", folder)
    assert code == 1
    assert "does not fit" in out
    code, out, _ = oversmooth("verify", folder, "--format", "json")
    assert code == 1
    assert not Verification.from_dict(json.loads(out)).passed


def test_verify_as_json_restores_the_result(oversmooth, folder):
    code, out, err = oversmooth("verify", folder, "--format", "json")
    assert (code, err) == (0, "")
    assert Verification.from_dict(json.loads(out)).largest_error < 1e-5


def test_verify_does_not_call_nan_a_fit(oversmooth, folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.1.attention.self.value.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    code, out, err = oversmooth("verify", folder)
    assert (code, out) == (2, "")
    assert "layer 1 returns values that are NaN or infinite" in err


def test_verify_refuses_before_it_loads_anything(oversmooth, folder, monkeypatch):
    def load(*_, **__):
        raise AssertionError("loaded")

    monkeypatch.setattr("oversmooth.models.live.load_model", load)
    edit_config(folder, model_type="mamba")
    code, _, err = oversmooth("verify", folder)
    assert code == 2
    assert "linear or recurrent attention" in err


def test_verify_says_of_a_bare_file_that_it_cannot_be_run(oversmooth, tmp_path):
    tiny_model("distilbert")[0].save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    code, _, err = oversmooth("verify", tmp_path / "model.safetensors")
    assert code == 2
    assert "no config.json" in err
    assert f"oversmooth inspect {tmp_path}/model.safetensors" in err


# --- bad input ------------------------------------------------------------------------------------------------------


def truncated(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def lying_header(folder):
    header = json.dumps({"w": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 32]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))


def malicious_pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"w": torch.ones(2), "x": _Payload(str(folder / "executed"))}, folder / "pytorch_model.bin")


class _Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def two_models(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(content)
    (folder / "model.safetensors").rename(folder / "b.safetensors")


def emptied(folder):
    for file in folder.iterdir():
        file.unlink()


BAD_INPUT = {
    "a missing path": (
        lambda folder: folder.rename(folder.with_name("gone")),
        ("Nothing was found at", "Tried:", "A target is"),
    ),
    "an empty folder": (emptied, ("Expected weights", "found nothing", "Point at")),
    "a truncated file": (truncated, ("bytes, as its header promises", "found", "Download or copy the file again")),
    "a header that lies": (lying_header, ("[4, 4] numbers of F32 in 'w'", "found 32 bytes", "copy the file again")),
    "heads that contradict": (
        lambda folder: edit_config(folder, num_attention_heads=5),
        ("the config says 5 heads", "says 32 columns", "Check that config.json"),
    ),
    "a width that contradicts": (
        lambda folder: edit_config(folder, hidden_size=64),
        ("the config says 64", "says 32", "Check that config.json"),
    ),
    "layers that contradict": (
        lambda folder: edit_config(folder, num_hidden_layers=7),
        ("the config says 7", "says 3", "Check that config.json"),
    ),
    "an unknown model type": (
        lambda folder: edit_config(folder, model_type="lama"),
        ("model_type 'lama'", "llama", "--model-type"),
    ),
    "a pickle that would run code": (
        malicious_pickle,
        ("needs more than tensors", "mkdir", "nothing was executed", "Convert it"),
    ),
    "two candidate models": (two_models, ("a.safetensors, b.safetensors", "Point at one file", "oversmooth inspect")),
    "a config that is no JSON": (
        lambda folder: (folder / "config.json").write_text("{oops"),
        ("expected a JSON object", "found no JSON", "copy the file again"),
    ),
}


@pytest.mark.parametrize("verb", ["inspect", "verify"])
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_ends_in_one_message_with_exit_code_2(case, verb, oversmooth, folder):
    spoil, parts = BAD_INPUT[case]
    spoil(folder)
    code, out, err = oversmooth(verb, folder)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for part in parts:
        assert part in err
    assert not (folder / "executed").exists()


def test_bad_input_is_no_traceback_in_a_real_shell(folder):
    truncated(folder)
    run = in_a_shell("inspect", folder)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ")
    assert "Traceback" not in run.stderr


def test_the_config_mismatch_of_a_live_load_is_no_traceback(oversmooth, folder):
    edit_config(folder, intermediate_size=7)
    code, out, err = oversmooth("verify", folder)
    assert (code, out) == (2, "")
    assert "does not hold every weight" in err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--precision", "half"), ("Unknown precision 'half'", "Known: auto, float32, float64")),
        (("--model-type", "berd"), ("'berd'", "Close: bert", "--model-type")),
        (("--n-heads", "0"), ("--n-heads",)),
        (("--no-such-option",), ("No such option",)),
    ],
)
def test_a_bad_option_ends_in_one_message_with_exit_code_2(options, parts, oversmooth, folder):
    code, out, err = oversmooth("inspect", folder, *options)
    assert (code, out) == (2, "")
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("place", "reason"), [("absent/out.csv", "there is no folder"), ("folder.csv", "it is a folder")]
)
def test_a_csv_that_cannot_be_written_is_refused_before_the_work(
    place, reason, oversmooth, tmp_path, folder, monkeypatch
):
    monkeypatch.setattr("oversmooth.spectra.inspect.open_model", lambda *_, **__: pytest.fail("the work was begun"))
    (tmp_path / "folder.csv").mkdir()
    code, out, err = oversmooth("inspect", folder, "-o", tmp_path / place)
    assert (code, out) == (2, "")
    for part in ("cannot be written", reason, "existing, writable folder"):
        assert part in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.csv", "model"]


def test_a_csv_that_fails_while_it_is_written_leaves_nothing_behind(oversmooth, tmp_path, folder, monkeypatch):
    (tmp_path / "out.csv").write_text("old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    code, _, err = oversmooth("inspect", folder, "-o", tmp_path / "out.csv")
    assert code == 2
    assert "No space left on device" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.csv"]
    assert (tmp_path / "out.csv").read_text() == "old"


# --- real models ----------------------------------------------------------------------------------------------------


def test_the_real_minilm_has_the_published_radii(oversmooth):
    result = osm.inspect(minilm())
    radii = [f"{layer.plain.rho_dc:.3f}" for layer in result.layers]
    assert radii == ["2.238", "2.075", "2.655", "2.510", "2.115", "2.535"]
    code, out, _ = oversmooth("inspect")
    assert code == 0
    for radius in radii:
        assert radius in out


def test_the_real_minilm_is_read_in_part_and_leaves_a_trace():
    provenance = osm.inspect(minilm()).provenance
    (file,) = provenance.files
    assert provenance.bytes_read < 0.1 * file.size_bytes
    assert dict(provenance.versions)["torch"] == metadata.version("torch")


def test_the_real_minilm_fits_its_declaration(oversmooth):
    code, out, _ = oversmooth("verify", minilm(), "--format", "json")
    assert code == 0
    assert Verification.from_dict(json.loads(out)).largest_error < 1e-4


def test_the_real_albert_is_one_layer_of_twelve_passes(oversmooth):
    (layer,) = osm.inspect(albert()).layers
    assert layer.passes == tuple(range(12))
    assert "0 (x12)" in oversmooth("inspect", albert())[1]


def test_the_real_albert_fits_its_declaration():
    assert osm.verify(albert()).largest_error < 1e-4


def test_without_minilm_the_verb_takes_the_shipped_model_and_says_so(oversmooth, monkeypatch):
    monkeypatch.setattr("oversmooth.models.example_model.find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    code, out, err = oversmooth("inspect")
    assert code == 0
    said = "This is the example model of this package, a ViT of 12 layers trained on handwritten digits, because"
    assert err.startswith(said)
    assert said in " ".join(out.split())
