"""Spectra of model types that nobody declared equal brute force: the map that the running model shows, column by column."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oversmooth as osm
from oversmooth.models.discovery.watch import discovered, known_inputs
from oversmooth.models.identify import declared_for
from oversmooth.models.live import call_model
from oversmooth.models.open import open_source
from oversmooth.models.stores.module import describe
from tests.contract.tiny_models import marked
from tests.small_skeletons import small_skeletons

TYPES = (
    *(
        "aimv2_vision_model",
        "align_text_model",
        "altclip_text_model",
        "altclip_vision_model",
        "apertus",
        "arcee",
        "aria_text",
    ),
    *("audio-spectrogram-transformer", "bert-generation", "big_bird", "biogpt", "blenderbot", "blip_2_vision_model"),
    *("blip_text_model", "blip_vision_model", "bridgetower_text_model", "canary_decoder", "chinese_clip_text_model"),
    *("chinese_clip_vision_model", "clap_text_model", "clipseg_text_model", "clipseg_vision_model", "cohere2_moe"),
    *(
        "cpmant",
        "csm_depth_decoder_model",
        "ctrl",
        "cwm",
        "data2vec-audio",
        "deberta",
        "moonshine_streaming_encoder",
        "ernie4_5",
        "esm",
        "exaone4",
    ),
    *("glm", "glm4", "gpt-sw3", "helium", "hunyuan_v1_dense", "ijepa", "mlcd", "mpt", "olmo", "persimmon", "phimoe"),
    *("seed_oss", "vit_msn", "vitdet", "xglm", "yolos"),
)


SAMPLE = random.Random(0).sample(sorted(set(TYPES)), 4)
EACH = marked(TYPES, SAMPLE)


def small_model(model_type: str) -> nn.Module:
    """The first small model of a type that can be built and run."""
    for build in small_skeletons(model_type):
        try:
            model = build()
            discovered(model, describe(model))
            return model
        except (osm.OversmoothError, ValueError, RuntimeError, TypeError):
            continue
    raise AssertionError(f"no small model of {model_type} runs")


@contextmanager
def fed(module: nn.Module, token: Tensor) -> Iterator[None]:
    """Every position of a module's input is the same token."""

    def replaced(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (token.expand_as(args[0]), *args[1:])

    handle = module.register_forward_pre_hook(replaced)
    try:
        yield
    finally:
        handle.remove()


def brute_force(model: nn.Module, value: nn.Module, output: nn.Module, width: int) -> Tensor:
    """The value map: what the output projection returns for each basis vector at all positions."""
    seen: list[Tensor] = []
    inputs = known_inputs(model)
    assert inputs is not None
    handle = output.register_forward_hook(lambda _, args, result: seen.append(result.reshape(-1, result.shape[-1])[0]))
    try:
        with torch.no_grad():
            for token in (torch.zeros(width), *torch.eye(width)):
                before = len(seen)
                with fed(value, token):
                    call_model(model, inputs)
                del seen[before + 1 :]  # a layer that runs several times shows the same map each time
    finally:
        handle.remove()
    return torch.stack([column - seen[0] for column in seen[1:]], 1).double()


@pytest.mark.parametrize("case", EACH)
def test_spectra_equal_brute_force(case: str) -> None:
    model = small_model(case)
    assert not declared_for(case)
    source = open_source(model)
    layers = {(layer.stack, layer.layer): layer for layer in osm.inspect(model).layers}
    for stack in source.stacks():
        block = stack.names.blocks[0]
        value, output = (source.store.owner(name) for name in (block.value.weight, block.output.weight))  # type: ignore[attr-defined]
        width = stack.weights(0, source.store.read).w_v.shape[-1]
        eigenvalues = torch.linalg.eigvals(brute_force(model, value, output, width))
        spectrum = layers[stack.label, block.index].plain
        assert spectrum is not None
        torch.testing.assert_close(spectrum.rho_dc, (1 + eigenvalues).abs().max().item(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(spectrum.max_real, max(eigenvalues.real.max().item(), 0.0), rtol=1e-4, atol=1e-4)


def test_there_are_at_least_forty_types() -> None:
    assert len(set(TYPES)) >= 40
