"""The command line: one thin function per verb. Never imports torch."""

from __future__ import annotations

import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.jobs.drive import Summary
    from shoal.jobs.run import Outcome
    from shoal.spec.job import Job

app = typer.Typer(
    name="shoal",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch models on whatever machines there are: the same weights, bit for bit, through any crash.",
)

JobFile = Annotated[Path, typer.Argument(help="The job file (YAML).", show_default=False)]
RunName = Annotated[str, typer.Argument(help="A run: its name, its path, or 'last'.", show_default=False)]
Runs = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]
Sets = Annotated[
    list[str],
    typer.Option("--set", help="Change a field of the job: --set optimizer.args.lr=0.01", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Rows of JSON for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only the receipt.")]

RUNS = Path("runs")
NOTHING: list[str] = []


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
    sets: Sets = NOTHING,
    workers: Annotated[str, typer.Option(help="2, or 1..8 for elastic.")] = "",
    listen: Annotated[str, typer.Option(help="The address of this machine where others may join.")] = "",
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train: run a job, show its progress, print the receipt."""
    from shoal.jobs import drive
    from shoal.terminal import hints, reports
    from shoal.terminal.live import display

    asked = {"workers": workers, "engine.listen": listen}
    checked = _load(job, [*sets, *(f"{field}={value}" for field, value in asked.items() if value)])
    if workers and not (quiet or as_json) and (hint := hints.other_lanes(checked, job, sets)):
        reports.lines(_console(), hint)
    if checked.sync.kind == "auto" and not (quiet or as_json):
        reports.lines(_console(), "planning: the job is measured for some seconds")
    with display(_console(as_json), as_json=as_json, quiet=quiet) as shown:
        outcome = drive.run(checked, runs=runs, look=shown.look)
    _end(outcome, as_json=as_json)


@app.command()
def resume(
    run: RunName, sets: Sets = NOTHING, runs: Runs = RUNS, as_json: AsJson = False, quiet: Quiet = False
) -> None:
    """Go on with a run after a crash, Ctrl-C or reboot."""
    from shoal.jobs import directory, drive
    from shoal.terminal.live import display

    paths = directory.find(run, runs)
    with display(_console(as_json), as_json=as_json, quiet=quiet) as shown:
        outcome = drive.resume(paths, sets=sets, look=shown.look)
    _end(outcome, as_json=as_json)


@app.command()
def check(job: JobFile, sets: Sets = NOTHING, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Is the job right? Reads the file, opens the data, makes one step on one batch."""
    from shoal.jobs import directory
    from shoal.jobs.ask import ask
    from shoal.terminal import reports

    checked = directory.with_its_start(_load(job, sets), runs)
    answer = ask("check", checked)
    if as_json:
        print(json.dumps(answer))
        return
    reports.check(_console(), answer)
    _console().print("[green]The job is right.[/green]")


@app.command()
def plan(
    job: JobFile,
    workers: Annotated[int | None, typer.Option(min=1, help="At most so many workers.", show_default=False)] = None,
    hosts: Annotated[int | None, typer.Option(min=1, max=64, help="So many machines like this one.")] = None,
    link: Annotated[str, typer.Option(help="Between them: 100mbit, 10gbit, 50MB/s.")] = "1gbit",
    latency: Annotated[str, typer.Option(help="One way between them: 200us, 1ms.")] = "200us",
    speeds: Annotated[str, typer.Option(help="Of each machine, this one first: 1,0.25.", show_default=False)] = "",
    every: Annotated[bool, typer.Option("--all", help="Every way that was looked at.")] = False,
    sets: Sets = NOTHING,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """How to run a job: measures it here, and predicts what workers, servers, codecs and threads would do."""
    from shoal.jobs import directory, planning
    from shoal.plan.costs import amounts
    from shoal.plan.costs.reading import Wanted
    from shoal.terminal import hints, plans, reports

    checked = _load_for(job, sets, workers)
    if workers and not as_json and (hint := hints.other_lanes(checked, job, sets)):
        reports.lines(_console(), hint)
    each = amounts.speeds(speeds, where="--speeds", hosts=hosts) if speeds else ()
    wanted = Wanted(
        amounts.seconds(latency, where="--latency"),
        amounts.bytes_per_s(link, where="--link"),
        hosts=len(each) or hosts or 1,
        most=workers or 0,
        speeds=each,
    )
    planned = planning.plan(directory.with_its_start(checked, runs), wanted)
    if as_json:
        print(json.dumps(planned.as_data()))
    else:
        command = shlex.join(["shoal", "run", str(job), *(word for one in sets for word in ("--set", one))])
        plans.show(_console(), planned, command=command, every=every)


@app.command()
def split(
    job: JobFile,
    sets: Sets = NOTHING,
    export: Annotated[Path | None, typer.Option(help="Write the split to Parquet in this directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """What the split looks like: sizes, balance, leaks."""
    from shoal.jobs.ask import ask
    from shoal.terminal import splits

    checked = _load(job, sets)
    answer = ask("split", checked, export=str(export.resolve()) if export else None)
    if as_json:
        print(json.dumps(answer))
    else:
        splits.show(_console(), answer)


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
    from shoal.jobs import catalogue, directory
    from shoal.jobs.ask import ask
    from shoal.spec.load import load_job
    from shoal.terminal import words

    paths = directory.find(run, runs)
    if paths.folds:
        one = f"{paths.name}/{paths.folds[0].name}"
        raise error("SH606", f"'{paths.name}' has folds", where=run, fix=f"Name one of them, such as {one}.")
    job = load_job(paths.job, check_names=False)
    weights, rows = (find(paths, job, best=best) for find in (catalogue.weights_of, catalogue.checkpoint_of))
    other = catalogue.other_source(job, data, target)
    answer = ask("evaluate", job, weights=weights, rows=rows, part=part or None, source=other)
    if as_json:
        print(json.dumps(answer))
        return
    for name, metrics in answer["metrics"].items():
        print(f"{name} ({words.count(answer['samples'][name])} samples): {words.metrics(metrics)}")


@app.command(name="runs")
def list_runs(runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """List the runs."""
    from shoal.jobs import catalogue
    from shoal.terminal import reports

    rows = catalogue.every(runs)
    if as_json:
        print(json.dumps(rows))
    else:
        reports.runs(_console(), rows)


@app.command()
def show(run: RunName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """A run: its state, its curves, its receipt."""
    from shoal.jobs import catalogue, directory, drive
    from shoal.terminal import reports

    paths = directory.find(run, runs)
    console = _console()
    if as_json:
        receipt = json.loads(paths.receipt.read_text()) if paths.receipt.is_file() else None
        print(json.dumps({**catalogue.summary(paths), "receipt": receipt}))
        return
    if paths.folds:
        done = [(one, catalogue.receipt_of(one)) for one in paths.folds]
        reports.folds(console, [r for _, r in done if r])
        for one, receipt in done:
            if receipt is None:
                reports.show(console, drive.picture_of(one), width=console.width)
        return
    reports.show(console, drive.picture_of(paths), width=console.width)
    found = catalogue.receipt_of(paths)
    if found:
        console.print()
        reports.receipt(console, found)


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(help="Two or more runs.", show_default=False)],
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Runs side by side: what differs in the jobs, and in the results."""
    from shoal.jobs import catalogue, directory
    from shoal.terminal import reports

    columns = [(name, catalogue.column(directory.find(name, runs))) for name in names]
    if as_json:
        print(json.dumps(dict(columns)))
    else:
        reports.compare(_console(), columns)


@app.command()
def scale(
    run: RunName,
    workers: Annotated[int | None, typer.Argument(help="How many workers from now on.", show_default=False)] = None,
    servers: Annotated[int | None, typer.Option(help="How many servers from now on.", show_default=False)] = None,
    runs: Runs = RUNS,
) -> None:
    """More or fewer workers or servers for a run that goes on."""
    from shoal.jobs import directory, wishes
    from shoal.terminal import reports

    answer = wishes.scale(directory.find(run, runs), workers, servers=servers)
    wanted = [f"{answer.wanted} workers"] + ([f"{answer.servers_wanted} servers"] if answer.servers_wanted else [])
    reports.lines(_console(), f"{' and '.join(wanted)} are wanted", *answer.notes)


@app.command()
def drain(
    run: RunName,
    who: Annotated[str, typer.Argument(help="worker-2, or 2, or server-3.", show_default=False)],
    runs: Runs = RUNS,
) -> None:
    """Let a worker or server go, without loss, and wait until it has left."""
    from shoal.jobs import directory, wishes
    from shoal.terminal import reports

    paths = directory.find(run, runs)
    seat, answer = wishes.drain(paths, who)
    wanted = answer.wanted if seat.role == "worker" else answer.servers_wanted
    reports.lines(_console(), f"{seat.name} is asked to leave; {wanted} {seat.role}s are wanted from now on")
    went = wishes.departure(paths, seat)
    reports.lines(_console(), f"{seat.name} {went}" if went else "the run ended first")


@app.command()
def stop(run: RunName, runs: Runs = RUNS) -> None:
    """Let a run save and end; `shoal resume` goes on with it."""
    from shoal.jobs import directory, wishes
    from shoal.terminal import reports

    paths = directory.find(run, runs)
    reports.stopped(_console(), paths.name, wishes.stop(paths), folds=bool(paths.folds))


@app.command()
def token(run: RunName, runs: Runs = RUNS) -> None:
    """Print a run's token: whoever has it can join the run."""
    from shoal.jobs import directory, wishes

    print(wishes.token(directory.find(run, runs)))


@app.command()
def join(
    where: Annotated[str, typer.Argument(help="HOST:PORT, as `shoal run --listen` shows it.", show_default=False)],
    token: Annotated[
        str,
        typer.Option(envvar="SHOAL_TOKEN", help="Better by the environment: others see command lines."),
    ] = "",
    directory: Annotated[Path, typer.Option("--dir", help="Where the job's code and data lie here.")] = Path("."),
    workers: Annotated[int, typer.Option(help="How many workers this machine gives.")] = 1,
    tls: Annotated[Path | None, typer.Option(help="cert.pem, key.pem and ca.pem, if the job has engine.tls.")] = None,
) -> None:
    """Work for a run that another machine drives."""
    from shoal.jobs.join import join
    from shoal.terminal import reports

    console = _console()
    show = partial(reports.lines, console)
    code = join(where, token, base_dir=directory, workers=workers, tls_dir=tls, show=show)
    sys.exit(code)


@app.command()
def verify(
    job: JobFile,
    workers: Annotated[str, typer.Option(help="Numbers of workers to compare.")] = "1,2,3",
    steps: Annotated[int, typer.Option(help="So many steps instead of the job's own.", show_default=False)] = 0,
    sets: Sets = NOTHING,
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Same weights on any number of workers? Runs the job with each; names the tensor where they part."""
    from shoal.jobs.verify import numbers, verify
    from shoal.terminal import verdicts
    from shoal.terminal.live import display

    wanted = numbers(workers)
    checked = _load(job, [*sets, *([f"steps={steps}", "epochs=null"] if steps else [])])
    with display(_console(), as_json=False, quiet=quiet or as_json) as shown:
        verdict = verify(checked, wanted, runs=runs, look=shown.look)
    if verdict.stopped is not None:
        _end(verdict.stopped, as_json=as_json)
    verdicts.verify(_console(), verdict, as_json=as_json)
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
    sets: Sets = NOTHING,
    runs: Runs = RUNS,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Kill, freeze, slow and add workers on purpose, kill servers: are the weights those of the undisturbed run?"""
    from shoal.jobs import catalogue
    from shoal.jobs.chaos import chaos
    from shoal.plan import faults
    from shoal.terminal import verdicts
    from shoal.terminal.live import display

    numbers: dict[faults.Kind, int] = {
        "kill": kills, "freeze": freezes, "slow": slow, "join": joins, "kill server": server_kills,
    }  # fmt: skip
    with display(_console(), as_json=False, quiet=quiet or as_json) as shown:
        verdict = chaos(
            _load(job, sets),
            faults.read(plan) if plan else numbers,
            workers=workers or None,
            seed=seed,
            against=catalogue.finished(against, runs) if against else None,
            runs=runs,
            look=shown.look,
        )
    if verdict.outcome.receipt is None:
        _end(verdict.outcome, as_json=as_json)
    verdicts.chaos(_console(), verdict, as_json=as_json)
    sys.exit(0 if verdict.same else 1)


def _load_for(path: Path, sets: list[str], workers: int | None) -> Job:
    """For up to so many workers, or, where replicas must be whole, for so many."""
    from shoal.errors import Problems

    if not workers:
        return _load(path, sets)
    try:
        return _load(path, [*sets, f"workers=1..{workers}"])
    except Problems:
        return _load(path, [*sets, f"workers={workers}"])


def _load(path: Path, sets: list[str]) -> Job:
    from shoal.spec.load import load_job

    return load_job(path, overrides=sets)


def _console(to_stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=to_stderr)


def _end(outcome: Outcome | Summary, *, as_json: bool) -> NoReturn:
    """Print how it ended, and leave with the exit code that says so."""
    from shoal.terminal import endings

    sys.exit(endings.tell(outcome, _console(), _console(True), as_json=as_json))


def main() -> NoReturn:
    """Errors of the user's are told without a traceback; everything else is a bug and shows one."""
    from shoal.errors import EXIT_INTERRUPTED, ShoalError

    try:
        app()
    except ShoalError as failure:
        from shoal.terminal import reports

        reports.failure(_console(True), failure)
        sys.exit(failure.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(0)
