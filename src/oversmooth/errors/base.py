"""The base of every error that a user can cause, and the words of errors that are not ours."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any


class OversmoothError(Exception):
    """Base of every error that is the input's fault, not ours.

    Each kind is a dataclass: its fields are facts, and its text is made from them in one place. Code that handles an
    error reads the fields; nobody searches the text.
    """

    @property
    def problem(self) -> str:
        """What was expected and what was found, on one line."""
        raise NotImplementedError

    @property
    def next_step(self) -> str:
        """What to do about it; empty where the problem says it."""
        return ""

    def __str__(self) -> str:
        return f"{self.problem}\n{self.next_step}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its fields, so that an error of a worker process arrives whole."""
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def whole_message(error: BaseException, longest: int = 400) -> str:
    """All that another library's error says, in one line of bounded length."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def reason_of(error: OSError) -> str:
    """What the operating system says, without the path, which our own message names."""
    return error.strerror or first_line(error)


def close_to(word: str, known: Iterable[str]) -> str:
    """A sentence with known names that are spelled nearly like the word; empty where there is none."""
    near = difflib.get_close_matches(word, list(known), n=3)
    return f" Close: {', '.join(near)}." if near else ""


def some_of(names: Sequence[str], shown: int = 6) -> str:
    """The first names, and how many more there are."""
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
