"""Claims 1 to 4, on pretrained models: observation, test, verdict and table of each."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from statistics import mean

import torch
from jaxtyping import Float
from torch import Tensor

from oversmooth.claims.claim import (
    LEVEL,
    Claim,
    Compared,
    Judgement,
    Observations,
    Tests,
    Verdict,
    direction,
    first_clear,
    protocol,
    share_left_open,
    sign_flip_p,
)
from oversmooth.claims.context import ClaimContext, Row, weights_at_hand
from oversmooth.claims.experiments import DEEP, MINI_BERT, POSITIVE, Experiment, PlannedRun, runs_of
from oversmooth.claims.trained import training_numbers
from oversmooth.data.batches import Batch, prepare, run_checked
from oversmooth.measurement.metrics import cosine
from oversmooth.measurement.statistics import rank_correlation
from oversmooth.models.hooks.places import Place, on_stream
from oversmooth.models.hooks.removal import Removed, why_not, without_skips
from oversmooth.models.hooks.taps import observed
from oversmooth.models.live import quiet_eval
from oversmooth.models.open import LiveModel
from oversmooth.models.source import Stack
from oversmooth.results import Analysis, LayerPrediction
from oversmooth.results.prediction import WhatIfPrediction

HUB_MODELS = (
    "google/vit-base-patch16-224",
    "facebook/deit-base-patch16-224",
    "facebook/dinov2-base",
    "openai/clip-vit-base-patch32",
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-base",
    "albert/albert-base-v2",
    "openai-community/gpt2",
    "Qwen/Qwen3-0.6B",
)
"""Both fields, encoders and decoders, shared layers, and a recent language model."""
MOST_OTHERS = 0.1
"""Share that may still be otherwise for "all are alike" to be said of more than those at hand (95%): of 29 or more."""
TRAINED = (DEEP, MINI_BERT[-1])
"""Unconstrained models that were trained here, judged apart from the pretrained ones."""
UNCONSTRAINED = tuple((experiment, ("vanilla",)) for experiment in TRAINED)
COMMANDS = tuple(f"oversmooth report {name} -o {name.split('/')[-1]}.html" for name in HUB_MODELS)


def _analyses(materials: ClaimContext) -> Iterator[tuple[Row, Analysis]]:
    """Every pretrained model, and every model that was trained here without a constraint, analysed."""
    for name, analysis in materials.surveyed():
        yield {"model": name, "kind": "pretrained"}, analysis
    for experiment, there in _trained_here(materials):
        for planned in there:
            name = f"{experiment.name} {planned.seed}"
            yield {"model": name, "kind": "trained"}, materials.trained(planned).analysis


def _trained_here(materials: ClaimContext) -> Iterator[tuple[Experiment, list[PlannedRun]]]:
    """The experiments of models without a constraint, and those of their runs that are there."""
    for experiment in (each.for_scale(materials.is_quick) for each in TRAINED):
        yield experiment, materials.there(runs_of(experiment, ("vanilla",), materials.rates))


def _layers(row: Row, analysis: Analysis) -> Iterator[tuple[Row, list[LayerPrediction]]]:
    """The passes of every layer, by the weights that act in them: shared weights count once."""
    found: dict[str, list[LayerPrediction]] = {}
    for layer in analysis.prediction.layers if analysis.prediction is not None else ():
        found.setdefault(f"{layer.stack} {layer.layer}".strip(), []).append(layer)
    for name, passes in found.items():
        yield {**row, "layer": name}, passes


def missing_models(materials: ClaimContext) -> list[Row]:
    """Models that were to be trained here and are not there."""
    found = []
    for experiment, there in _trained_here(materials):
        folders = {run.folder for run in there}
        found += [{"run": run.folder} for run in runs_of(experiment, ("vanilla",)) if run.folder not in folders]
    return found


def missing_words(observed: Observations) -> str:
    """Models that were to be trained here and are not there, in words."""
    count = len(observed.get("missing", ()))
    return f"; {count} models that were to be trained here are missing" if count else ""


def _mean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None and math.isfinite(value)]
    return round(sum(found) / len(found), 6) if found else None


def _exponent(changed: WhatIfPrediction) -> float | None:
    """Averaged over sequences as that of the layer as it is: rung 0."""
    return _mean([changed.rungs[0].mean]) if changed.rungs else None


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return found


def _signed(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:+.{digits}f}"


# --- claim 1 ---

WAYS = {1: "rises", -1: "falls", 0: "no clear change"}


def similarity_over_depth(materials: ClaimContext) -> Observations:
    """Mean cosine at the embedding and after the last layer, of every model on every input."""
    rows = []
    for name, found in materials.live_models():
        for order, batch in enumerate(found.batches):
            first, last = _ends(found.live, batch)
            rows.append({"model": name, "input": order, "cosine_embedding": first, "cosine_last": last})
    return {"inputs": rows, "left_out": materials.left_out(), "weights": weights_at_hand(materials)}


def _ends(live: LiveModel, batch: Batch) -> tuple[float | None, float | None]:
    """Mean cosine of one input's tokens at the embedding and where the last block leaves them, in the first stack."""
    stack = live.stacks[0]
    seen: dict[int, float | None] = {}

    def observe(place: Place, h: Float[Tensor, "batch token d_model"]) -> None:
        if place.stack == stack.label:  # places come in order: the last of a depth is what leaves the block
            found = cosine(h, torch.ones(h.shape[:2], dtype=torch.bool))
            seen[place.depth] = round(found.values.item(), 6) if found.defined.all() else None

    def wants(name: str, of: Stack) -> bool:
        return on_stream(name, of.arch.residual) and name != "final_norm"

    with quiet_eval(live.model), observed(live.stacks, live.store, observe, wants) as restart:
        restart()
        run_checked(live.model, live.config, prepare(live.model, live.config, batch))
    return seen[0], seen[max(seen)]


