"""The verbs that change a live run: scale, drain, stop; and its token."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli import output, search
from shoal.cli.options import RUNS, RunName, Runs

PANEL = "A run in progress"


def register(app: typer.Typer) -> None:
    for verb in (stop, scale, drain, token):
        app.command(rich_help_panel=PANEL)(verb)


def stop(run: RunName, runs: Runs = RUNS) -> None:
    """Save a run and stop it; `shoal resume` continues it."""
    from shoal.jobs import commands, run_dir
    from shoal.terminal import reports

    paths = run_dir.find(run, runs)
    if paths.search_journal.is_file():
        search.stop_search(str(paths.root), runs=runs)
        return
    reports.print_stopped(output.console(), paths.name, commands.stop(paths), folds=bool(paths.folds))


def scale(
    run: RunName,
    workers: Annotated[int | None, typer.Argument(help="How many workers from now on.", show_default=False)] = None,
    servers: Annotated[int | None, typer.Option(help="How many servers from now on.", show_default=False)] = None,
    runs: Runs = RUNS,
) -> None:
    """Change the number of workers or servers of a run in progress."""
    from shoal.errors import plural
    from shoal.jobs import commands, run_dir

    answer = commands.scale(run_dir.find(run, runs), workers, servers=servers)
    servers_wanted = [plural(answer.servers_wanted, "server")] if answer.servers_wanted else []
    wanted = [plural(answer.wanted, "worker"), *servers_wanted]
    output.print_lines(f"wanted: {', '.join(wanted)}", *answer.notes)


def drain(
    run: RunName,
    who: Annotated[str, typer.Argument(help="worker-2, or 2, or server-3.", show_default=False)],
    runs: Runs = RUNS,
) -> None:
    """Let a worker or server leave without loss, and wait until it has left."""
    from shoal.jobs import commands, run_dir
    from shoal.terminal import reports

    paths = run_dir.find(run, runs)
    seat, answer = commands.drain(paths, who)
    wanted = answer.wanted if seat.role == "worker" else answer.servers_wanted
    reports.print_lines(
        output.console(), f"{seat.name} is asked to leave; {wanted} {seat.role}s are wanted from now on"
    )
    went = commands.wait_for_departure(paths, seat)
    output.print_lines(f"{seat.name} {went}" if went else "the run ended first")


def token(run: RunName, runs: Runs = RUNS) -> None:
    """Print a run's token: whoever has it can join the run."""
    from shoal.jobs import commands, run_dir

    print(commands.read_token(run_dir.find(run, runs)))
