"""The program: all verbs in panels, and how it ends."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from shoal.cli import (
    cluster,
    compress,
    disk,
    inspection,
    output,
    prepare,
    proofs,
    queue,
    results,
    search,
    steer,
    train,
    web,
)
from shoal.cli.options import Verb, Verbs

app = typer.Typer(
    name="shoal",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on whatever machines there are: the same weights, bit for bit, through any crash.",
)
for group in (train, compress, prepare, results, inspection, steer, queue, cluster, web, disk, proofs):
    group.register(app)
app.add_typer(search.app, name="search", rich_help_panel=train.PANEL)
for registered in (*app.registered_commands, *search.app.registered_commands):
    registered.cls = Verb


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Train PyTorch models on whatever machines there are: the same weights, bit for bit, through any crash."""
    if version:
        from shoal import __version__

        print(f"shoal {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """User errors are printed without a traceback; any other exception is a bug and shows one."""
    from shoal.errors import EXIT_INTERRUPTED, ShoalError, from_os_error

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except (ShoalError, OSError) as failure:
        known = failure if isinstance(failure, ShoalError) else from_os_error(failure)
        if known is None:
            raise
        from shoal.terminal import reports

        reports.print_error(output.console(True), known)
        sys.exit(known.exit_code)
    sys.exit(0)
