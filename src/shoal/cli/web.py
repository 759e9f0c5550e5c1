"""The verbs of the web page: web, tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import output
from shoal.cli.options import RUNS, AsJson, Runs

DAY_S = 86400.0
PANEL = "Web page"


def register(app: typer.Typer) -> None:
    for verb in (web, tokens):
        app.command(rich_help_panel=PANEL)(verb)


def web(
    runs: Runs = RUNS,
    listen: Annotated[str, typer.Option(help="ADDRESS:PORT of this machine.", show_default=False)] = "",
    tls: Annotated[Path | None, typer.Option(help="A directory with cert.pem and key.pem.", show_default=False)] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="A name of this machine that browsers use.", show_default=False)
    ] = None,
) -> None:
    """See and steer runs in a browser. Prints a link with a one-time code; Ctrl-C ends it, and no run notices."""
    from shoal.errors import error

    try:
        from shoal.web.serve import WebServer
    except ModuleNotFoundError as failure:
        if failure.name not in ("starlette", "uvicorn"):
            raise
        raise error("SH207", f"the web page needs {failure.name}", fix="pip install 'shoal[web]'") from None
    server = WebServer(runs, listen=listen, tls=tls, names=tuple(name or ()), say=output.print_lines)
    output.print_plain(
        f"{server.url} serves the runs in {runs}", "Open this link once, in one browser:", f"  {server.link()}",
        "Ctrl-C ends the page; runs go on.",
    )  # fmt: skip
    server.run()
    output.end_at_once()  # questions that are still computed, and operations that wait for a run, hold up nobody


def tokens(
    make: Annotated[str, typer.Option("--create", help="Make a token with this name.", show_default=False)] = "",
    role: Annotated[str, typer.Option(help="read, operate or submit; machine for `shoal offer`.")] = "read",
    only: Annotated[str | None, typer.Option(help="Only these runs: a,b", show_default=False)] = None,
    days: Annotated[float, typer.Option(min=0, help="It expires after so many days; 0: never.")] = 30,
    revoke: Annotated[str, typer.Option(help="Revoke the token with this name.", show_default=False)] = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """List, make and revoke tokens of the web page, its API and the queue. A token is shown once."""
    from shoal.errors import error
    from shoal.jobs.queue.access_tokens import TokenFile
    from shoal.terminal import access_reports

    file = TokenFile(runs)
    if make:
        named = [one.strip() for one in (only or "").split(",") if one.strip()]
        if only is not None and not named:  # as an empty variable of a shell: it must not mean all
            raise error("SH676", "no run is named", where="--only", fix="Name runs, or leave --only out for all.")
        until = time.time() + days * DAY_S if days else None
        print(file.create(make, role=role, runs=named, expires_t=until))
    elif revoke:
        file.revoke(revoke)
    else:
        access_reports.print_tokens(file.read(), as_json=as_json)
