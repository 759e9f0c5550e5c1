"""The receipt of a run: a pure function of its job and its state."""

from __future__ import annotations

from shoal.events import RunState
from shoal.events.run_state import WORKER_TIMES
from shoal.events.state_parts import WorkerSummary
from shoal.spec.job import Job
from shoal.spec.receipt import InitialWeights, Receipt, WorkerContribution, describe_lost_residual


def make_receipt(job: Job, state: RunState, *, run: str) -> Receipt:
    """The receipt of a finished run; `state.result` has the fields of its `finished` event."""
    result = state.result
    staleness_mean, staleness_max = state.staleness
    exact, why = judge_exactness(job, state)
    start_t = state.last_event_t if state.started_t is None else state.started_t
    return Receipt(
        run=run,
        job_sha256=job.sha256(),
        exact=exact,
        why=why,
        lanes_checked=state.lanes_checked,
        weights_sha256=result["weights_sha256"],
        state_sha256=result["state_sha256"],
        steps=state.step,
        epochs=round(state.epoch, 4),
        samples_seen=result["samples_seen"],
        parameters=state.facts.get("parameters", 0),
        init_from=_initial_weights(job, state),
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
        total_s=round(state.last_event_t - start_t, 3),
        training_after_s=round((state.joined_t or start_t) - start_t, 3),
        samples_per_s=round(state.samples_computed / state.training_wall_s, 1) if state.training_wall_s else 0.0,
        bytes_sent=state.bytes_sent,
        bytes_plain=state.bytes_plain,
        bytes_saved=state.bytes_saved,
        metrics=state.metrics,
        best=state.best,
        platform=result["platform"],
        **worker_times(state),
    )


def judge_exactness(job: Job, state: RunState) -> tuple[bool | None, str]:
    """Whether any number of workers gives these bits, and why. None: nothing speaks against it, and nothing was
    checked."""
    codec = f", codec: {job.codec.kind}" if job.codec.kind != "none" else ""
    shard = f", shard: {job.shard.kind} over {job.workers_per_replica}" if job.shard.kind != "none" else ""
    how = f"sync: {job.sync.kind}{codec}{shard}"
    if against := _reason_against(job, state):
        return False, f"{how}: {against}"
    if state.lanes_checked:
        return True, f"{how}; lanes computed again: {state.lanes_checked}, all equal"
    if not job.self_check:
        return None, f"{how}: self_check is 0"
    return None, f"{how}: {state.check_failure or 'no lane was computed again'}"


def _reason_against(job: Job, state: RunState) -> str:
    if job.inexact_reason:
        return state.inexact or job.inexact_reason
    if state.lost_residuals:
        first, others = state.lost_residuals[0], len(state.lost_residuals) - 1
        more = f", and {others} more times" if others else ""
        return describe_lost_residual(first.lane, first.worker, first.step) + more
    return state.check_difference


def worker_times(state: RunState) -> dict[str, float]:
    """What the workers spent their time on, and the sum of it: `other_s` is what no event accounts for."""
    times = {name: round(state.times[name], 3) for name in WORKER_TIMES}
    lived_s = sum(worker.lifetime_s for worker in state.workers.values())
    times["other_s"] = round(max(lived_s - sum(times.values()), 0.0), 3)
    return times | {"worker_s": round(sum(times.values()), 3)}


def _initial_weights(job: Job, state: RunState) -> InitialWeights | None:
    """A worker on another machine has the weights at another path."""
    if not state.weights_loaded:
        return None
    given = {"path": job.init_from.path} if job.init_from and job.init_from.path else {}
    return InitialWeights.from_fields({**state.weights_loaded, **given})


def _contribution(worker: WorkerSummary) -> WorkerContribution:
    return WorkerContribution(
        host=worker.host,
        lanes=worker.lanes,
        steps=worker.steps,
        samples=worker.samples,
        work_s=round(worker.work_s, 3),
    )
