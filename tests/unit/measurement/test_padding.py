"""Padding is found by what the model does with an input of two values, whatever its name and polarity."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oversmooth as osm
from oversmooth.errors import WrongBatch
from tests.contract.handwritten import (
    VOCABULARY,
    WIDTH,
    Block,
    EncoderDecoder,
    Handwritten,
    Masked,
    PadNamed,
    TokenIds,
    truth_of,
)

IDS = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))
FEATURES = torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(0))
KEEP = torch.arange(7) < torch.tensor([7, 4, 5])[:, None]
"""True where a token is no padding."""
SECOND_HALF = (torch.arange(7) > 2).expand(3, 7)


class Allowed(Block):
    """Attention to the pairs of tokens that are allowed."""

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attn(self.n1(x), None, allowed)
        return x + self.ff(self.n2(x))


class OfPairs(TokenIds):
    """Which pairs of tokens are allowed is made from the second input."""

    def __init__(self, pairs: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Allowed() for _ in range(2))
        self.pairs = pairs

    def forward(self, ids: Tensor, given: Tensor) -> Tensor:
        return self.logits(ids, self.pairs(given))


def causal(given: Tensor) -> Tensor:
    return torch.ones(given.shape[-1], given.shape[-1]).tril().bool()[None, None]


class OfFeatures(nn.Module):
    """Padding is hidden from attention and set to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(2))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * real[..., None], real)
        return x


