"""The receipt of a run: a pure function of its job and its state."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.events import RunState
from shoal.events.run_state import LostResidual, WorkerSummary
from shoal.spec.job import Job
from shoal.spec.receipt import InitialWeights, Receipt, WorkerContribution, describe_lost_residual

WORK_TIMES = ("compute_s", "data_s", "exchange_s", "waiting_s")


def make_receipt(job: Job, state: RunState, *, run: str) -> Receipt:
    """The receipt of a finished run; `state.result` has the fields of its `finished` event."""
    result = state.result
    work_s = sum(state.times[name] for name in WORK_TIMES) / max(state.peak_workers, 1)
    staleness_mean, staleness_max = state.staleness
    return Receipt(
        run=run,
        job_sha256=job.sha256(),
        exact=not (job.inexact_reason or state.lost_residuals),
        why=exactness_reason(job, state.lost_residuals, state.inexact),
        weights_sha256=result["weights_sha256"],
        state_sha256=result["state_sha256"],
        steps=state.step,
        epochs=round(state.epoch, 4),
        samples_seen=result["samples_seen"],
        parameters=state.facts.get("parameters", 0),
        init_from=InitialWeights.from_fields(state.weights_loaded) if state.weights_loaded else None,
        workers=max(state.peak_workers, 1),
        lanes=job.lane_count,
        starts=state.starts,
        deaths_survived=state.deaths,
        redone=state.redone,
        servers=state.peak_servers,
        server_deaths_survived=state.server_deaths,
        staleness_mean=round(staleness_mean, 3),
        staleness_max=staleness_max,
        views=state.views,
        carried={worker.name: _contribution(worker) for worker in state.workers.values() if worker.steps},
        stopped=result["stopped"],
        total_s=round(state.last_event_t - (state.started_t or state.last_event_t), 3),
        samples_per_s=round(state.samples_computed / work_s, 1) if work_s else 0.0,
        bytes_sent=state.bytes_sent,
        bytes_plain=state.bytes_plain,
        bytes_saved=state.bytes_saved,
        metrics=state.metrics,
        best=state.best,
        platform=result["platform"],
        **{name: round(value, 3) for name, value in state.times.items()},
    )


def exactness_reason(job: Job, lost_residuals: Sequence[LostResidual], reported: str = "") -> str:
    """The run's sync, codec and sharding, and why its result is not exact, if so. `reported`: the workers' reason."""
    codec = f", codec: {job.codec.kind}" if job.codec.kind != "none" else ""
    shard = f", shard: {job.shard.kind} over {job.workers_per_replica}" if job.shard.kind != "none" else ""
    first = lost_residuals[0] if lost_residuals else None
    lost = describe_lost_residual(first.lane, first.worker, first.step) if first else ""
    reasons = [reported or job.inexact_reason or lost]
    if len(lost_residuals) > 1:
        reasons[0] += f", and {len(lost_residuals) - 1} more times"
    return ": ".join(filter(None, [f"sync: {job.sync.kind}{codec}{shard}", *reasons]))


def _contribution(worker: WorkerSummary) -> WorkerContribution:
    return WorkerContribution(
        host=worker.host,
        lanes=worker.lanes,
        steps=worker.steps,
        samples=worker.samples,
        work_s=round(worker.work_s, 3),
    )
