"""The rooms of the house: a package imports only from packages below it, modules of one package never in a circle,
and only few modules touch transformers or timm."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import oversmooth

PACKAGE = "oversmooth"
ROOT = Path(oversmooth.__file__).parent

LAYERS = (
    ("errors",),
    ("environment",),
    ("results",),
    ("models",),
    ("data", "spectra"),
    ("measurement", "control"),
    ("prediction",),
    ("worth",),
    ("analysis",),
    ("handle",),  # the opened model with every function above as a method
    ("surveys", "training"),
    ("recipes",),
    ("claims",),
    ("output",),  # above everything that computes, so that nothing that computes knows a page
    ("lightning",),  # one name, where users of Lightning look for it
    ("commands",),
    ("",),  # the package itself: the public names
    ("cli",),
    ("__main__",),
)
"""Rooms from the bottom to the top. A new room needs a place here; a new module in a room does not."""

LAYER: Mapping[str, int] = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
CONVENIENCE = {
    ("results.answer", "output.figures"),
    ("results.answer", "output.page"),
    ("results.base", "output.tables"),
    ("results.answer", "output.render"),
    *((f"results.{name}", "output.figures") for name in ("answer", "inspection", "measurement", "prediction")),
}
"""The only steps upwards: `analysis.save_html(path)`, `.plot()` and what a notebook shows of a result, inside
functions, because users and notebooks look for them there."""
MODEL_LIBRARIES = ("transformers", "timm")
MAY_IMPORT_THEM = ("models", "data", "training", "recipes")
MODEL_CODE = ("models.crammed_bert", "training.callback")
"""Classes that derive from transformers' own when they are defined; imported inside functions only."""


def module_name(file: Path) -> str:
    """The module's name below the package; `""` is the package itself."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


SOURCES = {module_name(file): file.read_text() for file in sorted(ROOT.rglob("*.py"))}


def room(module: str) -> str:
    return module.split(".")[0]


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the tree, inside functions too; ours without the package's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (_ours(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                submodule = _ours(f"{node.module}.{alias.name}")
                yield submodule if submodule in SOURCES else _ours(str(node.module))


def _ours(name: str) -> str:
    return name.removeprefix(PACKAGE).removeprefix(".") if name.split(".")[0] == PACKAGE else f"/{name}"


def upward_imports(module: str, text: str) -> list[str]:
    """What the module imports from other rooms of its own layer or above."""
    own = [name for name in imports(ast.parse(text)) if not name.startswith("/") and room(name) != room(module)]
    return [name for name in own if LAYER[room(name)] >= LAYER[room(module)] and (module, name) not in CONVENIENCE]


def circle(sources: Mapping[str, str]) -> list[str]:
    """Modules that import each other when they are loaded, in a circle; imports inside functions may look back."""
    graph = {}
    for module, text in sources.items():
        tree = ast.parse(text)
        late = _late(tree)
        loaded = [node for node in ast.walk(tree) if id(node) not in late]
        names = {name for node in loaded if isinstance(node, ast.Import | ast.ImportFrom) for name in imports(node)}
        graph[module] = {name for name in names if name in sources} - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _late(tree: ast.AST) -> set[int]:
    """Nodes that do not run when the module is loaded: bodies of functions, and what only type checkers read."""
    late = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    late += [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {id(node) for part in late for node in ast.walk(part)}


def misplaced_model_libraries(module: str, text: str) -> list[str]:
    """Imports of transformers or timm that run when the module is loaded, or in a room that may not have them."""
    tree = ast.parse(text)
    lazy = _late(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name[1:] for name in imports(node) if name.split(".")[0][1:] in MODEL_LIBRARIES]
            allowed = module in MODEL_CODE or (id(node) in lazy and room(module) in MAY_IMPORT_THEM)
            found += [] if allowed else names
    return found


def test_every_room_has_a_layer():
    assert {room(module) for module in SOURCES} == set(LAYER)


@pytest.mark.parametrize("module", SOURCES)
def test_a_room_imports_only_from_rooms_below_it(module):
    assert upward_imports(module, SOURCES[module]) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle({name: text for name, text in SOURCES.items() if name}) == []


@pytest.mark.parametrize("module", SOURCES)
def test_transformers_and_timm_are_imported_only_inside_functions_of_few_rooms(module):
    assert misplaced_model_libraries(module, SOURCES[module]) == []


def test_no_public_name_hides_a_module():
    assert [name for name in oversmooth.__all__ if name in SOURCES] == []


@pytest.mark.parametrize(
    "text",
    [
        "import oversmooth.cli",
        "from oversmooth import cli",
        "from oversmooth.data import batches",
        "from oversmooth.prediction import ladder",
        "def later():\n    from oversmooth.measurement.metrics import lookup",
        "if TYPE_CHECKING:\n    from oversmooth.analysis import analyze",
    ],
)
def test_the_guard_of_the_layers_can_fail(text):
    assert upward_imports("spectra.spectrum", "from oversmooth.results import Row\n" + text) != []


def test_the_guard_against_circles_can_fail():
    there, back = "from oversmooth.models import live", "from oversmooth.models.source import Source"
    assert circle({"models.source": there, "models.live": back})
    assert not circle({"models.source": f"def later():\n    {there}", "models.live": back})


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("models.source", "import timm"),
        ("models.source", "class A:\n    from transformers import AutoModel"),
        ("spectra.spectrum", "def f():\n    import transformers.models.bert"),
        ("cli", "async def f():\n    from timm.layers import Mlp"),
    ],
)
def test_the_guard_of_transformers_and_timm_can_fail(module, text):
    assert misplaced_model_libraries(module, text) != []
