"""The layer rule: a module imports only from strictly lower levels, and only few touch transformers or timm."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import oversmooth

PACKAGE = "oversmooth"
ROOT = Path(oversmooth.__file__).parent

LEVELS = (
    (
        "errors",
        "pins",
        "progress_bars",
        "recipes",
        "recipes.schedule",
        "recipes.vision",
        "torchvision_compat",
        "threads",
        "models",
        "samples",
        "control",
        "theory",
        "theory.agreement",
        "theory.arnoldi",
        "recipes",
        "recipes.language",
        "recipes.language.crammed_bert",
        "recipes.language.budget",
        "recipes.language.superglue",
        "recipes.language.superglue.tasks",
    ),
    (
        "results.base",
        "writing",
        "metrics",
        "models.architecture",
        "models.files",
        "models.embedded",
        "theory.radius",
        "recipes.schema",
        "recipes.language.documents",
        "recipes.language.wordpiece",
        "recipes.language.superglue.scoring",
        "recipes.language.superglue.reading",
        "recipes.language.superglue.encoding",
        "recipes.vision.images",
        "recipes.vision.cifar_archive",
        "recipes.vision.corruptions",
    ),
    (
        "results.inspection",
        "results.measurement",
        "results.verification",
        "models.families",
        "recipes.vision.settings",
        "recipes.vision.splits",
        "recipes.language.packing",
        "recipes.language.masking",
        "recipes.language.settings",
        "recipes.language.embedded_text",
        "recipes.language.superglue.submission",
    ),
    (
        "results.prediction",
        "results.control",
        "models.identify",
        "control.eigenbasis",
        "control.attention_calls",
        "recipes.vision.data",
        "recipes.vision.model",
        "recipes.language.corpus",
    ),
    (
        "results.analysis",
        "control.parametrizations",
        "control.projection",
        "control.rules",
        "recipes.language.sequences",
    ),
    ("results", "recipes.language.cramming_trainer"),
    ("models.store", "models.safetensors_store", "models.pickle_store", "models.gguf_store", "models.module_store"),
    ("spectra", "tables", "report.blocks", "report.words"),
    ("models.source", "theory.operator", "tables_prediction", "report.render", "report.weights"),
    ("models.live", "models.places", "models.attention_maps", "provenance", "control.selection", "control.checkpoint"),
    ("theory.causal", "theory.depth", "theory.heads", "theory.layer", "theory.simulate"),
    (
        "models.verify",
        "inspection",
        "batches",
        "theory.ladder",
        "theory.radii",
        "theory.what_if",
        "control.apply",
        "control.baselines",
        "recipes.language.superglue.classifier",
    ),
    ("data", "theory.asymptotics", "verdicts", "control.edit", "recipes.job", "recipes.manifest", "recipes.variants"),
    (
        "running",
        "report",
        "report.features",
        "report.static",
        "report.training",
        "report.theory",
        "theory.sample",
        "recipes.trainer",
        "recipes.vision.draws",
    ),
    ("measure", "prediction_summary", "report.compare", "report.page", "recipes.vision.augment"),
    ("monitor", "prediction_run"),
    ("predict", "trainer_callback"),
    ("analyze",),
    ("recipes.runner",),
    ("recipes.kinds", "recipes.language.superglue.job"),
    ("recipes.vision.kind", "recipes.language.kind", "recipes.language.superglue.finetune"),
    ("reproduce", "reproduce.paired", "reproduce.workshop"),
    ("reproduce.claim",),
    ("reproduce.training", "reproduce.pages"),
    ("reproduce.survey", "reproduce.reproduction"),
    ("reproduce.claims", "commands", "commands.options"),
    (
        "commands.edit",
        "commands.features",
        "commands.finetune",
        "commands.pages",
        "commands.reproduce",
        "commands.train",
        "commands.weights",
    ),
    ("",),  # the package itself: the public names
    ("cli",),
    ("__main__",),
)
"""Modules from the bottom to the top; a new module needs a place here."""

LEVEL: Mapping[str, int] = {
    f"{PACKAGE}.{name}".rstrip("."): level for level, names in enumerate(LEVELS) for name in names
}
CONVENIENCE = {
    ("oversmooth.results.analysis", "oversmooth.report"),
    ("oversmooth.results.analysis", "oversmooth.report.page"),
}
"""The one step upwards: `analysis.save_html(path)`, inside a function, because users look for it there."""
MODEL_LIBRARIES = ("transformers", "timm")
MAY_IMPORT_THEM = (
    "models.source",
    "models.live",
    "data",
    "trainer_callback",
    "recipes.trainer",
    "recipes.runner",
    "recipes.vision.augment",
    "recipes.vision.model",
    "recipes.language.wordpiece",
    "recipes.language.cramming_trainer",
    "recipes.language.kind",
    "recipes.language.superglue.classifier",
)
MODEL_CODE = ("recipes.language.crammed_bert",)
"""Model classes, which derive from transformers' own when they are defined; imported inside functions only."""


def module_name(file: Path) -> str:
    return ".".join((PACKAGE, *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {module_name(file): file.read_text() for file in sorted(ROOT.rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in the tree, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in SOURCES else str(node.module)


def violations(module: str, text: str) -> list[str]:
    """What the module imports from its own level or above."""
    own = [name for name in imports(ast.parse(text)) if name.split(".")[0] == PACKAGE]
    return [name for name in own if LEVEL[name] >= LEVEL[module] and (module, name) not in CONVENIENCE]


def misplaced_model_libraries(module: str, text: str) -> list[str]:
    """Imports of transformers or timm that run outside functions, or anywhere in a module that may not have them."""
    tree = ast.parse(text)
    late = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    late += [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    lazy = {id(node) for part in late for node in ast.walk(part)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name for name in imports(node) if name.split(".")[0] in MODEL_LIBRARIES]
            short = module.removeprefix(f"{PACKAGE}.")
            allowed = short in MODEL_CODE or (id(node) in lazy and short in MAY_IMPORT_THEM)
            found += [] if allowed else names
    return found


def test_every_module_has_a_level():
    assert set(SOURCES) - set(LEVEL) == set()


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_from_strictly_lower_levels(module):
    assert violations(module, SOURCES[module]) == []


@pytest.mark.parametrize("module", SOURCES)
def test_transformers_and_timm_are_imported_only_inside_functions_of_few_modules(module):
    assert misplaced_model_libraries(module, SOURCES[module]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import oversmooth.cli",
        "from oversmooth import cli",
        "from oversmooth.models import source",
        "from oversmooth.models.source import Source",
        "def later():\n    from oversmooth.inspection import inspect",
        "if TYPE_CHECKING:\n    from oversmooth.spectra import spectrum",
    ],
)
def test_the_layer_guard_can_fail(text):
    assert violations("oversmooth.spectra", "from oversmooth.results import Row\n" + text) != []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("oversmooth.models.source", "import timm"),
        ("oversmooth.models.source", "class A:\n    from transformers import AutoModel"),
        ("oversmooth.spectra", "def f():\n    import transformers.models.bert"),
        ("oversmooth.cli", "async def f():\n    from timm.layers import Mlp"),
    ],
)
def test_the_guard_of_transformers_and_timm_can_fail(module, text):
    assert misplaced_model_libraries(module, text) != []
