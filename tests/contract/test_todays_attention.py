"""Latent values, gates, sinks, norms on heads, differential attention and hybrids, on tiny models of the real classes."""

import pytest
import torch

import oversmooth as osm
from oversmooth.control.edit import edit
from oversmooth.errors import CannotControl, RefusedArchitecture
from oversmooth.models.declaration import sizes_of
from oversmooth.models.discovery.watch import discover_module
from oversmooth.models.hooks.attention_maps import attention_watched
from oversmooth.models.identify import declared_for
from oversmooth.models.live import call_model
from oversmooth.models.open import open_source
from tests.contract.tiny_models import randomise
from tests.contract.todays_models import GAINED, TEXT, TODAY, todays_model, with_exact_norms

HYBRIDS = {
    "qwen3_next": "1 of 3 blocks",
    "qwen3_5": "1 of 3 blocks",
    "jamba": "1 of 3 blocks",
    "bamba": "1 of 3 blocks",
}


@pytest.mark.parametrize("case", TODAY)
def test_the_equal_token_identity_holds(case):
    model, inputs = todays_model(case)
    assert osm.verify(model, inputs=inputs).largest_error < 1e-4


@pytest.mark.parametrize("case", TODAY)
def test_the_last_rung_is_what_the_layer_did(case):
    model, inputs = todays_model(case)
    found = osm.predict(model, [inputs], solve=1)
    for layer in found.layers:
        assert layer.identity_error < 1e-3
        assert layer.rungs[-1].name == ("gains" if case in GAINED else "token scale")
        assert layer.leak is not None
        assert 0.0 <= layer.leak < 1.0
    assert any(layer.leak > 0.01 for layer in found.layers) == (case in GAINED)
    assert type(found).from_dict(found.to_dict()) == found


@pytest.mark.parametrize("case", TODAY)
def test_in_float64_the_last_rung_is_exact(case, monkeypatch):
    """With norms that do not round to float32, as transformers' own do."""
    model, inputs = todays_model(case, torch.float64)
    with_exact_norms(model, monkeypatch.setattr)
    torch.set_default_dtype(torch.float64)  # some masks are made in it
    try:
        found = osm.predict(model, [inputs], solve=1, precision="float64")
    finally:
        torch.set_default_dtype(torch.float32)
    assert max(layer.identity_error for layer in found.layers) < 1e-9


@pytest.mark.parametrize("case", TODAY)
def test_spectra_equal_brute_force(case):
    model, _ = todays_model(case)
    source = open_source(model)
    found = osm.inspect(model, precision="float64")
    stack = source.stacks()[0]
    layer, block = found.layers[0], stack.names.blocks[0]
    weights = stack.weights(0, source.store.read)

    def read(name):
        return source.store.read(name).double()

    latent = torch.eye(weights.d_model, dtype=torch.float64)
    if block.latent is not None:
        latent = read(block.latent.weight)[: weights.w_v.shape[-1]]
    value, output = read(block.value.weight), read(block.output.weight)
    rows = weights.value_rows if weights.value_rows is not None else torch.arange(len(value))
    by_head = (value[rows] @ latent).reshape(weights.n_kv, weights.d_head, -1) * stack.arch.value_gain
    by_head = by_head.repeat_interleave(weights.n_heads // weights.n_kv, 0)
    columns = output.reshape(weights.d_model, weights.n_heads, weights.d_head)
    dense = sum(columns[:, head] @ by_head[head] for head in range(weights.n_heads))
    eigenvalues = torch.linalg.eigvals(dense)
    assert layer.plain.rho_dc == pytest.approx((1 + eigenvalues).abs().max().item(), rel=1e-6)
    assert layer.plain.max_real == pytest.approx(max(eigenvalues.real.max().item(), 0.0), abs=1e-6)
    assert layer.plain.spectral_radius == pytest.approx(eigenvalues.abs().max().item(), rel=1e-6)
    for head in layer.heads:
        own = torch.linalg.eigvals(columns[:, head.head] @ by_head[head.head]).abs().max().item()
        assert head.spectral_radius == pytest.approx(own, rel=1e-6)
    assert ("gain one" in found.stacks[0].form) == (case in GAINED)
    assert ("latent" in found.stacks[0].form) == (block.latent is not None)


DECLARED = [case for case, (model_type, _) in TODAY.items() if declared_for(model_type)]


@pytest.mark.parametrize("case", DECLARED)
def test_discovery_finds_what_is_declared(case):
    model, inputs = todays_model(case)
    source = open_source(model)
    stack = source.stacks()[0]
    arch = discover_module(model, inputs, target=case).archs[0]
    assert arch.gains == stack.arch.gains
    assert (arch.norm, arch.residual, arch.is_hybrid) == (stack.arch.norm, stack.arch.residual, stack.arch.is_hybrid)
    mine = open_source(model, arch=arch).stacks()[0]
    assert sizes_of({}, arch).n_heads == stack.sizes.n_heads
    for position, block in enumerate(stack.names.blocks):
        expected, found = (each.weights(position, source.store.read) for each in (stack, mine))
        torch.testing.assert_close(found.w_v, expected.w_v)
        torch.testing.assert_close(found.w_o, expected.w_o)
        assert found.norms.keys() == expected.norms.keys(), block
        if expected.latent is not None:
            torch.testing.assert_close(found.latent.w, expected.latent.w)


@pytest.mark.parametrize("case", HYBRIDS)
def test_hybrids_say_how_many_blocks_are_meant(case):
    model, inputs = todays_model(case)
    for found in (osm.inspect(model), osm.measure(model, [inputs]), osm.predict(model, [inputs], solve=1)):
        assert found.provenance.hybrids == (HYBRIDS[case],)
        assert HYBRIDS[case] in repr(found)


def test_blocks_without_softmax_are_measured_as_other():
    model, inputs = todays_model("qwen3_next")
    found = osm.measure(model, [inputs])
    parts = found.attributions[0].parts
    assert [(part.depth, part.place) for part in parts] == [
        *((1, "other_sum"), (2, "attn_sum"), (2, "ffn_sum"), (3, "other_sum"), (3, "final_norm"))
    ]
    assert sum(part.change for part in parts) == pytest.approx(found.attributions[0].total, abs=1e-5)


@pytest.mark.parametrize("model_type", ["mamba", "rwkv"])
def test_recurrence_alone_is_refused_with_the_reason(model_type):
    from transformers import AutoConfig, AutoModel

    settings = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "attention_hidden_size": 16}
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **settings))
    with pytest.raises(RefusedArchitecture, match="recurrent"):
        osm.inspect(model)


