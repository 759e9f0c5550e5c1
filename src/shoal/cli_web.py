"""The verbs of the web page and of what runs leave on disk: web, tokens, logs, du, gc, trash, tag, export."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer


def _check_runs(runs: Path) -> Path:
    from shoal.jobs import run_dir

    return run_dir.check_runs(runs)


RunName = Annotated[str, typer.Argument(help="A run: its name, its path, or 'last'.", show_default=False)]
Runs = Annotated[Path, typer.Option("--runs", help="The local directory of runs.", callback=_check_runs)]
AsJson = Annotated[bool, typer.Option("--json", help="Rows of JSON for scripts.")]
RUNS = Path("runs")
DAY_S = 86400.0


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(web)
    app.command()(tokens)
    app.command()(logs)
    app.command()(du)
    app.command()(tag)
    app.command()(trash)
    app.command()(gc)
    app.command()(export)


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
    from shoal.terminal import reports
    from shoal.terminal.console import make_console

    try:
        from shoal.web.serve import WebServer
    except ModuleNotFoundError as failure:
        if failure.name not in ("starlette", "uvicorn"):
            raise
        raise error("SH207", f"the web page needs {failure.name}", fix="pip install 'shoal[web]'") from None
    console = make_console()
    server = WebServer(
        runs, listen=listen, tls=tls, names=tuple(name or ()), say=lambda line: reports.print_lines(console, line)
    )
    reports.print_lines(console, f"{server.url} serves the runs in {runs}", "Open this link once, in one browser:")
    print(f"  {server.link()}", flush=True)
    reports.print_lines(console, "Ctrl-C ends the page; runs go on.")
    server.run()


def tokens(
    make: Annotated[str, typer.Option("--create", help="Make a token with this name.", show_default=False)] = "",
    role: Annotated[str, typer.Option(help="read, operate or submit; machine for `shoal offer`.")] = "read",
    only: Annotated[str, typer.Option(help="Only these runs: a,b", show_default=False)] = "",
    days: Annotated[float, typer.Option(min=0, help="It expires after so many days; 0: never.")] = 30,
    revoke: Annotated[str, typer.Option(help="Revoke the token with this name.", show_default=False)] = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """List, make and revoke tokens of the web page, its API and the queue. A token is shown once."""
    from shoal.jobs.access_tokens import TokenFile
    from shoal.terminal import access_reports

    file = TokenFile(runs)
    if make:
        until = time.time() + days * DAY_S if days else None
        token = file.create(make, role=role, runs=[one for one in only.split(",") if one], expires_t=until)
        print(token)
    elif revoke:
        file.revoke(revoke)
    else:
        access_reports.print_tokens(file.read(), as_json=as_json)


def logs(
    run: RunName,
    who: Annotated[str, typer.Argument(help="worker-1 or server-0; all if left out.", show_default=False)] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the run is driven.")] = False,
    grep: Annotated[str, typer.Option(help="Only lines that contain this text.", show_default=False)] = "",
    lines: Annotated[int, typer.Option(min=1, max=100_000, help="So many last lines of each.")] = 100,
    runs: Runs = RUNS,
) -> None:
    """What workers and servers printed, also after their death."""
    from shoal.jobs import run_dir
    from shoal.storage import log_printing

    paths = run_dir.find(run, runs)
    log_printing.print_logs(paths, who, text=grep, lines=lines, follow=follow, write=print)


def du(runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """What each run occupies on disk, and what deleting it would free."""
    from shoal.storage.disk_usage import all_usage
    from shoal.terminal import access_reports

    access_reports.print_usage(all_usage(runs), as_json=as_json)


def tag(
    run: RunName,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add.", show_default=False)] = None,
    remove: Annotated[list[str] | None, typer.Option(help="A tag to remove.", show_default=False)] = None,
    runs: Runs = RUNS,
) -> None:
    """Tag a run, or show its tags."""
    from shoal.jobs import run_dir
    from shoal.storage.tags import change_tags

    paths = run_dir.find(run, runs)
    print(" ".join(change_tags(runs, paths.parent_run.name, add=tags or (), remove=remove or ())))


def trash(
    delete: Annotated[str, typer.Option(help="Move this run to the trash.", show_default=False)] = "",
    part: Annotated[str, typer.Option(help="With --delete: only its checkpoints.", show_default=False)] = "",
    restore: Annotated[str, typer.Option(help="Put a run back.", show_default=False)] = "",
    empty: Annotated[bool, typer.Option("--empty", help="Delete for good.")] = False,
    days: Annotated[float, typer.Option(min=0, help="With --empty: only what is older.")] = 0,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Deleted runs: list them, delete one, put one back, or free their bytes."""
    from shoal.jobs import run_dir
    from shoal.storage import trash as bin_
    from shoal.terminal import access_reports

    if delete:
        access_reports.print_trash([bin_.move_to_trash(run_dir.find(delete, runs), runs, part=part)], as_json=as_json)
    elif restore:
        print(f"{bin_.restore(runs, restore).fields['run']} is back", file=sys.stderr)
    elif empty:
        access_reports.print_trash(bin_.empty_trash(runs, older_than_s=days * DAY_S), as_json=as_json)
    else:
        access_reports.print_trash(bin_.list_trash(runs), as_json=as_json)


def gc(
    older: Annotated[float, typer.Option("--older", min=0, help="Only runs unchanged for so many days.")] = 30,
    keep: Annotated[int, typer.Option(min=0, help="Keep the newest runs of each job.")] = 2,
    status: Annotated[str, typer.Option(help="Only these: failed,stopped", show_default=False)] = "",
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Only the checkpoints of finished runs with a model.")
    ] = False,
    apply: Annotated[str, typer.Option(help="Apply the plan with this hash.", show_default=False)] = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Clean up: shows a plan and its hash; --apply HASH moves exactly that to the trash."""
    from shoal.storage import cleanup
    from shoal.terminal import access_reports

    if apply:
        entries, stays = cleanup.apply_plan(runs, apply)
        access_reports.print_trash(entries, as_json=as_json)
        for line in stays:
            print(line, file=sys.stderr)
        return
    chosen = tuple(one for one in status.split(",") if one)
    rules = cleanup.CleanupRules(older * DAY_S, keep, chosen, checkpoints)
    items = cleanup.make_plan(runs, rules)
    access_reports.print_plan(items, cleanup.save_plan(runs, items) if items else "", as_json=as_json)


def export(
    run: RunName,
    to: Annotated[str, typer.Option(help="csv, parquet, html, tensorboard or safetensors.")] = "csv",
    out: Annotated[Path | None, typer.Option(help="The file; beside this run's name by default.")] = None,
    runs: Runs = RUNS,
) -> None:
    """A run's curves for other programs, its weights, or the whole run as one HTML file."""
    from shoal.errors import error
    from shoal.jobs import run_dir

    paths = run_dir.find(run, runs)
    target = out or Path(f"{paths.name}.{to}" if to != "tensorboard" else f"{paths.name}-tensorboard")
    if to != "html":
        from shoal.storage.export import export as write

        write(paths, to, target)
    else:
        try:
            from shoal.web.single_file import export_html
        except ModuleNotFoundError as failure:
            raise error("SH207", f"the page needs {failure.name}", fix="pip install 'shoal[web]'") from None
        if target.exists():
            raise error("SH609", f"{target} exists", where="--out", fix="Name a file that does not exist yet.")
        export_html(paths, target)
    print(target)
