"""`shoal compress`: from a finished run to a compressed one, by the ladder or by a recipe."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, error
from shoal.events import EventWriter
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_dir, run_index
from shoal.jobs.compression.errands import Errands, StoppedError
from shoal.jobs.compression.ladder import Ladder
from shoal.jobs.compression.result import write_result
from shoal.jobs.compression.workshop import Candidate, Show, Workshop
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.resume import has_finished
from shoal.plan.compression import meets_targets
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import AskedCompression, CompressionReport, Recipe, RungReport, read_asked
from shoal.spec.job import Job, WorkersConfig
from shoal.spec.load import check_job, load_run_job
from shoal.spec.run_paths import RunPaths, write_atomically


@dataclass(frozen=True)
class Compressed:
    """The run that came out, and its report."""

    paths: RunPaths
    report: CompressionReport


@dataclass(frozen=True)
class CompressRequest:
    """The parent, and where the result goes. `workers` are those of the tuning runs; None: the parent's. `reserved` is
    the directory of the result, in which an earlier compression may have begun. `how`: a job whose `RUN_FIELDS` count
    instead of the parent's. `errands`: who does the work; see there."""

    parent: RunPaths
    runs: Path
    workers: WorkersConfig | None = None
    best: bool = False
    show: Show = lambda text: None
    reserved: RunPaths | None = None
    how: Job | None = None
    errands: Errands | None = None
    on_answer: Callable[[], object] = lambda: None


RUN_FIELDS = ("workers", "threads", "limits", "engine", "network", "elastic")
"""Fields of a job that say how it is run, not what comes out."""


def compress(request: CompressRequest, config: CompressConfig, *, fork_server: ForkServer | None = None) -> Compressed:
    """Climb the ladder. The best model that was found is written, whether it meets the targets or not."""
    with _open(request, config, None, fork_server) as (paths, workshop):
        ladder = Ladder(workshop, config, show=request.show)
        ladder.climb()
        parent = ladder.parent
        report = CompressionReport(
            parent=request.parent.name,
            parent_sha256=parent.weights.sha256,
            rungs=ladder.rungs,
            chosen=ladder.now.name,
            targets_met=meets_targets(ladder.now, config.target),
            notes=[*ladder.notes, *_summary_notes(ladder)],
        )
        return _finish(paths, workshop, ladder.chosen, report)


def _summary_notes(ladder: Ladder) -> list[str]:
    return ["nothing helps: the result is the parent's model"] if ladder.chosen is ladder.parent else []


def replay(request: CompressRequest, recipe: Recipe, *, fork_server: ForkServer | None = None) -> Compressed:
    """Take the steps of a recipe. SH666 if the parent is another one, or the file comes out with another SHA-256."""
    with _open(request, CompressConfig(), recipe, fork_server) as (paths, workshop):
        parent = workshop.parent
        assert parent is not None
        if parent.weights.sha256 != recipe.parent_sha256:
            message = f"the recipe is for weights {recipe.parent_sha256:.12}, the run has {parent.weights.sha256:.12}"
            raise error("SH666", message, where=request.parent.name)
        made: Candidate = parent
        for step in recipe.steps:
            request.show(f"{step.kind}")
            made = workshop.take(made, step)
        if made.artefact.sha256 != recipe.artefact_sha256:
            message = f"the file has SHA-256 {made.artefact.sha256:.12}, the recipe says {recipe.artefact_sha256:.12}"
            raise error("SH666", message, where=made.artefact.path)
        share = made.artefact.size_bytes / parent.artefact.size_bytes
        row = RungReport(
            name="replay",
            steps=list(made.steps),
            artefact=made.artefact,
            size_ratio=share,
            parameters=made.parameters,
            quality=workshop.judge(made) if "validation" in workshop.held_out else None,
            kept=True,
            why="the same SHA-256 as in the recipe",
        )
        report = CompressionReport(
            parent=request.parent.name,
            parent_sha256=recipe.parent_sha256,
            rungs=[row],
            chosen="replay",
            targets_met=True,
        )
        return _finish(paths, workshop, made, report)


