"""Measurements made from the numbers that an answer speaks of."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from oversmooth.measurement.statistics import Running, direction
from oversmooth.results import (
    Attribution,
    DataFacts,
    KindChange,
    Measurement,
    PairSpread,
    Part,
    PlaceValue,
    Provenance,
    SequenceSimilarity,
    StreamCheck,
    TextFacts,
    UntrainedCurve,
)
from oversmooth.results.base import interval

PROVENANCE = Provenance(
    target="models/a-model",
    source="folder",
    model_type="bert",
    families=("bert",),
    files=(),
    weights_sha256="00",
    bytes_read=0,
    weight_dtypes=("float32",),
    compute_dtype="float32",
    versions=(),
)
TEXTS = TextFacts(texts=20, characters=100, characters_used=100, tokens=100, unknown_tokens=0, unknown_share=0.0)


def facts(sequences: int, origin: str = "built-in", description: str = "built-in samples (text)", **more) -> DataFacts:
    return DataFacts(
        description=description,
        sha256="00",
        sequences=sequences,
        tokens=100 * sequences,
        skipped=0,
        origin=origin,
        text=TEXTS if origin in ("built-in", "given") and "pictures" not in description else None,
        **more,
    )


def attribution(
    levels: Sequence[float],
    final: float | None = None,
    values: Sequence[float] = (),
    parts: Mapping[str, float] | None = None,
    stack: str = "",
    tokens: str = "text",
) -> Attribution:
    """The mean cosine at the input and after each layer, and after the final norm; `values` of the sequences at the end.

    Each layer's change is attention's, but for what `parts` say of the other kinds, which is spread over the layers.
    """
    end = levels[-1] if final is None else final
    values = [end] * 20 if not values else [value - sum(values) / len(values) + end for value in values]
    ends = Running()
    ends.add(np.array(values))
    others = {name: change / (len(levels) - 1) for name, change in (parts or {}).items()}
    found = []
    for depth, (before, after) in enumerate(pairwise(levels), start=1):
        found.append(_part(stack, depth, "attention", after - before - sum(others.values())))
        found += [_part(stack, depth, name, change) for name, change in others.items()]
    if final is not None:
        found.append(_part(stack, len(levels) - 1, "final norm", final - levels[-1]))
    sums: dict[str, float] = {}
    for part in found:
        sums[part.part] = sums.get(part.part, 0.0) + part.change
    shown = interval(ends.mean, ends.standard_error, ends.count)
    return Attribution(
        stack=stack,
        quantity="mean cosine",
        total=end - levels[0],
        standard_error=0.001,
        sequences=len(values),
        start=levels[0],
        end=end,
        end_interval=shown,
        end_values=tuple(values),
        parts=tuple(found),
        kinds=tuple(
            KindChange(
                part=name,
                change=change,
                standard_error=0.001,
                interval=(change - 0.002, change + 0.002),
                direction=direction(change, None, smooths_upwards=True),
            )
            for name, change in sums.items()
        ),
        tokens=tokens,
    )


def _part(stack: str, depth: int, name: str, change: float) -> Part:
    place = {"final norm": "final_norm", "attention": "attn_sum"}.get(name, "ffn_sum")
    return Part(stack=stack, depth=depth, part=name, place=place, change=change, standard_error=None)


def measured(
    *attributions: Attribution,
    data: DataFacts | None = None,
    provenance: Provenance = PROVENANCE,
    spread: tuple[float, float] | None = None,
    share_above: float = 0.0,
    rank: tuple[float, float, float] | None = None,
    between: tuple[float, float] | None = None,
    between_spread: float = 0.02,
    untrained: Sequence[float] = (),
    partial: str = "",
    is_partial: bool = False,
) -> Measurement:
    """A measurement of these stacks; pairs, rank, similarity and the untrained curve are of the first."""
    first = attributions[0]
    depth = max(part.depth for part in first.parts)
    has_norm = first.parts[-1].part == "final norm"
    pairs = []
    if spread is not None or rank is not None:
        ends = [(0, False), *((at + 1, False) for at in range(depth)), *([(depth, True)] if has_norm else [])]
        low, high = spread or (first.end, first.end)
        for at, is_norm in ends:
            of_rank = None if rank is None else rank[0] if at == 0 else rank[1]
            pairs.append(
                PairSpread(
                    stack=first.stack,
                    depth=at,
                    is_final_norm=is_norm,
                    quantiles=(low, low, (low + high) / 2, high, high),
                    histogram=(1.0,),
                    share_above=share_above,
                    rank=of_rank,
                    largest_rank=None if rank is None else rank[2],
                    sequences=first.sequences,
                    tokens=32,
                )
            )
    values = [
        PlaceValue(
            stack=first.stack,
            depth=at,
            place="ffn_sum" if at else "embedding",
            metric="between",
            mean=value,
            standard_error=0.01,
            sequences=first.sequences,
            on_stream=True,
        )
        for at, value in zip((0, depth), between or (), strict=False)
    ]
    return Measurement(
        provenance=provenance,
        data=data or facts(first.sequences),
        prefix_tokens="none",
        is_partial=is_partial,
        values=tuple(values),
        attributions=attributions,
        definitions=(("cosine", "mean cosine"),),
        pairs=tuple(pairs),
        similarities=_similarities(first, between, between_spread),
        untrained=(UntrainedCurve(stack=first.stack, seed=0, levels=tuple(untrained)),) if untrained else (),
        stream=StreamCheck(links=1, sums=1, partial=partial),
    )


def _similarities(
    first: Attribution, between: tuple[float, float] | None, spread: float
) -> tuple[SequenceSimilarity, ...]:
    """Every other sequence is that much more alike than the mean, the others that much less."""
    if between is None:
        return ()
    values = tuple(between[1] + spread * (-1) ** k for k in range(first.sequences))
    return (SequenceSimilarity(stack=first.stack, values=values),)
