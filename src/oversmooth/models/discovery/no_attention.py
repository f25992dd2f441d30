"""Models that cannot attend, by their code: no class of any of their modules speaks of attention."""

import inspect
import re

from torch import nn

WORDS = re.compile(
    r"attn|(?<!no)(?<!no )(?<!has_)attention|softmax|scaled_dot_product|logsumexp|\bexp\(", re.IGNORECASE
)


def cannot_attend(model: nn.Module) -> bool:
    """Whether no module of a model of transformers computes attention; a name in a comment is enough for a doubt.

    Only for code that names what it does as transformers does: it is read, not run.
    """
    if any(type(part).__module__.partition(".")[0] not in ("torch", "transformers") for part in model.modules()):
        return False
    classes = {base for part in model.modules() for base in type(part).__mro__ if _computes(base)}
    return bool(classes) and not any(WORDS.search(_code(one)) for one in classes)


def _computes(cls: type) -> bool:
    """Whether a class is a model's own; base classes speak of attention without computing it."""
    return cls.__module__.startswith("transformers.models.") and not cls.__name__.endswith("PreTrainedModel")


def _code(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return "attention"  # unknown
