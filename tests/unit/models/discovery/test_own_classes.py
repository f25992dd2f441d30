"""Classes of the user's own: their value path is found by running them, and every command works on them."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import oversmooth as osm
from oversmooth.errors import ConfigMismatch, NotDiscovered, NotLive, RefusedArchitecture
from oversmooth.models.declaration import Arch, FusedRows, Paths
from oversmooth.models.discovery.watch import known_inputs
from oversmooth.models.open import open_source
from tests.contract.handwritten import CASES, handwritten
from tests.unit.models.discovery.own_classes import (
    D_HEAD,
    HEADS,
    OWN,
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    Separate,
    attention_of,
    by_hand,
    own_model,
)


def brute_force(attention: nn.Module) -> Tensor:
    """The value map of an attention module, by feeding it equal tokens, one basis vector at a time."""

    def output(token: Tensor) -> Tensor:
        with torch.no_grad():
            return attention(token.expand(2, 5, WIDTH).contiguous())[0, -1].double()

    return torch.stack([output(basis) - output(torch.zeros(WIDTH)) for basis in torch.eye(WIDTH)], 1)


@pytest.mark.parametrize("case", OWN)
def test_spectra_equal_brute_force(case: str) -> None:
    model = own_model(case)
    found = osm.inspect(model)
    assert found.provenance.discovery_error is not None
    assert found.provenance.discovery_error < 1e-5
    assert len(found.layers) == len(attention_of(model))
    for layer, attention in zip(found.layers, attention_of(model), strict=True):
        eigenvalues = torch.linalg.eigvals(brute_force(attention))
        assert layer.plain is not None
        torch.testing.assert_close(layer.plain.rho_dc, (1 + eigenvalues).abs().max().item(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", OWN)
def test_the_top_rung_equals_what_is_measured(case: str) -> None:
    model = own_model(case)
    osm.discover(model)
    inputs = known_inputs(model)
    assert inputs is not None
    found = osm.predict(model, [inputs[""]], solve=1, heads=False)
    assert len(found.layers) == len(attention_of(model))
    assert max(layer.identity_error for layer in found.layers) < 1e-4
    measured = osm.measure(model, [inputs[""]])
    parts = sum(part.change for part in measured.attributions[0].parts)
    torch.testing.assert_close(parts, measured.attributions[0].total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["fused, interleaved", "shared values", "post-norm", "lists of lists"])
def test_the_value_map_can_be_constrained(case: str) -> None:
    model = own_model(case)
    osm.sharpen(model)
    for layer in osm.inspect(model).layers:
        assert layer.plain is not None
        assert layer.plain.rho_dc <= 1 + 1e-5
    assert osm.verify(model).passed


class Gated(Separate):
    """A gate between attention and the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(by_hand(q, k, v).transpose(1, 2).flatten(2) * torch.sigmoid(self.gate(x)))


class NormedHeads(Separate):
    """A norm between attention and the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(self.inner_norm(by_hand(q, k, v).transpose(1, 2).flatten(2)))


class Convolved(Separate):
    """Values that see their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k))
        v = self.mixer(self.v(x).mT).mT.unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2)
        return self.o(by_hand(q, k, v).transpose(1, 2).flatten(2))


