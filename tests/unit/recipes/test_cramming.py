"""Masking, budgets, rates, batches and decay of the language recipes against closed forms."""

import math

import numpy
import pytest
import torch

from oversmooth.errors import BadRecipe, BadValue
from oversmooth.recipes import language
from oversmooth.recipes.corpus import SPECIAL_TOKENS, CorpusSettings, prepare_corpus
from oversmooth.recipes.cramming import (
    IGNORED,
    MASK_ID,
    ClockPlan,
    MaskedValidation,
    StepBatches,
    StepPlan,
    TrainingSequences,
    mask_counts,
    masked,
    ramped_batch,
    triangle,
)
from oversmooth.recipes.language import python_docs
from oversmooth.recipes.train import load_recipe

VOCABULARY = 300


def rows(count=200, length=128, seed=0):
    return numpy.random.default_rng(seed).integers(5, VOCABULARY, (count, length)).astype(numpy.uint16)


def mask(sequences, places=None, seed=7, share=0.25):
    places = numpy.arange(len(sequences)) if places is None else places
    found = masked(sequences, places, share=share, vocabulary=VOCABULARY, seed=seed)
    return found["input_ids"].numpy(), found["labels"].numpy()


# --- masking ---------------------------------------------------------------------------------------------------------


def test_of_128_tokens_32_are_asked_for_26_hidden_3_replaced_3_left():
    sequences = rows()
    inputs, labels = mask(sequences)
    asked = labels != IGNORED
    assert (asked.sum(1) == 32).all()
    assert ((inputs == MASK_ID).sum(1) == 26).all()
    assert (labels[asked] == sequences[asked]).all()
    assert (inputs[~asked] == sequences[~asked]).all()
    changed = asked & (inputs != MASK_ID) & (inputs != sequences)
    # three are replaced by a random word, which is the old one once in 295 times
    assert 3 * 200 * (1 - 5 / 295) <= changed.sum() <= 3 * 200
    assert (inputs[changed] >= len(SPECIAL_TOKENS)).all()


@pytest.mark.parametrize(
    ("length", "share", "counts"), [(128, 0.25, (32, 26, 3)), (64, 0.25, (16, 13, 2)), (8, 0.15, (1, 1, 0))]
)
def test_the_counts_are_rounded_shares(length, share, counts):
    assert mask_counts(length, share) == counts


def test_special_tokens_are_never_asked_for_even_where_they_are_almost_all():
    sequences = rows()
    sequences[:, ::3] = 3
    sequences[0, 10:] = 3
    inputs, labels = mask(sequences)
    special = sequences < len(SPECIAL_TOKENS)
    assert (labels[special] == IGNORED).all()
    assert (inputs[special] == sequences[special]).all()
    assert (labels[0] != IGNORED).sum() == 6  # ten tokens, four of them special


def test_every_position_is_equally_likely_to_be_asked_for():
    _, labels = mask(rows(4000, 16))
    shares = (labels != IGNORED).mean(0)
    assert numpy.abs(shares - 0.25).max() < 4 * math.sqrt(0.25 * 0.75 / 4000)


def test_masks_belong_to_the_place_in_the_run_and_not_to_the_batch():
    sequences, places = rows(50), numpy.arange(100, 150)
    whole = mask(sequences, places)
    parts = [mask(sequences[part], places[part]) for part in (slice(0, 20), slice(20, 50))]
    for i in range(2):
        numpy.testing.assert_array_equal(whole[i], numpy.concatenate([part[i] for part in parts]))
    assert (mask(sequences, places + 50)[1] != whole[1]).any()
    assert (mask(sequences, places, seed=8)[1] != whole[1]).any()


# --- the budget ------------------------------------------------------------------------------------------------------


def test_the_triangle_has_a_quarter_at_the_start_the_peak_at_three_quarters_and_nothing_at_the_end():
    rate = [triangle(share / 100, peak=1e-3) for share in range(101)]
    assert rate[0] == pytest.approx(2.5e-4)
    assert rate[75] == pytest.approx(1e-3)
    assert rate[100] == 0.0
    assert max(rate) == rate[75]
    steps = numpy.diff(rate)
    numpy.testing.assert_allclose(steps[:75], 7.5e-4 / 75)
    numpy.testing.assert_allclose(steps[75:], -1e-3 / 25)
    assert triangle(1.5, peak=1.0) == 0.0


