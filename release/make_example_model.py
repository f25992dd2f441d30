"""Makes the example model that comes with the package again: `python release/make_example_model.py`, two minutes.

A vanilla ViT of 12 layers, trained by our own recipe `digits`, then written as transformers' ViT, so that the extra `hf`
alone runs it. With it come 40 of the held-out digits, four of each: the built-in pictures of models that take 8 x 8 pixels.
On the same machine and versions the files come out byte by byte; MANIFEST says which those were, and `--check FOLDER` makes
them into another folder and compares.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # sums in one order, whatever the machine

import numpy
import torch
from torch import Tensor, nn

PACKAGE = Path(__file__).parent.parent / "src" / "oversmooth"
FOLDER, IMAGES = "models/digits-vit", "data/samples/digits.npy"
MANIFEST = f"{FOLDER}/manifest.json"
FILES = (f"{FOLDER}/config.json", f"{FOLDER}/model.safetensors", f"{FOLDER}/preprocessor_config.json", IMAGES)
SETTINGS = ("model.depth=12", "model.width=48", "training.epochs=40")
"""Of the recipe `digits`: as deep as it is, narrower so that it stays below 1 MB, longer so that it is trained to the end."""
SEED = 0
EACH = 4
"""Pictures of every digit that come with the package."""
NAMES = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "head": "classifier",
}
IN_BLOCKS = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
"""timm's names and transformers'."""


def trained(folder: Path) -> Any:
    """The run of our recipe: its model as timm's checkpoint below the folder, and its manifest."""
    from oversmooth.recipes.train import RunRequest, train

    request = RunRequest(name="digits", out=folder, seed=SEED, overrides=SETTINGS, analyzes=False)
    return train(request).manifest


def as_transformers(folder: Path) -> nn.Module:
    """transformers' ViT with the weights of timm's checkpoint."""
    from safetensors.torch import load_file
    from transformers import ViTConfig, ViTForImageClassification

    said = json.loads((folder / "config.json").read_text())["model_args"]
    digits = [str(digit) for digit in range(10)]
    config = ViTConfig(
        hidden_size=said["embed_dim"],
        num_hidden_layers=said["depth"],
        num_attention_heads=said["num_heads"],
        intermediate_size=int(said["embed_dim"] * said["mlp_ratio"]),
        image_size=said["img_size"],
        patch_size=said["patch_size"],
        num_channels=said["in_chans"],
        layer_norm_eps=1e-6,  # timm's
        id2label=dict(enumerate(digits)),
        label2id={name: number for number, name in enumerate(digits)},
    )
    model = ViTForImageClassification(config)
    model.load_state_dict(dict(renamed(load_file(folder / "model.safetensors"))))
    return model.eval()


def renamed(tensors: dict[str, Tensor]) -> Any:
    """Every tensor under its name in transformers; queries, keys and values apart."""
    for name, tensor in tensors.items():
        owner, _, kind = name.rpartition(".")
        if not name.startswith("blocks."):
            yield (f"{NAMES[owner]}.{kind}", tensor) if owner else (NAMES[name], tensor)
            continue
        _, layer, part = owner.split(".", 2)
        block = f"vit.layers.{layer}"
        if part == "attn.qkv":
            yield from (
                (f"{block}.attention.{q}_proj.{kind}", third) for q, third in zip("qkv", tensor.chunk(3), strict=True)
            )
        else:
            yield f"{block}.{IN_BLOCKS[part]}.{kind}", tensor


def held_out() -> tuple[numpy.ndarray, numpy.ndarray]:
    """The digits that the recipe holds out for test, as grey values from 0 to 255, and what they are."""
    from oversmooth.recipes.image_sets import open_images, train_and_test
    from oversmooth.recipes.train import load_recipe

    data = load_recipe("digits", ()).data
    _, test = train_and_test(data, open_images(data, None))
    images = [numpy.asarray(test.images.image(position)) for position in test.positions]
    return numpy.stack(images), numpy.array([test.images.labels[position] for position in test.positions])


def count_right(model: nn.Module, images: numpy.ndarray, labels: numpy.ndarray) -> int:
    """How many pictures get their own class."""
    pixels = torch.from_numpy(images).float()[:, None] / 255 * 2 - 1
    with torch.no_grad():
        found = model(pixel_values=pixels).logits.argmax(-1)
    return int((found == torch.from_numpy(labels)).sum())


def require_same(model: nn.Module, folder: Path, images: numpy.ndarray) -> None:
    """Raises unless timm's model gives the same logits."""
    import timm

    pixels = torch.from_numpy(images).float()[:, None] / 255 * 2 - 1
    original = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(pixel_values=pixels).logits, original(pixels), rtol=1e-4, atol=1e-5)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make(into: Path) -> dict[str, Any]:
    """Writes the model, its pictures and the manifest below the folder; returns the manifest."""
    folder = into / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    (into / IMAGES).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    images, labels = held_out()
    with TemporaryDirectory() as work:
        run = trained(Path(work) / "run")
        model = as_transformers(Path(work) / "run" / "model")
        require_same(model, Path(work) / "run" / "model", images)
    model.save_pretrained(folder)
    processor = {"image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 8, "width": 8}}
    processor |= {"resample": 3, "do_rescale": True, "do_normalize": True, "image_mean": [0.5], "image_std": [0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")
    numpy.save(into / IMAGES, numpy.stack([images[labels == digit][:EACH] for digit in range(10)]))
    manifest = {
        "what": "A vanilla ViT of 12 layers trained on scikit-learn's handwritten digits (UCI, 1998).",
        "made_by": "python release/make_example_model.py",
        "recipe": "digits",
        "overrides": list(SETTINGS),
        "seed": SEED,
        "data": run.data,
        "versions": run.sessions[-1].versions,
        "held_out": {"images": len(images), "right": count_right(model, images, labels)},
        "files": {name: {"bytes": (into / name).stat().st_size, "sha256": sha256(into / name)} for name in FILES},
    }
    (into / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="make it there, and compare with what is shipped")
    asked = parser.parse_args()
    made = make(asked.check or PACKAGE)
    print(json.dumps(made["held_out"]), sum(file["bytes"] for file in made["files"].values()), "bytes")
    if asked.check:
        shipped = json.loads((PACKAGE / MANIFEST).read_text())
        if other := [name for name, file in shipped["files"].items() if made["files"][name] != file]:
            sys.exit(f"error: {', '.join(other)} came out otherwise; made with {made['versions']}")
        print("the same files, byte by byte")


if __name__ == "__main__":
    main()
