"""The command line: one thin function per verb. Never imports torch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shoal import cli_cluster, cli_compress, cli_inspect, cli_queue, cli_search, cli_web

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.jobs.run_result import RunResult
    from shoal.spec.job import Job

app = typer.Typer(
    name="shoal",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on whatever machines there are: the same weights, bit for bit, through any crash.",
)
app.add_typer(cli_search.app, name="search")


def _check_runs(runs: Path) -> Path:
    from shoal.jobs import run_dir

    return run_dir.check_runs(runs)


JobFile = Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)]
RunName = Annotated[str, typer.Argument(help="A run: its name, its path, or 'last'.", show_default=False)]
Runs = Annotated[Path, typer.Option("--runs", help="The local directory of runs.", callback=_check_runs)]
Sets = Annotated[
    list[str],
    typer.Option("--set", help="Change a field of the job: --set optimizer.args.lr=0.01", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Rows of JSON for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the receipt.")]

RUNS = Path("runs")
NO_OVERRIDES: list[str] = []


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    """Train PyTorch models on whatever machines there are: the same weights, bit for bit, through any crash."""
    if version:
        from shoal import __version__

        print(f"shoal {__version__}")
        raise typer.Exit


@app.command()
def run(
    job: JobFile,
    sets: Sets = NO_OVERRIDES,
    workers: Annotated[str, typer.Option(help="2, or 1..8 for elastic.")] = "",
    listen: Annotated[str, typer.Option(help="The address of this machine where others may join.")] = "",
    engine: cli_cluster.Engine = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train: run a job, show its progress, print the receipt."""
    from shoal.jobs import run_executor
    from shoal.terminal import hints, reports
    from shoal.terminal.live import make_display

    asked = [f"{field}={value}" for field, value in (("workers", workers), ("network.listen", listen)) if value]
    checked = _load(job, [*cli_cluster.engine_kind(engine), *sets, *asked])
    if workers and not (quiet or as_json) and (hint := hints.lanes_hint(checked, job, sets)):
        reports.print_lines(_console(), hint)
    if checked.sync.kind == "auto" and not (quiet or as_json):
        reports.print_lines(_console(), "planning: the job is measured for some seconds")
    with make_display(_console(as_json), as_json=as_json, quiet=quiet) as shown:
        outcome = run_executor.run(checked, runs=runs, on_event=shown.on_event)
    _print_and_exit(outcome, as_json=as_json)


