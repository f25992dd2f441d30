"""Verdicts of claims 1 to 4, from the numbers of the survey."""

from collections import Counter
from collections.abc import Sequence
from statistics import mean

from oversmooth.training.reproduce.claim import Compared, Judgement, Observations, Tests, Verdict
from oversmooth.training.reproduce.materials import Row
from oversmooth.training.reproduce.statistics import (
    LEVEL,
    direction,
    first_clear,
    rank_correlation,
    share_left_open,
    sign_flip_p,
)

MOST_OTHERS = 0.1
"""Share that may still be otherwise for "all are alike" to be said of more than those at hand (95%): of 29 or more."""
EXPONENT_MOVES = 0.01
REGIME_WORDS = {
    "smoothing": "smooth",
    "sharpening": "sharpen",
    "neutral": "stay neutral",
    "undecided": "are undecided",
    "mixed": "differ from input to input",
}
DECIDED = {"smoothing", "sharpening", "neutral"}
"""Regimes that were found; the others say that it could not be told."""
AGAINST_THE_SKIP = ("sharpening", "neutral")
"""Regimes that refute claim 3: with one head no layer can have them, with several it can."""


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["model"], []).append(row)
    return found


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


def similarity(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
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


def advantages(rows: Sequence[Row], rung: str = "rung_0") -> dict[str, float]:
    """Per model, the share of layers whose sign a rung gets right, minus what the model's own majority would get right."""
    found = {}
    for name, layers in by_model(rows).items():
        known = [row for row in layers if row.get(rung) is not None and row["measured"] is not None]
        if known:
            right = sum((row[rung] < 0) == (row["measured"] < 0) for row in known)
            smoothing = sum(row["measured"] < 0 for row in known)
            found[name] = (right - max(smoothing, len(known) - smoothing)) / len(known)
    return found


def correlations(rows: Sequence[Row], rung: str = "rung_0") -> dict[str, float]:
    """Per model, the rank correlation of a rung with the measurement over layers."""
    found = {}
    for name, layers in by_model(rows).items():
        known = [row for row in layers if row.get(rung) is not None and row["measured"] is not None]
        value = rank_correlation([row[rung] for row in known], [row["measured"] for row in known])
        if value is not None:
            found[name] = value
    return found


def _pretrained(observed: Observations) -> list[Row]:
    return [row for row in observed["layers"] if row["kind"] == "pretrained"]


def _with_both_kinds(observed: Observations) -> list[Row]:
    """Layers of pretrained models in which some layers smooth and others sharpen: only these can speak for the theorem."""
    known = [row for row in _pretrained(observed) if row["measured"] is not None and row["rung_0"] is not None]
    models = by_model(known)
    return [row for rows in models.values() if len({row["measured"] < 0 for row in rows}) == 2 for row in rows]


def eigenvalue_tests(observed: Observations, compared: Sequence[Compared]) -> Tests:
    """Sign flips over models that have layers of both kinds."""
    values = list(advantages(_with_both_kinds(observed)).values())
    if not values:
        return {}
    return {"confirmed": sign_flip_p(values), "refuted": sign_flip_p([-value for value in values])}


def eigenvalue(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
    """Claim 2: the theorem's sign against each model's own majority."""
    values = list(advantages(_with_both_kinds(observed)).values())
    if not tests:
        reason = "no pretrained model with layers that smooth and layers that sharpen was at hand"
        return Verdict(judgement="undecided" if _pretrained(observed) else "not run", brief=reason, because=reason)
    average = mean(values)
    ranks = list(correlations(_pretrained(observed)).values())
    rank = (
        f"; rank correlation within the {len(ranks)} of at least three layers {mean(ranks):+.2f} on average"
        if ranks
        else ""
    )
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


def skip(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
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
    brief += _missing(observed)
    judgement: Judgement = "theorem, checked" if is_checked else "undecided"
    return Verdict(judgement=judgement, brief=brief, because=words + _missing(observed))


def _missing(observed: Observations) -> str:
    """Models that were to be trained here and are not there, in words."""
    count = len(observed.get("missing", ()))
    return f"; {count} models that were to be trained here are missing" if count else ""


KINDS = {"pretrained": "pretrained models", "trained": "models trained here"}


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


def norm_signs(observed: Observations, compared: Sequence[Compared], tests: Tests) -> Verdict:
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
    return Verdict(judgement=judgement, brief=brief + _missing(observed), because=words + _missing(observed))


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
