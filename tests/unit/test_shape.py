"""The shape of the tree: how many modules, where a verb and a public function live, and that each name stands once."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import pytest

import oversmooth
from oversmooth.commands.verbs import app
from tests.unit.test_layers import SOURCES, imports, room

MODULES = 190
LINES = 52212
"""What the package has at most; lowered whenever it shrinks, never raised without a word in the pull request."""
BODY_LINES = 40
SHORT = 80

NAMED_OTHERWISE = {
    "apply": "control.apply",
    "unapply": "control.apply",
    "sharpen": "control.constrain",
    "smooth": "control.constrain",
    "accumulate": "control.eigenbasis",
    "bake": "control.constrain",
    "analyze": "analysis",
    "compare": "analysis",
    "discover": "models.verify",
    "load": "results.base",
    "measure_lengths": "prediction.lengths",
    "open": "handle",
    "read_survey": "surveys.table",
}
"""Public functions that share a module with their kin."""
SAME_NAME = {"SmoothingCallback"}
"""Classes that stand twice: users of Lightning look for their own under the name that users of transformers know."""
ALONE: dict[str, str] = {}
"""Short modules with one importer beside them, and why each is a module."""
TESTS_ONLY: dict[str, str] = {}
"""Public names of the package that nothing in it uses, and why they are there."""


def trees() -> Mapping[str, ast.Module]:
    return {module: ast.parse(text) for module, text in SOURCES.items()}


TREES = trees()


def bodies(module: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every function and the lines of its statements; signature and docstring do not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body:
                yield f"{module}.{node.name}", body[-1].end_lineno - body[0].lineno + 1


def twice(names: Iterator[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def classes(sources: Mapping[str, ast.Module]) -> Iterator[str]:
    for tree in sources.values():
        yield from (node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def importers(sources: Mapping[str, ast.Module]) -> Mapping[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in sources.items():
        for name in imports(tree):
            found[name].add(module)
    return found


def lonely(sources: Mapping[str, ast.Module], lines: Mapping[str, int]) -> set[str]:
    """Short modules, verbs apart, that only one other module imports, which lies in the same package."""
    by = importers(sources)
    return {
        module
        for module in sources
        if lines[module] < SHORT and len(by[module]) == 1 and "." in module and room(module) != "commands"
        if room(*by[module]) == room(module)
    }


def public(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_" and not node.decorator_list:
            yield node.name


def unused(sources: Mapping[str, ast.Module]) -> set[str]:
    """Public functions and classes that no code of the package names, the command line and the public names included."""
    named: Counter[str] = Counter()
    for tree in sources.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                named[node.id if isinstance(node, ast.Name) else node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.update(node.value.replace(".", " ").split()[:8])
    return {f"{module}.{name}" for module, tree in sources.items() for name in public(tree) if not named[name]}


def test_the_package_does_not_grow():
    assert len(SOURCES) <= MODULES
    assert sum(text.count("\n") for text in SOURCES.values()) <= LINES


def test_every_verb_lives_in_the_module_of_its_name():
    verbs = {command.name: command.callback.__module__ for command in app.registered_commands}
    assert verbs == {name: f"oversmooth.commands.{name}" for name in verbs}


@pytest.mark.parametrize("name", [name for name in oversmooth.__all__ if name[0].islower()])
def test_a_public_function_lives_in_a_module_of_its_name_or_in_a_listed_place(name):
    module = getattr(oversmooth, name).__module__.removeprefix("oversmooth.")
    assert module.rpartition(".")[2] == name or NAMED_OTHERWISE.get(name) == module


def test_no_two_modules_have_the_same_name():
    packages = {module.rpartition(".")[0] for module in SOURCES}
    modules = [module for module in SOURCES if room(module) != "commands" and module not in packages]
    assert twice(module.rpartition(".")[2] for module in modules) == set()


def test_no_two_public_classes_have_the_same_name():
    assert twice(classes(TREES)) == SAME_NAME


def test_short_modules_that_one_neighbour_imports_are_listed():
    lines = {module: text.count("\n") for module, text in SOURCES.items()}
    assert lonely(TREES, lines) == set(ALONE)


def test_nothing_in_the_package_is_used_by_tests_alone():
    assert unused(TREES) == set(TESTS_ONLY)


def test_bodies_of_functions_are_short():
    assert [item for module, tree in TREES.items() for item in bodies(module, tree) if item[1] > BODY_LINES] == []


def test_inspect_of_a_declared_family_loads_few_modules_and_no_discovery(tmp_path):
    code = (
        "import sys, oversmooth, oversmooth.spectra.inspect\n"
        "print(*sorted(name for name in sys.modules if name.startswith('oversmooth.')), sep='\\n')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in found if ".discovery" in name] == []
    assert len(found) <= 70


def test_the_guards_of_the_shape_can_fail():
    first = ast.parse("class A: ...\ndef f(): ...")
    second = ast.parse("class A: ...\nf()")
    assert twice(classes({"a": first, "b": second})) == {"A"}
    assert unused({"a": first, "b": second}) == {"a.A", "b.A"}
    sources = {"models.open": second, "models.live": ast.parse("from oversmooth.models import open")}
    assert lonely(sources, {"models.open": SHORT - 1, "models.live": 5}) == {"models.open"}
    assert lonely(sources, {"models.open": SHORT, "models.live": 5}) == set()
    text = 'def long():\n    """Not counted."""\n' + "    call()\n" * (BODY_LINES + 1)
    assert dict(bodies("m", ast.parse(text))) == {"m.long": BODY_LINES + 1}
