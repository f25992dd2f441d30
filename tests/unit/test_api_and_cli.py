"""What the command line takes the functions take, and the other way round: same names, same defaults; from one table."""

import dataclasses
import inspect

import pytest
import typer

import oversmooth as osm
from oversmooth.commands.verbs import app
from oversmooth.data.options import DataOptions, ReadingOptions
from oversmooth.measurement.metrics import DEFAULT_METRICS
from oversmooth.models.hooks.removal import PARTS
from oversmooth.models.open import LoadKeywords, LoadOptions
from tests.public_api import with_unpacked_keywords

COMMANDS = typer.main.get_command(app).commands
PAIRS = {
    "inspect": osm.inspect,
    "verify": osm.verify,
    "measure": osm.measure,
    "predict": osm.predict,
    "report": osm.analyze,
    "gate": osm.gate,
    "edit": osm.edit,
    "eval": osm.task_loss,
    "ablate": osm.ablate,
    "prune": osm.prune,
    "survey": osm.survey,
}
"""Each verb, and the function that does the same."""

OUTPUT = "where and how the result is shown; a function returns it"
ONLY_COMMAND = {
    **dict.fromkeys(("output", "format", "figures", "tables", "card"), OUTPUT),
    **dict.fromkeys(("config", "print_config", "help_all"), "the command itself"),
    "name": "the name on a model card",
    "print_declaration": "`discover`",
    "sweep": "`edit_curve`",
    **dict.fromkeys(("max_cosine", "rule"), "one entry of `rules`"),
    "details": OUTPUT,
    **dict.fromkeys(("sharpen", "smooth"), "a word for an `interval`"),
    "lengths": "`measure_lengths`, with `predicts` for `predict`",
    "loss": "`edit_curve` at that one strength",
}
UNSAID = {"mask", "arch", "inputs", "model_type", "n_heads", "n_kv"}
"""Of both groups, what no command takes, and what `edit` takes too."""
ONLY_COMMAND_OF = {
    # How `edit --loss` and `edit --sweep` run the model; the function runs none.
    "edit": {"data", "task", "max_loss_increase", *ReadingOptions.__annotations__, *LoadKeywords.__annotations__}
    - UNSAID,
    "gate": {"max_loss_increase"},  # one entry of `rules`
}
ONLY_FUNCTION = {
    **dict.fromkeys(("arch", "inputs", "mask"), "an object of Python"),
    **dict.fromkeys(("progress", "stage"), "a function of Python; the command line shows bars"),
    "command": "the command line that is running, for the report",
    "rules": "`--max-cosine`, `--rule` and others, one option each",
    "solve_what_ifs": "the command line solves those that it is asked for by name",
}
RENAMED = {
    ("predict", "what_if"): "what_ifs",  # an option that is repeated is singular
    ("report", "what_if"): "what_ifs",
    ("report", "targets"): "target",  # a page shows several
    **{(verb, "output"): "out" for verb in ("edit", "prune", "survey")},  # the folder, beside what is printed
}
SHOWN = {("inspect", "heads"), ("predict", "heads")}
"""Switches of one name that say what is printed here and what is computed there: heads are computed by default."""
DEFAULTS = {
    ("measure", "metrics"): DEFAULT_METRICS,
    ("predict", "what_if"): (),
    ("edit", "strength"): 1.0,  # several with commas there, with --sweep
    ("ablate", "parts"): PARTS,
}
"""Defaults that the command line leaves to the function, so that a file or a table can give another."""
REQUIRED = inspect.Parameter.empty
GROUPED = {field.name: field.default for group in (DataOptions, LoadOptions) for field in dataclasses.fields(group)}
"""Keywords that functions share, each declared in one of two groups."""


def of_command(verb: str) -> dict[str, object]:
    """Options by name with their defaults."""
    return {option.name: option.default for option in COMMANDS[verb].params}


def of_function(verb: str) -> dict[str, object]:
    """Parameters by name with their defaults; keywords about opening and about data are spelled out."""
    parameters = with_unpacked_keywords(list(inspect.signature(PAIRS[verb]).parameters.values()))
    return {one.name: GROUPED[one.name] if one.default is ... else one.default for one in parameters}


@pytest.mark.parametrize("verb", PAIRS)
def test_a_verb_and_its_function_take_the_same(verb):
    options = {RENAMED.get((verb, name), name) for name in of_command(verb)} - set(ONLY_COMMAND)
    options -= ONLY_COMMAND_OF.get(verb, set())
    parameters = set(of_function(verb)) - (set(ONLY_FUNCTION) - options)
    assert options == parameters


@pytest.mark.parametrize("verb", PAIRS)
def test_a_verb_and_its_function_have_the_same_defaults(verb):
    parameters = of_function(verb)
    for name, default in of_command(verb).items():
        other = parameters.get(RENAMED.get((verb, name), name), REQUIRED)
        if other is REQUIRED or (verb, name) in SHOWN or name in ONLY_COMMAND:
            continue  # of required arguments the command line has the embedded model
        expected = DEFAULTS.get((verb, name), default)
        assert other == expected, name


def test_every_exception_is_still_needed():
    options = {name for verb in PAIRS for name in of_command(verb)}
    parameters = {name for verb in PAIRS for name in of_function(verb)}
    assert set(ONLY_COMMAND) <= options
    assert set(ONLY_FUNCTION) <= parameters
    assert all(name in of_command(verb) for verb, name in (*RENAMED, *SHOWN, *DEFAULTS))
    assert all(names <= set(of_command(verb)) for verb, names in ONLY_COMMAND_OF.items())


def test_lists_of_the_command_line_hold_the_same_words():
    assert of_command("ablate")["parts"] == ",".join(PARTS)


@pytest.mark.parametrize(("keywords", "options"), [(ReadingOptions, DataOptions), (LoadKeywords, LoadOptions)])
def test_keywords_that_functions_share_are_those_of_their_group(keywords, options):
    assert set(keywords.__annotations__) == {field.name for field in dataclasses.fields(options)}


def test_all_metrics_are_asked_for_by_one_word_in_both():
    import torch

    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    found = osm.measure(model, [torch.randn(1, 5, 16)], metrics="all")
    assert {"cosine", "effective_rank", "token_norm"} <= {name for name, _ in found.definitions}
    assert "high_frequency" not in {name for name, _ in found.definitions}  # it needs a grid of patches
