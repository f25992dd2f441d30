"""The command line as a whole: its help, names that mean one thing, and commands as files."""

import json
import re
import shlex
import tomllib

import pytest
import typer

from oversmooth.commands import help as page
from oversmooth.commands.options import DATA_OPTIONS, LOAD_OPTIONS, SOURCE_OPTIONS
from oversmooth.commands.verbs import EXAMPLES, app
from tests.command_line import oversmooth

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands
VERBS = tuple(COMMANDS)
LINES, COLUMNS = 60, 80

# --- help -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_fits_a_screen(verb):
    lines = oversmooth(verb, "--help").stdout.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert oversmooth(verb, "-h").stdout.splitlines() == lines


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_in_the_help_or_in_all_of_it(verb):
    short, whole = oversmooth(verb, "--help").stdout, oversmooth(verb, "--help-all").stdout
    rare = {one.name for one in COMMANDS[verb].params if getattr(one, "hidden", False)}
    for one in COMMANDS[verb].params:
        shown = page.option_name(one).split(" ")[0] if one.param_type_name == "option" else page.shown_name(one)
        if one.name == "help_all" and not rare:
            assert shown not in whole, "there is no more to show"
            continue
        assert f" {shown}" in whole
        assert (f" {shown}" in short) == (one.name not in rare)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_what_it_is_for_and_what_follows_it_in_a_word(verb):
    for one in COMMANDS[verb].params:
        assert one.help, one.name
        if one.param_type_name == "option" and not one.is_flag:
            assert re.fullmatch(r"(INT|FLOAT|PATH|TEXT|FILE|FOLDER)( FLOAT)?", one.metavar), one.name


def test_an_option_that_must_be_given_says_so():
    assert "new or empty. [required]" in oversmooth("prune", "--help").stdout


def test_the_help_of_all_verbs_names_each_once_with_its_sentence():
    lines = oversmooth("--help").stdout.splitlines()
    assert len(lines) <= LINES
    assert [line.split()[0] for line in lines if re.match(r"  [a-z]", line)] == list(VERBS)
    assert oversmooth("-h").stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        *(("measure", "metric"), ("measure", "place"), ("measure", "prefix_tokens"), ("measure", "dtype")),
        *(("measure", "printed_format"), ("inspect", "spectrum"), ("inspect", "precision"), ("predict", "what_if")),
        *(("eval", "loss_task"), ("ablate", "part"), ("edit", "basis"), ("prune", "prune_by"), ("survey", "engine")),
        *(("finetune", "task"), ("finetune", "setting"), ("reproduce", "claim"), ("reproduce", "scale")),
        *(("list", "kind"), ("gate", "short_format")),
    ],
)
def test_what_a_user_chooses_from_is_listed_where_it_is_chosen(verb, kind):
    from oversmooth.commands.options import VALUES

    words = set(re.split(r"[\s,`()\[\]]+", oversmooth(verb, "--help").stdout))
    assert {value for value in VALUES[kind] if not any(word.startswith(value) for word in words)} == set()


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_a_verb_are_commands_that_are_understood(verb, tmp_path, monkeypatch):
    (tmp_path / "gate.toml").write_text("max-cosine = 0.9")
    monkeypatch.chdir(tmp_path)
    for line in EXAMPLES[verb]:
        done = oversmooth(*shlex.split(line)[1:], "--print-config")
        assert (done.returncode, done.stderr) == (0, ""), line
        assert tomllib.loads(done.stdout)["verb"] == verb


# --- one name, one meaning ------------------------------------------------------------------------------------------

MEANS_MORE = {
    "data": "`train` and `finetune` train on it: archives and folders of tasks, not texts to look at",
    "output": "a file, several, or the folder of a checkpoint, a run or a table, as the verb makes one",
    "format": "verbs without rows print a table or JSON",
    "target": "`gate` judges logs too, `prune` needs a folder",
    "targets": "what each verb can show together",
    "tolerance": "what a verb may find without complaint: an error of `verify`, a growth of `gate`",
}
"""Names that are described in more than one way, and why."""


def meanings() -> dict[str, set[tuple[object, ...]]]:
    found: dict[str, set[tuple[object, ...]]] = {}
    for command in COMMANDS.values():
        for one in command.params:
            meaning = (one.help, one.metavar, *one.opts, *one.secondary_opts)
            found.setdefault(one.name, set()).add(meaning)
    return found


def test_a_name_means_the_same_in_every_verb():
    assert {name for name, said in meanings().items() if len(said) > 1} == set(MEANS_MORE)


def test_no_option_has_a_second_name_but_one():
    second = {
        name
        for command in COMMANDS.values()
        for one in command.params
        if one.param_type_name == "option"
        for name in [name for name in one.opts if name.startswith("--")][1:]
    }
    assert second == {"--limit"}


def test_a_verb_has_a_group_of_options_as_a_whole_or_not_at_all():
    for verb, command in COMMANDS.items():
        names = {one.name for one in command.params}
        assert names & set(LOAD_OPTIONS) in (set(), set(SOURCE_OPTIONS), set(LOAD_OPTIONS)), verb
        assert names & set(DATA_OPTIONS) - {"seed"} in (set(), set(DATA_OPTIONS) - {"seed"}), verb


