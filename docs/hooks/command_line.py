"""Puts the reference of the command line into the page that asks for it, from the commands themselves."""

from typing import Any

import typer

from oversmooth.commands.verbs import app

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARKER, _commands()) if MARKER in markdown else markdown


def _commands() -> str:
    group: Any = typer.main.get_command(app)  # typer has a click of its own, whose classes are not public
    return "\n\n".join(_section(name, command) for name, command in group.commands.items())


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["oversmooth", name, *command.collect_usage_pieces(context)])
    rows = "\n".join(_row(parameter, context) for parameter in command.params)
    return (
        f"## oversmooth {name}\n\n{command.help}\n\n```text\n{usage}\n```\n\n"
        f"| argument or option | meaning | default |\n|---|---|---|\n{rows}"
    )


def _row(parameter: Any, context: Any) -> str:
    is_option = parameter.param_type_name == "option"
    name = ", ".join([*parameter.opts, *parameter.secondary_opts] if is_option else parameter.get_usage_pieces(context))
    default = parameter.get_default(context)
    says_nothing = default is None or default is False or default == ()
    shown = "required" if parameter.required else "" if says_nothing else f"`{default}`"
    return f"| `{name}` | {parameter.help or ''} | {shown} |"
