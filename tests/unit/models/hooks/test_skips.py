"""Forward passes without skip connections: the stream is the branch alone, and the model is as before afterwards."""

import pytest
import torch
from torch import nn

from oversmooth.models.hooks.removal import why_not, without_skips
from oversmooth.models.hooks.taps import observed
from oversmooth.models.live import call_model
from oversmooth.models.open import open_source
from tests.contract.tiny_models import tiny_model


def encoder(norm_first: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), torch.randn(2, 5, 16)


def by_hand(layer: nn.Module, x: torch.Tensor, removed: str, norm_first: bool) -> torch.Tensor:
    attention = lambda h: layer.self_attn(h, h, h, need_weights=False)[0]  # noqa: E731
    feed_forward = lambda h: layer.linear2(torch.relu(layer.linear1(h)))  # noqa: E731
    if norm_first:
        x = attention(layer.norm1(x))
        return feed_forward(layer.norm2(x)) + (x if removed == "attention" else 0)
    x = layer.norm1(attention(x))
    return layer.norm2(feed_forward(x) + (x if removed == "attention" else 0))


@pytest.mark.parametrize("removed", ["attention", "block"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_without_skips_a_block_is_what_its_branches_are(norm_first, removed):
    model, x = encoder(norm_first)
    before = model(x)
    source = open_source(model)
    expected = x
    for layer in model.layers:
        expected = by_hand(layer, expected, removed, norm_first)
    with without_skips(source.stacks(), source.store, removed):
        found = model(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("case", ["bert", "llama", "gpt2", "vit", "dinov2", "timm-vit"])
def test_the_first_stream_after_attention_is_what_attention_added(case):
    model, inputs = tiny_model(case)
    source = open_source(model)
    stacks = source.stacks()

    def first_places() -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = {}
        wants = lambda name, stack: name in ("attn_branch", "attn_sum")  # noqa: E731
        with observed(stacks, source.store, lambda p, h: seen.setdefault(p.name, h.clone()), wants) as restart:
            restart()
            with torch.no_grad():
                call_model(model.eval(), inputs)
        return seen

    ordinary = first_places()
    with without_skips(stacks, source.store, "attention"):
        changed = first_places()
    torch.testing.assert_close(changed["attn_sum"], ordinary["attn_branch"], rtol=1e-3, atol=1e-4)


def test_models_whose_skips_cannot_be_taken_out_say_why():
    assert why_not(open_source(tiny_model("bert")[0]).stacks()) is None
    assert "sandwich" in why_not(open_source(tiny_model("gemma2")[0]).stacks())
    assert "parallel" in why_not(open_source(tiny_model("gpt_neox")[0]).stacks())