def known_inputs(observed: Observations) -> dict[str, list[Row]]:
    """Per model, the inputs that have a cosine at both ends."""
    return by_model([row for row in observed["inputs"] if None not in (row["cosine_embedding"], row["cosine_last"])])


def directions(observed: Observations) -> dict[str, tuple[int, float, float]]:
    """Per model, whether the cosine rises (1), falls (-1) or neither over its inputs, at a level that all models share."""
    models = known_inputs(observed)
    level = LEVEL / max(10, len(models))
    return {
        name: direction([row["cosine_last"] - row["cosine_embedding"] for row in rows], level)
        for name, rows in models.items()
    }


def judge_similarity(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 1: each model's direction over its inputs."""
    models = directions(observed)
    up, down = (sum(way == sign for way, _, _ in models.values()) for sign in (1, -1))
    count = f"{len(models)} model{'s' * (len(models) != 1)}"
    brief = f"rises in {up}, falls in {down} of {count}"
    words = f"similarity clearly rises in {up} and clearly falls in {down} of {count}"
    if not models:
        reason = "no pretrained model could be run on inputs of its own kind"
        return Verdict(judgement="not run", brief=reason, because=reason)
    if up and down:
        return Verdict(judgement="confirmed", brief=brief, because=words)
    if max(up, down) < len(models):
        return Verdict(judgement="undecided", brief=brief, because=words)
    others = share_left_open(len(models))
    words += f"; with {count}, up to {others:.0%} of such models could still go the other way (95%)"
    return Verdict(judgement="refuted" if others <= MOST_OTHERS else "undecided", brief=brief, because=words)


def similarity_table(observed: Observations) -> list[Row]:
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


SIMILARITY = Claim(
    **protocol("similarity"),
    commands=COMMANDS,
    observe=similarity_over_depth,
    decide=judge_similarity,
    tabulate=similarity_table,
)

# --- claim 2 ---


def dominating_eigenvalue(materials: ClaimContext) -> Observations:
    """Every rung of every layer beside what was measured across its attention."""
    rows = [
        {
            **row,
            "measured": _mean(each.measured for each in passes),
            **{f"rung_{rung}": _mean(each.rungs[rung].mean for each in passes) for rung in range(len(passes[0].rungs))},
        }
        for model in _analyses(materials)
        for row, passes in _layers(*model)
    ]
    missing = missing_models(materials)
    return {"layers": rows, "left_out": materials.left_out(), "missing": missing, "weights": weights_at_hand(materials)}


def _pretrained(observed: Observations) -> list[Row]:
    return [row for row in observed["layers"] if row["kind"] == "pretrained"]


def _with_both_kinds(observed: Observations) -> list[Row]:
    """Layers of pretrained models in which some layers smooth and others sharpen: only these can speak for the theorem."""
    models = by_model(_known(_pretrained(observed), "rung_0"))
    return [row for rows in models.values() if len({row["measured"] < 0 for row in rows}) == 2 for row in rows]


def advantages(rows: Sequence[Row], rung: str = "rung_0") -> dict[str, float]:
    """Per model, the share of layers whose sign a rung gets right, minus what the model's own majority would get right."""
    found = {}
    for name, known in by_model(_known(rows, rung)).items():
        right = sum((row[rung] < 0) == (row["measured"] < 0) for row in known)
        smoothing = sum(row["measured"] < 0 for row in known)
        found[name] = (right - max(smoothing, len(known) - smoothing)) / len(known)
    return found


def correlations(rows: Sequence[Row], rung: str = "rung_0") -> dict[str, float]:
    """Per model, the rank correlation of a rung with the measurement over layers."""
    found = {}
    for name, known in by_model(_known(rows, rung)).items():
        value = rank_correlation([row[rung] for row in known], [row["measured"] for row in known])
        if value is not None:
            found[name] = value
    return found


def _known(rows: Sequence[Row], rung: str) -> list[Row]:
    return [row for row in rows if row.get(rung) is not None and row["measured"] is not None]


def eigenvalue_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Sign flips over models that have layers of both kinds."""
    values = list(advantages(_with_both_kinds(observed)).values())
    opposite = [-value for value in values]
    return {"confirmed": sign_flip_p(values), "refuted": sign_flip_p(opposite)} if values else {}


def judge_eigenvalue(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 2: the theorem's sign against each model's own majority."""
    values = list(advantages(_with_both_kinds(observed)).values())
    if not tests:
        reason = "no pretrained model with layers that smooth and layers that sharpen was at hand"
        return Verdict(judgement="undecided" if _pretrained(observed) else "not run", brief=reason, because=reason)
    average = mean(values)
    rank = ""
    if ranks := list(correlations(_pretrained(observed)).values()):
        rank = f"; rank correlation within the {len(ranks)} of at least three layers {mean(ranks):+.2f} on average"
    least = 2.0 ** -len(values)
    rank += f"; sign flips over {len(values)} models give p = {least:.2g} at best, before any correction"
    if trained := list(advantages([row for row in observed["layers"] if row["kind"] == "trained"]).values()):
        rank += f". In {len(trained)} models trained here, which do not count: {mean(trained):+.2f} on average"
    count = f"{len(values)} pretrained model{'s' * (len(values) != 1)} with layers of both kinds"
    words = (
        f"share of layers whose sign the dominating eigenvalue gets right, minus the share that the model's own majority "
        f"answer gets right: {average:+.2f} on average over {count} (p = {tests['confirmed']:.2g} for confirmed, "
        f"{tests['refuted']:.2g} for refuted){rank}"
    )
    points = round(100 * average)
    order = f"{abs(points)}% {'more' if points > 0 else 'fewer'} layers than" if points else "as many layers as"
    brief = f"its sign is right in {order} always answering as most layers of the model do ({len(values)} models)"
    return Verdict(judgement=first_clear(tests) or "undecided", brief=brief, because=words)


def eigenvalue_table(observed: Observations) -> list[Row]:
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


EIGENVALUE = Claim(
    **protocol("eigenvalue"),
    commands=COMMANDS,
    observe=dominating_eigenvalue,
    decide=judge_eigenvalue,
    tabulate=eigenvalue_table,
    tests=eigenvalue_tests,
    needs=UNCONSTRAINED,
)

# --- claim 3 ---

REMOVED: tuple[Removed | None, ...] = (None, "attention", "block")
AGAINST_THE_SKIP = ("sharpening", "neutral")
"""Regimes that refute claim 3: with one head no layer can have them, with several it can."""
REGIME_WORDS = {
    "smoothing": "smooth",
    "sharpening": "sharpen",
    "neutral": "stay neutral",
    "undecided": "are undecided",
    "mixed": "differ from input to input",
}
KINDS = {"pretrained": "pretrained models", "trained": "models trained here"}


def without_skip(materials: ClaimContext) -> Observations:
    """The theorem's operator without its skip, layer by layer; and real forward passes without skips, model by model."""
    computed = []
    for row, passes in (layer for model in _analyses(materials) for layer in _layers(*model)):
        changed = [found for each in passes for found in each.what_ifs if found.name == "no_skip"]
        applicable = [found for found in changed if not found.not_applicable]
        regimes = {found.regime for found in applicable}
        if regimes:
            regime = regimes.pop() if len(regimes) == 1 else "mixed"  # shared weights can act in several places
            computed.append({**row, "regime": regime, "exponent": _mean(_exponent(found) for found in applicable)})
    passes_rows: list[Row] = []
    refused: list[Row] = []
    for name, model in materials.live_models():
        if reason := why_not(model.live.stacks):
            refused.append({"model": name, "reason": reason})
            continue
        for order, batch in enumerate(model.batches[:4]):
            for removed in REMOVED:
                with nullcontext() if removed is None else without_skips(model.live.stacks, model.live.store, removed):
                    last = _ends(model.live, batch)[1]
                passes_rows.append({"model": name, "input": order, "removed": removed or "none", "cosine_last": last})
    left_out = [*materials.left_out(), *refused]
    return {"computed": computed, "passes": passes_rows, "left_out": left_out, "missing": missing_models(materials)}


def judge_skip(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 3: of one head a theorem, checked; several can leave it. Real passes are reported beside it."""
    regimes = Counter(row["regime"] for row in observed["computed"])
    total = sum(regimes.values())
    alike = {"attention": 0, "block": 0}
    models = by_model(observed["passes"])
    for rows in models.values():
        for removed in alike:
            rising, inputs = inputs_that_rise(rows, removed)
            alike[removed] += rising > inputs / 2
    counts = [_counted(observed["computed"], kind, words) for kind, words in KINDS.items()]
    words = (
        f"computed without the skip, {'; '.join(filter(None, counts))}. In real forward passes tokens of most inputs end "
        f"more alike without the attention skips in {alike['attention']} of {len(models)} models, without both skips of "
        f"every block in {alike['block']}"
    )
    against = sum(regimes[regime] for regime in AGAINST_THE_SKIP)
    others = total - regimes["smoothing"] - against
    brief = f"without it {regimes['smoothing']} of {total} layers smooth, {against} do not, {others} could not be told"
    if not total:
        reason = "no model was at hand"
        return Verdict(judgement="not run", brief=reason, because=reason)
    if against:
        return Verdict(judgement="refuted", brief=brief, because=words)
    is_checked = regimes["smoothing"] == total and not observed.get("missing")
    brief += missing_words(observed)
    judgement: Judgement = "theorem, checked" if is_checked else "undecided"
    return Verdict(judgement=judgement, brief=brief, because=words + missing_words(observed))


def _counted(rows: Sequence[Row], kind: str, words: str) -> str:
    """How many layers of one kind of model are in each regime."""
    regimes = Counter(row["regime"] for row in rows if row["kind"] == kind)
    if not regimes:
        return ""
    order = [regime for regime in REGIME_WORDS if regime in regimes]
    counts = ", ".join(f"{regimes[regime]} {REGIME_WORDS[regime]}" for regime in order)
    return f"of {sum(regimes.values())} layers of {words} {counts}"


def inputs_that_rise(rows: Sequence[Row], removed: str) -> tuple[int, int]:
    """Inputs of one model that end more alike with some skips removed, and all that have a cosine with and without."""
    by_input: dict[int, dict[str, float | None]] = {}
    for row in rows:
        by_input.setdefault(row["input"], {})[row["removed"]] = row["cosine_last"]
    pairs = [(found.get("none"), found.get(removed)) for found in by_input.values()]
    known = [(before, after) for before, after in pairs if before is not None and after is not None]
    return sum(after > before for before, after in known), len(known)


def skip_table(observed: Observations) -> list[Row]:
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


def _mean_last(rows: Sequence[Row], removed: str) -> float | None:
    """After the last layer, over inputs that have it."""
    values = [row["cosine_last"] for row in rows if row["removed"] == removed and row["cosine_last"] is not None]
    return round(mean(values), 3) if values else None


SKIP = Claim(
    **protocol("skip"),
    commands=COMMANDS,
    observe=without_skip,
    decide=judge_skip,
    tabulate=skip_table,
    needs=UNCONSTRAINED,
)

# --- claim 4 ---

EXPONENT_MOVES = 0.01
DECIDED = {"smoothing", "sharpening", "neutral"}
"""Regimes that were found; the others say that it could not be told."""


def sign_of_norms(materials: ClaimContext) -> Observations:
    """Negative norm weights that are there, and the exponent of each layer with them turned positive."""
    rows = []
    for model, analysis in _analyses(materials):
        norms = {f"{each.stack} {each.layer}".strip(): each.norms for each in analysis.inspection.layers}
        for row, passes in _layers(model, analysis):
            change = next(each for each in passes[0].what_ifs if each.name == "positive_norms")
            exponent = _mean([passes[0].rungs[0].mean])
            if change.not_applicable or exponent is None:
                continue
            shares = [norm.negative_share for norm in norms[row["layer"]] if norm.role == "attn_norm"]
            row |= {
                "negative_share": round(shares[0], 6) if shares else 0.0,
                "exponent": exponent,
                "exponent_positive": _exponent(change),
                "regime": passes[0].regime,
                "regime_positive": change.regime,
            }
            rows.append(row)
    trained = training_numbers(materials, ((POSITIVE, ("sharpen",)), (DEEP, ("sharpen",))))
    return {"layers": rows, "trained": trained, "missing": missing_models(materials)}


def judge_norm_signs(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 4: turning the negative norm weights that are there positive, in models that nobody constrained."""
    rows = [row for row in observed["layers"] if row["negative_share"] > 0 and row["exponent_positive"] is not None]
    changed = sum(is_change(row) for row in rows)
    moved = sum(abs(row["exponent"] - row["exponent_positive"]) > EXPONENT_MOVES for row in rows)
    words = (
        f"{len(rows)} of {len(observed['layers'])} pre-norm layers have negative norm weights; made positive, they move the "
        f"exponent of {moved} by more than {EXPONENT_MOVES} and the regime of {changed}"
    )
    words += _with_positive_norms(observed.get("trained", ()))
    brief = f"{len(rows)} layers have negative norm weights; making these positive changes the regime of {changed}"
    if not observed["layers"]:
        return Verdict(judgement="not run", brief=brief, because=words)
    is_whole = bool(rows) and not observed.get("missing") and share_left_open(len(rows)) <= MOST_OTHERS
    judgement: Judgement = "confirmed" if changed else "refuted" if is_whole and not moved else "undecided"
    return Verdict(judgement=judgement, brief=brief + missing_words(observed), because=words + missing_words(observed))


def is_change(row: Row) -> bool:
    """Whether a layer is clearly of one regime as it is and clearly of another with positive norm weights."""
    both = {row["regime"], row["regime_positive"]}
    return len(both) == 2 and both <= DECIDED


def _with_positive_norms(runs: Sequence[Row]) -> str:
    """What attention does in sharpened models whose norms were kept positive, beside those whose norms were free."""
    by_setting: dict[str, list[float]] = {}
    for row in runs:
        by_setting.setdefault(row["setting"], []).append(row["attention"])
    if len(by_setting) < 2:
        return ""
    parts = [f"{mean(values):+.2f} in {setting}" for setting, values in by_setting.items()]
    return f". Attention's change of log(HFC/LFC) in sharpened models: {', '.join(parts)}"


def norm_signs_table(observed: Observations) -> list[Row]:
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


NORM_SIGNS = Claim(
    **protocol("norm-signs"),
    commands=COMMANDS,
    observe=sign_of_norms,
    decide=judge_norm_signs,
    tabulate=norm_signs_table,
    needs=(*UNCONSTRAINED, (DEEP, ("sharpen",)), (POSITIVE, ("sharpen",))),
)

PRETRAINED_CLAIMS = (SIMILARITY, EIGENVALUE, SKIP, NORM_SIGNS)