@pytest.mark.parametrize(
    ("case", "reason"),
    [("deepseek_v3", "latent of 12"), ("gpt_oss", "a sink"), ("qwen3_next", "a gate"), ("bitnet", "a norm between")],
)
def test_an_interval_is_refused_where_the_guarantee_ends(case, reason):
    model, inputs = todays_model(case)
    with pytest.raises(CannotControl, match=f"{reason}.*guarantee does not cover"):
        osm.sharpen(model)
    found = osm.predict(model, [inputs], solve=1, what_ifs=["interval:-1,0", "scale:0.5"])
    interval, scaled = found.layers[0].what_ifs
    assert interval.not_applicable is not None
    assert reason in interval.not_applicable
    assert len(scaled.rungs) == len(found.layers[0].rungs)


@pytest.mark.parametrize("case", ["deepseek_v3", "qwen3_next"])
def test_baselines_that_make_sense_still_work(case):
    model, inputs = todays_model(case)
    before = call_model(model, inputs).last_hidden_state
    osm.apply(model, "attnscale")
    osm.apply(model, "layerscale")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "oversmooth_" in name:
                parameter.fill_(0.5)
    assert not torch.allclose(call_model(model, inputs).last_hidden_state, before)


@pytest.mark.parametrize(("case", "name"), [("gpt_oss", "attnscale"), ("qwen3_next", "neutreno")])
def test_baselines_without_an_exact_place_are_refused(case, name):
    model, _ = todays_model(case)
    with pytest.raises(CannotControl, match="no exact place"):
        osm.apply(model, name)


@pytest.mark.parametrize(
    ("case", "change", "reason"),
    [
        ("deepseek_v3", {"interval": (-1.0, 0.0)}, "latent of 12.*guarantee does not cover"),
        ("gpt_oss", {"interval": (0.0, 1.0)}, "a sink.*guarantee does not cover"),
        ("qwen3_next", {"flip_norm_signs": True}, "gates read the same norm"),
    ],
)
def test_an_edit_is_refused_where_the_guarantee_ends_and_nothing_is_written(case, change, reason, tmp_path):
    model, _ = todays_model(case)
    model.save_pretrained(tmp_path / "in")
    with pytest.raises(CannotControl, match=reason):
        edit(tmp_path / "in", tmp_path / "out", **change)
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_soft_capped_scores_are_read_as_the_model_uses_them():
    """A cap this low makes every map nearly even; the top rung would miss the measurement with maps of uncapped scores."""
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma2", **TEXT, attn_logit_softcapping=0.02, attn_implementation="eager")
    model = AutoModel.from_config(config).eval()
    randomise(model, 0)
    inputs = {"input_ids": torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))}
    found = osm.predict(model, [inputs], solve=1)
    assert max(layer.identity_error for layer in found.layers) < 1e-3
    source = open_source(model)
    (stack,) = source.stacks()
    with torch.no_grad(), attention_watched((stack,), source.store) as take:
        model(**inputs)
        last_row = take((stack.label, 0)).of(0, torch.ones(9, dtype=torch.bool))[:, -1]
    torch.testing.assert_close(last_row, torch.full_like(last_row, 1 / 9), rtol=0.05, atol=0)
    assert last_row.std() > 0
