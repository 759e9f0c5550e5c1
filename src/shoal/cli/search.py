"""The verbs of searches: `shoal search JOB`, and `shoal search resume`, `stop`, `show`, `best`, `compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shoal.cli import output
from shoal.cli.options import NO_OVERRIDES, RUNS, AsJson, JobFile, Quiet, Runs, Verbs

if TYPE_CHECKING:
    from shoal.jobs.search.driver import SearchOutcome

START = "start"


class SearchGroup(Verbs):
    """`shoal search JOB` starts a search; a first word that is a verb is that verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [START, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=SearchGroup,
    no_args_is_help=True,
    help="Search over jobs: shoal search JOB starts one. The same search, the same winner, on any number of workers.",
)


SearchName = Annotated[str, typer.Argument(help="A search: its name, its path, or 'last'.", show_default=False)]
Workers = Annotated[int | None, typer.Option(min=1, help="Workers for all trials together.", show_default=False)]


@app.command(START)
def start(
    job: JobFile,
    space: Annotated[Path | None, typer.Option(help="A file with the search, in place of the job's own.")] = None,
    workers: Workers = None,
    sets: Annotated[
        list[str], typer.Option("--set", help="Change a field of the job: --set search.slots=8", show_default=False)
    ] = NO_OVERRIDES,
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Start a search; the word `start` may be left out."""
    from shoal.jobs.search.driver import run_search
    from shoal.jobs.search.space_file import load_search_job
    from shoal.terminal.search_live import make_search_display

    checked = load_search_job(job, space=space, overrides=sets)
    with make_search_display(output.console(as_json), as_json=as_json, quiet=quiet) as shown:
        outcome = run_search(checked, runs=runs, workers=workers, on_update=shown.on_update)
    _print_and_exit(outcome, as_json=as_json)


@app.command()
def resume(
    search: SearchName, workers: Workers = None, runs: Runs = RUNS, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Go on with a search after a crash, Ctrl-C or reboot."""
    resume_search(search, workers=workers, runs=runs, as_json=as_json, quiet=quiet)


def resume_search(search: str, *, workers: int | None, runs: Path, as_json: bool, quiet: bool) -> NoReturn:
    from shoal.jobs.search import driver, search_dir
    from shoal.terminal.search_live import make_search_display

    paths = search_dir.find(search, runs)
    with make_search_display(output.console(as_json), as_json=as_json, quiet=quiet) as shown:
        outcome = driver.resume_search(paths, workers=workers, on_update=shown.on_update)
    _print_and_exit(outcome, as_json=as_json)


@app.command()
def stop(search: SearchName, runs: Runs = RUNS) -> None:
    """Let all trials of a search save and exit; `shoal search resume` goes on."""
    stop_search(search, runs=runs)


def stop_search(search: str, *, runs: Path) -> None:
    from shoal.jobs.search import search_dir, stopping

    paths = search_dir.find(search, runs)
    ended = stopping.stop_search(paths)
    told = "ended before it could be stopped" if ended else f"stopped. Go on with: shoal search resume {paths.name}"
    output.print_lines(f"{paths.name}: {told}")


@app.command()
def show(
    search: SearchName,
    runs: Runs = RUNS,
    as_json: AsJson = False,
    png: Annotated[Path | None, typer.Option(help="Also draw it into this file.", show_default=False)] = None,
) -> None:
    """A search: its trials, its history, which values matter, its receipt."""
    show_search(search, runs=runs, as_json=as_json, png=png)


def show_search(search: str, *, runs: Path, as_json: bool, png: Path | None = None) -> None:
    from shoal.jobs.search.summary import load_search, search_data
    from shoal.terminal import search_png, search_report

    found = load_search(search, runs)
    if png is not None:
        search_png.draw_search(found, png)
    if as_json:
        output.print_json(search_data(found))
    else:
        search_report.print_search(output.console(), found)


@app.command()
def best(search: SearchName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Print the job file of the winner, or of the best trial so far."""
    from shoal.jobs.search.summary import best_job_text, load_search, trial_data

    found = load_search(search, runs)
    text = best_job_text(found)
    if as_json and found.best is not None:
        output.print_json({**trial_data(found, found.best), "job": text})
    else:
        print(text, end="")


@app.command()
def compare(first: SearchName, second: SearchName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Two searches side by side: did they decide and find the same? Exits with 1 if not."""
    from shoal.jobs.search.summary import compare_searches, load_search, search_data
    from shoal.terminal import search_report

    compared = compare_searches(load_search(first, runs), load_search(second, runs))
    if as_json:
        alike = compared.first.paths.name == compared.second.paths.name
        both = {
            str(found.paths.root) if alike else found.paths.name: search_data(found)
            for found in (compared.first, compared.second)
        }
        output.print_json({"same": compared.same, "difference": compared.difference, "searches": both})
    else:
        search_report.print_search_comparison(output.console(), compared)
    sys.exit(0 if compared.same else 1)


def _print_and_exit(outcome: SearchOutcome, *, as_json: bool) -> NoReturn:
    """Print the receipt or how to go on, and exit with the outcome's code."""
    from shoal.terminal import reports, search_report

    if outcome.receipt is None:
        fix = f"{outcome.paths.name} is {outcome.status}: shoal search resume {outcome.paths.name} goes on."
        reports.print_lines(output.console(True), fix)
    elif as_json:
        output.print_json({"kind": "receipt", **json.loads(outcome.receipt.model_dump_json())})
    else:
        search_report.print_search_receipt(output.console(), outcome.receipt)
    sys.exit(outcome.exit_code)
