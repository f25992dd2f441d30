"""What a case is: files, a question about them, and what is known about the answer."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    note: str
    """What was done to the input, in words."""
    files: dict[str, bytes]
    """Name to content, of everything in the folder of the case."""
    arguments: tuple[str, ...]
    """Of the command line; `{folder}` is the folder of the case, `{url}` the address of its server."""
    is_sound: bool = False
    """Whether nothing was damaged: then it must be accepted."""
    reference: str = ""
    """The file whose tensors the format's own reader is asked for."""
    same_as: dict[str, bytes] = field(default_factory=dict)
    """Files of a sound checkpoint whose spectra the answer must equal, if there is an answer."""
    table: str = ""
    """The folder of a survey: where the command answers, it has a row of every target, and no other."""
    merged: bool = False
    """Whether base/ and adapter/ are there: what is read must be what the peft library merges."""
    pruned: str = ""
    """The folder that is written: transformers must load it whole."""
    server: Any = None
    """Answers requests, where the case has a server."""
