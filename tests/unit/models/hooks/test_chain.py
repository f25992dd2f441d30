"""The chain identity: features that are reported as the stream are the model's own, or the model is refused."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from torch import nn

import oversmooth as osm
from oversmooth.errors import OtherStream, OversmoothError, PartialReading, WrongBatch
from oversmooth.models.hooks.chain import Seen, is_mixture, is_sum, is_sum_of_moved, sample_of
from oversmooth.models.open import open_source
from oversmooth.results.wording import headline
from tests.contract.handwritten import Block, Model, handwritten, one_large_common_vector
from tests.contract.tiny_models import tiny_model

EPS = torch.finfo(torch.float32).eps


class Between(Model):
    """Something without a module acts between the blocks."""

    def forward(self, x):
        for block in self.blocks:
            x = block(torch.tanh(x))
        return self.norm(x)


def blocks(kind=Block, count=3):
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


def features(width=24):
    return torch.randn(3, 7, width, generator=torch.Generator().manual_seed(1))


# --- links ---


@pytest.mark.parametrize("where", [(2,), (1, 3), (0, 0, 5), (...,)], ids=["sequence", "token", "entry", "everything"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_is_a_reported_problem_and_no_reason_to_doubt_the_stream(where, value):
    x = features()
    x[where] = value
    found = osm.measure(Model(blocks()).eval(), [x])
    assert any("NaN" in problem for problem in found.problems)
    assert not found.stream.broken
    assert not found.stream.partial


def test_a_stream_that_is_not_followed_is_refused_beside_nan_too():
    x = features()
    x[2] = torch.nan
    with pytest.raises(OtherStream, match=r"expected the input of blocks\.1 to follow"):
        osm.measure(Between(blocks()).eval(), [x])


@pytest.mark.parametrize("run", [osm.measure, osm.predict])
def test_another_width_is_of_two_streams_only_where_the_model_runs_through(run):
    two = handwritten("two streams side by side")
    with pytest.raises(OtherStream, match=r"expected the 24 of its attention to follow from the 48 channels"):
        run(two.model, [two.batch])
    with pytest.raises(WrongBatch, match="the model says"):
        run(Model(blocks()).eval(), [features(5)])


def test_what_no_module_explains_is_refused_with_both_places():
    with pytest.raises(OtherStream) as caught:
        osm.measure(Between(blocks()).eval(), [features()])
    assert caught.value.first == "the sum behind the feed-forward in blocks.0"
    assert caught.value.second == "the input of blocks.1"


def test_verify_does_not_pass_over_a_stream_that_is_not_followed():
    model = Between(blocks()).eval()
    found = osm.verify(model, inputs={"": features()})
    assert found.largest_error < 1e-4
    assert not found.passed
    assert found.stream.broken[0][1] == "the input of blocks.1"


@pytest.mark.parametrize("name", ["U-shaped, added", "U-shaped, concatenated", "added between blocks"])
def test_what_acts_between_blocks_is_a_part_of_its_own_with_a_name(name):
    case = handwritten(name)
    found = osm.measure(case.model, [case.batch], metrics=("cosine", "steps"))
    assert found.stream.between
    assert "between blocks" in {kind.part for one in found.attributions for kind in one.kinds}
    for one in found.attributions:
        torch.testing.assert_close(sum(kind.change for kind in one.kinds), one.total, rtol=0, atol=1e-5)
    saved = osm.Measurement.from_dict(json.loads(json.dumps(found.to_dict())))
    assert saved.stream == found.stream


def test_a_norm_inside_the_block_of_another_stack_is_no_final_norm():
    case = handwritten("U-shaped, added")
    found = osm.measure(case.model, [case.batch])
    final = {value.stack for value in found.values if value.place == "final_norm"}
    assert final == {"up"}


def test_every_batch_has_the_places_of_the_first():
    case = handwritten("U-shaped, added")
    once = osm.measure(case.model, [case.batch])
    twice = osm.measure(case.model, [case.batch, case.batch])
    assert [(v.depth, v.place) for v in once.values] == [(v.depth, v.place) for v in twice.values]
    for one, other in zip(once.values, twice.values, strict=True):
        torch.testing.assert_close(one.mean, other.mean)


# --- declarations that read another stream ---


class ScaledSkip(nn.TransformerEncoderLayer):
    """torch's own layer with another forward pass: the names fit, the stream does not."""

    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        h = self.norm1(src)
        src = src + self.self_attn(h, h, h, need_weights=False)[0]
        return src + self.linear2(self.activation(self.linear1(self.norm2(src))))


