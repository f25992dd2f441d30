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
    server: Any = None
    """Answers requests, where the case has a server."""
