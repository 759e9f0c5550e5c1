"""`shoal compress`. Never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shoal.cli import output
from shoal.cli.options import RUNS, AsJson, RunName, Runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from shoal.jobs.compression.compress import Compressed
    from shoal.spec.compression.config import CompressConfig
    from shoal.spec.job import WorkersConfig
    from shoal.spec.run_paths import RunPaths

NO_TARGETS: list[str] = []
PANEL = "Train"


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(compress)


def compress(
    run: RunName,
    target: Annotated[
        list[str], typer.Option("--target", help="'size<25%' or 'latency<50%' of the parent.", show_default=False)
    ] = NO_TARGETS,
    max_drop: Annotated[str, typer.Option(help="How much worse it may be: 0.5%.", show_default=False)] = "",
    lossless: Annotated[bool, typer.Option("--lossless", help="Only what is proven; nothing is trained.")] = False,
    replay: Annotated[Path | None, typer.Option(help="Take the steps of this recipe.json.")] = None,
    workers: Annotated[str, typer.Option(help="For tuning: 2, or 1..8.", show_default=False)] = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Make a run's model smaller and faster, with proof that it still does its job."""
    from shoal.errors import error
    from shoal.jobs import run_dir
    from shoal.jobs.compression.compress import CompressRequest
    from shoal.jobs.compression.compress import compress as climb
    from shoal.jobs.compression.compress import replay as take_steps
    from shoal.spec.compression.measured import read_recipe
    from shoal.spec.load import load_run_job

    if replay is not None and (target or max_drop or lossless):
        message = "--replay takes the steps of the recipe, and decides nothing"
        raise error("SH609", message, where="--replay", fix="Leave out --target, --max-drop and --lossless.")
    parent = run_dir.find(run, runs)
    config = _config(load_run_job(parent.job).compress, target, max_drop, lossless=lossless)
    console = output.console(as_json)
    request = CompressRequest(
        parent, runs, workers=_workers(workers), show=lambda text: console.print(text, style="dim")
    )
    recipe = None if replay is None else read_recipe(replay)
    _print_and_exit(lambda: climb(request, config) if recipe is None else take_steps(request, recipe), as_json=as_json)


def resume_compression(paths: RunPaths, *, as_json: bool, quiet: bool) -> NoReturn:
    from shoal.jobs.compression.compress import resume

    console = output.console(as_json)
    console.quiet = quiet
    _print_and_exit(lambda: resume(paths, show=lambda text: console.print(text, style="dim")), as_json=as_json)


def _config(config: CompressConfig, targets: list[str], max_drop: str, *, lossless: bool) -> CompressConfig:
    from shoal.plan.compression import parse_drop, parse_targets

    update: dict[str, object] = {}
    if targets:
        update["target"] = parse_targets(targets)
    if max_drop:
        update["max_drop"] = parse_drop(max_drop)
    if lossless:
        update["steps"] = ["lossless"]
    return config.model_copy(update=update)


def _workers(text: str) -> WorkersConfig | None:
    from shoal.errors import error
    from shoal.spec.job import WorkersConfig

    try:
        return WorkersConfig.model_validate(text) if text else None
    except ValueError:
        message = f"'{text}' is not a number of workers"
        raise error("SH609", message, where="--workers", fix="Write 2 or 1..8.") from None


def _print_and_exit(make: Callable[[], Compressed], *, as_json: bool) -> NoReturn:
    from shoal.errors import EXIT_INTERRUPTED, EXIT_TERMINATED
    from shoal.jobs.compression.errands import StoppedError

    try:
        made = make()
    except StoppedError as stopped:
        sys.exit(EXIT_TERMINATED if str(stopped) == "terminated" else EXIT_INTERRUPTED)
    _print(made, as_json=as_json)
    sys.exit(0 if made.report.targets_met else _missed(made))


def _print(made: Compressed, *, as_json: bool) -> None:
    from shoal.terminal.compression import print_report

    if as_json:
        output.print_json({"run": made.paths.name, **made.report.model_dump(mode="json")})
        return
    console = output.console()
    print_report(console, made.report)
    console.print(f"Written: {made.paths.root}")


def _missed(made: Compressed) -> int:
    """The exit code of a result that does not meet the targets; the reason goes to standard error."""
    from shoal.errors import error

    message = f"the best that was found is '{made.report.chosen}', in {made.paths.name}"
    failure = error("SH663", message, where=made.report.parent)
    output.console(True).print(str(failure), markup=False)
    return failure.exit_code


def print_report_of(console: Console, paths: RunPaths) -> None:
    """The report of a run that a compression made; nothing for other runs."""
    from shoal.spec.compression.measured import REPORT, read_report
    from shoal.terminal.compression import print_report

    if report := read_report(paths.root / REPORT):
        console.print()
        print_report(console, report)
