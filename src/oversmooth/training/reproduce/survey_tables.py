"""Claims 1 to 4 model by model, for readers: what the verdicts were made from, in few numbers each."""

from collections.abc import Sequence
from statistics import mean

from oversmooth.training.reproduce.claim import Observations
from oversmooth.training.reproduce.materials import Row
from oversmooth.training.reproduce.survey_verdicts import (
    advantages,
    by_model,
    correlations,
    directions,
    inputs_that_rise,
    is_change,
    known_inputs,
)

WAYS = {1: "rises", -1: "falls", 0: "no clear change"}


def similarity(observed: Observations) -> list[Row]:
    """Claim 1: both ends, and the interval of their difference over inputs that the verdict uses."""
    models = known_inputs(observed)
    return [
        {
            "model": name,
            "inputs": len(models[name]),
            "cosine_at_embedding": round(mean(row["cosine_embedding"] for row in models[name]), 3),
            "cosine_after_last_layer": round(mean(row["cosine_last"] for row in models[name]), 3),
            "change": f"[{low:+.3f}, {high:+.3f}]",
            "similarity": WAYS[way],
        }
        for name, (way, low, high) in directions(observed).items()
    ]


def eigenvalue(observed: Observations) -> list[Row]:
    """Claim 2: the advantage of the theorem's sign, and the ladder: rank correlation of every rung with the measurement."""
    layers = observed["layers"]
    advantage = advantages(layers)
    rungs = sorted({name for row in layers for name in row if name.startswith("rung_")})
    ladder = {rung: correlations(layers, rung) for rung in rungs}
    found = []
    for name, rows in by_model(layers).items():
        ranks = {f"rank_at_{rung}": _signed(ladder[rung].get(name)) for rung in rungs}
        smooth = sum(row["measured"] < 0 for row in rows if row["measured"] is not None)
        counts = {"layers": len(rows), "smooth": smooth, "advantage_over_majority": _signed(advantage.get(name))}
        found.append({"model": name, "kind": rows[0]["kind"], **counts, **ranks})
    return found


def skip(observed: Observations) -> list[Row]:
    """Claim 3: where real passes end with all skips, without those around attention, and without any."""
    return [
        {
            "model": name,
            "last_cosine": _mean_last(rows, "none"),
            "without_attention_skips": _mean_last(rows, "attention"),
            "without_any": _mean_last(rows, "block"),
            "inputs": sum(row["removed"] == "none" for row in rows),
            "more_alike_without_attention_skips": inputs_that_rise(rows, "attention")[0],
            "more_alike_without_any": inputs_that_rise(rows, "block")[0],
        }
        for name, rows in by_model(observed["passes"]).items()
    ]


def norm_signs(observed: Observations) -> list[Row]:
    """Claim 4: negative weights that are there, and what turning them positive does; trained ones beside them."""
    found: list[Row] = []
    for name, rows in by_model(observed["layers"]).items():
        solved = [row for row in rows if row["exponent_positive"] is not None]
        found.append(
            {
                "model": name,
                "kind": rows[0]["kind"],
                "layers": len(rows),
                "with_negative_weights": sum(row["negative_share"] > 0 for row in rows),
                "largest_share": f"{max(row['negative_share'] for row in rows):.1%}",
                "largest_move": _signed(
                    max((row["exponent_positive"] - row["exponent"] for row in solved), key=abs, default=None), 3
                ),
                "regime_changes": sum(is_change(row) for row in solved),
            }
        )
    return found


def _mean_last(rows: Sequence[Row], removed: str) -> float | None:
    """After the last layer, over inputs that have it."""
    values = [row["cosine_last"] for row in rows if row["removed"] == removed and row["cosine_last"] is not None]
    return round(mean(values), 3) if values else None


def _signed(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:+.{digits}f}"
