"""Claim, two cores: a training step of the crammed BERT, by its recipe on the shared runner with masking, clipping,
schedule and accumulation, does at least 0.95 times as many tokens per second as a plain loop over transformers' BERT of
the same geometry (4 layers of width 768, 12 heads, feed-forward 3072, 32768 pieces, sequences of 128, batch 8).

Both mask a quarter of the tokens and step AdamW. BERT decodes every token, as its class does; ours decodes the masked ones.
"""

import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy
import torch
import torch.nn.functional as F  # noqa: N812

from oversmooth.recipes.corpus import Corpus
from oversmooth.recipes.cramming import masked
from oversmooth.recipes.train import RunRequest, kind_of, load_recipe, train_job

STEPS, ROUNDS, LIMIT, BATCH, LENGTH, VOCABULARY = 4, 2, 0.95, 8, 128, 32768
SETTINGS = (
    "model.layers=4",
    f"training.steps={STEPS}",
    f"training.batch={BATCH}",
    "training.ramp=0.0",
    "hardware.precision=float32",
    "hardware.micro_batch=0",
    "watch.monitor_every=1000",
    "watch.evaluate_every=1000",
    "watch.save_every=1000",
    "watch.probe_sequences=1",
    "watch.validation_sequences=2",
)


def corpus(folder: Path) -> Corpus:
    """Random tokens where a corpus would be: what they are does not change the time."""
    (folder / "tokenizer").mkdir(parents=True)
    draw = numpy.random.default_rng(harness.SEED)
    sizes = {"train": 256, "validation": 4}
    for split, count in sizes.items():
        draw.integers(5, VOCABULARY, (count, LENGTH)).astype(numpy.uint16).tofile(folder / f"{split}.bin")
    facts: dict[str, Any] = {"settings": {"length": LENGTH}, "sequences": sizes, "vocabulary": VOCABULARY, "hash": "-"}
    return Corpus(folder=folder, facts={**facts, "unigram_entropy": 0.0, "skipped": {}, "named": [], "records": 0})


def recipe_seconds(data: Corpus, out: Path, variant: str) -> list[float]:
    """Seconds of the steps of a run, after the first."""
    from oversmooth.recipes import language

    language.load_corpus = lambda settings, given: data
    ends: list[float] = []
    request = RunRequest(name="pile-bert-steps", out=out, overrides=SETTINGS, variant=variant)
    job = kind_of("language").job(load_recipe("pile-bert-steps", SETTINGS), None, request)
    manifest = train_job(job, request, lambda done, total: ends.append(time.perf_counter())).manifest
    assert manifest.steps == STEPS == len(ends), "no step was left out"
    return [after - before for before, after in itertools.pairwise(ends)]


def plain_seconds(data: Corpus) -> list[float]:
    """What anyone would write: BERT, its own loss, AdamW, clipping."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**sizes, **dropout, intermediate_size=3072)).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.98), 1e-12, 0.01)
    ends, sequences = [], data.sequences("train")
    for step in range(STEPS):
        rows = numpy.arange(step * BATCH, (step + 1) * BATCH)
        batch = masked(sequences[rows], rows, share=0.25, vocabulary=VOCABULARY, seed=0)
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends)]


def check_answer(data: Corpus) -> None:
    """Decoding masked tokens only gives the loss of decoding all of them."""
    from oversmooth.recipes.language import build_model

    torch.manual_seed(harness.SEED)
    model = build_model(load_recipe("pile-bert-steps", SETTINGS), VOCABULARY)
    batch = masked(data.sequences("train")[:2], numpy.arange(2), share=0.25, vocabulary=VOCABULARY, seed=0)
    with torch.no_grad():
        dense = F.cross_entropy(model(input_ids=batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())
        torch.testing.assert_close(model(**batch).loss, dense)


def main() -> None:
    harness.fix()
    seconds: dict[str, list[float]] = {"recipe": [], "sharpen": [], "plain": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = corpus(folder / "corpus")
        check_answer(data)
        for turn in range(ROUNDS):
            seconds["plain"] += plain_seconds(data)
            seconds["recipe"] += recipe_seconds(data, folder / f"vanilla{turn}", "vanilla")
            seconds["sharpen"] += recipe_seconds(data, folder / f"sharpen{turn}", "sharpen")
            print(json.dumps(seconds), flush=True)
    tokens = {name: BATCH * LENGTH / min(times) for name, times in seconds.items()}
    ratio = tokens["recipe"] / tokens["plain"]
    harness.write(
        "language_throughput",
        claim="training tokens per second at least 0.95 of a plain transformers BERT of the same geometry",
        ours=f"{tokens['recipe']:.0f} tokens/s ({tokens['sharpen']:.0f} with sharpen)",
        alternative=f"{tokens['plain']:.0f} tokens/s",
        ratio=ratio,
        numbers={"tokens_per_second": tokens, "step_seconds": seconds, "batch": BATCH, "length": LENGTH, "layers": 4},
    )
    assert ratio >= LIMIT, ratio


if __name__ == "__main__":
    main()
