"""The verbs that look into a live run: stacks, profile."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli import output
from shoal.cli.options import RUNS, AsJson, RunName, Runs

PANEL = "A run in progress"


def register(app: typer.Typer) -> None:
    for verb in (stacks, profile):
        app.command(rich_help_panel=PANEL)(verb)


def stacks(run: RunName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Where every thread of every worker is now, also of one that hangs. Needs no privileges."""
    from dataclasses import asdict

    from shoal.jobs import run_dir
    from shoal.jobs.inspection.stacks import collect_stacks

    for one in collect_stacks(run_dir.find(run, runs)):
        if as_json:
            output.print_json(asdict(one))
        else:
            print(f"{one.who}, process {one.pid} on {one.host}\n{one.problem or one.text}\n")


def profile(
    run: RunName,
    steps: Annotated[int, typer.Option(min=1, max=200, help="How many steps.")] = 20,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Profile some steps of a live run on all workers: one trace for chrome://tracing or Perfetto."""
    from shoal.jobs import run_dir
    from shoal.jobs.inspection import profiles
    from shoal.terminal import inspection_reports

    paths = run_dir.find(run, runs)
    made = profiles.profile_run(paths, steps=steps)
    where = profiles.trace_file(paths, made.name)
    if as_json:
        output.print_json({**made.model_dump(mode="json"), "trace": str(where)})
    else:
        inspection_reports.print_profile(output.console(), made, where)