def test_a_declaration_that_reads_another_stream_is_replaced_by_what_running_the_model_shows():
    torch.manual_seed(0)
    layer = ScaledSkip(24, 4, 48, batch_first=True, dropout=0.0)  # said to be post-norm, and pre-norm in truth
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    seen = []
    for part in model.layers:
        part.register_forward_hook(lambda module, args, output: seen.append(output))
    x = features()
    expected = []
    found = osm.measure(model, [x])
    with torch.no_grad():
        seen.clear()
        model(x)
    for h in seen:
        unit = h / h.norm(dim=-1, keepdim=True)
        n = h.shape[1]
        cosines = ((unit @ unit.mT).sum((1, 2)) - n) / (n * (n - 1))
        expected.append(cosines.mean().item())
    torch.testing.assert_close([value.mean for value in found.curve("cosine")[1:]], expected, rtol=0, atol=1e-5)
    assert found.provenance.discovery_error is not None
    assert osm.verify(model).passed


def test_a_declaration_of_the_user_that_reads_another_stream_is_refused():
    model, inputs = tiny_model("gpt2")
    declared = osm.discover(model).archs[0]
    wrong = dataclasses.replace(declared, residual="post", paths=dataclasses.replace(declared.paths, final_norm=""))
    with pytest.raises(OtherStream):
        osm.measure(model, [inputs], arch=wrong)


# --- partial readings ---


