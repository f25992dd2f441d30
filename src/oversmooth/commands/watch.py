"""`oversmooth watch`: training runs on a page that follows them."""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs or of a Trainer, or .jsonl files of a monitor.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535)] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve loss, accuracy and smoothing of runs on this machine, and keep the page up to date while they train."""
    from oversmooth.output.render import LOOPBACK, page_server
    from oversmooth.output.run_pages import watched_page
    from oversmooth.recipes.run_folder import read_log

    def page():  # type: ignore[no-untyped-def]
        return watched_page([read_log(path.expanduser()) for path in runs])

    page()  # what cannot be read is said before anything is served
    with page_server(page, port) as server:
        address = f"http://{LOOPBACK}:{server.server_address[1]}/"
        typer.echo(f"watching: {address} (end with Ctrl-C)")
        if open_:
            typer.launch(address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
