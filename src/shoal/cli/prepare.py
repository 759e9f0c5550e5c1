"""The verbs before a run: check, plan, split."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import output
from shoal.cli.options import NO_OVERRIDES, RUNS, AsJson, JobFile, Runs, Sets, load_for_workers, load_job

PANEL = "Before a run"


def register(app: typer.Typer) -> None:
    for verb in (check, plan, split):
        app.command(rich_help_panel=PANEL)(verb)


def check(
    job: JobFile,
    sets: Sets = NO_OVERRIDES,
    static: Annotated[
        bool, typer.Option("--static", help="Execute nothing: read the job and the source only.")
    ] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Is the job right? Reads the file, opens the data, makes one step on one batch: it executes the job's code."""
    from shoal.jobs import run_dir
    from shoal.jobs.probes import run_probe
    from shoal.terminal import notes, reports

    checked = run_dir.resolve_init_from(load_job(job, sets), runs)
    if static:
        reports.print_static_check(output.console(), checked, as_json=as_json)
        return
    said: list[str] = []
    answer = run_probe("check", checked, on_event=lambda event: said.append(notes.describe_event(event)))
    if as_json:
        output.print_json(answer)
        return
    output.print_lines(*filter(None, said))
    reports.print_check(output.console(), answer)
    output.console().print("The job can run: one step on one batch worked.", style="green")


def plan(
    job: JobFile,
    workers: Annotated[int | None, typer.Option(min=1, help="At most so many workers.", show_default=False)] = None,
    hosts: Annotated[int | None, typer.Option(min=1, max=64, help="So many machines like this one.")] = None,
    link: Annotated[str, typer.Option(help="Between them: 100mbit, 10gbit, 50MB/s.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="One way between them: 200us, 1ms.")] = "200us",
    speeds: Annotated[str, typer.Option(help="Of each machine, this one first: 1,0.25.", show_default=False)] = "",
    every: Annotated[bool, typer.Option("--all", help="Every way that was looked at.")] = False,
    sets: Sets = NO_OVERRIDES,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """How to run a job: measures it here, and predicts what workers, servers, codecs and threads would do."""
    from shoal.jobs import planner, run_dir
    from shoal.jobs.queue import client
    from shoal.plan.costs import units
    from shoal.plan.costs.inputs import PlanRequest
    from shoal.terminal import hints, plan_report

    checked = load_for_workers(job, sets, workers)
    if workers and not as_json and (hint := hints.lanes_hint(checked, job, sets)):
        output.print_lines(hint)
    each = units.parse_speeds(speeds, where="--speeds", hosts=hosts) if speeds else ()
    wanted = PlanRequest(
        units.parse_seconds(latency, where="--latency"),
        units.parse_bytes_per_s(link, where="--link"),
        hosts=len(each) or hosts or 1,
        most=workers or 0,
        speeds=each,
    )
    planned = planner.plan(run_dir.resolve_init_from(checked, runs), wanted)
    not_kept = client.keep_planned_speeds(runs, checked, planned.speeds)
    if as_json:
        output.print_json(planned.to_json_data())
    else:
        command = shlex.join(["shoal", "run", str(job), *(word for one in sets for word in ("--set", one))])
        plan_report.print_plan(output.console(), planned, command=command, show_all=every)
        output.print_lines(*filter(None, [not_kept]))


def split(
    job: JobFile,
    sets: Sets = NO_OVERRIDES,
    export: Annotated[Path | None, typer.Option(help="Write the split to Parquet in this directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """What the split looks like: sizes, balance, leaks, and what was checked for them."""
    from shoal.jobs.probes import run_probe
    from shoal.terminal import splits

    checked = load_job(job, sets)
    answer = run_probe("split", checked, export=str(export.resolve()) if export else None)
    if as_json:
        output.print_json(answer)
    else:
        splits.print_split(output.console(), answer)
