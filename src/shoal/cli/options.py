"""Arguments and options that several verbs share, and the job file as they load it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from shoal.spec.job import Job


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
Engine = Annotated[
    str, typer.Option("--engine", help="Where workers run: local, ssh, slurm or ray.", show_default=False)
]

RUNS = Path("runs")
NO_OVERRIDES: list[str] = []


def load_job(path: Path, sets: list[str]) -> Job:
    from shoal.spec.load import load_job

    return load_job(path, overrides=sets)


def load_for_workers(path: Path, sets: list[str], workers: int | None) -> Job:
    """Load the job for up to this many workers; a sharded job gets exactly this many."""
    from shoal.errors import ErrorGroup

    if not workers:
        return load_job(path, sets)
    try:
        return load_job(path, [*sets, f"workers=1..{workers}"])
    except ErrorGroup:
        return load_job(path, [*sets, f"workers={workers}"])


def engine_kind(engine: str) -> list[str]:
    """As an override. The other fields of the engine's section are kept if it is of this kind already."""
    return [f"engine.kind={engine}"] if engine else []


def without_flag_types(parameters: list[Any]) -> list[Any]:
    """The parameters of a verb for its help: a flag has no value, so no type stands beside it."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Verb(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_flag_types(super().get_params(ctx))


class Verbs(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return without_flag_types(super().get_params(ctx))
