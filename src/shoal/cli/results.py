"""The verbs about runs, live or past: runs, show, compare, evaluate, predict, logs, export, tag."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli import compress, output, proofs, search
from shoal.cli.options import RUNS, AsJson, RunName, Runs

if TYPE_CHECKING:
    from shoal.spec.run_paths import RunPaths

PANEL = "Runs and results"


def register(app: typer.Typer) -> None:
    app.command("runs", rich_help_panel=PANEL)(list_runs)
    for verb in (show, compare, evaluate, predict, logs, export, tag):
        app.command(rich_help_panel=PANEL)(verb)


def list_runs(runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """List the runs."""
    from shoal.jobs import run_index
    from shoal.terminal import reports

    rows = run_index.list_summaries(runs)
    if as_json:
        output.print_json(rows)
    else:
        reports.print_runs(output.console(), rows)


def show(run: RunName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """A run: its state, its curves, its receipt."""
    from shoal.jobs import run_dir, run_executor, run_index
    from shoal.spec.receipt import read_receipt_file
    from shoal.terminal import reports

    paths = run_dir.find(run, runs)
    if paths.search_journal.is_file():
        search.show_search(str(paths.root), runs=runs, as_json=as_json)
        return
    console = output.console()
    stored = read_receipt_file(paths.receipt)
    if as_json:
        receipt = stored.found.model_dump(mode="json") if stored.found else None
        output.print_json({**run_index.run_summary(paths), "receipt": receipt, "receipt_damage": stored.damage})
        return
    if paths.folds:
        done = [(one, read_receipt_file(one.receipt)) for one in paths.folds]
        reports.print_folds(console, [one.own for _, one in done if one.own])
        for one, fold in done:
            if fold.own is None:
                reports.print_run(console, run_executor.load_run_state(one), width=console.width)
                reports.print_receipt_damage(console, fold.damage, one)
    else:
        reports.print_run(console, run_executor.load_run_state(paths), width=console.width)
    if stored.own:
        console.print()
        reports.print_receipt(console, stored.own)
    compress.print_report_of(console, paths)
    proofs.print_verdict_of(console, paths)
    reports.print_receipt_damage(console, stored.damage, paths)


def compare(
    names: Annotated[list[str], typer.Argument(help="Two or more runs.", show_default=False)],
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Runs side by side: what differs in the jobs, and in the results."""
    from shoal.jobs import run_dir, run_index
    from shoal.terminal import reports

    columns = [(name, run_index.comparison_column(run_dir.find(name, runs))) for name in names]
    if as_json:
        output.print_json(dict(columns))
    else:
        reports.print_comparison(output.console(), columns)


def evaluate(
    run: RunName,
    data: Annotated[str, typer.Option(help="Other data of the same kind: a path or URL.")] = "",
    target: Annotated[str, typer.Option(help="The other data's target file, where the source has one.")] = "",
    part: Annotated[str, typer.Option(help="train, validation or test.")] = "",
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the last.")] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Metrics of a run on a part of its data, or on any other data."""
    from shoal.errors import error, plural
    from shoal.jobs import run_dir, run_index
    from shoal.jobs.probes import run_probe
    from shoal.spec.load import load_run_job
    from shoal.terminal import formatting

    paths = run_dir.find(run, runs)
    if paths.folds:
        one = f"{paths.name}/{paths.folds[0].name}"
        raise error("SH606", f"'{paths.name}' has folds", where=run, fix=f"Name one of them, such as {one}.")
    job = load_run_job(paths.job)
    weights, rows = (find(paths, job, best=best) for find in (run_index.find_weights, run_index.find_checkpoint))
    other = run_index.source_override(job, data, target)
    answer = run_probe("evaluate", job, weights=weights, rows=rows, part=part or None, source=other)
    if as_json:
        output.print_json(answer)
        return
    for name, metrics in answer["metrics"].items():
        samples = plural(answer["samples"][name], "sample")
        output.print_lines(f"{name} ({samples}): {formatting.metrics(metrics)}")


def predict(
    run: RunName,
    data: Annotated[str, typer.Option(help="Data of the job's kind, without labels: a path or URL.")],
    out: Annotated[Path, typer.Option(help="The file to write: .parquet or .csv.")] = Path("predictions.parquet"),
    workers: Annotated[int, typer.Option(min=1, max=256, help="So many processes.")] = 1,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint instead of the last.")] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """What a run's model says of new data: a row for each row, in the same order."""
    from shoal.errors import plural
    from shoal.jobs import run_dir
    from shoal.jobs.predictions import predict as write

    found = write(run_dir.find(run, runs), data=data, out=out, workers=workers, best=best)
    if as_json:
        output.print_json({"out": str(found.out), "samples": found.samples, "deaths_survived": found.deaths_survived})
        return
    output.print_lines(f"{plural(found.samples, 'prediction')}: {found.out}")


def logs(
    run: RunName,
    who: Annotated[str, typer.Argument(help="worker-1 or server-0; all if left out.", show_default=False)] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the run is driven.")] = False,
    grep: Annotated[str, typer.Option(help="Only lines that contain this text.", show_default=False)] = "",
    lines: Annotated[int, typer.Option(min=1, max=100_000, help="So many last lines of each.")] = 100,
    runs: Runs = RUNS,
) -> None:
    """What workers and servers printed, also after their death."""
    from shoal.jobs import run_dir
    from shoal.storage import log_printing

    paths = run_dir.find(run, runs)
    log_printing.print_logs(paths, who, text=grep, lines=lines, follow=follow, write=print)


def export(
    run: RunName,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            "--to",
            help="Curves: csv, parquet, tensorboard, mlflow. The model: safetensors, onnx, pt2, hf. All: html.",
        ),
    ] = "csv",
    out: Annotated[str, typer.Option(help="The file, or the address of MLflow's server.", show_default=False)] = "",
    runs: Runs = RUNS,
) -> None:
    """A run's curves or its model for other programs, or the whole run as one HTML file."""
    from shoal.jobs import run_dir
    from shoal.storage import export as exports

    paths = run_dir.find(run, runs)
    if kind == "mlflow":
        from shoal.storage.mlflow_export import export_to_mlflow

        print(export_to_mlflow(paths, out or os.environ.get("MLFLOW_TRACKING_URI", "")))
        return
    target = Path(out or f"{paths.name}{'-' if kind in exports.DIRECTORIES else '.'}{kind}")
    if kind == "html":
        _export_html(paths, target)
    else:
        exports.export(paths, kind, target)
    print(target)


def _export_html(paths: RunPaths, target: Path) -> None:
    from shoal.errors import error
    from shoal.storage.export import check_target

    try:
        from shoal.web.single_file import export_html
    except ModuleNotFoundError as failure:
        raise error("SH207", f"the page needs {failure.name}", fix="pip install 'shoal[web]'") from None
    check_target(target)
    export_html(paths, target)


def tag(
    run: RunName,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add.", show_default=False)] = None,
    remove: Annotated[list[str] | None, typer.Option(help="A tag to remove.", show_default=False)] = None,
    runs: Runs = RUNS,
) -> None:
    """Tag a run, or show its tags."""
    from shoal.jobs import run_dir
    from shoal.storage.tags import change_tags

    paths = run_dir.find(run, runs)
    print(" ".join(change_tags(runs, paths.parent_run.name, add=tags or (), remove=remove or ())))
