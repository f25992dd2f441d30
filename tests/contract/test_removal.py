"""A part that was taken out adds nothing, for every family; everything else of the block stays as it is."""

from contextlib import nullcontext

import pytest
import torch

from oversmooth.errors import CannotControl
from oversmooth.models.hooks.places import received, returned
from oversmooth.models.hooks.removal import PARTS, Replay, block_module, removed
from oversmooth.models.hooks.taps import observed
from oversmooth.models.live import call_model
from oversmooth.models.open import open_source
from tests.contract.tiny_models import ALL, tiny_model

REFUSED = ("torch-attention-stack",)
"""Models whose blocks are no modules that take the stream and return it."""
NOTHING_BEHIND = ("gpt_neo", "jamba")
"""Tiny models with no attention behind their second block."""
QUICK = ("bert", "gpt2", "llama", "vit", "dinov2", "t5", "gemma2", "gptj", "timm-vit", "torch-encoder")


def seen_without(model, inputs, part):
    """Places of the first stack while a part of its second block is missing."""
    source = open_source(model)
    stack = source.stacks()[0]
    seen = {}
    with (
        torch.no_grad(),
        removed(stack, source.store, 1, part),
        observed([stack], source.store, seen.__setitem__, lambda name, of: True) as restart,
    ):
        restart()
        output = call_model(model, inputs)
    depth = stack.passes[1][0] + 1
    return {place.name: h for place, h in seen.items() if place.depth == depth}, seen, depth, output


def require_passed_on(case):
    """What enters the second block is what the model goes on with, whatever comes next: a block, a recurrence or a norm."""
    model, inputs = tiny_model(case)
    source = open_source(model)
    stack = source.stacks()[0]
    calls = []
    with torch.no_grad(), removed(stack, source.store, 1, "block"):
        module = block_module(stack, source.store, 1)
        handle = module.register_forward_hook(  # behind the hook of the removal, so that it sees what that made
            lambda module, args, kwargs, output: calls.append((received(args, kwargs), returned(output))),
            with_kwargs=True,
        )
        with handle:
            call_model(model, inputs)
    assert calls
    for entered, left in calls:
        torch.testing.assert_close(left, entered, rtol=0, atol=0)


def require_nothing_added(case, part):
    if part == "block":
        require_passed_on(case)
        require_next_block_adds_to_it(case)
        return
    model, inputs = tiny_model(case)
    at, _, _, _ = seen_without(model, inputs, part)
    branch = at["attn_branch" if part == "attention" else "ffn_branch"]
    torch.testing.assert_close(branch, torch.zeros_like(branch), rtol=0, atol=2e-6)


def require_next_block_adds_to_it(case):
    model, inputs = tiny_model(case)
    _, seen, depth, _ = seen_without(model, inputs, "block")
    entered = [h for place, h in seen.items() if place.depth == depth - 1 and place.name != "final_norm"][-1]
    after = {place.name: h for place, h in seen.items() if place.depth == depth + 1}
    assert ("attn_branch" in after) == (case not in NOTHING_BEHIND)
    if case not in NOTHING_BEHIND:
        torch.testing.assert_close(after["attn_sum"] - after["attn_branch"], entered, rtol=1e-4, atol=1e-5)


def test_the_check_of_removed_blocks_can_fail(monkeypatch):
    monkeypatch.setattr("tests.contract.test_removal.removed", lambda *args: nullcontext())
    with pytest.raises(AssertionError, match="not equal"):
        require_passed_on("bert")


@pytest.mark.parametrize("part", ["attention", "feed-forward", "block"])
@pytest.mark.parametrize("case", QUICK)
def test_a_part_that_was_taken_out_adds_nothing(case, part):
    require_nothing_added(case, part)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attention", "feed-forward", "block"])
@pytest.mark.parametrize("case", [case for case in ALL if case not in (*QUICK, *REFUSED)])
def test_a_part_that_was_taken_out_adds_nothing_in_any_family(case, part):
    require_nothing_added(case, part)


@pytest.mark.parametrize("case", REFUSED)
def test_blocks_that_are_no_modules_are_refused(case):
    with pytest.raises(CannotControl, match="not modules that take the stream"):
        require_nothing_added(case, "attention")


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "vit", "gemma2", "gptj"])
def test_a_replayed_run_gives_what_a_whole_run_gives(case):
    model, inputs = tiny_model(case)
    source = open_source(model)
    (stack,) = source.stacks()
    replay = Replay(stack, source.store)
    with torch.no_grad():
        with replay.recording():
            call_model(model, inputs)
        for position in range(len(stack.names.blocks)):
            for part in PARTS:
                with removed(stack, source.store, position, part):
                    whole = call_model(model, inputs)[0]
                with replay.without(position, part):
                    torch.testing.assert_close(call_model(model, inputs)[0], whole)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("case", ["bert", "gpt2"])
def test_without_its_feed_forward_or_as_a_whole_a_block_is_not_computed(case):
    model, inputs = tiny_model(case)
    source = open_source(model)
    (stack,) = source.stacks()
    replay = Replay(stack, source.store)
    computed = []
    values = source.store.owner(stack.names.blocks[1].value.weight)
    with torch.no_grad():
        with replay.recording():
            call_model(model, inputs)
        with values.register_forward_hook(lambda module, args, output: computed.append(module)):
            for part in PARTS:
                with replay.without(1, part):
                    call_model(model, inputs)
    assert len(computed) == 1  # attention taken out is still computed, and not added


def test_the_model_is_as_before_when_a_removal_ends_in_an_error():
    model, inputs = tiny_model("bert")
    before = call_model(model.eval(), inputs)[0]
    with pytest.raises(RuntimeError, match="stop"):
        with_error(model)
    torch.testing.assert_close(call_model(model, inputs)[0], before)


def with_error(model):
    source = open_source(model)
    with removed(source.stacks()[0], source.store, 0, "attention"):
        raise RuntimeError("stop")