class Types(TokenIds):
    """Two kinds of tokens, and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.types = nn.Embedding(2, WIDTH)

    def forward(self, ids: Tensor, types: Tensor, hide: Tensor) -> Tensor:
        x = self.embedding(ids) + self.types(types)
        for block in self.blocks:
            x = block(x, ~hide)
        return self.norm(x)


def curve(found: osm.Measurement) -> list[float | None]:
    return [value.mean for value in found.curve("cosine")[1:]]


def measured(model: Any, batch: Any, keep: Tensor | None, **options: Any) -> osm.Measurement:
    """The measurement, once it is what plain hooks on the blocks give over these tokens."""
    truth = truth_of(Handwritten(model=model, batch=batch, blocks=list(model.blocks), keep=keep))
    found = osm.measure(model, [batch], **options)
    torch.testing.assert_close(curve(found), list(truth.after), atol=1e-5, rtol=0)
    return found


@pytest.mark.parametrize(
    ("model", "batch", "keep"),
    [
        (lambda: OfPairs(lambda given: given[:, None, None, :] & causal(given)), (IDS, KEEP), KEEP),
        (lambda: OfPairs(lambda given: given), (IDS, KEEP[:, None, None, :]), KEEP),
        (lambda: OfPairs(lambda given: (given > -1)[:, None, None, :]), (IDS, torch.where(KEEP, 0.0, -1e9)), KEEP),
        (lambda: OfPairs(lambda given: (given == 0)[:, None, None, :]), (IDS, (~KEEP).long()), KEEP),
        (OfFeatures, (FEATURES, KEEP.flip(1)), KEEP.flip(1)),
    ],
    ids=["causal", "four axes", "added to scores", "inverted", "zeroed features"],
)
def test_padding_is_found_by_what_the_model_does_with_it(
    model: Callable[[], nn.Module], batch: Any, keep: Tensor
) -> None:
    torch.manual_seed(0)
    found = measured(model(), batch, keep)
    assert found.data.tokens == int(keep.sum())
    assert "those tokens were left out" in found.data.notes[0]
    assert found.data.warnings == ()


@pytest.mark.parametrize(
    ("pairs", "given"),
    [
        (causal, KEEP),  # a mask for the loss: later tokens are hidden anyway
        (lambda given: causal(given) | given[:, None, None, :], ~SECOND_HALF),  # a prefix that sees itself
        (lambda given: given[:, None, :, None] == given[:, None, None, :], SECOND_HALF),  # two segments in one row
        (lambda given: torch.ones(1, 1, 7, 7).bool(), KEEP),  # no mask at all
    ],
    ids=["loss", "prefix", "segments", "unused"],
)
def test_an_input_of_two_values_that_hides_nothing_is_no_mask_and_is_named(
    pairs: Callable[[Tensor], Tensor], given: Tensor
) -> None:
    torch.manual_seed(0)
    found = measured(OfPairs(pairs), (IDS, given), None)
    assert found.data.tokens == IDS.numel()
    assert "'given'" in found.data.warnings[0]
    assert "mask=" in found.data.warnings[0]


def test_types_of_tokens_are_told_from_padding() -> None:
    torch.manual_seed(0)
    found = measured(Types(), (IDS, SECOND_HALF.long(), ~KEEP), KEEP)
    assert ["'types'" in warning for warning in found.data.warnings] == [True]
    assert ["'hide'" in note for note in found.data.notes] == [True]


def test_an_attention_mask_that_marks_padding_is_not_taken_by_its_name() -> None:
    class Inverted(TokenIds):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.logits(ids, ~attention_mask)

    torch.manual_seed(0)
    measured(Inverted(), {"ids": IDS, "attention_mask": ~KEEP}, KEEP)


def test_a_mask_that_shows_itself_in_a_later_batch_is_used_from_there_on() -> None:
    torch.manual_seed(0)
    model = PadNamed()
    nothing = torch.zeros_like(KEEP)
    found = osm.measure(model, [(IDS, nothing), (IDS, ~KEEP), (IDS[:, :4], nothing[:, :4])])
    assert found.data.tokens == IDS.numel() + int(KEEP.sum()) + 12


@pytest.mark.parametrize(
    "mask", [KEEP, [KEEP], lambda batch: batch["real"] > 0], ids=["tensor", "one per batch", "function"]
)
def test_a_mask_can_be_given(mask: Any) -> None:
    torch.manual_seed(0)
    model = OfFeatures()
    everything = {"x": FEATURES, "real": KEEP if callable(mask) else torch.ones_like(KEEP)}
    assert measured(model, everything, KEEP, mask=mask).data.tokens == int(KEEP.sum())


def test_predict_takes_a_mask_too() -> None:
    found = osm.predict(OfFeatures(), [{"x": FEATURES, "real": KEEP}], solve=1, mask=KEEP)
    assert found.data.tokens == int(KEEP.sum())


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (KEEP[:, :5], r"expected a mask of shape \(3, 7\), found \(3, 5\)"),
        (KEEP[:2], "with 3 rows, true where a token counts, found shape"),
        ([], "a mask for every batch"),
    ],
    ids=["tokens", "rows", "too few"],
)
def test_a_mask_that_does_not_fit_is_refused(mask: Any, words: str) -> None:
    with pytest.raises(WrongBatch, match=words):
        osm.measure(OfFeatures(), [{"x": FEATURES, "real": KEEP}], mask=mask)


def test_the_padding_of_a_source_is_not_that_of_a_target_of_the_same_length() -> None:
    class Padded(EncoderDecoder):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(Masked() for _ in range(2))

        def forward(self, source: Tensor, target: Tensor, real: Tensor) -> Tensor:  # type: ignore[override]
            for block in self.encoder:
                source = block(source, real)
            lengths = real.sum(1, keepdim=True)
            memory = (source * real[..., None]).cumsum(1) / lengths[..., None]
            for block in self.decoder:
                target = block(target, memory)
            return target

    torch.manual_seed(0)
    model = Padded()
    found = osm.measure(model, [{"source": FEATURES, "target": FEATURES.flip(0), "real": KEEP}])
    for stack, keep in (("encoder", KEEP), ("decoder", None)):
        blocks = list(model.get_submodule(stack))  # type: ignore[arg-type]
        batch = {"source": FEATURES, "target": FEATURES.flip(0), "real": KEEP}
        truth = truth_of(Handwritten(model=model, batch=batch, blocks=blocks, keep=keep))
        means = [value.mean for value in found.curve("cosine", stack)[1:]]
        torch.testing.assert_close(means, list(truth.after), atol=1e-5, rtol=0)


def test_tensors_without_names_are_the_arguments_in_order() -> None:
    torch.manual_seed(0)
    model = PadNamed()
    by_name = osm.measure(model, [{"pad": ~KEEP, "ids": IDS}])
    assert curve(by_name) == curve(osm.measure(model, [(IDS, ~KEEP)])) == curve(osm.measure(model, [[IDS, ~KEEP]]))
    with pytest.raises(WrongBatch, match=r"at most 2 tensors \(ids, pad\), found 3 tensors without names"):
        osm.measure(model, [(IDS, ~KEEP, KEEP)])
