"""Vision transformers of timm with a recipe's sizes, and their ordinary checkpoints."""

from pathlib import Path
from typing import Any

from torch import nn

from oversmooth.training.recipes.vision.settings import VisionRecipe

ARCHITECTURES = {"patches": "vit_tiny_patch16_224", "convolution": "vit_tiny_r_s16_p8_224"}
"""By stem, the entry of timm's registry that carries the sizes; each of them is overridden."""
FIRST_CONVOLUTIONS = {"patches": "patch_embed.proj", "convolution": "patch_embed.backbone.conv"}
NOT_SAVED = ("drop_path_rate",)
"""Arguments that matter in training only."""


def build_model(recipe: VisionRecipe) -> nn.Module:
    """A fresh model; seed torch before."""
    import timm

    name = ARCHITECTURES[recipe.model.stem]
    model: nn.Module = timm.create_model(name, pretrained=False, **recipe.model_arguments())
    return model


def save_model(recipe: VisionRecipe, model: nn.Module, folder: Path) -> None:
    """Writes what `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""
    from timm.models import save_for_hf

    arguments = {name: value for name, value in recipe.model_arguments().items() if name not in NOT_SAVED}
    config: dict[str, Any] = {
        "pretrained_cfg": {
            "input_size": [recipe.data.channels, recipe.data.image_size, recipe.data.image_size],
            "fixed_input_size": True,
            "mean": recipe.data.mean,
            "std": recipe.data.std,
            "crop_pct": recipe.evaluation.crop_ratio,
            "interpolation": "bicubic",
            "classifier": "head",
            "first_conv": FIRST_CONVOLUTIONS[recipe.model.stem],
            "num_classes": recipe.data.classes,
        }
    }
    save_for_hf(model, str(folder), model_config=config, model_args=arguments, safe_serialization=True)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """DeiT's rule: matrices only, no positions and tokens; nor the tangent of a basis, which decay would turn back."""
    return parameter.ndim > 1 and not name.endswith(("pos_embed", "cls_token", ".tangent"))
