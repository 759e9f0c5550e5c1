"""The verbs that look into a live run: stacks, profile."""

from __future__ import annotations

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


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(stacks)
    app.command()(profile)


def stacks(run: RunName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Where every thread of every worker is now, also of one that hangs. Needs no privileges."""
    from dataclasses import asdict

    from shoal.jobs import run_dir
    from shoal.jobs.inspection.stacks import collect_stacks
    from shoal.terminal.console import json_line

    for one in collect_stacks(run_dir.find(run, runs)):
        if as_json:
            print(json_line(asdict(one)))
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
    from shoal.terminal.console import json_line, make_console

    paths = run_dir.find(run, runs)
    made = profiles.profile_run(paths, steps=steps)
    where = profiles.trace_file(paths, made.name)
    if as_json:
        print(json_line({**made.model_dump(mode="json"), "trace": str(where)}))
    else:
        inspection_reports.print_profile(make_console(), made, where)
