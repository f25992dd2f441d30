"""Published interventions: their formulas against dense references, padding, causality, gradients, copies, refusals."""

import copy
import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import oversmooth as osm
from oversmooth.control.attention_calls import AttentionProduct, Visible, fused, visible_in
from oversmooth.control.eigenbasis import Heads
from oversmooth.control.interventions import (
    GFSA,
    RULES,
    AttnScale,
    Centered,
    ContraNorm,
    Differential,
    Exclusive,
    FeatScale,
    Gate,
    LayerFacts,
    TempScale,
)
from oversmooth.errors import BadValue, CannotControl, UnknownName
from oversmooth.models.live import call_model
from oversmooth.models.open import open_source
from tests.contract.test_control import loss_of, outputs
from tests.contract.tiny_models import EACH_FAMILY, tiny_model

IDENTITY = {
    "attnscale": {},
    "featscale": {},
    "gfsa": {},
    "neutreno": {"strength": 0.0},
    "contranorm": {"scale": 0.0},
    "layerscale": {"init": 1.0},
    "value_residual": {"first": 0.0},
    "tempscale": {"temperature": 1.0},
    "differential": {"start": -17.0},
    "gate": {"bias": 17.0},
}
"""Interventions that leave outputs unchanged where they start, or with which options they would."""
STRONG = {
    "layerscale": {"init": 0.7},
    "tempscale": {"temperature": 0.3},
    "differential": {"start": -0.5},
    "gate": {"bias": 0.5},
}
"""Options with which an intervention clearly does something; the others do with their own."""
LEARNED = ("attnscale", "featscale", "gfsa", "layerscale", "value_residual", "differential", "gate")
EACH = pytest.mark.parametrize("name", RULES)
REFUSED = {
    **{("albert", name): "several depths" for name in ("neutreno", "value_residual")},
    **{
        (case, name): "cross-attention"
        for case in ("t5", "mt5", "umt5", "bart", "marian", "whisper")
        for name in ("layerscale", "residual_scaling")
    },
    ("torch-attention-stack", "contranorm"): "no residual sum",
}
"""Where a rule has no exact place, and the word that says why."""
PAIRED = (
    *("falcon-multi-query", "falcon-grouped", "llama", "mistral", "mixtral", "qwen2", "qwen3", "phi3", "gemma2"),
    "granite",
)
"""Cases in which an even number of heads reads each value head."""
NORM_AFTER = ("bert", "mpnet", "bart", "opt-post-norm", "torch-encoder", "torch-attention-stack")
"""Cases without a norm before their branches."""


def fits(case: str, name: str) -> bool:
    """Whether a rule has a place in a case of the lists below."""
    has_place = case in PAIRED if name == "differential" else case not in NORM_AFTER
    return (case, name) not in REFUSED and (has_place or name not in ("differential", "layernorm_scaling"))


def pairs(cases) -> list[tuple[str, str]]:
    return [pair for pair in itertools.product(cases, RULES) if fits(*pair)]


def refusal(model: nn.Module, case: str, name: str) -> str | None:
    """The word that says why a model takes no such rule, from the weights and norms of its blocks."""
    source = open_source(model)
    for stack in source.stacks():
        for position, block in enumerate(stack.names.blocks):
            weights = stack.weights(position, source.store.read)
            if name == "differential" and weights.n_heads // weights.n_kv % 2:
                return "do not go in pairs"
            is_after = stack.arch.residual == "post" or not block.norms.keys() & {"attn_norm", "ffn_norm"}
            if name == "layernorm_scaling" and is_after:
                return "several depths" if stack.arch.shared_layers else "no norm stands before"
    return REFUSED.get((case, name))


