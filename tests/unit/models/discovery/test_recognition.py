"""What real models do beside plain attention, on classes as small as it can be shown on."""

import copy

import pytest
import torch
from torch import Tensor, nn

import oversmooth as osm
from oversmooth.errors import NotDiscovered
from tests.unit.models.discovery.own_classes import D_HEAD, HEADS, WIDTH, Block, Model, PostNorm, Separate, by_hand


class OneMore(nn.LayerNorm):
    """A norm whose weight is stored as an offset from one (as Nemotron has it)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class OneMoreOutside(nn.Module):
    """The same with the weight outside of the norm (as Moonshine has it)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.plain = nn.LayerNorm(width, elementwise_affine=False)
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) * (self.gamma + 1)


@pytest.mark.parametrize("norm", [OneMore, OneMoreOutside])
def test_norms_with_weights_stored_as_offsets_from_one_are_folded_as_they_act(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = Model([Block(Separate()) for _ in range(2)])
    for block in model.blocks:
        block.norm1 = norm(WIDTH)
        with torch.no_grad():
            next(block.norm1.parameters()).copy_(0.3 * torch.randn(WIDTH))
    assert osm.discover(model).archs[0].norm == "layer+1"
    twin = copy.deepcopy(model)
    for block, other in zip(model.blocks, twin.blocks, strict=True):
        other.norm1 = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            other.norm1.weight.copy_(next(block.norm1.parameters()) + 1)
    assert osm.discover(twin).archs[0].norm == "layer"
    ours, theirs = ([layer.folded for layer in osm.inspect(one).layers] for one in (model, twin))
    assert None not in ours
    assert ours == theirs


class Chunked(Separate):
    """Local attention: the queries of a chunk read the chunk before, too (as LongT5 has it)."""

    def forward(self, x: Tensor) -> Tensor:
        def cut(part: Tensor) -> Tensor:
            return part.unflatten(-1, (HEADS, D_HEAD)).unflatten(1, (-1, 4))  # batch chunk token head channel

        q, k, v = (cut(p(x)) for p in (self.q, self.k, self.v))
        k, v = (torch.cat([part.roll(1, 1), part], 2) for part in (k, v))
        mixed = by_hand(q.transpose(2, 3), k.transpose(2, 3), v.transpose(2, 3))
        return self.o(mixed.transpose(2, 3).flatten(1, 2).flatten(2))


def test_chunks_that_read_their_neighbours_are_self_attention() -> None:
    found = osm.discover(Model([Block(Chunked()) for _ in range(2)]))
    assert [arch.paths.v for arch in found.archs] == ["attn.v"]
    assert found.left_out == ()


def test_inputs_of_one_token_show_no_attention() -> None:
    with pytest.raises(NotDiscovered, match="its inputs are too small"):
        osm.discover(Model([Block(Separate())]), torch.zeros(2, 1, dtype=torch.long))


class Queries(Model):
    """Learned tokens instead of an input: the first values are a parameter times a parameter."""

    def __init__(self) -> None:
        super().__init__([PostNorm(Separate()) for _ in range(2)])
        self.queries = nn.Parameter(torch.randn(1, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        stream = self.queries.expand(len(x), -1, -1)
        for block in self.blocks:
            stream = block(stream)
        return stream


def test_values_of_learned_tokens_are_found_in_the_first_layer_too() -> None:
    found = osm.discover(Queries(), torch.zeros(3, 5, dtype=torch.long))
    assert [arch.paths.block for arch in found.archs] == ["blocks.{i}"]
    assert found.left_out == ()


class Twice(nn.Module):
    """Two attentions in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = Separate(), Separate()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.rows(self.norm1(x))
        return x + self.columns(self.norm2(x))


def test_two_attentions_of_one_block_are_told_apart_by_their_names() -> None:
    found = osm.discover(Model([Twice(), Twice()]))
    assert [arch.stack for arch in found.archs] == ["rows", "columns"]