def test_the_batch_grows_by_its_quantum_and_is_whole_at_sixty_percent():
    sizes = [ramped_batch(s / 10_000, batch=8192, ramp=0.6, quantum=128) for s in range(10_001)]
    assert sizes[0] == 128
    assert sizes[5999] == 8192
    assert set(sizes[6000:]) == {8192}
    assert set(numpy.diff(sizes)) == {0, 128}
    assert sizes[3000] == 4224  # half of 8192 is 32 quanta, and one is added so that the first step has one
    assert ramped_batch(0.0, batch=64, ramp=0.0, quantum=8) == 64


def test_a_plan_of_steps_reads_every_sequence_once_and_in_order():
    plan = StepPlan(50, batch=64, ramp=0.6, quantum=8)
    following = 0
    for step in range(50):
        first, count = plan.batch_of(step)
        assert first == following
        following += count
    assert following == plan.firsts[-1]
    assert plan.firsts.index(plan.batch_of(17)[0]) == 17
    assert plan.share(25) == 0.5


def test_a_plan_of_hours_follows_the_clock_and_survives_an_interruption(tmp_path):
    time = [1000.0]
    plan = ClockPlan(1.0, batch=64, ramp=0.5, quantum=8, now=lambda: time[0])
    plan.begin()
    assert plan.batch_of(0) == (0, 8)
    time[0] += 900.0  # a quarter of the hour
    assert plan.share(1) == 0.0  # nothing counts before every process has been told
    plan.tick(plan.measured())
    assert plan.share(1) == 0.25
    assert plan.batch_of(1) == (8, 40)
    plan.save(tmp_path)
    time[0] += 10_000.0  # the machine was off
    again = ClockPlan(1.0, batch=64, ramp=0.5, quantum=8, now=lambda: time[0])
    again.load(tmp_path)
    again.begin()
    time[0] += 1800.0
    again.tick(again.measured())
    assert again.share(2) == pytest.approx(0.75)
    assert again.batch_of(2) == (48, 64)
    assert not again.is_over
    time[0] += 900.0
    again.tick(again.measured())
    assert again.is_over


# --- the recipes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pile-bert", "pile-bert-steps"])
def test_the_published_recipes_have_the_published_numbers(name):
    recipe = load_recipe(name)
    assert recipe.model_arguments(32768) == {
        "vocab_size": 32768,
        "hidden_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 128,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "hidden_dropout_prob": 0.0,
    }
    optimizer = recipe.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.clip_norm) == (1e-3, 0.01, 0.5)
    assert (optimizer.betas, optimizer.epsilon) == ((0.9, 0.98), 1e-12)
    training = recipe.training
    assert (training.batch, training.ramp, training.mask, training.peak_at, training.start_share) == (
        8192,
        0.6,
        0.25,
        0.75,
        0.25,
    )
    assert (recipe.data.vocab_size, recipe.data.length, recipe.data.trash_cutoff) == (32768, 128, 0.25)
    assert recipe.hardware.precision == "bfloat16"
    assert training.budget_hours == (24.0 if name == "pile-bert" else 0.0)
    assert training.batch % recipe.hardware.micro_batch == 0


def test_a_budget_of_steps_reads_the_sequences_that_its_recipe_says():
    plan = language.plan_of(load_recipe("pile-bert-steps"))
    assert isinstance(plan, StepPlan)
    assert plan.firsts[-1] == pytest.approx(12_500 * 8192 * 0.7, rel=0.01)
    assert isinstance(language.plan_of(load_recipe("pile-bert")), ClockPlan)


def test_the_rate_of_a_recipe_follows_its_plan():
    recipe = load_recipe("pile-bert-steps", ["training.steps=100"])
    plan = language.plan_of(recipe)
    assert language.learning_rate(recipe, plan, 0, 100) == pytest.approx(2.5e-4)
    assert language.learning_rate(recipe, plan, 75, 100) == pytest.approx(1e-3)
    assert language.learning_rate(recipe, plan, 99, 100) == pytest.approx(4e-5)


