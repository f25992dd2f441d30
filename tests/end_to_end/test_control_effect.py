"""What the interval does on a real task: handwritten digits, a deep narrow ViT, a few epochs, under a minute each."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import oversmooth as osm

EPOCHS, BATCH, PEAK_RATE = 12, 96, 2e-3
TRAIN = 1437
"""Of 1797 images; the others are looked at once, at the end."""
KINDS = ("vanilla", "smooth", "sharpen")


@dataclass(frozen=True)
class Trained:
    model: nn.Module
    accuracy: float
    cosine: list[float]
    """Mean cosine between tokens in the embedding and after every layer."""
    images: Tensor


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    scaled = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    return scaled[order], torch.tensor(labels)[order]


def vision_transformer() -> nn.Module:
    """12 layers, 64 wide, 4 heads; 16 patches of 2 x 2 pixels and a class token."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 12, "num_heads": 4}
    return VisionTransformer(**sizes, mlp_ratio=2, num_classes=10)


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    steps = len(images) // BATCH
    search = torch.optim.AdamW(model.parameters(), PEAK_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(search, PEAK_RATE, total_steps=EPOCHS * steps)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images), generator=generator).split(BATCH)[:steps]:
            search.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            search.step()
            schedule.step()
    model.eval()


@pytest.fixture(scope="module")
def trained() -> dict[str, Trained]:
    images, labels = digits()
    found = {}
    for kind in KINDS:
        model = vision_transformer()
        if kind != "vanilla":
            getattr(osm, kind)(model, init="fresh", generator=torch.Generator().manual_seed(2))
        train(model, images[:TRAIN], labels[:TRAIN])
        unseen = images[TRAIN:]
        with torch.no_grad():
            accuracy = (model(unseen).argmax(1) == labels[TRAIN:]).double().mean().item()
        curve = osm.measure(model, [unseen[:128]], metrics="cosine").curve("cosine")
        found[kind] = Trained(model, accuracy, [value.mean for value in curve], unseen)
    return found


@pytest.mark.slow
def test_smooth_makes_tokens_alike_sharpen_keeps_them_apart_and_vanilla_is_between(trained):
    for kind, run in trained.items():
        curve = " ".join(f"{value:.2f}" for value in run.cosine)
        print(f"\n{kind}: accuracy {run.accuracy:.3f}, mean cosine over depth {curve}")
    last = {kind: run.cosine[-1] for kind, run in trained.items()}
    assert len(trained["vanilla"].cosine) == 13
    assert last["smooth"] > 0.9
    assert last["sharpen"] < 0.3
    assert last["sharpen"] < last["vanilla"] < last["smooth"]


@pytest.mark.slow
def test_all_of_them_learn_the_task(trained):
    assert all(run.accuracy > 0.6 for run in trained.values())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "interval"), [("smooth", (0.0, 1.0)), ("sharpen", (-1.0, 0.0))])
def test_after_training_the_eigenvalues_are_where_they_belong_and_baking_changes_nothing(trained, kind, interval):
    run = trained[kind]
    for layer in osm.inspect(run.model).layers:
        assert interval[0] - 1e-5 <= layer.plain.min_real <= layer.plain.max_real <= interval[1] + 1e-5
    baked = osm.bake(copy.deepcopy(run.model))
    with torch.no_grad():
        torch.testing.assert_close(baked(run.images), run.model(run.images), rtol=1e-4, atol=1e-4)
