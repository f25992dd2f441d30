"""Pictures reach a model as it was trained to see them, and the result says how."""

import json
import shutil

import pytest
import torch
from PIL import Image

from oversmooth.data.options import DataOptions
from oversmooth.data.preprocessing import IMAGENET, PUBLISHED, Geometry, find_preprocessing
from oversmooth.errors import BadValue, BrokenFile, MissingValue, WrongBatch
from oversmooth.measurement.measure import measure
from oversmooth.models.open import open_source
from tests.contract.tiny_models import tiny_model
from tests.real_data import real_data
from tests.real_models import real_model

RED = Image.new("RGB", (40, 30), (255, 0, 0))


def steps_of(target, *, is_generated=False, **options):
    source = open_source(target)
    from oversmooth.models.live import load_model

    model = load_model(source, "measure")
    config = open_source(model).config
    return find_preprocessing(model, source, config, DataOptions(**options), is_generated=is_generated)


def red_of(steps):
    """What a red picture becomes, per channel."""
    return steps.apply([RED])[0].mean((1, 2))


def normalised_red(mean, std):
    return (torch.tensor([1.0, 0.0, 0.0]) - torch.tensor(mean)) / torch.tensor(std)


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for index, size in enumerate([(40, 30), (20, 60)]):
        Image.effect_noise(size, 60).convert("RGB").save(folder / f"{index}.png")
    return str(folder)


@pytest.mark.parametrize(
    ("case", "mean", "std"),
    [("vit", [0.5] * 3, [0.5] * 3), ("deit", *IMAGENET), ("dinov2", *IMAGENET), ("beit", [0.5] * 3, [0.5] * 3)],
)
def test_without_a_processor_the_published_one_of_the_family_is_used_and_said(case, mean, std):
    steps = steps_of(tiny_model(case)[0])
    torch.testing.assert_close(red_of(steps), normalised_red(mean, std), rtol=1e-4, atol=1e-4)
    assert f"published preprocessing of {case}" in steps.statement
    assert "no processor beside the model" in steps.statement


def test_dinov2_of_518_pixels_is_given_224_as_published():
    from transformers import Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = Dinov2Model(Dinov2Config(image_size=518, patch_size=14, **sizes)).eval()
    assert steps_of(model).apply([RED]).shape == (1, 3, 224, 224)
    assert "shorter side to 256, middle 224 x 224" in steps_of(model).statement


def test_the_models_own_processor_comes_first(tmp_path):
    tiny_model("dinov2")[0].save_pretrained(tmp_path)
    settings = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": 20},
        "crop_size": {"height": 16, "width": 16},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    steps = steps_of(str(tmp_path))
    assert steps.apply([RED]).shape == (1, 3, 16, 16)
    torch.testing.assert_close(red_of(steps), normalised_red([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]), rtol=1e-4, atol=1e-4)
    assert "own processor (preprocessor_config.json): shorter side to 20, middle 16 x 16" in steps.statement
    changed = steps_of(str(tmp_path), mean=0.5, std=[0.25] * 3)
    torch.testing.assert_close(red_of(changed), torch.tensor([2.0, -2.0, -2.0]), rtol=1e-4, atol=1e-4)
    assert "changed by the user" in changed.statement


def test_a_broken_processor_file_is_named(tmp_path):
    tiny_model("dinov2")[0].save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(BrokenFile, match=r"preprocessor_config\.json"):
        steps_of(str(tmp_path))


def test_timm_models_are_given_their_own_data_config():
    model, _ = tiny_model("timm-vit")
    steps = steps_of(model)
    config = model.pretrained_cfg
    assert steps.apply([RED]).shape == (1, 3, 16, 16)
    torch.testing.assert_close(red_of(steps), normalised_red(config["mean"], config["std"]), rtol=1e-4, atol=1e-4)
    assert "timm's data config of vit_tiny_patch16_224" in steps.statement


def test_photographs_for_a_model_of_unknown_statistics_are_refused(photos):
    model, _ = tiny_model("timm-vit")
    del model.pretrained_cfg
    with pytest.raises(MissingValue, match="--mean"):
        measure(model, photos)
    assert measure(model, photos, mean=0.5, std=0.5).data.warnings == ()