def test_decay_acts_on_matrices_and_not_on_norms_and_scales():
    import oversmooth as osm

    recipe = load_recipe("mini-bert", ["model.layers=2", "model.width=16", "model.heads=2", "model.feed_forward=16"])
    model = language.build_model(recipe, 64)
    osm.sharpen(model)
    free = {name for name, parameter in model.named_parameters() if not language.decays(name, parameter)}
    assert {name for name, _ in model.named_parameters() if "norm" in name} <= free
    assert "encoder.embeddings.positions.scale" in free
    assert any(name.endswith("psi") for name in free)
    decayed = {name for name, _ in model.named_parameters()} - free
    assert "encoder.embeddings.word_embeddings.weight" in decayed
    assert not any("norm" in name for name in decayed)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.heads=5", r"model.width must be divisible by model.heads \(5\)"),
        ("model.feed_forward=7", r"model.feed_forward must be even, because .* got 7"),
        ("training.ramp_quantum=5", r"training.batch must be divisible by training.ramp_quantum \(5\); got 32"),
        ("data.order=random", "data.order must be 'sentence-length' or 'as-read'"),
        ("training.mask=1.5", "training.mask must be less than 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_key(setting, words):
    with pytest.raises(BadRecipe, match=words):
        load_recipe("mini-bert", [setting])


def test_a_batch_that_the_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        BadValue, match=r"training.ramp_quantum must be divisible by the number of processes \(3\); got \d+"
    ):
        language._require_processes(load_recipe("mini-bert"))


# --- what a step reads -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    settings = CorpusSettings(
        source=str(python_docs(folder)),
        vocab_size=300,
        length=32,
        trash_cutoff=None,
        max_documents=60,
        validation_fraction=0.1,
    )
    return prepare_corpus(settings, folder / "cache")


def test_the_embedded_text_is_prose_and_is_the_same_again(tmp_path):
    path = python_docs(tmp_path)
    first = path.read_bytes()
    assert 300_000 < len(first) < 3_000_000
    assert python_docs(tmp_path).read_bytes() == first
    assert "An identifier" in first.decode() or "identifier" in first.decode()


def test_every_epoch_reads_every_sequence_once_shuffled_or_by_the_curriculum(corpus):
    sequences, order = corpus.sequences("train"), corpus.order()
    count = len(sequences)
    by_curriculum = TrainingSequences(corpus, seed=0, shuffle=False)
    numpy.testing.assert_array_equal(by_curriculum(0, count), sequences[order])
    numpy.testing.assert_array_equal(by_curriculum(count - 2, 4), sequences[[order[-2], order[-1], order[0], order[1]]])
    shuffled = TrainingSequences(corpus, seed=0, shuffle=True)
    epochs = [shuffled(e * count, count) for e in (0, 1)]
    assert not (epochs[0] == epochs[1]).all()
    for epoch in epochs:
        numpy.testing.assert_array_equal(epoch[numpy.lexsort(epoch.T)], sequences[numpy.lexsort(sequences.T)])
    numpy.testing.assert_array_equal(TrainingSequences(corpus, seed=0, shuffle=True)(count + 3, 5), epochs[1][3:8])
    assert TrainingSequences(corpus, seed=0, shuffle=False, fraction=0.5).count == count // 2


@pytest.mark.parametrize("shuffle", [True, False])
def test_sequences_for_tuning_are_judged_and_never_trained_on(corpus, shuffle):
    sequences = corpus.sequences("train")
    held_out = 20
    judged = language.judged_sequences(corpus, held_out)
    numpy.testing.assert_array_equal(judged, sequences[-held_out:])
    reading = TrainingSequences(corpus, seed=0, shuffle=shuffle, held_out=held_out)
    assert reading.count == len(sequences) - held_out
    epoch, rest = reading(0, reading.count), sequences[:-held_out]
    numpy.testing.assert_array_equal(epoch[numpy.lexsort(epoch.T)], rest[numpy.lexsort(rest.T)])
    numpy.testing.assert_array_equal(language.judged_sequences(corpus, 0), corpus.sequences("validation"))
    with pytest.raises(BadValue, match=r"data\.tuning_sequences.*below"):
        language.judged_sequences(corpus, len(sequences))


def test_the_shares_of_two_processes_are_the_batch_of_one(corpus):
    def batches(process, processes):
        plan = StepPlan(10, batch=16, ramp=0.6, quantum=4)
        reading = TrainingSequences(corpus, seed=3, shuffle=True)
        found = StepBatches(reading, plan, steps=10, mask=0.25, vocabulary=300, seed=3)
        found.process, found.processes = process, processes
        return found

    for step in (0, 4, 9):
        whole, halves = batches(0, 1)[step], [batches(p, 2)[step] for p in (0, 1)]
        for name in whole:
            torch.testing.assert_close(whole[name], torch.cat([half[name] for half in halves]))


def test_validation_masks_are_the_same_in_every_run(corpus):
    held_out = corpus.sequences("validation")[:10]
    one, two = (MaskedValidation(held_out, mask=0.25, vocabulary=300) for _ in range(2))
    assert len(one) == 10
    torch.testing.assert_close(one[3], two[3])
    assert (one[3]["labels"] != IGNORED).sum() == 8
