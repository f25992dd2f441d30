"""A model with the head that its task needs: language, masked tokens, classes; or none, for embeddings."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from oversmooth.errors import NotLive, NotSupported, UnknownName, first_line
from oversmooth.models.completeness import require_complete
from oversmooth.models.live import load_model, register_own_models, silenced
from oversmooth.models.source import Source

TASKS = {
    "causal language": ("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
    "masked language": ("AutoModelForMaskedLM", ("ForMaskedLM",)),
    "classification": (
        "AutoModelForImageClassification|AutoModelForSequenceClassification",
        ("ForImageClassification", "ForSequenceClassification"),
    ),
    "similarity": ("", ()),
}
"""Each task, the classes of transformers that load a model with its head, and how names of such classes end."""


def task_of(source: Source) -> str:
    """The task that the model has a head for; `similarity` where it has none."""
    names = (
        [type(source.module).__name__] if source.module is not None else list(source.config.get("architectures") or ())
    )
    for task, (_, endings) in TASKS.items():
        if any(str(name).endswith(endings) for name in names if endings):
            return task
    if source.gguf_file and any(stack.arch.is_causal for stack in source.stacks()):
        return "causal language"
    if source.module is None:
        is_timm = "architecture" in source.config or str(source.place or "").startswith("timm:")
        has_classes = bool(source.config.get("num_classes")) or is_timm
        return "classification" if is_timm and has_classes else "similarity"
    classes = getattr(source.module, "num_classes", 0)
    return "classification" if isinstance(classes, int) and classes > 0 else "similarity"


def with_head(source: Source, task: str | None, verb: str, *, trust_remote_code: bool = False) -> tuple[Source, str]:
    """The source with a live model that has the head of a task, and that task; raises where the checkpoint has none."""
    if task is not None and task not in TASKS:
        raise UnknownName("task", task, tuple(TASKS))
    found = task_of(source)
    if task not in (None, found, "similarity"):
        has = "no head" if found == "similarity" else f"a head for {found}"
        raise NotSupported(f"the task {task!r}", f"for {source.target}", f"its checkpoint has {has}")
    task = task or found
    is_transformers = "architecture" not in source.config and not str(source.place or "").startswith("timm:")
    if source.module is None and task != "similarity" and is_transformers and source.place is not None:
        return replace(source, module=_loaded(source, task, verb, trust_remote_code)), task
    return replace(source, module=load_model(source, verb, trust_remote_code=trust_remote_code)), task


def _loaded(source: Source, task: str, verb: str, trust_remote_code: bool) -> nn.Module:
    import transformers

    register_own_models()
    classes = TASKS[task][0].split("|")
    names = [str(name) for name in source.config.get("architectures") or ()]
    wanted = classes[-1] if any(name.endswith("ForSequenceClassification") for name in names) else classes[0]
    stored: Any = torch.float32 if source.gguf_file else "auto"
    try:
        with silenced(transformers):
            model, loaded = getattr(transformers, wanted).from_pretrained(
                source.place,
                dtype=source.dtype or stored,
                trust_remote_code=trust_remote_code,
                **source.origin(),
                output_loading_info=True,
            )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise NotLive(source.target, verb, first_line(error)) from error
    require_complete(source.target, loaded["missing_keys"], [], loaded["unexpected_keys"])
    found: nn.Module = model.eval()
    return found
