"""Variants: controls differ from the forms in exactly what they say."""

import pytest
import torch

import oversmooth as osm
from oversmooth.control.eigenbasis import Eigenbasis
from oversmooth.models.open import open_source
from oversmooth.recipes.variants import FORMS, put_on
from tests.contract.tiny_models import tiny_model


def varied(variant: str, case: str = "timm-vit"):
    model, _ = tiny_model(case)
    put_on(model, variant, seed=3)
    return model


def weights(model):
    source = open_source(model)
    (stack,) = source.stacks()
    return [stack.weights(position, source.store.read) for position in range(len(stack.names.blocks))]


def eigenbases(model) -> list[Eigenbasis]:
    return [part for part in dict.fromkeys(model.modules()) if isinstance(part, Eigenbasis)]


@pytest.mark.parametrize("variant", FORMS)
def test_eigenvalues_start_where_the_variant_says(variant):
    form = FORMS[variant]
    low, high = form.start or (form.low, form.high)
    for layer in osm.inspect(varied(variant), heads=False).layers:
        assert low - 1e-5 <= layer.plain.min_real <= layer.plain.max_real <= high + 1e-5
        assert layer.plain.max_real - layer.plain.min_real > 0.5 * (high - low)


def test_all_forms_of_a_seed_share_basis_and_draws():
    first = eigenbases(varied("sharpen"))
    for variant in FORMS:
        form = FORMS[variant]
        low, high = form.start or (form.low, form.high)
        for mine, theirs in zip(first, eigenbases(varied(variant)), strict=True):
            torch.testing.assert_close(mine.basis.base, theirs.basis.base, rtol=0, atol=0)
            torch.testing.assert_close((theirs.psi - low) / (high - low), mine.psi + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["sharpen-start", "smooth-start"])
def test_a_start_inside_is_free_afterwards(variant):
    for eigenbasis in eigenbases(varied(variant)):
        assert eigenbasis.interval() == (-1.0, 1.0)


@pytest.mark.parametrize("case", ["timm-vit", "gpt2", "llama", "bert"])
def test_matched_weights_are_ordinary_orthogonal_and_of_the_size_of_the_forms(case):
    model = varied("matched", case)
    assert not eigenbases(model)
    plain, _ = tiny_model(case)
    assert list(model.state_dict()) == list(plain.state_dict())
    for layer in weights(model):
        value = layer.w_v.flatten(0, 1).detach()
        has_groups = layer.n_heads != layer.n_kv  # then the forms keep their eigenvalues in the output weights
        size = 1 if has_groups else 1 / 3
        torch.testing.assert_close(value @ value.T, size * torch.eye(len(value)), rtol=0, atol=1e-5)
        if not has_groups:
            output = layer.w_o.flatten(1).detach()
            torch.testing.assert_close(output.T @ output, torch.eye(output.shape[1]), rtol=0, atol=1e-5)


def test_the_map_of_matched_weights_has_no_identity_part_and_no_preferred_sign():
    for layer in osm.inspect(varied("matched"), heads=False).layers:
        assert layer.plain.min_real < -0.1 < 0.1 < layer.plain.max_real
        assert max(abs(imaginary) for _, imaginary in layer.plain.eigenvalues) > 0.1


def test_the_identity_part_is_what_no_identity_takes_off():
    traces = {
        variant: sum(
            torch.einsum("dhk,hkd->", layer.w_o.detach(), layer.w_v.detach()).item()
            for layer in weights(varied(variant))
        )
        for variant in ("sharpen", "smooth", "no-identity")
    }
    width = sum(layer.d_model for layer in weights(varied("sharpen")))
    assert traces["sharpen"] + width / 2 == pytest.approx(traces["no-identity"], abs=1e-3)
    assert traces["smooth"] - width / 2 == pytest.approx(traces["no-identity"], abs=1e-3)
