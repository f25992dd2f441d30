"""How names are written in a declaration: blocks with a number in their path, and paths below a block."""

import itertools
import re
from collections.abc import Sequence

NUMBER = re.compile(r"\d+")
NUMBERED = re.compile(r"(\d+|\{i\})(\.|$)")
"""A path that begins with a number."""


def unnumbered(name: str) -> str:
    """A name without its numbers: the same for alike blocks."""
    return NUMBER.sub("#", name)


def template_of(name: str, place: int) -> str:
    """The path of the block that a tensor is in, `{i}` standing for the number at a place among its numbers.

    >>> template_of("encoder.layer.3.attention.dense.weight", 0)
    'encoder.layer.{i}'
    """
    match = list(NUMBER.finditer(name))[place]
    end = name.find(".", match.end())
    return name[: match.start()] + "{i}" + name[match.end() : end if end > 0 else len(name)]


def relative(block: str, index: int, path: str) -> str:
    """A path below the block, or `^` and the whole path with the block's number in it.

    >>> relative("layers.1", 1, "layers.1.attn.v"), relative("layers.1", 1, "norms.1")
    ('attn.v', '^norms.{i}')
    """
    if not block or path.startswith(f"{block}."):
        return path[len(block) + 1 :] if block else path
    if path == block:
        return ""
    return "^" + NUMBER.sub(lambda match: "{i}" if match[0] == str(index) else match[0], path)


def spelled(block: str, index: int, weight: str, bias: str) -> str:
    """The path that names a weight and its bias.

    >>> spelled("layers.0", 0, "layers.0.norm.a_2", "layers.0.norm.b_2")
    'norm.[a_2,b_2]'
    """
    weight, bias = relative(block, index, weight), relative(block, index, bias) if bias else ""
    stem = weight.removesuffix(".weight")
    if stem != weight and bias in ("", f"{stem}.bias"):
        return stem
    stem = weight.removesuffix("weight")
    if stem and stem != weight and bias in ("", f"{stem}bias"):
        return f"{stem}*"
    module, _, last = weight.rpartition(".")
    listed = f"[{last},{bias.removeprefix(module).lstrip('.')}]" if bias else f"[{last}]"
    return f"{module}.{listed}" if module else listed


def shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """The parts that all paths begin with."""
    return [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


def distinct(templates: Sequence[str], tails: Sequence[str]) -> list[str]:
    """The paths of stacks, those that are the same with what stands below them.

    >>> distinct(["layers.{i}", "layers.{i}", "blocks.{i}"], [".self.out", ".cross.out", ".out"])
    ['layers.{i}.self.out', 'layers.{i}.cross.out', 'blocks.{i}']
    """
    return [
        template + tail if templates.count(template) > 1 else template
        for template, tail in zip(templates, tails, strict=True)
    ]


def labels_of(templates: Sequence[str]) -> list[str]:
    """What tells the stacks apart, as short as possible: nothing where there is one.

    >>> labels_of(["encoder.text_model.layers.{i}", "encoder.vision_tower.layers.{i}", "decoder.layers.{i}"])
    ['text', 'vision', 'decoder']
    """
    if len(templates) == 1:
        return [""]
    found = _first_difference(templates)
    for label in dict.fromkeys(found):
        alike = [place for place, other in enumerate(found) if other == label]
        if 1 < len(alike) < len(found):
            inner = labels_of([templates[place] for place in alike])
            is_enough = not set(inner) & set(found)
            for place, own in zip(alike, inner, strict=True):
                found[place] = own if is_enough else f"{label}.{own}"
    return found if len(set(found)) == len(found) else [template.replace(".{i}", "") for template in templates]


def _first_difference(templates: Sequence[str]) -> list[str]:
    """The first part of each path in which they differ."""
    split = [re.split(r"[.,]", template) for template in templates]
    front = len(shared(split))
    found = [part[front] if len(part) > front else part[-1] for part in split]
    while front and any(NUMBERED.match(label) for label in found):
        front -= 1
        found = [f"{split[0][front]}.{label}" for label in found]
    return [re.sub(r"(?<=.)_(model|tower|transformer)$", "", label).replace(".{i}", "") for label in found]
