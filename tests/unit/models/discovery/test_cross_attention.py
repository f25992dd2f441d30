"""Attention to another sequence is told from self-attention by where its values come from, and nothing writes to it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import oversmooth as osm
from tests.contract.handwritten import WIDTH, Attention, Crossing, EncoderDecoder, TorchCrossing, mean_cosine
from tests.contract.tiny_models import tiny_model


class Decoder(nn.Module):
    """A decoder alone: its memory is an argument."""

    def __init__(self, block: Callable[[], nn.Module] = Crossing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, memory)
        return x


class OptionalMemory(Decoder):
    """Without a memory, every cross-attention reads the block's own sequence."""

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, context)  # type: ignore[arg-type]


class CrossFirst(Crossing):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.cross(self.n3(x), memory)
        x = x + self.attn(self.n1(x))
        return x + self.ff(self.n2(x))


class OneNorm(Crossing):
    """Queries and memory go through the same norm."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.cross(self.n3(x), self.n3(memory))
        x = x + self.attn(self.n1(x))
        return x + self.ff(self.n2(x))


class Projected(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x, self.project(memory))


CROSSING = {
    "self, then cross": (Decoder, "blocks"),
    "cross, then self": (partial(Decoder, CrossFirst), "blocks"),
    "one norm for both": (partial(Decoder, OneNorm), "blocks"),
    "a projected memory": (Projected, "blocks"),
    "an optional memory": (OptionalMemory, "blocks"),
    "an encoder of its own": (EncoderDecoder, "decoder"),
}


@pytest.mark.parametrize("case", CROSSING)
def test_cross_attention_is_left_out_by_name_and_never_written_to(case: str) -> None:
    make, stack = CROSSING[case]
    torch.manual_seed(0)
    model = make()
    found = osm.inspect(model)
    assert {layer.stack for layer in found.layers} <= {"", "encoder", "decoder"}
    assert len(found.layers) == sum(1 for name, _ in model.named_modules() if name.endswith(".attn"))
    assert [(one.field, "from another sequence" in one.reason) for one in found.missing] == [
        (f"{stack}.{number}.cross", True) for number in range(2)
    ]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    osm.sharpen(model)
    osm.bake(model)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert not {name for name in changed if ".cross." in name}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_decoder_layers_have_three_norms_and_cross_attention(*, first: bool, norm_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, 4, 1, 2, 32, 0.0, batch_first=first, norm_first=norm_first)
    found = osm.inspect(model)
    assert [one.field for one in found.missing] == [f"decoder.layers.{number}.multihead_attn" for number in range(2)]
    source, target = torch.randn(3, 7, WIDTH), torch.randn(3, 5, WIDTH)
    batch = {"src": source, "tgt": target} if first else {"src": source.transpose(0, 1), "tgt": target.transpose(0, 1)}
    measured = osm.measure(model, [batch])
    kinds = {part.part for part in measured.attributions[-1].parts}
    assert {"attention", "cross-attention", "feed-forward"} <= kinds
    assert osm.verify(model).passed


class Wrapper(nn.Module):
    """Query, key and value are arguments of their own, as of torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (p(x) for p, x in ((self.attn.q, query), (self.attn.k, key), (self.attn.v, value)))
        return self.attn.o((q @ k.mT).softmax(-1) @ v)


def test_arguments_that_are_one_sequence_are_tried_too() -> None:
    assert len(osm.inspect(Wrapper()).layers) == 1


@pytest.mark.parametrize("targets", [7, 5])
def test_sources_and_targets_may_have_any_length(targets: int) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(TorchCrossing if targets == 5 else Crossing)
    batch = {"source": torch.randn(2, 7, WIDTH), "target": torch.randn(2, targets, WIDTH)}
    found = osm.predict(model, [batch], solve=1)
    assert [(layer.stack, layer.layer) for layer in found.layers] == [
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("decoder", 1),
    ]
    assert max(layer.identity_error for layer in found.layers) < 1e-4


@pytest.mark.parametrize("targets", [5, 12])
def test_t5_is_read_with_targets_of_any_length_and_padded_sources(targets: int) -> None:
    model, inputs = tiny_model("t5")
    ids = inputs["input_ids"][:1].repeat(3, 1)
    keep = torch.arange(ids.shape[1]) < torch.tensor([12, 8, 10])[:, None]
    batch = {"input_ids": ids, "attention_mask": keep.long(), "decoder_input_ids": ids.flip(1)[:, :targets]}
    after: dict[str, list[Tensor]] = {"encoder": [], "decoder": []}
    handles = [
        block.register_forward_hook(
            lambda module, args, output, name=name: after[name].append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        for name in after
        for block in model.get_submodule(name).block
    ]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    found = osm.measure(model, [batch])
    for name, kept in (("encoder", keep), ("decoder", None)):
        expected = [mean_cosine(h, kept) for h in after[name]]
        blocks = [value.mean for value in found.curve("cosine", name)[1 : len(expected) + 1]]
        assert blocks == pytest.approx(expected, abs=1e-5)
    assert max(layer.identity_error for layer in osm.predict(model, [batch]).layers) < 1e-3
    assert osm.verify(model, inputs=batch).passed
