"""Learning rates as functions of the step."""

import math


def warm_cosine(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    cosine_steps: int,
    start: float = 0.0,
    minimum: float = 0.0,
    warmup_first: bool,
) -> float:
    """Linear from `start` to `peak`, then half a cosine to `minimum`.

    `warmup_first`: the whole cosine follows the warm-up; otherwise the warm-up covers its beginning, as in timm and DeiT,
    and the rate joins the cosine where it is by then.
    """
    if step < warmup_steps:
        return start + (peak - start) * step / warmup_steps
    done = (step - warmup_steps if warmup_first else step) / max(1, cosine_steps)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
