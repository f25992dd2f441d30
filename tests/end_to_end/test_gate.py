"""The gate: exit code 0 within limits, 1 beyond them, 2 for what is no question; files for machines."""

import json
from xml.etree import ElementTree

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import MissingValue
from tests.command_line import oversmooth
from tests.contract.tiny_models import tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model as it is drawn, and one whose attention adds much of what all tokens share."""
    place = tmp_path_factory.mktemp("gate")
    model, _ = tiny_model("gpt2")
    model.save_pretrained(place / "good")
    with torch.no_grad():
        for block in model.h[1:]:
            block.attn.c_proj.weight.zero_()
            block.attn.c_proj.bias.fill_(30.0)  # the same vector on every token
            block.attn.c_proj.bias[::2] = -30.0
    model.save_pretrained(place / "smooth")
    return place


@pytest.fixture(scope="module")
def batches():
    return [{"input_ids": torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))}]


def test_a_smoothed_model_breaks_the_rule_at_its_layer_and_attention_is_to_blame(folders, batches):
    good = osm.gate(folders / "good", batches, rules={"max_cosine": 0.9})
    assert good.passed
    result = osm.gate(folders / "smooth", batches, rules={"max_cosine": 0.9, "min_effective_rank_share": 0.01})
    assert [breach.depth for breach in result.breaches if breach.rule == "max_cosine"] == [2, 3]
    first = result.breaches[0]
    assert first.sub_block == "attention"
    assert first.sub_block_change > 0
    assert first.words.startswith("after layer 1: mean cosine is 0.9")
    assert "at most 0.9 is allowed; in that layer, attention raises it most (+" in first.words
    assert osm.GateResult.from_dict(result.to_dict(), where="here") == result


def test_a_comparison_names_layers_that_became_smoother_only(folders, batches):
    before = osm.measure(folders / "good", batches, metrics=("cosine", "effective_rank_share"))
    after = osm.measure(folders / "smooth", batches, metrics=("cosine", "effective_rank_share"))
    assert osm.gate(folders / "good", batches, against=before).passed
    worse = osm.gate(folders / "smooth", batches, against=before, tolerance=0.05)
    assert {breach.depth for breach in worse.breaches} == {2, 3}
    assert osm.gate(folders / "good", batches, against=after).passed


def test_the_command_ends_with_one_beyond_the_limits_and_writes_for_machines(folders, tmp_path, monkeypatch):
    ids = tmp_path / "ids.json"
    monkeypatch.setattr(
        "oversmooth.measurement.gate.measure",
        lambda target, data, **options: osm.measure(
            target, [{"input_ids": torch.arange(24).reshape(2, 12)}], metrics=options["metrics"]
        ),
    )
    good = oversmooth("gate", folders / "good", "--max-cosine", 0.9)
    assert (good.returncode, good.stdout) == (0, "passed\n")
    xml = tmp_path / "gate.xml"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    bad = oversmooth("gate", folders / "smooth", "--rule", "max_cosine=0.9", "-o", xml)
    assert bad.returncode == 1
    assert bad.stdout.startswith("max_cosine: after layer 1: mean cosine is 0.9")
    assert bad.stdout.endswith("failed: 2 breaches\n")
    assert "::error title=oversmooth gate max_cosine::after layer 1: mean cosine" in bad.stderr
    suite = ElementTree.parse(xml).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert suite.find("testcase/failure").get("message").startswith("after layer 1: mean cosine is 0.9")
    rules = tmp_path / "gate.toml"
    rules.write_text("max-cosine = 0.9\n")
    told = oversmooth("gate", folders / "smooth", "--config", rules, "--format", "json")
    assert told.returncode == 1
    assert json.loads(told.stdout)["rules"] == [["max_cosine", 0.9]]
    assert not ids.exists()


# --- models that were trained -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Two ViTs trained on the same handwritten digits, one of them smoothed, and a folder of digits."""
    from PIL import Image
    from sklearn.datasets import load_digits
    from transformers import ViTConfig, ViTForImageClassification

    place = tmp_path_factory.mktemp("digits")
    found = load_digits()
    (place / "images").mkdir()
    for number, image in enumerate(found.images[:8]):
        Image.fromarray((image * 255 / 16).astype("uint8")).convert("RGB").save(place / "images" / f"{number}.png")
    images = torch.tensor(found.images / 8 - 1, dtype=torch.float32)[:, None].expand(-1, 3, 8, 8)
    labels = torch.tensor(found.target)
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 64}
    for name in ("vanilla", "smooth"):
        torch.manual_seed(0)
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=2, num_labels=10))
        if name == "smooth":
            osm.smooth(model, init="fresh")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(30):
            batch = torch.arange(step * 64, (step + 1) * 64) % len(images)
            optimizer.zero_grad()
            model(images[batch], labels=labels[batch]).loss.backward()
            optimizer.step()
        osm.bake(model).vit.save_pretrained(place / name)
    return place


