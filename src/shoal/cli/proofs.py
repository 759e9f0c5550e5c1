"""The verbs that test the promise: verify, chaos."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import output
from shoal.cli.options import NO_OVERRIDES, RUNS, AsJson, JobFile, Quiet, Runs, Sets, load_job

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.spec.run_paths import RunPaths

PANEL = "Proofs"


def register(app: typer.Typer) -> None:
    for verb in (verify, chaos):
        app.command(rich_help_panel=PANEL)(verb)


def verify(
    job: JobFile,
    workers: Annotated[str, typer.Option(help="Numbers of workers to compare.")] = "1,2,3",
    steps: Annotated[int, typer.Option(help="So many steps instead of the job's own.", show_default=False)] = 0,
    sets: Sets = NO_OVERRIDES,
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Same weights on any number of workers? Runs the job with each; names the tensor where they part."""
    from shoal.jobs.verify import parse_worker_counts, verify
    from shoal.terminal import proofs
    from shoal.terminal.live import make_display

    wanted = parse_worker_counts(workers)
    checked = load_job(job, [*sets, *([f"steps={steps}", "epochs=null"] if steps else [])])
    with make_display(output.console(), as_json=False, quiet=quiet or as_json) as shown:
        verdict = verify(checked, wanted, runs=runs, on_event=shown.on_event)
    if verdict.stopped is not None:
        output.print_and_exit(verdict.stopped, as_json=as_json)
    proofs.print_verify(output.console(), verdict, as_json=as_json)
    sys.exit(0 if verdict.same else 1)


def chaos(
    job: JobFile,
    kills: Annotated[int, typer.Option(min=0, help="kill -9 of a worker.")] = 5,
    joins: Annotated[int, typer.Option(min=0, help="One worker more.")] = 1,
    freezes: Annotated[int, typer.Option(min=0, help="A worker stands still (SIGSTOP).")] = 0,
    slow: Annotated[int, typer.Option(min=0, help="A worker becomes several times slower.")] = 0,
    server_kills: Annotated[int, typer.Option(min=0, help="kill -9 of a server.")] = 0,
    seed: Annotated[int, typer.Option(help="Another seed is another plan.")] = 0,
    plan: Annotated[Path | None, typer.Option(help="A file of faults instead: kill worker 2 at step 7")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers to begin with.", show_default=False)] = 0,
    against: Annotated[str, typer.Option(help="A finished run of the same job, instead of running it first.")] = "",
    sets: Sets = NO_OVERRIDES,
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Kill, freeze, slow and add workers on purpose, kill servers: are the weights those of the undisturbed run?"""
    from shoal.jobs import run_index
    from shoal.jobs.chaos import chaos
    from shoal.plan import fault_plan
    from shoal.terminal import proofs
    from shoal.terminal.live import make_display

    numbers: dict[fault_plan.FaultKind, int] = {
        "kill": kills, "freeze": freezes, "slow": slow, "join": joins, "kill server": server_kills,
    }  # fmt: skip
    with make_display(output.console(), as_json=False, quiet=quiet or as_json) as shown:
        verdict = chaos(
            load_job(job, sets),
            fault_plan.read_fault_plan(plan) if plan else numbers,
            workers=workers or None,
            seed=seed,
            against=run_index.require_receipt(against, runs) if against else None,
            runs=runs,
            on_event=shown.on_event,
        )
    if verdict.outcome.receipt is None:
        output.print_and_exit(verdict.outcome, as_json=as_json)
    proofs.print_chaos(output.console(), verdict, as_json=as_json)
    sys.exit(0 if verdict.same else 1)


def print_verdict_of(console: Console, paths: RunPaths) -> None:
    """The verdict of a verification that the queue ran; nothing for other runs."""
    from shoal.jobs.queue.verification import read_verdict
    from shoal.terminal.proofs import print_verify

    if verdict := read_verdict(paths.root):
        console.print()
        print_verify(console, verdict, as_json=False)
