"""The verbs of the queue: one thin function each. Never imports torch."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from shoal.cli import output
from shoal.cli.options import NO_OVERRIDES, RUNS, AsJson, JobFile, Runs, Sets

JobId = Annotated[int, typer.Argument(help="The number of the job, as `shoal queue` shows it.", show_default=False)]
PANEL = "Queue"
NO_IDS: list[int] = []


def register(app: typer.Typer) -> None:
    for verb in (submit, queue, cancel, priority, release, top, up, down):
        app.command(rich_help_panel=PANEL)(verb)


def submit(
    job: JobFile,
    priority: Annotated[int, typer.Option(help="Higher goes first, from -100 to 100.")] = 0,
    user: Annotated[str, typer.Option(help="Whose job it is: for quotas and turns.", show_default=False)] = "",
    after: Annotated[list[int], typer.Option(help="Only after this job has finished.", show_default=False)] = NO_IDS,
    sets: Sets = NO_OVERRIDES,
    search: Annotated[bool, typer.Option("--search", help="Run the job's search instead of the job itself.")] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Put a job or its search into the queue. A daemon in the background runs it; the first submit starts it."""
    from shoal.jobs.queue import client
    from shoal.spec.load import load_job
    from shoal.terminal import queue_tables

    checked = load_job(job, overrides=sets)
    kind: Literal["training", "search"] = "search" if search else "training"
    entries = client.submit([checked], runs=runs, user=user, priority=priority, after=after, kind=kind)
    if as_json:
        output.print_json(entries[0].model_dump(mode="json"))
    else:
        queue_tables.print_submitted(output.console(), entries)


def queue(
    why: Annotated[int | None, typer.Option(help="Why this job is where it is.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="All jobs, however many.")] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """What runs, what waits and why."""
    from shoal.errors import error
    from shoal.jobs.queue import client
    from shoal.terminal import queue_tables

    view = client.look(runs)
    if why is not None and why not in view.entries:
        raise error("SH646", f"there is no job {why} in the queue", where="--why")
    rows = queue_tables.shown_entries(view, everything=everything) if why is None else [view.entries[why]]
    if as_json:
        output.print_json(queue_tables.queue_data(view, rows))
    elif why is None:
        queue_tables.print_queue(output.console(), view, everything=everything)
    else:
        queue_tables.print_why(output.console(), view.entries[why], view, client.read_history(runs, why))


def cancel(job: JobId, runs: Runs = RUNS) -> None:
    """Cancel a job of the queue. A running one is saved and stopped."""
    from shoal.jobs.queue import client

    entry = client.cancel(runs, job)
    said = "is cancelled" if entry.has_ended else "is saved and stopped at its next step"
    output.print_lines(f"job {entry.id} {said}")


def priority(
    job: JobId,
    to: Annotated[int, typer.Argument(help="Higher goes first, from -100 to 100.", show_default=False)],
    runs: Runs = RUNS,
) -> None:
    """Change the priority of a job of the queue that has not ended. Negative: -- ID -5."""
    from shoal.jobs.queue import client

    entry = client.set_priority(runs, job, to)
    output.print_lines(f"job {entry.id} has priority {entry.priority}")


def release(job: JobId, runs: Runs = RUNS) -> None:
    """Let a held or failed job of the queue go on."""
    from shoal.jobs.queue import client
    from shoal.terminal import queue_tables

    queue_tables.print_submitted(output.console(), [client.release(runs, job)])


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False, runs: Runs = RUNS
) -> None:
    """The queue, live: what runs, what waits and why, and workers over time."""
    from functools import partial

    from shoal.jobs.queue import client
    from shoal.terminal import queue_tables

    queue_tables.watch_queue(
        output.console(), partial(client.look, runs), partial(client.read_history, runs), once=once
    )


def up(
    quota: Annotated[
        list[str], typer.Option(help="At most so many cores for a user: --quota ann=4", show_default=False)
    ] = NO_OVERRIDES,
    policy: Annotated[str, typer.Option(help="How the machine is divided: elastic or first-come.")] = "elastic",
    engine: Annotated[str, typer.Option(help="Run all jobs with this engine.", show_default=False)] = "",
    web: Annotated[bool, typer.Option("--web", help="Serve the web page too, and print its link.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Serve the queue in the foreground, for several users, until Ctrl-C or `shoal down`."""
    import contextlib

    from shoal.jobs.queue import client, serve
    from shoal.web.beside import page_beside

    for user, cores in serve.parse_quotas(quota).items():
        client.set_quota(runs, user, cores)
    with page_beside(runs) if web else contextlib.nullcontext():
        serve.serve(runs, policy=policy, engine=serve.parse_engine(engine), show=output.print_lines)


def down(runs: Runs = RUNS) -> None:
    """End the daemon of the queue. Its runs are saved; the next daemon resumes them."""
    from shoal.jobs.queue import client

    ended = client.down(runs)
    output.print_lines("the daemon has ended" if ended else "no daemon serves the queue")
