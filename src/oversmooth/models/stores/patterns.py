"""Patterns of a checkpoint's config, matched without backtracking: a file must not decide how long reading it takes.

Python's `re` tries one way after the other, and `(a+)+$` has exponentially many. Here a part of a pattern turns the set of
places where it may begin into the set of those where it may end, so every place is looked at once for each part.
"""

import re
from collections.abc import Callable, Set

Places = Set[int]
Part = Callable[[str, Places], Places]
LONGEST = 1000
"""Characters of a pattern; those in use have fewer than a hundred."""
DEEPEST = 20
"""Brackets inside brackets."""
MOST_STEPS = 1_000_000
"""Places that are looked at before a pattern is given up: patterns in use need a few hundred."""


class Unmatchable(Exception):
    """A pattern that is not matched, with the reason."""


def matches(pattern: str, text: str, *, whole: bool = False) -> bool:
    """What `re.match` says, or with `whole` `re.fullmatch`, of characters, classes, groups, choices and repetitions.

    >>> matches(r"model.layers.[0-9]+.(mlp|self_attn)", "model.layers.12.mlp.up_proj")
    True
    """
    ends = _Reader(pattern).whole()(text, {0})
    return len(text) in ends if whole else bool(ends)


class _Reader:
    """Reads a pattern from left to right into one part."""

    def __init__(self, pattern: str):
        if len(pattern) > LONGEST:
            raise Unmatchable(f"it has {len(pattern)} characters, and at most {LONGEST} are read")
        self._pattern = pattern
        self._at = self._depth = self._steps = 0

    def whole(self) -> Part:
        found = self._choice()
        if self._at < len(self._pattern):
            raise Unmatchable("it has a bracket that was not opened")
        return found

    def _next(self, *words: str) -> str:
        """The word that comes next, which is passed over; empty where none of them does."""
        found = next((word for word in words if self._pattern.startswith(word, self._at)), "")
        self._at += len(found)
        return found

    def _counted(self, places: Places) -> Places:
        self._steps += len(places) + 1
        if self._steps > MOST_STEPS:
            raise Unmatchable("matching it takes too long")
        return places

    def _choice(self) -> Part:
        choices = [self._sequence()]
        while self._next("|"):
            choices.append(self._sequence())
        return lambda text, places: {end for choice in choices for end in choice(text, places)}

    def _sequence(self) -> Part:
        parts = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._repeated(self._one()))

        def sequence(text: str, places: Places) -> Places:
            for part in parts:
                places = part(text, places)
            return places

        return sequence

    def _one(self) -> Part:
        if kind := self._next("(?:", "(?=", "(?!", "(?", "("):
            return self._group(kind)
        if self._next("^"):
            return lambda text, places: places & {0}
        if self._next("$"):
            return lambda text, places: places & {len(text)}
        return self._character()

    def _group(self, kind: str) -> Part:
        self._depth += 1
        if kind == "(?" or self._depth > DEEPEST:
            raise Unmatchable("it has a group of a kind that is not read, or too many in each other")
        inner = self._choice()
        if not self._next(")"):
            raise Unmatchable("it has a bracket that is not closed")
        self._depth -= 1
        if kind in ("(?=", "(?!"):
            wanted = kind == "(?="
            return lambda text, places: {place for place in places if bool(inner(text, {place})) is wanted}
        return inner

    def _character(self) -> Part:
        found = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]|\\[dDwWsS]|\\[^a-zA-Z0-9]|[^\\*+?{[]").match(
            self._pattern, self._at
        )
        if found is None:
            raise Unmatchable(f"{self._pattern[self._at : self._at + 8]!r} in it is not read")
        self._at = found.end()
        try:
            fits = re.compile(found[0]).fullmatch  # of one character, where there is nothing to go back to
        except re.error as error:
            raise Unmatchable(str(error)) from error

        def character(text: str, places: Places) -> Places:
            self._counted(places)
            return {place + 1 for place in places if place < len(text) and fits(text[place])}

        return character

    def _repeated(self, part: Part) -> Part:
        found = re.compile(r"([*+?]|\{(\d{0,4})(,?)(\d{0,4})\})\??").match(self._pattern, self._at)
        if found is None:
            return part
        self._at = found.end()
        if self._next("*", "+", "?", "{"):
            raise Unmatchable("it repeats a repetition")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found[1], (int(found[2] or 0), None))
        if found[2] is not None and (not found[3] or found[4]):
            most = int(found[4] or least)

        def repeated(text: str, places: Places) -> Places:
            for _ in range(least):
                places = self._counted(part(text, places))
            seen, new, left = set(places), set(places), most
            while new and (left is None or left > least):
                new = set(self._counted(part(text, new))) - seen
                seen |= new
                left = None if left is None else left - 1
            return seen

        return repeated
