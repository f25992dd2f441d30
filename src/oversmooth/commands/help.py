"""The help of a verb within 60 lines of 80 columns, its options by panel; `--config` and `--print-config`, which all have."""

import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from oversmooth.commands.options import declared
from oversmooth.environment.files import json_object, read_text_file, toml_tables
from oversmooth.errors import BadValue, BrokenFile, UnknownName

LEFT, GAP = 20, 2
"""Columns of the names of options, and between them and their sentences."""
PANELS = ("Options", "Model", "Data", "Output", "General")
LIMIT = "--limit"
"""The other name of --max-samples, which its sentence mentions."""
TYPES = {int: "INT", float: "FLOAT", Path: "PATH", str: "TEXT"}


# --- the page ---


class Verb(TyperCommand):
    """A command with our help; `--help-all` shows rare options too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_of(self, ctx, width_of(formatter)))

    def invoke(self, ctx: Any) -> Any:
        if ctx.meta.get(PRINTS):
            typer.echo(config_text(ctx), nl=False)
            return None
        token = _RUNNING.set(ctx)
        try:
            return super().invoke(ctx)
        finally:
            _RUNNING.reset(token)


class Verbs(TyperGroup):
    """All commands, by panel."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = width_of(formatter)
        lines: list[str] = [
            f"Usage: {ctx.command_path} VERB [ARGUMENTS] [OPTIONS]",
            "",
            *wrapped(self.help or "", width),
        ]
        panels: dict[str, list[str]] = {}
        commands: dict[str, Any] = dict(self.commands)
        for name, command in commands.items():
            rows = panels.setdefault(command.rich_help_panel, [])
            rows += row(name, on_one_line(command.help), width, left=9)
        options: list[Any] = list(self.get_params(ctx))
        panels["Options"] = [line for one in options for line in row(option_name(one), one.help, width)]
        for panel, found in panels.items():
            lines += ["", heading(panel), *found]
        lines += ["", f"The options of a verb: {ctx.command_path} VERB --help"]
        formatter.write("\n".join(lines))


def width_of(formatter: Any) -> int:
    """Columns of the terminal, at most 80; the formatter leaves two empty."""
    return int(formatter.width) + 2


def help_of(command: Any, ctx: Any, width: int, *, shows_all: bool = False) -> str:
    """Usage, what the verb does, arguments, options by panel, examples."""
    usage = " ".join(["Usage:", ctx.command_path, *(usage_of(one) for one in arguments(command)), "[OPTIONS]"])
    lines = [*wrapped(usage, width), "", *wrapped(on_one_line(command.help), width), ""]
    for argument in arguments(command):
        lines += row(shown_name(argument), described(argument), width)
    panels: dict[str, list[str]] = {panel: [] for panel in PANELS}
    has_rare = any(getattr(option, "hidden", False) for option in command.params)
    for option in command.get_params(ctx):
        if option.param_type_name == "argument":
            continue
        if (option.hidden and not shows_all) or (option.name == "help_all" and not has_rare):
            continue
        name = option.rich_help_panel or ("General" if option.name == "help" else "Options")
        panels[name] += row(option_name(option), described(option), width)
    for panel, found in panels.items():
        if found:
            lines += ["", heading(panel), *found] if lines[-1] else [heading(panel), *found]
    return "\n".join([*lines, "", heading("Examples"), *example_lines(command.epilog, width)])


def example_lines(epilog: str, width: int) -> Iterator[str]:
    """Commands that can be pasted: a long one goes on behind a backslash, never between an option and its value."""
    for line in epilog.splitlines():
        if len(line) + 2 <= width:
            yield f"  {line}"
            continue
        parts = wrapped(re.sub(r"( --?\w[\w-]*) (?!-)", "\\1\0", line), width - 8)
        yield textwrap.indent(" \\\n    ".join(parts).replace("\0", " "), "  ")