class OverChannels(Separate):
    """Attention between channels."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).permute(0, 2, 3, 1) for p in (self.q, self.k, self.v))
        return self.o(((q @ k.mT).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))


class TalkingHeads(Separate):
    """Heads that are mixed after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Linear(HEADS, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = self.talk((q @ k.mT).softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Sink(Separate):
    """A learned logit that takes probability away."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.zeros(1, HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.mT
        scores = torch.cat([scores, self.sink.expand(*scores.shape[:3], 1)], -1)
        return self.o((scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2))


class Delayed(Separate):
    """Half of the values are those of the token before."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([self.k(torch.zeros_like(x[:, :1])), self.k(x[:, :-1])], 1)
        v = torch.cat([self.v(x)[..., : WIDTH // 2], before[..., WIDTH // 2 :]], -1)
        q, k, v = (part.unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for part in (self.q(x), self.k(x), v))
        return self.o(by_hand(q, k, v).transpose(1, 2).flatten(2))


class BesideConvolution(Separate):
    """A softmax over three neighbours beside softmax attention, in one output projection (as ConvBERT has it)."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        half = WIDTH // 2
        q, k, v = (
            p(x)[..., :half].unflatten(-1, (HEADS // 2, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        padded = torch.nn.functional.pad(self.v(x)[..., half:], (0, 0, 1, 1)).unfold(1, 3, 1)
        near = padded @ self.kernel(x).softmax(-1)[..., None]
        return self.o(torch.cat([by_hand(q, k, v).transpose(1, 2).flatten(2), near[..., 0]], -1))


class WithMemory(Separate):
    """Keys and values of learned tokens beside those of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([torch.tanh(self.memory).expand(len(x), -1, -1), x], 1)
        q, k, v = (
            p(part).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2)
            for p, part in ((self.q, x), (self.k, seen), (self.v, seen))
        )
        return self.o(by_hand(q, k, v).transpose(1, 2).flatten(2))


class NoSoftmax(Separate):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.v(x).cumsum(1))


@pytest.mark.parametrize(
    ("attention", "gains", "inner_norm"),
    [(Gated, ("gate",), ""), (NormedHeads, (), "attn.inner_norm"), (Sink, ("sink",), "")],
)
def test_gates_sinks_and_norms_on_heads_of_ones_own_are_found(
    attention: type[nn.Module], gains: tuple[str, ...], inner_norm: str
) -> None:
    torch.manual_seed(0)
    model = Model([Block(attention()) for _ in range(2)])
    arch = osm.discover(model).archs[0]
    assert (arch.gains, arch.paths.inner_norm) == (gains, inner_norm)
    assert osm.verify(model).passed
    found = osm.predict(model, [torch.randint(50, (2, 5))], solve=1)
    assert max(layer.identity_error for layer in found.layers) < 1e-3
    assert [layer.rungs[-1].name for layer in found.layers] == ["gains", "gains"]


@pytest.mark.parametrize(
    ("attention", "kind", "words"),
    [
        (Convolved, "convolution", r"blocks\.0\.attn\.mixer\) stands between the values and attention"),
        (OverChannels, "channels", "attention over channels"),
        (TalkingHeads, "heads", r"blocks\.0\.attn\.talk .*heads are mixed"),
        (NoSoftmax, "no attention", "no softmax attention was seen"),
        (Delayed, "tokens", r"values of blocks\.0\.attn do not come from the same rows of one weight at every token"),
        (BesideConvolution, "concatenation", r"blocks\.0\.attn puts something else beside the attention"),
        (WithMemory, "concatenation", r"blocks\.0\.attn puts other features or tokens beside the residual stream"),
    ],
)
def test_what_the_theory_does_not_cover_is_refused_by_the_name_of_the_module(
    attention: type[nn.Module], kind: str, words: str
) -> None:
    model = Model([Block(attention()) for _ in range(2)])
    with pytest.raises(RefusedArchitecture) as refusal:
        osm.inspect(model)
    assert refusal.value.kind == kind
    assert re.search(words, refusal.value.reason), refusal.value.reason


def test_a_block_that_is_refused_is_not_taken_for_one_of_its_neighbours() -> None:
    found = osm.discover(Model([Block(TalkingHeads()), Block(Separate()), Block(Separate())]))
    assert [arch.paths.block for arch in found.archs] == ["blocks.1,blocks.2"]
    assert [(one.where, one.kind) for one in found.left_out] == [("blocks.0.attn.talk", "heads")]


def test_blocks_with_and_without_a_gate_are_one_stack() -> None:
    model = Model([Block(Gated()), Block(Separate()), Block(Gated())])
    assert [arch.paths.block for arch in osm.discover(model).archs] == ["blocks.{i}"]
    assert osm.verify(model).largest_error < 1e-5
    found = osm.predict(model, [{"ids": torch.randint(VOCABULARY, (2, 7))}], solve=1)
    assert max(layer.identity_error for layer in found.layers) < 1e-5
    assert [layer.leak > 1e-6 for layer in found.layers] == [True, False, True]


class ConvolvedBeside(Separate):
    """A convolution of the values, added in place to the result of attention (as Nystromformer does)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(HEADS, HEADS, (3, 1), padding=(1, 0), groups=HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = by_hand(q, k, v)
        mixed += self.conv(v)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Turned(Separate):
    """Rotary positions on the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None].expand(-1, D_HEAD)
        turned = v * angle.cos() + torch.cat([-v[..., D_HEAD // 2 :], v[..., : D_HEAD // 2]], -1) * angle.sin()
        return self.o(by_hand(q, k, turned).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("attention", "kind", "words"),
    [
        (ConvolvedBeside, "addition", r"blocks\.0\.attn adds a convolution to the result of attention"),
        (Turned, "positions", r"blocks\.0\.attn turns the values by their position"),
    ],
)
def test_what_changes_values_or_results_is_named(attention: type[nn.Module], kind: str, words: str) -> None:
    with pytest.raises(RefusedArchitecture, match=words) as refusal:
        osm.discover(Model([Block(attention()) for _ in range(2)]))
    assert refusal.value.kind == kind


def test_a_compiled_model_is_refused() -> None:
    model = own_model("separate q, k, v")
    model.blocks[0].compile()  # type: ignore[union-attr, operator, index]
    with pytest.raises(NotDiscovered, match="compiled"):
        osm.inspect(model)


def test_a_quantised_model_is_refused_by_the_name_of_the_module() -> None:
    model = own_model("separate q, k, v")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop its old quantisation
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(
        NotDiscovered, match=r"a quantised module \(blocks\.0\.attn\.q, a Linear\) hides its operations"
    ):
        osm.inspect(quantised)


def test_a_discovery_that_is_not_proved_is_not_used() -> None:
    class Moody(Separate):
        """Uses other values from its second run on."""

        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Moody.runs += 1
            return super().forward(x) if Moody.runs == 1 else self.o(torch.zeros_like(x))

    with pytest.raises(NotDiscovered, match=r"the equal-token identity fails at blocks\.0\.attn\.o\.weight"):
        osm.inspect(Model([Block(Moody())]))


class Crossing(nn.Module):
    """A decoder block: self-attention, then attention to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Block(Separate())
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Parameter(torch.randn(1, 7, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        k, v = self.kv(torch.tanh(self.memory)).chunk(2, -1)
        return x + self.o(torch.nn.functional.scaled_dot_product_attention(self.q(x), k, v))


def test_cross_attention_is_left_out_by_name() -> None:
    model = Model([Crossing(), Crossing()])
    found = osm.discover(model)
    assert [arch.paths.block for arch in found.archs] == ["blocks.{i}"]
    assert {one.kind for one in found.left_out} == {"cross"}
    missing = osm.inspect(model).missing
    assert [one.field for one in missing] == ["blocks.0", "blocks.1"]
    assert "another sequence" in missing[0].reason


def test_a_declaration_can_be_kept_and_passed_on() -> None:
    found = osm.discover(own_model("fused, interleaved"))
    twin = own_model("fused, interleaved", seed=1)
    given, own = osm.inspect(twin, arch=found), osm.inspect(twin)
    assert [layer.plain for layer in given.layers] == [layer.plain for layer in own.layers]
    written = eval(found.code(), {"Arch": Arch, "Paths": Paths, "FusedRows": FusedRows})
    assert written == replace(found.archs[0], proof=None)
    assert written.fused == FusedRows(first=2, per_head=3 * D_HEAD, per_channel=3)


@pytest.mark.parametrize("case", OWN)
def test_a_bare_file_of_an_own_class_is_read_with_what_was_discovered(case: str, tmp_path: Path) -> None:
    """The route that the message about an unknown file names."""
    model = own_model(case)
    torch.save({"model": model.state_dict(), "step": 3}, tmp_path / "own.pt")
    found = osm.discover(model)
    given, own = osm.inspect(tmp_path / "own.pt", arch=found), osm.inspect(model)
    assert [layer.plain for layer in given.layers] == [layer.plain for layer in own.layers]
    assert given.layers


def test_a_file_that_names_a_shared_block_once_per_pass_is_read_once(tmp_path: Path) -> None:
    case = CASES["two blocks twice"]()
    torch.save(case.model.state_dict(), tmp_path / "own.pt")
    found = osm.discover(case.model, case.batch)
    given, own = osm.inspect(tmp_path / "own.pt", arch=found), osm.inspect(case.model, arch=found)
    assert [(layer.passes, layer.plain) for layer in given.layers] == [
        (layer.passes, layer.plain) for layer in own.layers
    ]
    three = {name: value for name, value in case.model.state_dict().items() if "blocks.3" not in name}
    torch.save(three, tmp_path / "three.pt")
    with pytest.raises(ConfigMismatch, match="2 in 4 passes"):
        osm.inspect(tmp_path / "three.pt", arch=found)


def test_two_forward_passes_are_enough_and_nothing_is_left_behind() -> None:
    model = own_model("separate q, k, v").train()
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    found = osm.discover(model)
    assert len(runs) == found.forward_passes == 2
    assert model.training
    assert not any(part._forward_pre_hooks for part in model.modules())
    osm.inspect(model)
    assert len(runs) == 2


class OfIds(nn.Module):
    """A model of token ids that takes five of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(20, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] == 5, "five ids"
        x: Tensor = self.block(self.embedding(ids))
        return x


@pytest.mark.parametrize(
    "inputs", [{"": torch.randn(2, 5)}, {"": torch.zeros(2, 4).long()}, {"words": torch.zeros(2, 5).long()}]
)
def test_verify_says_inputs_where_an_own_model_does_not_run(inputs: dict[str, Tensor]) -> None:
    model = OfIds().eval()
    good = {"": torch.arange(10).reshape(2, 5)}
    assert osm.verify(model, inputs=good).passed  # also what is found by running it is found on these inputs
    with pytest.raises(NotLive, match=r"osm\.verify\(model, inputs="):
        osm.verify(model, inputs=inputs)


class OwnBias(nn.Module):
    """The bias behind the output projection has a name of its own, in some blocks, and is added outside of it."""

    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dense_bias = nn.Parameter(torch.randn(WIDTH)) if has_bias else None
        self.other, self.ff = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = self.dense((q @ k.mT).softmax(-1) @ v)
        x = x + (y if self.dense_bias is None else y + self.dense_bias)
        return x + self.ff(self.other(x))


def test_a_bias_with_a_name_of_its_own_is_read_where_a_block_has_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OwnBias(has_bias=False), OwnBias(has_bias=True)).eval()
    (stack,) = open_source(model).stacks()
    assert [block.output.bias for block in stack.names.blocks] == [None, "1.dense_bias"]
    measured = osm.measure(model, [torch.randn(2, 6, WIDTH)])
    assert measured.stream is not None
    assert (measured.stream.broken, measured.stream.unmatched) == ((), ())
    predicted = osm.predict(model, [torch.randn(2, 6, WIDTH)])
    assert max(layer.identity_error for layer in predicted.layers) < 1e-4


class LayersByName(nn.Module):
    """torch's own layers, of two forms, under names instead of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, norm_first=is_first)
            for is_first in (False, True)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


def test_torchs_own_layers_under_names_of_their_own_are_found_by_running_them() -> None:
    model = LayersByName().eval()
    assert [stack.arch.residual for stack in open_source(model).stacks()] == ["post", "pre"]
    assert osm.verify(model).passed


def test_inputs_whose_scores_would_fill_the_memory_are_refused_and_smaller_ones_taken() -> None:
    model = handwritten("pre-norm").model
    with pytest.raises(
        NotDiscovered, match=r"attention between 8,192 tokens has 268,435,456 scores; give fewer tokens"
    ):
        osm.discover(model, {"": torch.randn(1, 8192, 24)})
    assert osm.discover(model, {"": torch.randn(1, 64, 24)}).archs[0].n_heads == 4
