"""Two models on the same inputs: how they differ, how sure that is, and which of them is better at what."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from oversmooth.results.answer import Answer, Difference, Told
from oversmooth.results.base import interval
from oversmooth.results.reading import ENOUGH, similarity_interval
from oversmooth.results.wording import change_words, counted, level


def differences(first: Answer, other: Answer) -> tuple[Difference, Difference | None]:
    """Of tokens of one input, and of different inputs where that was measured in both; at the output, in pairs."""
    moves = _paired(first.values, other.values)
    found = interval(fmean(moves), stdev(moves) / sqrt(len(moves)), len(moves)) if moves else None
    count = min(len(first.values), len(other.values))
    tokens = Difference(before=first.output, after=other.output, interval=found, inputs=count)
    if first.between is None or other.between is None:
        return tokens, None
    found = similarity_interval(_paired(first.between_values, other.between_values))
    return tokens, Difference(before=first.between[1], after=other.between[1], interval=found, inputs=count)


def _paired(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """What each input moved by; nothing where they are too few, or not the same."""
    if len(before) != len(after) or len(before) < ENOUGH:
        return []
    return [b - a for a, b in zip(before, after, strict=True)]


# --- the sentences ---


def compare_words(names: Sequence[str], first: Answer, other: Answer) -> str:
    """Which model is better at what, where the numbers show it."""
    a, b = names
    tokens, inputs = differences(first, other)
    if tokens.interval is None:
        moved = {1: "more alike", -1: "more distinct", 0: "about as alike"}[tokens.seen]
        ends = f"tokens end {moved} in {b} ({level(tokens.after)}) {'as' if tokens.seen == 0 else 'than'} in {a}"
        return f"On these inputs {ends} ({level(tokens.before)}): {_why_not(tokens, first, other)}."
    known = [(tokens, "keeps tokens more distinct", "in how distinct tokens stay")]
    if inputs is not None:
        known.append((inputs, "tells different inputs apart better", "in telling different inputs apart"))
    told = [(b if found.way < 0 else a, verb) for found, verb, _ in known if found.way]
    same = [(found, where) for found, _, where in known if not found.way]
    if not told:
        return (
            f"{_no_difference([found for found, _ in same])} between {a} and {b}{_shown([found for found, _ in same])}."
        )
    if len(told) == 2:
        (better, does), (best, also) = told
        return f"{better} {does} and {also}." if better == best else f"{better} {does}, but {best} {also}."
    ((better, does),) = told
    rest = "; ".join(f"{where} there is {_no_difference([f]).lower()}{_shown([f])}" for f, where in same)
    return f"{better} {does}{'; ' if rest else ''}{rest}."


def _no_difference(found: Sequence[Difference]) -> str:
    return "Hardly a difference" if any(each.is_clear for each in found) else "No difference"


def _shown(found: Sequence[Difference]) -> str:
    return "" if any(each.is_clear for each in found) else f" that {counted(found[0].inputs)} inputs can show"


def _why_not(tokens: Difference, first: Answer, other: Answer) -> str:
    if len(first.values) != len(other.values):
        return "not the same inputs, so which model is better is not known"
    return f"{counted(tokens.inputs)} {'is' if tokens.inputs == 1 else 'are'} too few to say which model is better"


def deck_words(names: Sequence[str], first: Answer, other: Answer) -> str:
    """The numbers of the headline."""
    a, b = names
    tokens, inputs = differences(first, other)
    ends = f"{level(tokens.before)} in {a}, {level(tokens.after)} in {b}"
    text = f"Mean cosine between tokens of one input at the output: {ends}."
    if inputs is None:
        return text
    ends = f"{level(inputs.before)} in {a}, {level(inputs.after)} in {b}"
    return f"{text} Between different inputs (their mean tokens): {ends}."


def sure_words(first: Answer, other: Answer) -> Told:
    """How sure both differences are."""
    tokens, inputs = differences(first, other)
    if tokens.interval is None:
        if len(first.values) != len(other.values):
            return Told(title="Not sure: not the same inputs", text="Only the same inputs can be compared in pairs.")
        return Told(title="Not sure: too few inputs to compare in pairs", text="Add inputs, 8 or more.")
    text = f"{tokens.inputs} inputs in pairs"
    if inputs is not None:
        text = f"Different inputs {_interval_words(inputs)}. {text}"
    return Told(title=f"Tokens {_interval_words(tokens)}", text=f"{text}.")


def _interval_words(found: Difference) -> str:
    if found.interval is None:
        return f"{change_words(found.change)}, no interval"
    low, high = (change_words(end) for end in found.interval)
    unclear = "" if found.is_clear else ", no clear difference"
    return f"{change_words(found.change)}, 95% interval {low} to {high}{unclear}"