def heading(panel: str) -> str:
    return typer.style(f"{panel}:", bold=True)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def row(name: str, sentence: str, width: int, left: int = LEFT) -> list[str]:
    """A name, and its sentence beside it, or below it where the name is long; a list of names below both."""
    indent = " " * (2 + left + GAP)
    sentence, _, names = sentence.partition("\n")
    lines = wrapped(sentence, width, indent) or [""]
    lines += wrapped(names, width, " " * 6)
    if len(name) > left:
        return [f"  {name}", *lines]
    return [f"  {name.ljust(left + GAP)}{lines[0].lstrip()}".rstrip(), *lines[1:]]


def on_one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def arguments(command: Any) -> list[Any]:
    return [one for one in command.params if one.param_type_name == "argument"]


def shown_name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def usage_of(argument: Any) -> str:
    name = shown_name(argument) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def option_name(option: Any) -> str:
    """Short name first, both forms of a switch, and what kind of value follows."""
    if option.secondary_opts:
        return option.opts[0].replace("--", "--[no-]", 1)
    names = ", ".join(sorted((one for one in option.opts if one != LIMIT), key=lambda name: name.startswith("--")))
    return names if option.is_flag or option.metavar is None else f"{names} {option.metavar}"


def described(parameter: Any) -> str:
    """The sentence, and the default where it says something."""
    if parameter.required and parameter.param_type_name == "option":
        return f"{parameter.help} [required]"
    default = parameter.default
    says_nothing = default is None or isinstance(default, bool) or default == () or callable(default)
    if says_nothing or parameter.show_default is False or parameter.param_type_name == "argument":
        return str(parameter.help or "")
    sentence, newline, names = str(parameter.help or "").partition("\n")
    return f"{sentence} [{default}]{newline}{names}"


# --- types of options in one word ---


def as_verb(command: Callable[..., None]) -> Callable[..., None]:
    """The command with what every verb has; options that do not say what follows them say INT, FLOAT, PATH or TEXT."""
    everything = [*signature(command).parameters.values()]
    everything += [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default) for name, kind, default in GENERAL
    ]

    def run(**given: Any) -> None:
        command(**{name: value for name, value in given.items() if name not in GENERAL_NAMES})

    for parameter in everything:
        kind, info = get_args(parameter.annotation)
        if hasattr(info, "param_decls") and info.metavar is None and (word := type_word(kind)):
            is_argument = type(info).__name__ == "ArgumentInfo"
            info.metavar = parameter.name.upper() if is_argument else word
    return declared(run, command, everything)