@pytest.mark.parametrize("name", ["max-samples", "max_samples", "limit"])
def test_underscores_are_dashes_and_limit_is_max_samples(name):
    done = oversmooth("measure", f"--{name}", "3", "--print-config")
    assert tomllib.loads(done.stdout) == {"verb": "measure", "max-samples": 3}


@pytest.mark.parametrize(
    ("words", "pieces"),
    [
        (("measure", "--metrcs", "cosine"), ("No such option: --metrcs", "--metrics")),
        (("mesure",), ("No such command 'mesure'", "measure")),
        (("measure", "--batch-size", "0"), ("--batch-size", "greater than or equal to 1")),
        (("prune", "folder"), ("Missing option '--output' / '-o'",)),
        (("measure", "--device", "cpu", "--device-map", "auto"), ("Give only one of device, device_map",)),
        (("measure", "--device-map", "everywhere"), ("Unknown device_map 'everywhere'", "auto, balanced")),
        (("inspect", "--spectrum", "most"), ("Unknown spectrum 'most'", "auto, extremes, full")),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(words, pieces):
    done = oversmooth(*words)
    assert (done.returncode, done.stdout) == (2, "")
    for piece in pieces:
        assert piece in done.stderr


# --- commands as files ----------------------------------------------------------------------------------------------

GIVEN = {
    "inspect": ("model", "--heads", "--spectrum", "full", "-o", "a.csv", "-o", "b.json"),
    "verify": ("model", "--tolerance", "0.5", "--no-offload"),
    "measure": ("model", "--metrics", "cosine,hfc_lfc", "--mean", "0.5", "--trust-remote-code"),
    "predict": ("model", "--what-if", "no_skip", "--what-if", "scale:0.5", "--solve", "2"),
    "report": ("one", "two", "-o", "page.html", "--limit", "4"),
    "compare": ("one", "two", "--loss"),
    "gate": ("model", "--max-cosine", "0.9", "--rule", "min_stable_rank=2", "--against", "before.json"),
    "edit": ("model", "--interval", "-0.5", "0.5", "-o", "folder"),
    "prune": ("model", "--budget", "0.25", "-o", "folder"),
    "ablate": ("model", "--parts", "block", "--no-theory"),
    "eval": ("model", "--task", "causal-lm", "--per-line"),
    "survey": ("list.txt", "--engine", "process", "--workers", "2"),
    "train": ("digits", "--set", "model.depth=2", "--set", "training.epochs=1", "--no-analyze"),
    "finetune": ("model", "--seeds", "0,1", "--set", "training.epochs=1"),
    "reproduce": ("skip", "--no-train", "--model", "one"),
    "watch": ("run", "other", "--port", "8000", "--open"),
    "list": ("metrics", "cosine"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_command_comes_back_from_its_file_and_the_command_line_wins(verb, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(oversmooth(verb, *GIVEN[verb], "--print-config").stdout)
    again = oversmooth(verb, "--config", file, "--print-config")
    assert (again.returncode, again.stderr) == (0, "")
    assert tomllib.loads(again.stdout) == tomllib.loads(file.read_text())
    assert len(tomllib.loads(file.read_text())) > 2
    argument = next(one for one in COMMANDS[verb].params if one.param_type_name == "argument")
    changed = tomllib.loads(oversmooth(verb, "--config", file, "other", "--print-config").stdout)
    assert changed[argument.name] == (["other"] if argument.nargs == -1 else "other")


@pytest.mark.parametrize("verb", VERBS)
def test_what_a_command_stores_makes_the_same_command(verb, tmp_path, monkeypatch):
    stored = []
    monkeypatch.setattr(COMMANDS[verb], "callback", lambda **_: stored.append(page.command_line()))
    monkeypatch.setattr(typer.main, "get_command", lambda _: GROUP)
    assert oversmooth(verb, *GIVEN[verb]).returncode == 0
    (tmp_path / "manifest.json").write_text(json.dumps({"command": stored[0]}))
    for place in (tmp_path, tmp_path / "manifest.json"):
        given, again = (
            oversmooth(verb, *words, "--print-config").stdout for words in (GIVEN[verb], ("--config", place))
        )
        assert tomllib.loads(given) == tomllib.loads(again)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("max-sample = 3", ("Unknown key in", "'max-sample'", "Close: max-samples")),
        ('max-samples = "many"', ("Invalid value for '--max-samples'",)),
        ("max-samples = true", ("max-samples in", "a value, as on the command line")),
        ("max-samples = [3]", ("max-samples in", "one value")),
        ("pairs = 1", ("pairs in", "true or false")),
        ('output = "a.csv"', ("output in", "a list")),
        ('verb = "predict"', ("a file for measure", "oversmooth predict")),
        ("[model]\ndevice = 'cpu'", ("Unknown key in", "'model'")),
        ("max-samples", ("expected a TOML file of options",)),
    ],
)
def test_a_file_with_a_mistake_is_refused(text, pieces, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    done = oversmooth("measure", "--config", tmp_path / "run.toml")
    assert (done.returncode, done.stdout) == (2, "")
    for piece in pieces:
        assert piece in done.stderr


def test_json_without_a_command_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    done = oversmooth("measure", "--config", tmp_path / "x.json")
    assert done.returncode == 2
    assert "--print-config" in done.stderr
    assert "cannot be read" in oversmooth("measure", "--config", tmp_path / "none.toml").stderr
