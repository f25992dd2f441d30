"""Real text on every machine: the language reference that Python carries inside itself for `help()`."""

import json
from pathlib import Path

from oversmooth.errors import UnreadableData
from oversmooth.output.whole_files import write_whole

PYTHON_DOCS = "python-docs"
DOCUMENT_CHARACTERS = 2000


def python_docs(folder: Path) -> Path:
    """Writes the topics of this Python's `help()`, about half a million characters of prose, as a .jsonl file.

    Whole paragraphs, about 2000 characters to a document. The text differs between versions of Python; the hash of the
    corpus says which one it was.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        advice = "a Python without its own documentation; give a text with --data"
        raise UnreadableData(PYTHON_DOCS, "the module pydoc_data of the standard library", advice) from error
    lines = []
    for name in sorted(topics):
        held: list[str] = []
        for paragraph in topics[name].split("\n\n"):
            held.append(" ".join(paragraph.split()))
            if sum(map(len, held)) >= DOCUMENT_CHARACTERS:
                lines.append(json.dumps({"text": "\n".join(held)}))
                held = []
        lines += [json.dumps({"text": "\n".join(held)})] if held else []
    path = folder / "python-docs.jsonl"
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path
