"""Claim, two cores: an optimizer step of 64 micro-batches (1 x 128 tokens) of the crammed BERT of pile-bert (16 layers,
width 768) takes at most 1.05 times as long sharpened as plain, inside of `osm.accumulate`.

A step is 64 forward and backward passes, clipping and AdamW, as the recipe's trainer takes them. Plain, sharpened, and
sharpened without `accumulate` (for comparison, 16 micro-batches scaled to 64) take turns; the shortest of each counts.
"""

from contextlib import nullcontext

import harness
import torch
from torch import nn

import oversmooth as osm
from oversmooth.recipes.language import build_model
from oversmooth.recipes.train import load_recipe

MICRO_BATCHES, LENGTH, VOCABULARY, ROUNDS, LIMIT = 64, 128, 32768, 3, 1.05
COMPARED = 16
"""Micro-batches without `accumulate`: every one of them costs the same."""


def models() -> dict[str, nn.Module]:
    torch.manual_seed(harness.SEED)
    plain = build_model(load_recipe("pile-bert-steps"), VOCABULARY).train()
    torch.manual_seed(harness.SEED)
    sharp = build_model(load_recipe("pile-bert-steps"), VOCABULARY).train()
    osm.sharpen(sharp, init="fresh", generator=torch.Generator().manual_seed(harness.SEED))
    return {"plain": plain, "sharpened": sharp}


def step(model: nn.Module, search: torch.optim.Optimizer, micro_batches: int, inside: bool) -> None:
    draw = torch.Generator().manual_seed(harness.SEED)
    with osm.accumulate(model) if inside else nullcontext():
        for _ in range(micro_batches):
            ids = torch.randint(5, VOCABULARY, (1, LENGTH), generator=draw)
            labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) > 0.25, -100)
            (model(input_ids=ids, labels=labels).loss / micro_batches).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    search.step()
    search.zero_grad()


def check_answer(model: nn.Module) -> None:
    """Both ways give the same gradients."""
    found = []
    for inside in (False, True):
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        with osm.accumulate(model) if inside else nullcontext():
            for seed in range(2):
                ids = torch.randint(5, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(seed))
                model(input_ids=ids, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        still.zero_grad()
    for outside, inside_gradient in zip(*found, strict=True):
        torch.testing.assert_close(inside_gradient, outside, rtol=1e-2, atol=1e-4 * float(outside.abs().max()) + 1e-9)


def main() -> None:
    harness.fix()
    harness.keep_memory()
    plain, sharp = models().values()
    check_answer(sharp)
    searches = {id(model): torch.optim.AdamW(model.parameters(), 1e-5) for model in (plain, sharp)}
    best = harness.best_seconds(
        {
            "plain": lambda: step(plain, searches[id(plain)], MICRO_BATCHES, inside=True),
            "sharpened": lambda: step(sharp, searches[id(sharp)], MICRO_BATCHES, inside=True),
            "every pass": lambda: step(sharp, searches[id(sharp)], COMPARED, inside=False),
        },
        ROUNDS,
    )
    every_pass = best["every pass"] * MICRO_BATCHES / COMPARED
    ratio = best["sharpened"] / best["plain"]
    harness.write(
        "accumulate",
        claim="optimizer step of 64 micro-batches of the crammed BERT, sharpened, at most 1.05 times the plain model's",
        ours=f"{best['sharpened']:.1f} s ({every_pass:.1f} s with an eigenbasis for every pass)",
        alternative=f"{best['plain']:.1f} s",
        ratio=ratio,
        numbers={"seconds": best, "micro_batches": MICRO_BATCHES, "tokens": LENGTH, "compared": COMPARED},
    )
    assert ratio <= LIMIT, ratio


if __name__ == "__main__":
    main()