@app.command()
def resume(
    run: RunName,
    sets: Sets = NO_OVERRIDES,
    engine: cli_cluster.Engine = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run after a crash, Ctrl-C or reboot."""
    from shoal.jobs import run_dir, run_executor
    from shoal.terminal.live import make_display

    paths = run_dir.find(run, runs)
    if paths.search_journal.is_file() and not (sets or engine):
        cli_search.resume_search(str(paths.root), workers=None, runs=runs, as_json=as_json, quiet=quiet)
    with make_display(_console(as_json), as_json=as_json, quiet=quiet) as shown:
        outcome = run_executor.resume(
            paths, overrides=[*cli_cluster.engine_kind(engine), *sets], on_event=shown.on_event
        )
    _print_and_exit(outcome, as_json=as_json)


@app.command()
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

    checked = run_dir.resolve_init_from(_load(job, sets), runs)
    if static:
        reports.print_static_check(_console(), checked, as_json=as_json)
        return
    said: list[str] = []
    answer = run_probe("check", checked, on_event=lambda event: said.append(notes.describe_event(event)))
    if as_json:
        _print_json(answer)
        return
    reports.print_lines(_console(), *filter(None, said))
    reports.print_check(_console(), answer)
    _console().print("The job can run: one step on one batch worked.", style="green")


@app.command()
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
    from shoal.plan.costs import units
    from shoal.plan.costs.inputs import PlanRequest
    from shoal.terminal import hints, plan_report, reports

    checked = _load_for_workers(job, sets, workers)
    if workers and not as_json and (hint := hints.lanes_hint(checked, job, sets)):
        reports.print_lines(_console(), hint)
    each = units.parse_speeds(speeds, where="--speeds", hosts=hosts) if speeds else ()
    wanted = PlanRequest(
        units.parse_seconds(latency, where="--latency"),
        units.parse_bytes_per_s(link, where="--link"),
        hosts=len(each) or hosts or 1,
        most=workers or 0,
        speeds=each,
    )
    planned = planner.plan(run_dir.resolve_init_from(checked, runs), wanted)
    if as_json:
        _print_json(planned.to_json_data())
    else:
        command = shlex.join(["shoal", "run", str(job), *(word for one in sets for word in ("--set", one))])
        plan_report.print_plan(_console(), planned, command=command, show_all=every)


@app.command()
def split(
    job: JobFile,
    sets: Sets = NO_OVERRIDES,
    export: Annotated[Path | None, typer.Option(help="Write the split to Parquet in this directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """What the split looks like: sizes, balance, leaks, and what was checked for them."""
    from shoal.jobs.probes import run_probe
    from shoal.terminal import splits

    checked = _load(job, sets)
    answer = run_probe("split", checked, export=str(export.resolve()) if export else None)
    if as_json:
        _print_json(answer)
    else:
        splits.print_split(_console(), answer)


@app.command()
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
    from shoal.errors import error
    from shoal.jobs import run_dir, run_index
    from shoal.jobs.probes import run_probe
    from shoal.spec.load import load_run_job
    from shoal.terminal import formatting, reports

    paths = run_dir.find(run, runs)
    if paths.folds:
        one = f"{paths.name}/{paths.folds[0].name}"
        raise error("SH606", f"'{paths.name}' has folds", where=run, fix=f"Name one of them, such as {one}.")
    job = load_run_job(paths.job)
    weights, rows = (find(paths, job, best=best) for find in (run_index.find_weights, run_index.find_checkpoint))
    other = run_index.source_override(job, data, target)
    answer = run_probe("evaluate", job, weights=weights, rows=rows, part=part or None, source=other)
    if as_json:
        _print_json(answer)
        return
    for name, metrics in answer["metrics"].items():
        count = formatting.count(answer["samples"][name])
        reports.print_lines(_console(), f"{name} ({count} samples): {formatting.metrics(metrics)}")


@app.command()
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
    from shoal.jobs import run_dir
    from shoal.jobs.predictions import predict as write
    from shoal.terminal import formatting, reports

    found = write(run_dir.find(run, runs), data=data, out=out, workers=workers, best=best)
    if as_json:
        _print_json({"out": str(found.out), "samples": found.samples, "deaths_survived": found.deaths_survived})
        return
    reports.print_lines(_console(), f"{formatting.count(found.samples)} predictions: {found.out}")


@app.command(name="runs")
def list_runs(runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """List the runs."""
    from shoal.jobs import run_index
    from shoal.terminal import reports

    rows = run_index.list_summaries(runs)
    if as_json:
        _print_json(rows)
    else:
        reports.print_runs(_console(), rows)


@app.command()
def show(run: RunName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """A run: its state, its curves, its receipt."""
    from shoal.jobs import run_dir, run_executor, run_index
    from shoal.spec.receipt import read_receipt_file
    from shoal.terminal import reports

    paths = run_dir.find(run, runs)
    if paths.search_journal.is_file():
        cli_search.show_search(str(paths.root), runs=runs, as_json=as_json)
        return
    console = _console()
    stored = read_receipt_file(paths.receipt)
    if as_json:
        receipt = stored.found.model_dump(mode="json") if stored.found else None
        _print_json({**run_index.run_summary(paths), "receipt": receipt, "receipt_damage": stored.damage})
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
    cli_compress.print_report_of(console, paths)
    reports.print_receipt_damage(console, stored.damage, paths)


@app.command()
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
        _print_json(dict(columns))
    else:
        reports.print_comparison(_console(), columns)


@app.command()
def scale(
    run: RunName,
    workers: Annotated[int | None, typer.Argument(help="How many workers from now on.", show_default=False)] = None,
    servers: Annotated[int | None, typer.Option(help="How many servers from now on.", show_default=False)] = None,
    runs: Runs = RUNS,
) -> None:
    """Change the number of workers or servers of a run in progress."""
    from shoal.jobs import commands, run_dir
    from shoal.terminal import reports

    answer = commands.scale(run_dir.find(run, runs), workers, servers=servers)
    wanted = [f"{answer.wanted} workers"] + ([f"{answer.servers_wanted} servers"] if answer.servers_wanted else [])
    reports.print_lines(_console(), f"{' and '.join(wanted)} are wanted", *answer.notes)


@app.command()
def drain(
    run: RunName,
    who: Annotated[str, typer.Argument(help="worker-2, or 2, or server-3.", show_default=False)],
    runs: Runs = RUNS,
) -> None:
    """Let a worker or server leave without loss, and wait until it has left."""
    from shoal.jobs import commands, run_dir
    from shoal.terminal import reports

    paths = run_dir.find(run, runs)
    seat, answer = commands.drain(paths, who)
    wanted = answer.wanted if seat.role == "worker" else answer.servers_wanted
    reports.print_lines(_console(), f"{seat.name} is asked to leave; {wanted} {seat.role}s are wanted from now on")
    went = commands.wait_for_departure(paths, seat)
    reports.print_lines(_console(), f"{seat.name} {went}" if went else "the run ended first")


@app.command()
def stop(run: RunName, runs: Runs = RUNS) -> None:
    """Save a run and stop it; `shoal resume` continues it."""
    from shoal.jobs import commands, run_dir
    from shoal.terminal import reports

    paths = run_dir.find(run, runs)
    if paths.search_journal.is_file():
        cli_search.stop_search(str(paths.root), runs=runs)
        return
    reports.print_stopped(_console(), paths.name, commands.stop(paths), folds=bool(paths.folds))


@app.command()
def token(run: RunName, runs: Runs = RUNS) -> None:
    """Print a run's token: whoever has it can join the run."""
    from shoal.jobs import commands, run_dir

    print(commands.read_token(run_dir.find(run, runs)))


@app.command()
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
    checked = _load(job, [*sets, *([f"steps={steps}", "epochs=null"] if steps else [])])
    with make_display(_console(), as_json=False, quiet=quiet or as_json) as shown:
        verdict = verify(checked, wanted, runs=runs, on_event=shown.on_event)
    if verdict.stopped is not None:
        _print_and_exit(verdict.stopped, as_json=as_json)
    proofs.print_verify(_console(), verdict, as_json=as_json)
    sys.exit(0 if verdict.same else 1)


@app.command()
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
    with make_display(_console(), as_json=False, quiet=quiet or as_json) as shown:
        verdict = chaos(
            _load(job, sets),
            fault_plan.read_fault_plan(plan) if plan else numbers,
            workers=workers or None,
            seed=seed,
            against=run_index.require_receipt(against, runs) if against else None,
            runs=runs,
            on_event=shown.on_event,
        )
    if verdict.outcome.receipt is None:
        _print_and_exit(verdict.outcome, as_json=as_json)
    proofs.print_chaos(_console(), verdict, as_json=as_json)
    sys.exit(0 if verdict.same else 1)


cli_queue.register(app)
cli_cluster.register(app)
cli_web.register(app)
cli_inspect.register(app)


def _load_for_workers(path: Path, sets: list[str], workers: int | None) -> Job:
    """Load the job for up to this many workers; a sharded job gets exactly this many."""
    from shoal.errors import ErrorGroup

    if not workers:
        return _load(path, sets)
    try:
        return _load(path, [*sets, f"workers=1..{workers}"])
    except ErrorGroup:
        return _load(path, [*sets, f"workers={workers}"])


def _load(path: Path, sets: list[str]) -> Job:
    from shoal.spec.load import load_job

    return load_job(path, overrides=sets)


def _console(to_stderr: bool = False) -> Console:
    from shoal.terminal.console import make_console

    return make_console(to_stderr=to_stderr)


def _print_json(value: Any) -> None:
    from shoal.terminal.console import json_line

    print(json_line(value))


def _print_and_exit(result: RunResult, *, as_json: bool) -> NoReturn:
    """Print the result, and exit with its exit code."""
    from shoal.terminal import exit_status

    sys.exit(exit_status.print_result(result, _console(), _console(True), as_json=as_json))


cli_compress.register(app)


def main() -> NoReturn:
    """User errors are printed without a traceback; any other exception is a bug and shows one."""
    from shoal.errors import EXIT_INTERRUPTED, ShoalError, from_os_error

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except (ShoalError, OSError) as failure:
        known = failure if isinstance(failure, ShoalError) else from_os_error(failure)
        if known is None:
            raise
        from shoal.terminal import reports

        reports.print_error(_console(True), known)
        sys.exit(known.exit_code)
    sys.exit(0)