class Apart(nn.Module):
    """Feed-forwards stand in a list of their own, between blocks that are nothing but attention."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(nn.MultiheadAttention(24, 4, batch_first=True) for _ in range(2))
        self.wide = nn.Linear(24, 240)

    def forward(self, x):
        for attention in self.attention:
            x = x + attention(x, x, x, need_weights=False)[0]
            self.wide(x)  # a probe that nothing reads
        return x


def test_a_reading_that_leaves_parameters_out_says_so_everywhere(tmp_path):
    torch.manual_seed(0)
    model = Apart().eval()
    found = osm.measure(model, [features()])
    assert found.stream.partial.startswith("partial reading: ")
    assert "wide" in found.stream.partial
    assert found.stream.partial in repr(found)
    assert found.to_dict()["stream"]["partial"] == found.stream.partial
    analysis = osm.analyze(model, [features()])
    assert headline(analysis).startswith("Partial reading: ")
    analysis.save_html(tmp_path / "page.html")
    assert "Partial reading: " in (tmp_path / "page.html").read_text()
    with pytest.raises(PartialReading, match="wide"):
        osm.gate(model, [features()], rules={"max_cosine": 0.99})


# --- blocks that write into the stream ---


class InPlace(Block):
    def forward(self, x):
        x += self.attn(self.n1(x))
        x += self.ff(self.n2(x))
        return x


def test_blocks_that_write_into_the_stream_are_measured_like_those_that_do_not():
    plain, written = Model(blocks()).eval(), Model(blocks(InPlace)).eval()
    written.load_state_dict(plain.state_dict())
    x = features()
    before = x.clone()
    expected = osm.measure(plain, [x, x], metrics=("cosine", "steps"), at="all")
    found = osm.measure(written, [x, x], metrics=("cosine", "steps"), at="all")
    for ours, theirs in zip(found.values, expected.values, strict=True):
        assert (ours.depth, ours.place, ours.metric) == (theirs.depth, theirs.place, theirs.metric)
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def test_the_theory_sees_the_stream_before_a_block_wrote_into_it():
    plain, written = Model(blocks()).eval(), Model(blocks(InPlace)).eval()
    written.load_state_dict(plain.state_dict())
    expected, found = (osm.predict(model, [features()], solve=1) for model in (plain, written))
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.rungs[-1].mean, theirs.rungs[-1].mean, rtol=1e-4, atol=1e-5)


# --- the relations themselves ---


@pytest.mark.parametrize("gain", [1.0, 0.3, -2.0])
def test_a_sum_with_a_constant_gain_is_recognised(gain):
    x, branch = features(), features(24).flip(1)
    total = sample_of(x + gain * branch)
    assert is_sum(total, sample_of(x), sample_of(branch), EPS)


def test_a_sum_with_a_gain_that_changes_from_token_to_token_is_not_one():
    x, branch = features(), features().flip(1)
    gate = torch.linspace(0.9, 1.1, 7)[:, None]
    assert not is_sum(sample_of(x + gate * branch), sample_of(x), sample_of(branch), EPS)


def test_a_difference_in_the_fifth_digit_is_seen():
    x, branch = features(), features().flip(1)
    wrong = x + branch
    wrong[1, 3] *= 1 + 1e-4
    assert not is_sum(sample_of(wrong), sample_of(x), sample_of(branch), EPS)


def test_a_mixture_of_two_tensors_is_recognised_and_a_third_is_not():
    x, other, third = features(), features().flip(1), features().roll(1, 1)
    assert is_mixture(sample_of(0.7 * x - 0.2 * other), sample_of(x), sample_of(other), EPS)
    assert not is_mixture(sample_of(x + other + 0.01 * third), sample_of(x), sample_of(other), EPS)


# --- cost ---


def test_the_check_keeps_no_tensor_and_no_hook():
    model, inputs = tiny_model("gpt2")
    before = len(torch.nn.modules.module._global_forward_hooks)
    osm.measure(model, [inputs])
    assert len(torch.nn.modules.module._global_forward_hooks) == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


# --- ends ---


def test_a_monitor_with_rules_does_not_judge_a_part_of_a_model():
    model = handwritten("one more block behind").model
    batches = [features()]
    assert osm.Monitor(model, batches, spectra=False).step()
    with pytest.raises(PartialReading, match="extra"):
        osm.Monitor(model, batches, spectra=False, rules={"max_cosine": 0.5}).step()


class Headed(Model):
    """A head that reads the stream as most heads do."""

    def __init__(self, read):
        super().__init__(blocks())
        self.head, self.read = nn.Linear(24, 5), read

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.read(x))


@pytest.mark.parametrize(
    ("read", "end"),
    [
        (lambda x: x, "head"),
        (lambda x: x[:, 0], "head"),
        (lambda x: x.mean(1), "head"),
        (lambda x: x[:, 1:], "head"),
        (lambda x: 0.5 * x, "a constant factor"),
    ],
    ids=["all tokens", "the first token", "their mean", "without the first", "times a constant"],
)
def test_a_head_that_reads_the_stream_is_its_end(read, end):
    model = Headed(read).eval()
    found = osm.measure(model, [features()]).stream
    assert found.partial == ""
    assert found.ends == (end,)


def test_a_head_that_reads_something_else_of_its_size_is_named():
    found = osm.measure(Headed(torch.tanh).eval(), [features()]).stream
    assert found.partial == "partial reading: the stream goes on behind the last block, in head"


def test_the_input_that_the_first_block_adds_to_is_the_stream():
    case = handwritten("memory before the stream")
    found = osm.measure(case.model, [case.batch]).stream
    assert (found.unmatched, found.partial) == ((), "")
    torch.manual_seed(1)
    other = {**case.batch, "source": torch.randn(case.batch["source"].shape)}
    once, twice = (osm.measure(case.model, [batch]).curve("cosine", "decoder")[0] for batch in (case.batch, other))
    torch.testing.assert_close(once.mean, twice.mean, rtol=0, atol=0)  # what enters the decoder is no memory


# --- weights that are elsewhere ---


def test_the_stream_of_a_model_whose_weights_stay_in_files_is_followed(tmp_path):
    model, inputs = tiny_model("gpt2")
    model.save_pretrained(tmp_path)
    whole = osm.measure(model, [inputs]).stream
    assert osm.measure(open_source(tmp_path, offload=True, dtype="float32"), [inputs]).stream == whole


def test_the_stream_of_a_compiled_model_is_followed():
    model, inputs = tiny_model("gpt2")
    whole = osm.measure(model, [inputs]).stream
    model.compile()
    assert osm.measure(model, [inputs]).stream == whole


# --- windows ---


class Windowed(Block):
    """Attention inside windows that are padded, as SAM has it: no module gives what is added to the stream."""

    def forward(self, x):
        batch, tokens, width = x.shape
        padded = nn.functional.pad(self.n1(x), (0, 0, 0, -tokens % 4))
        y = self.attn(padded.reshape(-1, 4, width)).reshape(batch, -1, width)[:, :tokens]
        x = x + self.sign() * y
        return x + self.ff(self.n2(x))

    def sign(self):
        return 1.0


class WindowedAndChanged(Windowed):
    def sign(self):
        return torch.linspace(0.9, 1.1, 7)[:, None]


def test_attention_in_padded_windows_is_followed():
    model = Model(blocks(Windowed)).eval()
    found = osm.measure(model, [features()]).stream
    assert (found.broken, found.unmatched, found.partial) == ((), (), "")


def test_what_attention_in_windows_gave_may_not_be_changed_on_the_way():
    with pytest.raises(OversmoothError):
        osm.measure(Model(blocks(WindowedAndChanged)).eval(), [features()])
    stream = Seen.at("before", features())
    branch = features().flip(1)
    assert is_sum_of_moved(features() + branch.roll(2, 1), stream, branch, None)
    assert not is_sum_of_moved(features() + 1.001 * branch, stream, branch, None)


def test_what_a_model_returns_of_another_number_of_sequences_is_no_end():
    h = features()
    assert Seen.at("last", h).holds(h[:, :2])
    assert not Seen.at("last", h).holds(torch.randn(6, 9, 24))
    assert not Seen.at("last", h).holds(torch.randn(3, 9, 24))


# --- the case of the issue, everywhere ---


def test_one_large_common_vector_is_told_by_every_verb(tmp_path):
    torch.manual_seed(0)
    case = one_large_common_vector()
    model, batches = case.model.eval(), [case.batch]
    assert osm.measure(model, batches).curve("cosine")[-1].mean > 0.99
    verified = osm.verify(model)
    assert verified.passed
    assert verified.stream.partial == ""
    assert max(layer.identity_error for layer in osm.predict(model, batches).layers) < 1e-3
    breach = osm.gate(model, batches, rules={"max_cosine": 0.5}).breaches[0]
    assert breach.value > 0.99
    assert breach.sub_block == "feed-forward"
    with pytest.warns(UserWarning, match="cosine"):
        osm.Monitor(model, batches, rules={"max_cosine": 0.5}).step()
    analysis = osm.analyze(model, batches)
    answer = analysis.answer
    assert answer.who.title == "Feed-forward draws tokens together"
    assert "nearly all of each token is one shared offset" in answer.headline
    assert answer.headline in text_of(analysis, tmp_path)


def text_of(analysis, folder):
    analysis.save_html(folder / "page.html")
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", (folder / "page.html").read_text()))


# --- models in double precision ---


@pytest.mark.parametrize("name", ["gpt2", "bert", "own"])
def test_models_in_double_precision_go_through_every_verb(name):
    if name == "own":
        model, batch = Model(blocks()).double().eval(), features().double()
        inputs = {"": batch}
    else:
        model, inputs = tiny_model(name)
        model, batch = model.double(), inputs
    single = osm.measure(copy.deepcopy(model).float(), [batch])
    double = osm.measure(model, [batch], metrics="all", at="all")
    assert "metrics float64" in double.provenance.compute_dtype
    ends = ([value.mean for value in found.curve("cosine")] for found in (double, single))
    torch.testing.assert_close(*ends, atol=1e-5, rtol=0)
    assert osm.verify(model, inputs=inputs).largest_error < 1e-12
    assert max(layer.identity_error for layer in osm.predict(model, [batch], solve=1).layers) < 1e-3
    assert osm.analyze(model, [batch]).missing == ()
    assert osm.gate(model, [batch], rules={"max_cosine": 0.9999}).passed
    assert osm.Monitor(model, [batch]).step()
    assert osm.inspect(model).layers
    osm.sharpen(model)
    assert osm.measure(model, [batch]).curve("cosine")