def disturb(model: nn.Module, seed: int = 0) -> None:
    """Moves the parameters of interventions away from where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "oversmooth_" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)


def applied(case: str, name: str, **config) -> tuple[nn.Module, dict]:
    """A tiny model with an intervention that does something."""
    model, inputs = tiny_model(case)
    if config:
        model.set_attn_implementation(**config)
    osm.apply(model, name, **STRONG.get(name, {}))
    disturb(model)
    return model, inputs


# --- every family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EACH_FAMILY)
def test_interventions_start_as_the_identity_do_something_later_and_leave_no_trace(case):
    model, inputs = tiny_model(case)
    names = list(model.state_dict())
    with torch.no_grad():
        expected = outputs(model, inputs)
        for name in RULES:
            if (word := refusal(model, case, name)) is not None:
                with pytest.raises(CannotControl, match=word):
                    osm.apply(model, name)
                assert list(model.state_dict()) == names
                continue
            result = osm.apply(model, name, **IDENTITY.get(name, STRONG.get(name, {})))
            assert (result.parameters > 0) == (name in LEARNED)
            if name in IDENTITY:
                for found, before in zip(outputs(model, inputs), expected, strict=True):
                    torch.testing.assert_close(found, before, rtol=1e-5, atol=1e-5)
            if name in ("differential", "gate"):  # so close to the identity, a sigmoid does not feel a disturbance
                osm.unapply(model, name)
                osm.apply(model, name, **STRONG[name])
            disturb(model)
            if name not in ("neutreno", "contranorm", "tempscale"):  # these have nothing to disturb
                assert not torch.allclose(outputs(model, inputs)[0], expected[0], rtol=1e-3, atol=1e-3)
            osm.unapply(model, name)
            for found, before in zip(outputs(model, inputs), expected, strict=True):
                torch.testing.assert_close(found, before, rtol=0, atol=0)
    assert list(model.state_dict()) == names
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


# --- formulas against dense attention ----------------------------------------------------------------------------------

HEADS = Heads(d_model=10, n_heads=4, n_kv=2, d_head=3)
MASKS = {
    "none": (None, False),
    "causal": (None, True),
    "padding": (torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None], False),
    "padded and causal": (
        torch.ones(6, 6, dtype=torch.bool).tril() & torch.tensor([[True] * 6, [True] * 5 + [False]])[:, None, None],
        False,
    ),
    "window with bias": (
        torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(9), dtype=torch.float64).masked_fill(
            (torch.arange(6)[:, None] - torch.arange(6)).abs() > 2, -math.inf
        ),
        False,
    ),
}


def dense(mask: torch.Tensor | None, is_causal: bool, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and uniform attention under a mask, written out."""
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool)
    looks = mask if mask.dtype == torch.bool else mask > -1e9
    bias = torch.zeros_like(scores) if mask.dtype == torch.bool else mask
    attention = (scores + bias).masked_fill(~looks, -math.inf).softmax(-1)
    uniform = torch.zeros_like(scores).masked_fill(~looks, -math.inf).softmax(-1)
    return attention, uniform


