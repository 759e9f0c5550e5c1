"""The verbs of the queue: one thin function each. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import output
from shoal.cli.options import NO_OVERRIDES, RUNS, AsJson, Runs, Sets

if TYPE_CHECKING:
    from shoal.jobs.queue.client import LocalQueue
    from shoal.jobs.queue.network.remote_queue import RemoteQueue
    from shoal.plan.queueing.work import Work

What = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="A job file; with --compress a run, or the number of a job.", show_default=False
    ),
]
Tls = Annotated[Path | None, typer.Option(help="A directory with cert.pem, key.pem and ca.pem.", show_default=False)]
JobId = Annotated[int, typer.Argument(help="The number of the job, as `shoal queue` shows it.", show_default=False)]
PANEL = "Queue"
NO_IDS: list[int] = []


def register(app: typer.Typer) -> None:
    for verb in (submit, queue, cancel, priority, release, top, up, down, offer):
        app.command(rich_help_panel=PANEL)(verb)


def submit(
    job: What,
    priority: Annotated[int, typer.Option(help="Higher goes first, from -100 to 100.")] = 0,
    user: Annotated[str, typer.Option(help="Whose job it is: for quotas and turns.", show_default=False)] = "",
    after: Annotated[list[int], typer.Option(help="Only after this job has finished.", show_default=False)] = NO_IDS,
    sets: Sets = NO_OVERRIDES,
    search: Annotated[bool, typer.Option("--search", help="Run the job's search instead of the job itself.")] = False,
    verify: Annotated[
        str, typer.Option(help="Run it with each of these numbers of workers and compare: 1,2,3", show_default=False)
    ] = "",
    compress: Annotated[
        bool, typer.Option("--compress", help="Compress a run, or what a job of the queue trains.")
    ] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Put a job, search, verification or compression into the queue. The first submit starts a daemon that runs it."""
    from shoal.spec.load import load_job
    from shoal.terminal import queue_tables

    work, asked = _work(search=search, verify=verify, compress=compress), _queue(runs)
    if work is None:
        entry = asked.submit_compression(job, sets, user=user, priority=priority, after=after)
    else:
        entry = asked.submit(load_job(job, overrides=sets), user=user, priority=priority, after=after, work=work)
    if as_json:
        output.print_json(entry.model_dump(mode="json"))
    else:
        queue_tables.print_submitted(output.console(), [entry])


