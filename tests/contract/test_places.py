"""What the hooks see, against the model's own hidden states, for every family."""

import pytest
import torch

import oversmooth as osm
from oversmooth.measurement.measure import measure
from oversmooth.models.hooks.places import PLACES, ObserverFailed
from oversmooth.models.hooks.taps import observed
from oversmooth.models.open import open_source
from tests.contract.tiny_models import EACH_FAMILY, TINY, marked, tiny_model

TEXT_FAMILIES = [
    case
    for case, (_, config) in TINY.items()
    if ("vocab_size" in config and "num_mel_bins" not in config and "conv_dim" not in config and case != "jamba")
]


def see_everything(model, inputs):
    """Every place's features, by place."""
    source = open_source(model)
    seen = {}
    with (
        observed(source.stacks(), source.store, seen.__setitem__, lambda name, stack: True) as restart,
        torch.no_grad(),
    ):
        restart()
        named = {name: value for name, value in inputs.items() if name}
        model(inputs[""], **named) if "" in inputs else model(**named)
    return source.stacks(), seen


def own_output(model, inputs, stack):
    """The model's own hidden states and its last hidden state, of one stack."""
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
    if stack.arch.stack == "encoder":
        return output.encoder_hidden_states, output.encoder_last_hidden_state
    if stack.arch.stack == "decoder":
        return output.decoder_hidden_states, output.last_hidden_state
    return output.hidden_states, output.last_hidden_state


ONE_TOWER = [case for case in TINY if case not in ("clip", "siglip", "gemma3-multimodal", "vit_mae")]
"""Models that offer their hidden states; vit_mae shuffles its tokens, two-tower models hide theirs inside."""


@pytest.mark.parametrize("case", ONE_TOWER)
def test_the_stream_that_leaves_each_block_is_the_models_own_hidden_state(case):
    model, inputs = tiny_model(case)
    stacks, seen = see_everything(model, inputs)
    for stack in stacks:
        states, last = own_output(model, inputs, stack)
        ours = {(place.depth, place.name): h for place, h in seen.items() if place.stack == stack.label}
        leaving = "ffn_norm" if stack.arch.residual == "post" else "ffn_sum"
        blocks = [depth for depth, name in ours if name == leaving]
        assert len(blocks) == sum(len(passes) for passes in stack.passes)
        for depth in blocks:
            if depth < len(states) - 1:  # the last state is normed in some models and not in others
                torch.testing.assert_close(ours[depth, leaving], states[depth], rtol=1e-5, atol=1e-5)
        end = (max(blocks), "final_norm") if stack.names.final_norm else (max(blocks), leaving)
        torch.testing.assert_close(ours[end], last, rtol=1e-5, atol=1e-5)
        if (0, "embedding") in ours:
            torch.testing.assert_close(ours[0, "embedding"], states[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", EACH_FAMILY)
def test_each_sum_is_the_stream_before_it_plus_the_branch(case):
    model, inputs = tiny_model(case)
    stacks, seen = see_everything(model, inputs)
    for stack in stacks:
        stream, checked = None, 0
        for place, h in seen.items():
            if place.stack != stack.label:
                continue
            if place.name.endswith("_branch"):
                branch = h
            elif place.name.endswith("_sum") and place.name != "other_sum":
                torch.testing.assert_close(h, stream + branch, rtol=1e-4, atol=1e-5)
                checked += 1
            is_normed = place.name.endswith("_norm") and stack.arch.residual == "post"
            if place.name == "embedding" or place.name.endswith("_sum") or is_normed:
                stream = h
        assert checked or stack.label == "vision"


@pytest.mark.parametrize("case", EACH_FAMILY)
def test_the_parts_add_up_to_the_change_from_embedding_to_output(case):
    model, inputs = tiny_model(case)
    result = measure(model, [inputs], metrics=("cosine", "log_hfc_lfc", "log_hfc_lfc_unit", "steps"), at="all")
    assert len(result.attributions) == len(result.unit_attributions) == len(result.raw_attributions) > 0
    named = [("cosine", item) for item in result.attributions]
    named += [("log_hfc_lfc", item) for item in result.raw_attributions]
    named += [("log_hfc_lfc_unit", item) for item in result.unit_attributions]
    for metric, attribution in named:
        on_stream = [v for v in result.values if v.stack == attribution.stack and v.on_stream]
        values = [v.mean for v in on_stream if v.metric == metric]
        total = sum(part.change for part in attribution.parts)
        torch.testing.assert_close(total, attribution.total, rtol=0, atol=1e-5)
        torch.testing.assert_close(values[-1] - values[0], attribution.total, rtol=0, atol=1e-5)
        torch.testing.assert_close(sum(kind.change for kind in attribution.kinds), total, rtol=0, atol=1e-5)
        torch.testing.assert_close(attribution.end - attribution.start, total, rtol=0, atol=1e-5)
    steps = {}
    for v in result.values:
        steps.setdefault((v.stack, v.depth, v.place), {})[v.metric] = v.mean
    split = [numbers for numbers in steps.values() if numbers.get("influence") is not None]
    assert len(split) > len(result.attributions[0].parts)  # sub-blocks and whole blocks
    for numbers in split:
        parts = [numbers[f"influence_{part}"] for part in ("smoothing", "shared", "differing")]
        torch.testing.assert_close(sum(parts), numbers["influence"], rtol=0, atol=2e-6)
        assert numbers["influence"] <= numbers["ceiling"] + 1e-6


@pytest.mark.parametrize("case", marked(TEXT_FAMILIES))
def test_padding_is_never_measured(case):
    model, inputs = tiny_model(case)
    ids = inputs["input_ids"]
    short = ids[:, :7]
    padded = torch.cat(
        [ids, torch.nn.functional.pad(short, (0, ids.shape[1] - 7), value=model.config.pad_token_id or 0)]
    )
    mask = torch.ones_like(padded)
    mask[1, 7:] = 0
    together = measure(model, [{"input_ids": padded, "attention_mask": mask}])
    apart = measure(model, [{"input_ids": ids}, {"input_ids": short}])
    for ours, theirs in zip(together.values, apart.values, strict=True):
        assert (ours.stack, ours.depth, ours.place) == (theirs.stack, theirs.depth, theirs.place)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("case", EACH_FAMILY)
def test_the_chain_identity_holds_for_every_family(case):
    """Every block reads what the one before gives, and every sum is explained by a module of its block."""
    model, inputs = tiny_model(case)
    stream = measure(model, [inputs]).stream
    assert stream.links
    assert stream.sums
    assert (stream.broken, stream.unmatched, stream.between, stream.partial) == ((), (), (), "")
    assert osm.verify(model, inputs=inputs).stream.passed


def test_hooks_are_gone_after_the_context_even_on_error():
    model, inputs = tiny_model("bert")
    source = open_source(model)
    before = _hook_count(model)
    with (
        pytest.raises(ObserverFailed) as caught,
        observed(source.stacks(), source.store, _explode, lambda *_: True),
    ):
        model(**inputs)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert _hook_count(model) == before


def _explode(place, h):
    raise ZeroDivisionError


def _hook_count(model):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_shared_layers_give_one_row_per_pass():
    model, inputs = tiny_model("albert")
    assert [value.depth for value in measure(model, [inputs]).curve("cosine")] == [0, 1, 2, 3, 4]


def test_every_place_name_is_seen_in_some_family():
    seen = set()
    for case in ("bert", "t5", "jamba", "gpt2"):
        seen |= {place.name for place in see_everything(*tiny_model(case))[1]}
    assert seen == set(PLACES) - {"between"}  # of U-shaped models: tests/unit/models/hooks/test_chain.py