def products(mask: str) -> tuple[AttentionProduct, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    given, is_causal = MASKS[mask]
    scores = torch.randn(2, 4, 6, 6, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 4, 6, 3, generator=generator, dtype=torch.float64)
    attention, uniform = dense(given, is_causal, scores)
    visible = visible_in(given, 6, 6, is_causal)
    product = AttentionProduct(output=attention @ values, values=values, visible=visible, again=lambda x: attention @ x)
    return product, attention, uniform


@pytest.mark.parametrize("mask", MASKS)
def test_the_mean_of_what_is_visible_has_the_length_of_each_row(mask):
    product, _, uniform = products(mask)
    expected = uniform @ product.values
    torch.testing.assert_close(product.visible.mean(product.values).expand_as(expected), expected)


@pytest.mark.parametrize("mask", MASKS)
def test_attnscale_is_its_formula(mask):
    product, attention, uniform = products(mask)
    rule = AttnScale(LayerFacts(heads=HEADS)).double()
    with torch.no_grad():
        rule.weight.copy_(torch.tensor([-0.5, 0.2, 1.0, 3.0]))
        expected = uniform + (1 + rule.weight[:, None, None]) * (attention - uniform)
        torch.testing.assert_close(rule.product(product), expected @ product.values)
        looks = Visible(queries=6, keys=6, mask=uniform > 0)
        torch.testing.assert_close(rule.probabilities(attention, looks), expected)


def test_attnscale_multiplies_every_eigenvalue_of_attention_but_one():
    _, attention, uniform = products("none")
    values = torch.linalg.eigvals(attention[0, 0])
    wanted = torch.where((values - 1).abs() < 1e-9, values, 4 * values)
    found = torch.linalg.eigvals((uniform + 4 * (attention - uniform))[0, 0])
    torch.testing.assert_close(found.abs().sort().values, wanted.abs().sort().values)


@pytest.mark.parametrize("mask", MASKS)
def test_centered_attention_is_its_formula(mask):
    product, attention, uniform = products(mask)
    rule = Centered(LayerFacts(heads=HEADS))
    torch.testing.assert_close(rule.product(product), (attention - uniform) @ product.values)
    looks = Visible(queries=6, keys=6, mask=uniform > 0)
    torch.testing.assert_close(rule.probabilities(attention, looks), attention - uniform)


@pytest.mark.parametrize("mask", MASKS)
def test_gfsa_is_its_formula(mask):
    product, attention, _ = products(mask)
    rule = GFSA(LayerFacts(heads=HEADS), order=3).double()
    with torch.no_grad():
        for parameter in rule.parameters():
            parameter.copy_(torch.randn(4, generator=torch.Generator().manual_seed(2)))
        w0, w1, high = (w[:, None, None] for w in (rule.identity, rule.first, rule.high))
        expected = w0 * torch.eye(6) + w1 * attention + high * (attention + 2 * (attention @ attention - attention))
        torch.testing.assert_close(rule.product(product), expected @ product.values)
        torch.testing.assert_close(rule.probabilities(attention, Visible(queries=6, keys=6)), expected)


@pytest.mark.parametrize("mask", MASKS)
def test_featscale_scales_each_part_once(mask):
    product, _, uniform = products(mask)
    y = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rule = FeatScale(LayerFacts(heads=HEADS)).double()
    with torch.no_grad():
        rule.low.fill_(0.5)
        rule.high.fill_(-0.25)
    rule.seen(product.visible)
    common = uniform[:, 0] @ y  # all heads look at the same tokens
    torch.testing.assert_close(rule.projected(y).detach(), 1.5 * common + 0.75 * (y - common))


@pytest.mark.parametrize("mask", MASKS)
def test_contranorm_is_its_formula(mask):
    product, _, uniform = products(mask)
    x = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rule = ContraNorm(LayerFacts(heads=HEADS), scale=0.2)
    rule.seen(product.visible)
    rows = x / x.norm(dim=-1, keepdim=True)
    nearby = (rows @ rows.mT).masked_fill(uniform[:, 0] == 0, -math.inf).softmax(-1)
    torch.testing.assert_close(rule.summed(x), 1.2 * x - 0.2 * nearby @ x)


def test_rows_that_see_nothing_stay_finite():
    nothing = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    assert torch.isfinite(Visible(queries=3, keys=3, mask=nothing).mean(torch.ones(1, 2, 3, 4))).all()


FUSED_AND_EAGER = ("bert", "gpt2", "llama", "t5", "bart", "modernbert", "vit", "qwen3", "falcon-grouped")


@pytest.mark.parametrize(("case", "name"), pairs(FUSED_AND_EAGER))
def test_fused_and_eager_attention_agree(case, name):
    model, inputs = applied(case, name, attn_implementation="sdpa")
    with torch.no_grad():
        expected = outputs(model, inputs)[0]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(outputs(model, inputs)[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in RULES if fits("torch-attention-stack", name)])
def test_torchs_attention_agrees_with_and_without_weights(name):
    stack, inputs = applied("torch-attention-stack", name)
    x = inputs[""][:1]
    mask = torch.ones(12, 12, dtype=torch.bool).triu(1)
    padding = torch.zeros(1, 12, dtype=torch.bool)
    padding[:, 10:] = True
    results = {}
    for need_weights in (True, False):
        for batched in (True, False):
            h = x if batched else x[0]
            for mixer in stack.mixers.values():
                options = {"attn_mask": mask, "key_padding_mask": padding if batched else padding[0]}
                h = h + mixer(h, h, h, need_weights=need_weights, **options)[0]
            results[need_weights, batched] = h if batched else h[None]
    for found in results.values():
        torch.testing.assert_close(found, results[True, True], rtol=1e-4, atol=1e-5)


def test_torchs_attention_is_what_it_was_under_every_mask():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    twin = copy.deepcopy(attention)
    osm.apply(attention, "gfsa")
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    bias = torch.randn(6, 5, 5, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for options in (
        {},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
        {"attn_mask": bias, "key_padding_mask": torch.zeros(3, 5).double().masked_fill(padding, -math.inf)},
        {"key_padding_mask": padding, "average_attn_weights": False},
    ):
        found, expected = attention(x, x, x, **options), twin(x, x, x, **options)
        torch.testing.assert_close(found[0], expected[0])
        assert (found[1] is None) == (expected[1] is None)
        if found[1] is not None:
            torch.testing.assert_close(found[1], expected[1])


# --- values of the first layer, branches ---------------------------------------------------------------------------------


def test_neutreno_and_value_residual_are_their_formulas():
    stack, inputs = tiny_model("torch-attention-stack")
    heads = {"neutreno": lambda o, v, v0: o + 0.6 * (v0 - v), "value_residual": lambda o, v, v0: o}
    for name, mix in heads.items():
        h, first = inputs[""], None
        for mixer in stack.mixers.values():
            q, k, v = (
                part.unflatten(-1, (4, 8)).transpose(1, 2)
                for part in F.linear(h, mixer.in_proj_weight, mixer.in_proj_bias).chunk(3, -1)
            )
            first = v if first is None else first
            v = (first + v) / 2 if name == "value_residual" else v
            o = mix(F.scaled_dot_product_attention(q, k, v), v, first)
            h = h + mixer.out_proj(o.transpose(1, 2).flatten(2))
        osm.apply(stack, name, **({"strength": 0.6} if name == "neutreno" else {}))
        torch.testing.assert_close(call_model(stack, inputs), h, rtol=1e-4, atol=1e-5)
        osm.unapply(stack)


@pytest.mark.parametrize("case", ["bert", "gpt2", "llama", "timm-vit", "gpt_neox", "bloom"])
@pytest.mark.parametrize("name", ["neutreno", "value_residual"])
def test_first_values_reach_fused_and_shared_value_heads(case, name):
    """When all layers see the first layer's values, a value residual changes nothing: their weights and inputs agree."""
    model, inputs = tiny_model(case)
    osm.apply(model, name, layers=[1])
    with torch.no_grad():
        before = outputs(model, inputs)[0]
        osm.unapply(model)
        assert not torch.allclose(outputs(model, inputs)[0], before, atol=1e-4)
    carried = osm.apply(model, name, layers=[2])
    assert {layer for _, layer in carried.layers} == {0, 2}


def test_the_strength_of_neutreno_depends_on_the_kind_of_data():
    for case, strength in (("vit", 0.6), ("bert", 0.4)):
        model, _ = tiny_model(case)
        osm.apply(model, "neutreno")
        rules = [part for name, part in model.named_modules() if name.endswith("oversmooth_neutreno")]
        assert {rule.strength for rule in rules} == {strength}


SCALED_BY_HAND = {
    "gpt2": ("pre", r"attn.c_proj", r"mlp.c_proj"),
    "bert": ("post", r"attention.output.dense", r"layer.\d.output.dense"),
    "llama": ("pre", r"o_proj", r"down_proj"),
    "opt-post-norm": ("post", r"out_proj", r"fc2"),
    "timm-vit": ("pre", r"attn.proj", r"mlp.fc2"),
    "gpt_neox": ("parallel", r"attention.dense", r"dense_4h_to_h"),
    "torch-encoder": ("post", r"self_attn.out_proj", r"linear2"),
    "torch-encoder-pre-norm": ("pre", r"self_attn.out_proj", r"linear2"),
    "gemma2": ("sandwich", r"post_attention_layernorm", r"post_feedforward_layernorm"),
    "granite": ("pre", r"o_proj", r"down_proj"),
}


@pytest.mark.parametrize("name", ["layerscale", "residual_scaling"])
@pytest.mark.parametrize("case", SCALED_BY_HAND)
def test_scaled_branches_are_those_of_a_model_whose_last_weights_are_scaled(case, name):
    import re

    residual, attn, ffn = SCALED_BY_HAND[case]
    model, inputs = tiny_model(case)
    gains = {"attn": 1 / math.sqrt(3), "ffn": 1 / math.sqrt(3)}
    if name == "layerscale":
        gains = {"attn": 0.4, "ffn": 0.4 if residual == "parallel" else 0.9}
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for path, parameter in by_hand.named_parameters():
            for branch, pattern in (("attn", attn), ("ffn", ffn)):
                if re.search(pattern, path):
                    offset = 1.0 if case == "gemma2" else 0.0
                    parameter.copy_(gains[branch] * (parameter + offset) - offset)
        osm.apply(model, name)
        for path, parameter in model.named_parameters():
            if "oversmooth_" in path:
                parameter.fill_(gains[path.rpartition(".")[2]])
        torch.testing.assert_close(outputs(model, inputs)[0], outputs(by_hand, inputs)[0], rtol=1e-4, atol=1e-4)


# --- the newer ones: the sentence that defines each ----------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
def test_tempscale_is_the_softmax_of_divided_scores(mask):
    given, is_causal = MASKS[mask]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    scores = q @ k.mT / math.sqrt(3)
    bias = None if given is None or given.dtype == torch.bool else given / 0.4
    attention = dense(given if bias is None else bias, is_causal, scores / 0.4)[0]
    rule = TempScale(LayerFacts(heads=HEADS), temperature=0.4)
    torch.testing.assert_close(fused(rule, q, k, v, given, is_causal=is_causal), attention @ v)
    once, uniform = dense(given, is_causal, scores)
    looks = Visible(queries=6, keys=6, mask=uniform > 0)
    torch.testing.assert_close(rule.probabilities(once, looks), attention)


def test_tempscale_lowers_the_entropy_of_attention():
    model, inputs = tiny_model("bert")
    model.set_attn_implementation("eager")

    def entropy() -> float:
        with torch.no_grad():
            maps = model(**inputs, output_attentions=True).attentions[0]
        return torch.special.entr(maps).sum(-1).mean().item()

    before = entropy()
    osm.apply(model, "tempscale", layers=0, temperature=0.5)
    osm.apply(model, "tempscale", layers=1, temperature=0.9)  # one temperature per layer
    assert entropy() < before - 0.01


def test_what_exclusive_attention_returns_is_orthogonal_to_each_tokens_own_value():
    rule = Exclusive(LayerFacts(heads=HEADS))
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(2, 6, 2, 3, generator=generator, dtype=torch.float64)
    v[0, 3] = 0  # a token that says nothing loses nothing
    o = torch.randn(2, 6, 4, 3, generator=generator, dtype=torch.float64)
    assert rule.values(v) is v
    found = rule.mixed(o)
    own = v.repeat_interleave(2, 2)
    torch.testing.assert_close((found * own).sum(-1), torch.zeros(2, 6, 4, dtype=torch.float64))
    torch.testing.assert_close(found[0, 3], o[0, 3])
    along = (o - found).flatten(0, 2)  # and only that part was taken off
    torch.testing.assert_close(torch.linalg.cross(along, own.flatten(0, 2)), torch.zeros_like(along))


def test_differential_heads_subtract_their_partners_attention_and_their_rows_sum_to_less():
    _, attention, _ = products("none")
    values = torch.randn(2, 2, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = values.repeat_interleave(2, 1)  # two heads read one value head
    rule = Differential(LayerFacts(heads=HEADS)).double()
    with torch.no_grad():
        rule.weight.copy_(torch.tensor([-1.0, 0.5, 2.0, -30.0]))
        share = rule.weight.sigmoid()[:, None, None]
        expected = attention - share * attention[:, [1, 0, 3, 2]]
        torch.testing.assert_close(expected.sum(-1), (1 - share[..., 0]).expand(2, 4, 6))
        mixed = rule.mixed((attention @ values).transpose(1, 2))
    torch.testing.assert_close(mixed, (expected @ values).transpose(1, 2))
    assert Differential.refusal(LayerFacts(heads=Heads(d_model=12, n_heads=4, n_kv=4, d_head=3)))


def test_the_gate_starts_at_one_and_opens_by_what_each_token_says():
    rule = Gate(LayerFacts(heads=HEADS)).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 10, generator=generator, dtype=torch.float64)
    o = torch.randn(2, 6, 4, 3, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        rule.read(x)
        torch.testing.assert_close(rule.mixed(o), o, rtol=1e-4, atol=0)
        rule.weight.copy_(torch.randn(4, 10, generator=generator))
        rule.bias.copy_(torch.tensor([0.0, 1.0, -1.0, 2.0]))
        rule.read(x)
        expected = (x @ rule.weight.T + rule.bias).sigmoid()[..., None] * o
        torch.testing.assert_close(rule.mixed(o), expected)


@pytest.mark.parametrize(
    ("case", "norms"), [("gpt2", ("ln_1", "ln_2")), ("llama", ("input_layernorm", "post_attention_layernorm"))]
)
def test_layernorm_scaling_divides_what_the_norms_of_block_l_give_by_the_root_of_l(case, norms):
    model, inputs = tiny_model(case)
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for number, block in enumerate(by_hand.h if case == "gpt2" else by_hand.layers, start=1):
            for parameter in (p for norm in norms for p in getattr(block, norm).parameters()):
                parameter /= math.sqrt(number)
        osm.apply(model, "layernorm_scaling")
        torch.testing.assert_close(outputs(model, inputs)[0], outputs(by_hand, inputs)[0], rtol=1e-4, atol=1e-5)


def test_value_residual_mixes_in_the_first_values_and_learns_how_much():
    model, inputs = tiny_model("llama")
    with torch.no_grad():
        before = outputs(model, inputs)[0]
        osm.apply(model, "value_residual", first=0.0)
        torch.testing.assert_close(outputs(model, inputs)[0], before, rtol=1e-5, atol=1e-5)
    loss_of(model, inputs).backward()
    weights = {path: p.grad for path, p in model.named_parameters() if "oversmooth_" in path}
    assert len(weights) == 2 * 2  # two numbers in each layer behind the first
    assert all(gradient.abs() > 0 for gradient in weights.values())


def test_values_of_other_sizes_than_the_first_layers_are_refused():
    facts = LayerFacts(heads=HEADS, first_heads=Heads(d_model=10, n_heads=4, n_kv=4, d_head=3))
    said = RULES["value_residual"].refusal(facts)
    assert said == "its values have 2 heads of width 3, and those of the first layer 4 heads of width 3"


# --- padding and causality ---------------------------------------------------------------------------------------------

PADDED = (
    "bert",
    "gpt2",
    "llama",
    "mpnet",
    "bloom",
    "modernbert",
    "t5",
    "opt",
    "falcon-multi-head",
    "gemma2",
    "gpt_neo",
)
CAUSAL = ("gpt2", "llama", "bloom", "gpt_neox", "gptj", "opt-post-norm", "falcon-multi-query", "gemma2", "mistral")


@pytest.mark.parametrize(
    ("case", "name"),
    [*pairs(PADDED), ("t5", "layerscale"), ("t5", "residual_scaling")],  # of its encoder, which has no cross-attention
)
def test_a_padded_sequence_gives_what_it_gives_alone(case, name):
    model, inputs = tiny_model(case)
    stack = "encoder" if case == "t5" else None
    osm.apply(model, name, stack=stack, **STRONG.get(name, {}))
    disturb(model)
    model = model.encoder if case == "t5" else model
    ids = inputs["input_ids"][:, :7]
    padded = torch.cat([inputs["input_ids"][:, :12], F.pad(ids, (0, 5), value=5)])
    mask = torch.ones_like(padded)
    mask[1, 7:] = 0
    with torch.no_grad():
        alone = outputs(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0]
        together = outputs(model, {"input_ids": padded, "attention_mask": mask})[0]
    torch.testing.assert_close(together[1:, :7], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("case", "name"), pairs(CAUSAL))
def test_no_token_sees_a_later_one(case, name):
    model, inputs = applied(case, name)
    changed = inputs["input_ids"].clone()
    changed[:, 8:] = (changed[:, 8:] + 17) % 90 + 3
    with torch.no_grad():
        before, after = outputs(model, inputs)[0], outputs(model, {**inputs, "input_ids": changed})[0]
    torch.testing.assert_close(after[:, :8], before[:, :8], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after[:, 8:], before[:, 8:], atol=1e-3)


WITH_CACHE = ("attnscale", "centered", "value_residual", "neutreno", "layerscale")
NEWER = ("layernorm_scaling", "tempscale", "exclusive", "differential", "gate")


@pytest.mark.parametrize("name", [*WITH_CACHE, *NEWER])
def test_generation_with_a_cache_agrees_with_whole_sequences(name):
    model, inputs = applied("llama", name)
    ids = inputs["input_ids"]
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        first = model(ids[:, :8], use_cache=True)
        rest = model(ids[:, 8:], past_key_values=first.past_key_values, use_cache=True).last_hidden_state
    torch.testing.assert_close(rest, expected[:, 8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gfsa", "featscale", "contranorm"])
def test_what_needs_whole_sequences_refuses_a_cache(name):
    model, inputs = applied("llama", name)
    ids = inputs["input_ids"]
    with torch.no_grad():
        first = model(ids[:, :8], use_cache=True)
        with pytest.raises(CannotControl, match="4 queries look at 12 keys"):
            model(ids[:, 8:], past_key_values=first.past_key_values)


# --- gradients ---------------------------------------------------------------------------------------------------------


def small_model(name: str) -> nn.Module:
    """BERT, or what takes rules that it does not: norms first, and two heads on one value head."""
    from transformers import BertConfig, BertModel, Starcoder2Config, Starcoder2Model

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 4,
        "vocab_size": 5,
    }
    if fits("bert", name):
        model = BertModel(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    else:
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        model = Starcoder2Model(Starcoder2Config(**sizes, num_key_value_heads=1, **ends))
    return model.double().eval()


@EACH
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_agree_with_finite_differences(name, attention):
    model = small_model(name)
    model.set_attn_implementation(attention)
    osm.apply(model, name, **STRONG.get(name, {}))
    disturb(model)
    names = [path for path, _ in model.named_parameters() if "oversmooth_" in path]
    start = [model.get_parameter(path) for path in names]
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)

    def forward(features: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        changed = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(model, changed, (), {"inputs_embeds": features}).last_hidden_state

    assert torch.autograd.gradcheck(forward, (x, *start), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in RULES if name != "differential"])
def test_gradients_of_torchs_attention_agree_with_finite_differences(name):
    torch.manual_seed(0)
    is_first = name == "layernorm_scaling"
    layer = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True, norm_first=is_first, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    osm.apply(model, name, **STRONG.get(name, {}))
    disturb(model)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model, (x,), atol=1e-6)


@pytest.mark.parametrize(("case", "name"), pairs(["bert", "llama"]))
def test_gradient_checkpointing_changes_no_gradient(case, name):
    model, inputs = applied(case, name)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss_of(model, inputs).backward()
        return {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for path, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[path], rtol=1e-3, atol=1e-4)


def test_first_values_without_a_gradient_are_refused_rather_than_dropped():
    model, inputs = applied("llama", "neutreno")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(CannotControl, match="use_reentrant=False"):
        loss_of(model, inputs).backward()


# --- as part of a model ------------------------------------------------------------------------------------------------


@EACH
def test_copies_and_state_dicts_carry_the_intervention(name):
    case = "bert" if fits("bert", name) else "llama"
    model, inputs = applied(case, name)
    with torch.no_grad():
        expected = outputs(model, inputs)[0]
        twin = copy.deepcopy(model)
        torch.testing.assert_close(outputs(twin, inputs)[0], expected, rtol=0, atol=0)
        osm.unapply(model)
        torch.testing.assert_close(outputs(twin, inputs)[0], expected, rtol=0, atol=0)  # it has hooks of its own
        other, _ = tiny_model(case, seed=3)
        osm.apply(other, name, **STRONG.get(name, {}))
        other.load_state_dict(twin.state_dict())
        torch.testing.assert_close(outputs(other, inputs)[0], expected, rtol=0, atol=0)


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_models_run(name, dtype):
    model, inputs = applied("timm-vit" if fits("timm-vit", name) else "llama", name)
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model, inputs)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for n, p in model.named_parameters() if "oversmooth_" in n)
    half, inputs = tiny_model("llama")
    osm.apply(half.to(dtype), name, **STRONG.get(name, {}))
    assert outputs(half, inputs)[0].dtype == dtype


def test_several_interventions_work_together():
    model, inputs = tiny_model("gpt2")
    for name in ("attnscale", "gfsa", "featscale"):
        osm.apply(model, name)
    disturb(model)
    loss_of(model, inputs).backward()
    grads = {path: p.grad for path, p in model.named_parameters() if "oversmooth_" in path}
    assert len(grads) == 3 * (1 + 3 + 2)
    assert all(torch.isfinite(gradient).all() and gradient.abs().max() > 0 for gradient in grads.values())
    osm.unapply(model, "gfsa")
    assert {
        path.split("oversmooth_")[1].split(".")[0] for path, _ in model.named_parameters() if "oversmooth_" in path
    } == {
        "attnscale",
        "featscale",
    }


def test_interventions_on_top_of_each_other_agree_between_fused_and_eager_attention():
    model, inputs = tiny_model("llama")
    for name in ("attnscale", "gfsa"):
        osm.apply(model, name)
    disturb(model)
    with torch.no_grad():
        expected = outputs(model, inputs)[0]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(outputs(model, inputs)[0], expected, rtol=1e-3, atol=1e-4)


def test_interventions_and_the_eigenbasis_work_together():
    model, inputs = tiny_model("timm-vit")
    osm.sharpen(model)
    osm.apply(model, "attnscale")
    disturb(model)
    loss_of(model, inputs).backward()
    with pytest.raises(CannotControl, match=r"unapply\(model, 'attnscale'\)"):
        osm.bake(model)
    osm.bake(osm.unapply(model))


def test_only_chosen_layers_and_stacks_are_touched():
    model, _ = tiny_model("bart")
    result = osm.apply(model, "attnscale", stack="decoder", layers=1)
    assert result.layers == (("decoder", 1),)
    assert result.parameters == 8
    assert "attnscale in 1 layers, 8 new parameters" in repr(result)
    assert [row["layer"] for row in result.rows()] == [1]


def test_wrong_names_and_options_are_refused():
    model, _ = tiny_model("bert")
    with pytest.raises(UnknownName, match="Close: attnscale"):
        osm.apply(model, "atnscale")
    with pytest.raises(UnknownName):
        osm.unapply(model, "atnscale")
    with pytest.raises(UnknownName, match=r"option of gfsa .*Known: order"):
        osm.apply(model, "gfsa", scale=1.0)
    with pytest.raises(BadValue, match="order"):
        osm.apply(model, "gfsa", order=1)
    with pytest.raises(BadValue, match="temperature must be greater than 0 and at most 1"):
        osm.apply(model, "tempscale", temperature=2.0)
    osm.apply(model, "centered")
    with pytest.raises(CannotControl, match="already applied"):
        osm.apply(model, "centered")


def test_attention_that_nobody_can_see_into_is_refused_when_it_runs():
    from transformers import AttentionInterface

    def hidden(module, query, key, value, attention_mask, scaling=None, **_):
        scores = (query @ key.mT).exp()
        return (scores / scores.sum(-1, keepdim=True) @ value).transpose(1, 2), None

    AttentionInterface.register("hidden", hidden)
    model, inputs = tiny_model("vit")
    model.set_attn_implementation("hidden")
    osm.apply(model, "attnscale")
    with pytest.raises(CannotControl, match=r"0 calls of fused attention") as raised, torch.no_grad():
        call_model(model, inputs)
    assert "attn_implementation='sdpa'" in str(raised.value)
    torch.softmax(torch.zeros(2, 2, 2), -1)  # no interception is left behind
    model.set_attn_implementation("sdpa")
    call_model(model, inputs)


def test_an_error_inside_attention_leaves_no_interception_behind():
    model, inputs = applied("timm-vit", "centered")
    model.blocks[1].attn.proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call_model(model, inputs)
    from torch.overrides import _get_current_function_mode_stack

    assert not _get_current_function_mode_stack()


COMPILED = """
import torch, oversmooth as osm
from oversmooth.models.live import call_model
from tests.contract.tiny_models import tiny_model
from tests.unit.control.test_interventions import applied

torch.set_num_threads(1)
for name in ("attnscale", "featscale"):
    model, inputs = applied("timm-vit", name)
    expected = call_model(model, inputs)
    torch.testing.assert_close(call_model(torch.compile(model), inputs), expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
"""


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_outputs():
    subprocess.run([sys.executable, "-c", COMPILED], check=True)