def resume(paths: RunPaths, *, show: Show = lambda text: None, fork_server: ForkServer | None = None) -> Compressed:
    """Go on with a compression that was killed or stopped: what it found out and kept is not done again. SH604 if it
    has finished."""
    if has_finished(paths):
        shutil.rmtree(paths.root / "rungs", ignore_errors=True)  # whoever wrote the receipt was killed before this
        raise error("SH604", f"'{paths.name}' has finished", where=str(paths.root), fix=f"shoal show {paths.name}")
    asked = read_asked(paths.asked_compression)
    parent = run_dir.find(asked.parent, paths.root.parent)
    request = CompressRequest(parent, paths.root.parent, asked.workers, asked.best, show, reserved=paths)
    if asked.recipe is not None:
        return replay(request, asked.recipe, fork_server=fork_server)
    return compress(request, asked.config, fork_server=fork_server)


@contextlib.contextmanager
def _open(
    request: CompressRequest, config: CompressConfig, recipe: Recipe | None, fork_server: ForkServer | None
) -> Iterator[tuple[RunPaths, Workshop]]:
    """The new run with its events, and a workshop with the parent's model. A failure becomes the run's status."""
    job = _parent_job(request)
    weights = run_index.find_weights(request.parent, job, best=request.best)
    job = job.model_copy(update={"name": compressed_name(job)})
    paths = request.reserved or _begin(request, job.name, config, recipe)
    paths.root.mkdir(parents=True, exist_ok=True)  # a reserved one may have been removed
    with (
        run_dir.driver_lock(paths),
        contextlib.closing(EventWriter(paths.events, "driver")) as stream,
        ForkServerPool(fork_server) as fork_servers,
    ):
        run_dir.create(job, request.runs, reserved=paths)
        stream.emit("run_started", run=paths.name)
        try:
            workshop = Workshop(
                job, paths.root / "rungs", fork_server=fork_servers.for_job(job), errands=request.errands
            )
            workshop.on_answer = request.on_answer
            workshop.open_parent(weights)
            yield paths, workshop
        except BaseException as failure:
            if isinstance(failure, ShoalError):
                fields: dict[str, Any] = dict(failure.to_fields())
                stream.emit("failed", **fields)
            status = _status_of(failure)
            stream.emit("run_ended", status=status)
            if status != "failed":
                request.show(f"{status}. Continue with: shoal resume {paths.name}")
            raise


def _begin(request: CompressRequest, name: str, config: CompressConfig, recipe: Recipe | None) -> RunPaths:
    """A directory that says what is asked for. It has no job yet: whoever finds one can go on."""
    paths = run_dir.reserve(name, request.runs)
    parent = str(request.parent.root.resolve())
    asked = AskedCompression(parent=parent, config=config, recipe=recipe, workers=request.workers, best=request.best)
    paths.asked_compression.parent.mkdir()
    write_atomically(paths.asked_compression, asked.model_dump_json() + "\n")
    return paths


def _status_of(failure: BaseException) -> str:
    if isinstance(failure, StoppedError):
        return str(failure) or "interrupted"
    return "failed" if isinstance(failure, Exception) else "interrupted"


def _parent_job(request: CompressRequest) -> Job:
    if request.parent.folds:
        one = f"{request.parent.name}/{request.parent.folds[0].name}"
        raise error("SH606", f"'{request.parent.name}' has folds", where=request.parent.name, fix=f"Name one: {one}.")
    job = load_run_job(request.parent.job)
    check_compressible(job)
    if request.how is not None:
        own = {name: getattr(request.how, name) for name in RUN_FIELDS}
        job = job.model_copy(update={**own, "lanes": job.lane_count})
    if request.workers is None:
        return job
    update = {"workers": request.workers, "lanes": job.lane_count}  # lanes are part of the result, workers are not
    return check_job(job.model_copy(update=update), check_names=False)


def check_compressible(job: Job) -> None:
    if job.shard.kind != "none":
        message = f"the job has `shard: {job.shard.kind}`, and a compressed model is trained whole"
        raise error("SH110", message, where="shard", fix="Compress a run without `shard`.")


def compressed_name(job: Job) -> str:
    return f"{job.name[:53]}-compressed"


def _finish(paths: RunPaths, workshop: Workshop, chosen: Candidate, report: CompressionReport) -> Compressed:
    """The test part is looked at once, here."""
    if "test" in workshop.held_out:
        report = report.model_copy(update={"test": workshop.judge(chosen, part="test")})
    report = write_result(paths, workshop, chosen, report)
    return Compressed(paths, report)
