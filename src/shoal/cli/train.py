"""The verbs that train: run, resume."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli import compress, output, search
from shoal.cli.options import (
    NO_OVERRIDES,
    RUNS,
    AsJson,
    Engine,
    JobFile,
    Quiet,
    RunName,
    Runs,
    Sets,
    engine_kind,
    load_job,
)

PANEL = "Train"


def register(app: typer.Typer) -> None:
    for verb in (run, resume):
        app.command(rich_help_panel=PANEL)(verb)


def run(
    job: JobFile,
    sets: Sets = NO_OVERRIDES,
    workers: Annotated[str, typer.Option(help="2, or 1..8 for elastic.")] = "",
    listen: Annotated[str, typer.Option(help="The address of this machine where others may join.")] = "",
    engine: Engine = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train: run a job, show its progress, print the receipt."""
    from shoal.jobs.fork_servers import ForkServerPool

    asked = [f"{field}={value}" for field, value in (("workers", workers), ("network.listen", listen)) if value]
    with ForkServerPool() as fork_servers:
        fork_servers.start_early()  # it imports torch while this process reads the job and imports the rest
        checked = load_job(job, [*engine_kind(engine), *sets, *asked])
        fork_servers.for_job(checked)
        from shoal.jobs.run_executor import RunExecutor, run_to_end
        from shoal.terminal import hints
        from shoal.terminal.live import make_display

        if workers and not (quiet or as_json) and (hint := hints.lanes_hint(checked, job, sets)):
            output.print_lines(hint)
        if checked.sync.kind == "auto" and not (quiet or as_json):
            output.print_lines("planning: the job is measured for some seconds")
        display = make_display(output.console(as_json), as_json=as_json, quiet=quiet)
        with display as shown, RunExecutor(fork_servers) as executor:
            outcome = run_to_end(executor, executor.submit(checked, runs=runs, on_event=shown.on_event))
    output.print_and_exit(outcome, as_json=as_json)


def resume(
    run: RunName,
    sets: Sets = NO_OVERRIDES,
    engine: Engine = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run after a crash, Ctrl-C or reboot."""
    from shoal.jobs import run_dir, run_executor
    from shoal.terminal.live import make_display

    paths = run_dir.find(run, runs)
    if paths.search_journal.is_file() and not (sets or engine):
        search.resume_search(str(paths.root), workers=None, runs=runs, as_json=as_json, quiet=quiet)
    if paths.asked_compression.is_file() and not (sets or engine):
        compress.resume_compression(paths, as_json=as_json, quiet=quiet)
    with make_display(output.console(as_json), as_json=as_json, quiet=quiet) as shown:
        outcome = run_executor.resume(paths, overrides=[*engine_kind(engine), *sets], on_event=shown.on_event)
    output.print_and_exit(outcome, as_json=as_json)