def test_the_exit_code_of_a_model_trained_on_digits_is_zero_and_of_its_smoothed_twin_one(digits):
    words = ("--data", digits / "images", "--mean", "0.5", "--std", "0.5", "--size", "8", "--max-cosine", "0.9")
    good = oversmooth("gate", digits / "vanilla", *words)
    assert (good.returncode, good.stdout) == (0, "passed\n"), good.stderr
    bad = oversmooth("gate", digits / "smooth", *words)
    assert bad.returncode == 1, bad.stderr
    assert "max_cosine: after layer 5: mean cosine is 0.9" in bad.stdout


def test_the_log_of_a_run_is_held_to_limits_too(tmp_path):
    log = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 1, "loss": 2.0, "smoothing/cosine/depth_0": 0.99, "smoothing/cosine/depth_1": 0.5},
        {"step": 2, "loss": 1.0},
        {"step": 3, "loss": 1.4, "smoothing/cosine/depth_0": 0.99, "smoothing/cosine/depth_1": 0.97},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert oversmooth("gate", log, "--max-loss-increase", 0.5, "--max-cosine", 0.98).returncode == 0
    done = oversmooth("gate", log, "--max-loss-increase", 0.3, "--max-cosine", 0.95, "--rule", "min_hfc_lfc=0.1")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "max_cosine: after layer 0: mean cosine is 0.97, at most 0.95 is allowed",
        "min_hfc_lfc: the run: hfc_lfc has no value, at least 0.1 is allowed",
        "max_loss_increase: the run: loss_increase is 0.4, at most 0.3 is allowed",
        "failed: 3 breaches",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rule", "max_cosin=0.9"], "Unknown rule 'max_cosin'. Close: max_cosine"),
        (["--rule", "max_cosine"], "without a value"),
        (["--rule", "max_cosine=much"], "NAME=NUMBER, such as max_cosine=0.95"),
        (["--max-loss-increase", "0.1"], "Give the metrics.jsonl of a run"),
        (["--against", "nowhere.json"], "nowhere.json cannot be read"),
        (["--max-cosine", "0.9", "--tolerance", "-1"], "tolerance must be at least 0"),
        (["--config", "nowhere.toml"], "nowhere.toml cannot be read"),
        ([], "rules or against must be given."),
    ],
)
def test_what_is_no_question_ends_with_two_and_says_why(folders, words, said):
    done = oversmooth("gate", folders / "good", *words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-cosine = 'high'\n", "Invalid value for '--max-cosine'"),
        ("max-cosine = nan\n", "the rule max_cosine must be a finite number"),
        ("max-cosin = 1\n", "Close: max-cosine"),
        ("max-cosine = [1]\n", "must be one value"),
        ("rule = 3\n", "must be a list"),
        ("github = true\n", "Unknown key in"),
        ("[rules\n", "expected a TOML file of options"),
    ],
)
def test_a_file_of_rules_with_a_mistake_is_refused(folders, tmp_path, text, said):
    path = tmp_path / "gate.toml"
    path.write_text(text)
    done = oversmooth("gate", folders / "good", "--config", path)
    assert done.returncode == 2
    assert said in done.stderr


def test_an_analysis_of_another_model_is_refused(folders, batches, tmp_path):
    model, _ = tiny_model("bert")
    other = osm.measure(model, batches)
    (tmp_path / "other.json").write_text(other.to_json())
    with pytest.raises(osm.OversmoothError, match="model type was bert, is gpt2"):
        osm.gate(folders / "good", batches, against=tmp_path / "other.json")
    same = osm.measure(folders / "good", [{"input_ids": torch.arange(8)[None]}], metrics="cosine")
    with pytest.raises(osm.OversmoothError, match="hash of the inputs"):
        osm.gate(folders / "good", batches, against=same)


def test_a_gate_without_rules_is_refused(folders):
    with pytest.raises(MissingValue, match="rules or against"):
        osm.gate(folders / "good")
