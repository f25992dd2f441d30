"""Claim: watching a ViT-Ti at CIFAR size (32 px, patch 4, batch 96) every 100 steps costs at most 2% of training time.

Training steps (forward, backward, AdamW) and measurements of 32 images take turns in one run; the medians count.
"""

import statistics
import time

import harness
import torch

import oversmooth as osm

CLAIM = 0.02
EVERY = 100
ROUNDS = 5


def main() -> None:
    harness.fix()
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=100)
    images, labels = torch.randn(96, 3, 32, 32), torch.randint(0, 100, (96,))
    watched = [torch.randn(32, 3, 32, 32)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = osm.Monitor(model, watched, every=EVERY)
    direct = osm.measure(model, watched, metrics="cosine").curve("cosine")
    assert monitor.measure(0)["smoothing/cosine/depth_12"] == direct[-1].mean
    steps, measurements = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        model.train()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        monitor.measure(0)
        measurements.append(time.perf_counter() - start)
    step, measurement = statistics.median(steps), statistics.median(measurements)
    share = measurement / (EVERY * step)
    harness.write(
        "monitor_vit",
        claim=f"watching ViT-Ti at CIFAR size every {EVERY} steps: at most {CLAIM:.0%} of training time",
        ours=f"{measurement:.2f} s per measurement",
        alternative=f"{EVERY} training steps of {step:.2f} s",
        ratio=share,
        numbers={"step_seconds": steps, "measurement_seconds": measurements},
    )
    print(f"one measurement costs {share:.2%} of {EVERY} steps")
    assert share <= CLAIM, f"claimed {CLAIM:.0%}, measured {share:.2%}"


if __name__ == "__main__":
    main()
