"""Puts the table of covered models into the page that asks for it, from the file that `make families` writes."""

from collections import Counter
from typing import Any

from oversmooth.models.families import STATES, counted, coverage, versions

MARKER = "<!-- coverage -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARKER, f"{_counts()}\n\n{_refusals()}") if MARKER in markdown else markdown


def _counts() -> str:
    libraries = versions()
    head = " | ".join(f"{library} {version}" for library, version in libraries.items())
    counts = {library: counted(library) for library in libraries}
    rows = [
        f"| {words} | " + " | ".join(str(counts[library][state]) for library in libraries) + " |"
        for state, words in STATES.items()
    ]
    return "\n".join([f"| | {head} |", "|---|" + "---|" * len(libraries), *rows])


def _refusals() -> str:
    found = [row for row in coverage() if row.state == "refused"]
    kinds = Counter(row.kind for row in found)
    rows = [
        f"| {kind} | {count} | {', '.join(row.name.partition(':')[0] for row in found if row.kind == kind)} |"
        for kind, count in kinds.most_common()
    ]
    return "\n".join(["| refused for | types | |", "|---|---|---|", *rows])