def queue(
    why: Annotated[int | None, typer.Option(help="Why this job is where it is.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="All jobs, however many.")] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """What runs, what waits and why."""
    from shoal.errors import error
    from shoal.terminal import queue_tables

    asked = _queue(runs)
    view = asked.look()
    if why is not None and why not in view.entries:
        raise error("SH646", f"there is no job {why} in the queue", where="--why")
    rows = queue_tables.shown_entries(view, everything=everything) if why is None else [view.entries[why]]
    if as_json:
        output.print_json(queue_tables.queue_data(view, rows))
    elif why is None:
        queue_tables.print_queue(output.console(), view, everything=everything)
    else:
        queue_tables.print_why(output.console(), view.entries[why], view, asked.history(why))


def cancel(job: JobId, runs: Runs = RUNS) -> None:
    """Cancel a job of the queue. A running one is saved and stopped."""

    entry = _queue(runs).cancel(job)
    said = "is cancelled" if entry.has_ended else "is saved and stopped at its next step"
    output.print_lines(f"job {entry.id} {said}")


def priority(
    job: JobId,
    to: Annotated[int, typer.Argument(help="Higher goes first, from -100 to 100.", show_default=False)],
    runs: Runs = RUNS,
) -> None:
    """Change the priority of a job of the queue that has not ended. Negative: -- ID -5."""

    entry = _queue(runs).set_priority(job, to)
    output.print_lines(f"job {entry.id} has priority {entry.priority}")


def release(job: JobId, runs: Runs = RUNS) -> None:
    """Let a held or failed job of the queue go on."""
    from shoal.terminal import queue_tables

    queue_tables.print_submitted(output.console(), [_queue(runs).release(job)])


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False, runs: Runs = RUNS
) -> None:
    """The queue, live: what runs, what waits and why, and workers over time."""
    from shoal.terminal import queue_tables

    asked = _queue(runs)
    queue_tables.watch_queue(output.console(), asked.look, asked.history, once=once)


def up(
    quota: Annotated[
        list[str], typer.Option(help="At most so many cores for a user: --quota ann=4", show_default=False)
    ] = NO_OVERRIDES,
    policy: Annotated[str, typer.Option(help="How the machine is divided: elastic or first-come.")] = "elastic",
    engine: Annotated[
        str, typer.Option(help="Run all jobs with this engine: ray, or a YAML file with it.", show_default=False)
    ] = "",
    listen: Annotated[
        str, typer.Option(help="ADDRESS:PORT for users and machines of the network.", show_default=False)
    ] = "",
    tls: Tls = None,
    web: Annotated[bool, typer.Option("--web", help="Serve the web page too, and print its link.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Serve the queue in the foreground, for several users and machines, until Ctrl-C or `shoal down`."""
    import contextlib

    from shoal.errors import error
    from shoal.jobs.queue import client, serve
    from shoal.jobs.queue.clusters import Listening
    from shoal.spec.remote.engine_option import parse_engine
    from shoal.web.beside import page_beside

    if engine and listen:
        fix = "Leave one out: with --listen the jobs run on the machines that offer their cores."
        raise error("SH609", "--engine and --listen do not go together", where="--engine", fix=fix)
    for user, cores in serve.parse_quotas(quota).items():
        client.set_quota(runs, user, cores)
    listening = Listening(listen, tls) if listen else None
    with page_beside(runs) if web else contextlib.nullcontext():
        serve.serve(
            runs,
            policy=policy,
            engine=parse_engine(engine) if engine else None,
            listening=listening,
            show=output.print_lines,
        )


def offer(
    where: Annotated[str, typer.Argument(help="HOST:PORT, as `shoal up --listen` shows it.", show_default=False)],
    cores: Annotated[int, typer.Option(min=0, help="How many cores; 0: all.")] = 0,
    name: Annotated[str, typer.Option(help="The machine's name in the queue; its host name by default.")] = "",
    tls: Tls = None,
) -> None:
    """Offer this machine's cores to a queue until Ctrl-C. Jobs of its users run here, with your rights."""
    import os
    import sys

    from shoal.jobs.queue.network import offer as machine
    from shoal.jobs.queue.network.remote_queue import TOKEN_VARIABLE, QueueAddress

    address = QueueAddress.of(where, os.environ.get(TOKEN_VARIABLE, ""), tls)
    sys.exit(machine.offer(address, cores=cores, machine=name, tls=tls, show=output.print_lines))


def down(runs: Runs = RUNS) -> None:
    """End the daemon of the queue. Its runs are saved; the next daemon resumes them."""
    from shoal.jobs.queue import client

    ended = client.down(runs)
    output.print_lines("the daemon has ended" if ended else "no daemon serves the queue")


def _work(*, search: bool, verify: str, compress: bool) -> Work | None:
    """What is to be done with a job; None for a compression, which has no job file."""
    from shoal.errors import error
    from shoal.jobs.verify import parse_worker_counts
    from shoal.plan.queueing.work import TRAINING, SearchWork, VerifyWork

    if search + bool(verify) + compress > 1:
        raise error("SH609", "--search, --verify and --compress do not go together", fix="Submit each on its own.")
    if verify:
        return VerifyWork(workers=tuple(parse_worker_counts(verify, where="--verify")))
    return None if compress else SearchWork() if search else TRAINING


def _queue(runs: Path) -> LocalQueue | RemoteQueue:
    """The queue of another machine if SHOAL_QUEUE names it, else that of this directory of runs."""
    from shoal.jobs.queue.client import LocalQueue
    from shoal.jobs.queue.network.remote_queue import RemoteQueue, address_of_environment

    address = address_of_environment()
    return LocalQueue(runs) if address is None else RemoteQueue(address)