def test_generated_pictures_for_such_a_model_come_with_a_warning():
    model, _ = tiny_model("timm-vit")
    del model.pretrained_cfg
    (warning,) = measure(model, max_samples=2).data.warnings
    assert "Nothing says which pixel statistics" in warning


def test_what_the_user_says_is_done_and_stated(photos):
    facts = measure(tiny_model("dinov2")[0], photos, mean=[0.1, 0.2, 0.3], std=0.5, size=24, crop=20).data
    for piece in ("shorter side to 24, middle 20 x 20", "mean 0.1 0.2 0.3", "standard deviation 0.5"):
        assert piece in facts.preprocessing


def test_another_size_is_interpolated_where_the_model_offers_it(photos):
    facts = measure(tiny_model("vit")[0], photos, size=24).data
    assert "position encodings interpolated from 16 x 16" in facts.preprocessing
    assert facts.tokens == 2 * (1 + (24 // 4) ** 2)


def test_another_size_is_refused_where_the_model_refuses_it(photos):
    with pytest.raises(WrongBatch, match=r"(?s)doesn't match.*built for images of shape \(batch, 3, 16, 16\)"):
        measure(tiny_model("timm-vit")[0], photos, size=24)


@pytest.mark.parametrize(
    "options",
    [
        {"std": 0.0},
        {"std": [0.5, 0.5, -1.0]},
        {"size": 0},
        {"size": 10, "crop": 12},
        {"mean": [0.5, 0.5]},
        {"seed": 2**64},
    ],
)
def test_impossible_choices_are_refused(options, photos):
    with pytest.raises(BadValue, match=list(options)[-1]):
        measure(tiny_model("vit")[0], photos, **options)


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (16, 16), (3, 200), (1, 1)])
def test_every_picture_gets_the_models_size(size):
    for shorter in (None, 18, 16):
        made = Geometry(height=16, width=16, shorter=shorter).apply(Image.new("RGB", size))
        assert made.size == (16, 16)


def test_the_middle_is_cut_out_without_distortion():
    picture = Image.new("RGB", (60, 20), (0, 0, 0))
    picture.paste((255, 255, 255), (20, 0, 40, 20))
    middle = Geometry(height=20, width=20, shorter=20).apply(picture)
    assert middle.getextrema() == ((255, 255),) * 3


def test_every_published_family_is_declared_or_part_of_a_declared_one():
    from oversmooth.models.identify import known_model_types

    assert PUBLISHED.keys() <= {*known_model_types(), "clip", "siglip", "dinov3_vit"}


def plain_change(folder, images):
    """From embedding to last layer: mean of log(HFC/LFC), with nothing of ours."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    changes = []
    for path in images:
        picture = Image.open(path).convert("RGB")
        scale = 256 / min(picture.size)
        picture = picture.resize(
            (round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BICUBIC
        )
        left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
        cut = picture.crop((left, top, left + 224, top + 224))
        pixels = torch.tensor(list(cut.tobytes()), dtype=torch.float32).reshape(224, 224, 3).permute(2, 0, 1) / 255
        with torch.no_grad():
            found = model(((pixels - mean) / std)[None], output_hidden_states=True)
        ratios = []
        for h in (found.hidden_states[0][0], found.last_hidden_state[0]):
            shared = h.mean(0, keepdim=True).expand_as(h)
            ratios.append(torch.log((h - shared).norm() / shared.norm()))
        changes.append(ratios[1] - ratios[0])
    return torch.stack(changes).mean().item()


@pytest.mark.parametrize("with_processor", [False, True])
def test_dinov2_on_photographs_has_the_sign_of_an_independent_script(with_processor, tmp_path):
    folder, photographs = real_model("dinov2-small"), real_data("images")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    if with_processor:
        settings = {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": 256},
            "crop_size": {"height": 224, "width": 224},
            "image_mean": IMAGENET[0],
            "image_std": IMAGENET[1],
            "resample": 3,
        }
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    images = sorted(photographs.rglob("*.jpg"))[:8]
    result = measure(str(tmp_path), str(photographs), max_samples=len(images))
    expected = plain_change(tmp_path, images)
    assert expected < -0.2, "with ImageNet's statistics DINOv2 smooths"
    torch.testing.assert_close(result.raw_attributions[0].total, expected, rtol=0.02, atol=0.0)
    assert ("own processor" if with_processor else "published preprocessing of dinov2") in result.data.preprocessing
