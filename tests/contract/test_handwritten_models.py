"""Every hand-written model is measured like plain hooks on its own blocks measure it, or refused by the name of a place."""

from itertools import combinations

import pytest
import torch

import oversmooth as osm
from oversmooth.errors import OversmoothError, PartialReading
from tests.contract.handwritten import CASES, Handwritten, Truth, handwritten, one_large_common_vector, truth_of

REFUSED = {
    "gated branches": r"blocks\.0 multiplies the output of attention",
    "gated skips": r"blocks\.0 multiplies the output of attention",
    "skips that are no sums": r"what goes around blocks\.0\.attn\.o .* is not added",
    "registers of each block": r"features of block 0 .* expected 7 tokens, found 9",
    "a token dropped": r"features of block 1 .* expected 7 tokens, found 6",
    "tokens rolled": r"expected the input of blocks\.1 to follow from .* blocks\.0",
    "highway gates": r"blocks\.0 multiplies the output of attention",
    "two streams side by side": r"expected the 24 of its attention to follow from the 48 channels that blocks\.0 reads",
    "skips with a constant factor": r"skip connection is not the identity \(blocks\.0 multiplies it by 0\.9\)",
    "a skip from the norm": r"expected the sum behind the feed-forward in blocks\.0 to follow from the sum behind attention",
    "registers from the second block on": r"features of block 1 .* expected 7 tokens, found 9",
    "two stacks that change places": r"expected the input of right\.1 to follow from .* right\.0",
    "one block with a vector for each pass": r"expected the input of block to follow from .* block",
}
"""Models whose skip connection or branch is no plain sum or whose tokens change, and the place that the refusal names."""
PARTIAL = {
    "sums with a factor": "what the last block gives was not seen",
    "one more block behind": "the stream goes on behind the last block, in extra",
    "added behind the last block": "the stream goes on behind the last block, in added",
    "adapters between blocks": "the stream goes on behind the last block, in adapters.2",
    "two stacks beside each other": "the stream of left goes on behind the last block, in norm",
    "the last block is not used": "the stream goes on behind the last block",
}
"""Models of which a part is read, and what the label says."""


def close(found: float | None, expected: float) -> bool:
    return found is not None and abs(found - expected) < 1e-5


def covered(measured: osm.Measurement, truth: Truth) -> set[int]:
    """The calls of blocks that are in the measurement; raises where a stack says something that no block puts out."""
    calls: set[int] = set()
    for stack in dict.fromkeys(value.stack for value in measured.values):
        first, *curve = measured.curve("cosine", stack)
        call = -1
        for value in curve:
            following = [k for k in range(call + 1, len(truth.after)) if close(value.mean, truth.after[k])]
            assert following, (
                f"{stack or 'the stack'}, depth {value.depth}, {value.place}: {value.mean} is no block's output"
            )
            if call < 0:
                assert close(first.mean, truth.before[following[0]]), (
                    f"{stack}: {first.mean} is not what the block reads"
                )
            call = following[0]
            calls.add(call)
    return calls


@pytest.mark.parametrize("name", sorted(CASES.keys() - REFUSED.keys() - PARTIAL.keys()))
def test_a_handwritten_model_is_measured_like_plain_hooks_measure_it(name: str) -> None:
    case = handwritten(name)
    truth = truth_of(case)
    measured = osm.measure(case.model, [case.batch])
    assert covered(measured, truth) == set(range(len(truth.after)))
    if truth.final is not None:
        stack = measured.values[-1].stack
        final = measured.final("cosine", stack)
        assert final is None or close(final.mean, truth.final)
    assert measured.stream is not None
    assert (measured.stream.partial, measured.stream.broken) == ("", ())
    assert osm.verify(case.model, inputs=named(case)).passed


def named(case: Handwritten) -> dict[str, torch.Tensor] | None:
    """The batch as the inputs of one forward pass."""
    return case.batch if isinstance(case.batch, dict) else {"": case.batch} if torch.is_tensor(case.batch) else None


@pytest.mark.parametrize("name", PARTIAL)
def test_a_handwritten_model_that_is_read_in_part_is_labelled_and_not_judged(name: str) -> None:
    case = handwritten(name)
    measured = osm.measure(case.model, [case.batch])
    covered(measured, truth_of(case))
    assert measured.stream is not None
    assert PARTIAL[name] in measured.stream.partial
    assert PARTIAL[name] in repr(measured)
    with pytest.raises(PartialReading):
        osm.gate(case.model, [case.batch], rules={"max_cosine": 0.999999})


@pytest.mark.parametrize("name", REFUSED)
def test_a_handwritten_model_that_cannot_be_measured_is_refused_by_name(name: str) -> None:
    case = handwritten(name)
    with pytest.raises(OversmoothError, match=REFUSED[name]):
        osm.measure(case.model, [case.batch])


@pytest.mark.parametrize("name", CASES)
def test_the_blocks_of_a_handwritten_model_can_be_told_apart(name: str) -> None:
    """Otherwise the test above could not fail."""
    truth = truth_of(handwritten(name))
    assert len(truth.after) >= 3
    assert min(abs(one - other) for one, other in combinations(truth.after, 2)) > 1e-3


def test_one_large_common_vector_in_the_last_feed_forward_is_seen() -> None:
    case = one_large()
    truth = truth_of(case)
    assert truth.after[-1] > 0.99 > 0.1 > max(truth.after[:-1])
    measured = osm.measure(case.model, [case.batch])
    torch.testing.assert_close(
        [value.mean for value in measured.curve("cosine")[1:]], list(truth.after), atol=1e-5, rtol=0
    )
    assert {kind.part: kind.change for kind in measured.attributions[0].kinds}["feed-forward"] > 0.5
    assert osm.verify(case.model).passed
    assert not osm.gate(case.model, [case.batch], rules={"max_cosine": 0.5}).passed


def one_large() -> Handwritten:
    torch.manual_seed(0)
    return one_large_common_vector()
