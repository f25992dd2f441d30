"""`oversmooth plugins`: what other packages add."""

import typer

from oversmooth.commands.options import Json


def plugins(json: Json = False) -> None:
    """List what installed packages add: families, metrics, interventions, report sections; broken ones with the reason."""
    import warnings

    from oversmooth.control.rules import all_rules
    from oversmooth.environment.plugins import KINDS, PluginWarning
    from oversmooth.environment.plugins import plugins as plugins_
    from oversmooth.measurement.metrics import all_metrics
    from oversmooth.models.identify import architectures
    from oversmooth.output.report.plugged import all_sections
    from oversmooth.output.terminal.tables import show_plugins

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the table says it
        for load in (architectures, all_metrics, all_rules, all_sections):
            load()
    rows = [
        {"adds to": kind, "name": plugin.name, "package": plugin.package, "state": plugin.problem or "used"}
        for kind in KINDS
        for plugin in plugins_(kind)
    ]
    if json:
        import json as json_module

        typer.echo(json_module.dumps(rows, indent=2))
    elif rows:
        show_plugins(rows)
    else:
        typer.echo("No plugins are installed. How to write one: docs/guides/write-a-plugin.md")