def type_word(kind: Any) -> str | None:
    """Of `int | None` and the like; `None` for a switch."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    if get_origin(kind) is tuple:
        return " ".join(str(type_word(one)) for one in get_args(kind))
    return TYPES.get(kind)


# --- a command as a file, and back ---

PRINTS = "oversmooth.prints_config"
VERB = "verb"
_RUNNING: ContextVar[Any] = ContextVar("the verb that is running")


def command_line() -> str:
    """The command that is running, with what `--config` added, for the manifest of what it makes."""
    ctx = _RUNNING.get()
    words = ["oversmooth", str(ctx.info_name)]
    for parameter, value in said(ctx):
        words += words_for(parameter, value)
    return shlex.join(words)


def words_for(parameter: Any, value: Any) -> list[str]:
    """One argument or option as it is typed."""
    if parameter.param_type_name == "argument":
        return [str(one) for one in (value if isinstance(value, list) else [value])]
    name = parameter.opts[0]
    if isinstance(value, bool):
        return [name] if value else list(parameter.secondary_opts[:1])
    if parameter.multiple:
        return [word for one in value for word in (name, str(one))]
    return [name, *(str(one) for one in (value if isinstance(value, list) else [value]))]


def read_config(ctx: Any, path: Path | None) -> None:
    """Makes the values of a file those that count where the command line says nothing."""
    if path is None or ctx.resilient_parsing:
        return
    given = values_in(path, ctx)
    known = {typed(one): one for one in own_parameters(ctx)}
    found: dict[str, Any] = {}
    for key, value in given.items():
        parameter = known.get(key.replace("_", "-"))
        if parameter is None:
            raise UnknownName(f"key in {path}", key, list(known))
        found[str(parameter.name)] = checked(parameter, value, f"{key} in {path}")
    ctx.default_map = found


def checked(parameter: Any, value: Any, where: str) -> Any:
    """A value of a file, where it is of the kind that the option takes; the option itself checks the rest."""
    takes_many = getattr(parameter, "multiple", False) or parameter.nargs != 1
    is_flag = getattr(parameter, "is_flag", False)
    if is_flag != isinstance(value, bool) or isinstance(value, dict):
        raise BadValue(where, value, "true or false" if is_flag else "a value, as on the command line")
    if takes_many:
        if not isinstance(value, list):
            raise BadValue(where, value, "a list, such as [1, 2]")
        return [str(one) for one in value]
    if isinstance(value, list):
        raise BadValue(where, value, "one value")
    return value if is_flag else str(value)


def values_in(path: Path, ctx: Any) -> dict[str, Any]:
    """Options by name: of TOML, or of the command that a run, an analysis or a reproduction stores in its JSON."""
    verb = str(ctx.info_name)
    if path.is_dir():
        path = path / "manifest.json"
    expected = "a TOML file of options, or JSON that holds the command of a run"
    text = read_text_file(path, expected)
    if path.suffix != ".json":
        given = toml_tables(text, str(path), expected)
        other = given.pop(VERB, verb)
        if other != verb:
            raise BadValue("--config", str(path), f"a file for {verb}", f"This one is for: oversmooth {other}")
        return given
    command = json_object(text, str(path), expected).get("command")
    if not isinstance(command, str) or not command:
        raise BrokenFile(str(path), expected, "no command", "Make a file of options with --print-config.")
    return values_of_command(command, str(path), ctx)


def values_of_command(command: str, where: str, ctx: Any) -> dict[str, Any]:
    """What a command line gives, by name."""
    verb = str(ctx.info_name)
    _, other, *words = [*shlex.split(command), ""]
    if other != verb:
        raise BadValue("--config", where, f"a file for {verb}", f"This one is for: oversmooth {other}")
    inner = ctx.command.make_context(verb, [word for word in words if word], resilient_parsing=True)
    return {typed(parameter): value for parameter, value in said(inner)}


def own_parameters(ctx: Any) -> list[Any]:
    """Those of the verb, without the ones that every verb has."""
    return [one for one in ctx.command.params if one.name not in GENERAL_NAMES]


def said(ctx: Any) -> Iterator[tuple[Any, Any]]:
    """Every argument and option that was given, on the command line or in a file, with its value in plain types."""
    for parameter in own_parameters(ctx):
        source = ctx.get_parameter_source(parameter.name)
        if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
            yield parameter, plain(ctx.params[parameter.name])


def plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def typed(parameter: Any) -> str:
    """The name of an option as it is typed; some of ours end in _, because they are words of Python."""
    return str(parameter.name).rstrip("_").replace("_", "-")


def config_text(ctx: Any) -> str:
    """The command as TOML. A string of JSON is one of TOML too."""
    lines = [f"# oversmooth {ctx.info_name} --config THIS_FILE", f"{VERB} = {json.dumps(ctx.info_name)}"]
    lines += [f"{typed(one)} = {json.dumps(value, ensure_ascii=False)}" for one, value in said(ctx)]
    return "\n".join(lines) + "\n"


def ask_for_config(ctx: Any, asked: bool) -> None:
    ctx.meta[PRINTS] = asked


def show_all(ctx: Any, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        typer.echo(help_of(ctx.command, ctx, width_of(ctx.make_formatter()), shows_all=True))
        raise typer.Exit


def general_option(*names: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel="General", is_eager=True, **more)


GENERAL: Sequence[tuple[str, Any, object]] = (
    (
        "config",
        Annotated[
            Path | None,
            general_option(
                help="Take options from this file, or from a run's folder.",
                metavar="FILE",
                callback=read_config,
            ),
        ],
        None,
    ),
    (
        "print_config",
        Annotated[
            bool,
            general_option(
                "--print-config", help="Print such a file for this command; run nothing.", callback=ask_for_config
            ),
        ],
        False,
    ),
    (
        "help_all",
        Annotated[bool, general_option("--help-all", help="Show rare options too.", callback=show_all)],
        False,
    ),
)
"""What every verb has: name, type and default."""
GENERAL_NAMES = {name for name, *_ in GENERAL}
