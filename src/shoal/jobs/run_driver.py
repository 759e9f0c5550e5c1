"""Driving one run: start its worker, look at what it tells, decide when it dies, write the receipt."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from shoal.errors import EXIT_BUG, ShoalError, error, error_from_fields
from shoal.events import Event, EventReader, EventWriter, LineTail, RunState
from shoal.events.run_state import WorkerSummary
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import ForkServer, LocalEngine
from shoal.jobs.plan_file import read_plan_file
from shoal.jobs.replanner import Replanner
from shoal.jobs.server_group import SERVER_MODULE, ServerGroup
from shoal.jobs.worker_group import WORKER_MODULE, WorkerGroup
from shoal.plan.membership_policy import decide_restart
from shoal.spec.job import Job
from shoal.spec.receipt import Receipt, WorkerContribution
from shoal.spec.run_paths import RunPaths, write_atomically

OPTIMIZER_MODULE = "torch._dynamo"  # torch imports it when the first optimizer is made: a second of work
SHUTDOWN_TIMEOUT_S = 10.0
"""How long workers may take to go when the run is finished."""
OnRunEvent = Callable[[Event, RunState], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended: with a receipt, with an error, or stopped so that it can be resumed."""

    paths: RunPaths
    status: str
    receipt: Receipt | None = None
    error: ShoalError | None = None
    traceback: str = ""
    saved_step: int | None = None


def make_fork_server(threads: int, *, modules: Sequence[str] = (), python: str = "") -> ForkServer:
    """Where workers come from; `modules` are imported once for all of them.

    The one place that sets environment variables: threads are fixed before torch is loaded, and sets iterate in the
    same order in every process.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    return ForkServer(environment, [WORKER_MODULE, SERVER_MODULE, OPTIMIZER_MODULE, *modules], python=python)


def modules_to_preload(job: Job) -> list[str]:
    """What every worker of this job would import, besides torch, and takes its time."""
    data = job.data
    kinds = {source.kind for source in (data.source, data.validation, data.test) if source is not None}
    wanted = {
        "torchmetrics": bool(job.metrics),
        "sklearn.datasets": "sklearn" in kinds,
        "sklearn.model_selection": data.split.kind in ("kfold", "stratified", "grouped", "holdout"),
        "pyarrow.parquet": "parquet" in kinds,
        "pyarrow.csv": "csv" in kinds,
    }
    return [module for module, needed in wanted.items() if needed]


@contextlib.contextmanager
def fork_server_for(fork_server: ForkServer | None, job: Job) -> Iterator[ForkServer]:
    """The nursery that was brought, or one for this job alone."""
    if fork_server is not None:
        yield fork_server
    else:
        with make_fork_server(job.threads, modules=modules_to_preload(job)) as own:
            yield own


class RunDriver:
    """One run being driven. `tick` is called until it returns an outcome; `stop` asks the workers to leave."""

    def __init__(
        self,
        job: Job,
        paths: RunPaths,
        fork_server: ForkServer,
        *,
        on_event: OnRunEvent | None = None,
        trace: bool = False,
    ) -> None:
        self.job = job
        self.paths = paths
        self.state = RunState()
        self._on_event = on_event
        self._trace = trace
        self._stream = EventWriter(paths.events, "driver")
        self._reader = EventReader(paths.events)
        self._output_tails: dict[int, tuple[str, LineTail]] = {}
        self.engine = LocalEngine(fork_server, name=str(paths.root), logs=paths.logs)
        self._plan_file = read_plan_file(paths)
        self._replanner: Replanner | None = None
        self._restarts_left = job.engine.restarts
        self._expected_exits: set[int] = set()  # seats whose end is counted elsewhere
        self._stop_reason = ""
        self._shutdown_deadline_s = 0.0

    def start(self) -> None:
        """From the beginning, or from where an earlier driver left it."""
        for event in self._reader.read_new():  # what an earlier driver showed is not shown again
            self.state.apply(event)
        already = bool(self.state.result)
        first_seat = first_free_seat([*self.state.workers, *self.state.servers])
        self.worker_group = WorkerGroup(
            self.job, self.paths, self.engine, self._stream, first_seat=first_seat, trace=self._trace
        )
        if not already:  # its workers finished it without a driver
            tls = self.job.engine.tls is not None
            self._stream.emit(
                "run_started", run=self.paths.name, pid=os.getpid(), listens=self.worker_group.address, tls=tls
            )
        if self._plan_file and self.job.workers_per_replica == 1:  # it may have been given a shard since
            if not self.state.plan:
                self._stream.emit("plan", **self._plan_file.told)
            crew, grants = self.worker_group.membership, self.worker_group.commands
            self._replanner = Replanner(self.job, self._plan_file, crew, grants, self._stream, self.state)
        self.worker_group.start()

    def stop(self, why: str) -> None:
        if not self._stop_reason:
            self._stop_reason = why
            self.worker_group.stop(why)

    @property
    def stop_requested(self) -> str:
        """By a user, from another process."""
        return self.worker_group.commands.stop_requested

    def filenos(self) -> list[int]:
        """For select(): `tick` has something to do when one of them is readable."""
        return self.worker_group.filenos()

    def tick(self, timeout_s: float) -> RunResult | None:
        """Take in what happened, waiting up to the time given for something to happen; decide; act."""
        wait(self.filenos(), timeout_s)
        exits = self.engine.poll(0)
        self.worker_group.receive()
        self._read_events()
        for one in exits:
            outcome = self._handle_exit(one)
            if outcome is not None:
                return self._finish(outcome)
        if self.state.result:
            return self._shut_down()
        wanted = self.worker_group.apply_policy()
        if self._stop_reason and not self.worker_group.worker_seats:
            return self._finish(RunResult(self.paths, self._stop_reason))
        if wanted:
            self.worker_group.start_workers(wanted)
        if (lost := self.worker_group.tick_servers()) and (outcome := self._restart_from_checkpoint(lost)):
            return self._finish(outcome)
        if self._replanner:  # at the end: it may think for a second, in which nobody is listened to
            self._replanner.replan_if_needed(self.state.step)
        return None

    def _shut_down(self) -> RunResult | None:
        """It is finished: let everybody go."""
        now = time.monotonic()
        self._shutdown_deadline_s = self._shutdown_deadline_s or now + SHUTDOWN_TIMEOUT_S
        if self.worker_group.worker_seats and now < self._shutdown_deadline_s:
            self.worker_group.dismiss("finished")
            return None
        if self.worker_group.server_group:
            self.worker_group.server_group.flush_stats()
            self._read_events()
        return self._finish(RunResult(self.paths, "finished", receipt=self._make_receipt()))

    def _read_events(self) -> None:
        for number in self.engine.seats:
            if number not in self._output_tails:
                seat = self.worker_group.seat(number)
                self._output_tails[number] = seat.name, LineTail(self.paths.log(number, seat.role))
        for name, lines in self._output_tails.values():
            for line in lines.read_new():
                self._notify(Event("printed", time.time(), name, fields={"text": line}))
        for event in self._reader.read_new():
            self.state.apply(event)
            if self._replanner:
                self._replanner.observe(event, self.state)
            self._notify(event)

    def _notify(self, event: Event) -> None:
        if self._on_event:
            self._on_event(event, self.state)

    def _handle_exit(self, one: Exit) -> RunResult | None:
        """A process is gone. An outcome if the run cannot go on."""
        if self.worker_group.server_group and one.seat in self.worker_group.server_group.seats:
            return self._handle_server_exit(self.worker_group.server_group, one)
        member = self.worker_group.membership.members.get(one.seat)
        was_ready = member is not None and (member.stopped or member.training)
        why = self.worker_group.handle_exit(one)
        self._output_tails.pop(one.seat, None)
        if self.state.result:
            return None
        if self.state.error:
            return RunResult(self.paths, "failed", error=self._reported_error(), traceback=self._traceback())
        if self._stop_reason:
            return None if self.worker_group.worker_seats else RunResult(self.paths, self._stop_reason)
        if one.seat in self._expected_exits:
            return None
        if not why:
            left_for_good = not self.worker_group.membership.members and not self.worker_group.worker_seats
            return RunResult(self.paths, "stopped") if left_for_good else None
        if was_ready and self.worker_group.has_live_state:
            return None  # the others go on, and its place is filled
        choice = decide_restart(restarts_left=self._restarts_left, ready=was_ready)
        if choice.action == "restart":
            self._restarts_left -= 1
            return None
        return RunResult(self.paths, "failed", error=self._death_error(one, choice.why))

    def _handle_server_exit(self, server_group: ServerGroup, one: Exit) -> RunResult | None:
        why = server_group.handle_exit(one)
        self._output_tails.pop(one.seat, None)
        if self.state.result:
            return None
        if self.state.error:
            return RunResult(self.paths, "failed", error=self._reported_error(), traceback=self._traceback())
        where = str(self.paths.error_log(one.seat, "server"))
        return RunResult(self.paths, "failed", error=error("SH618", why, where=where)) if why else None

    def _restart_from_checkpoint(self, why: str) -> RunResult | None:
        """What the servers held is lost: as if all workers had died together. An outcome if that was once too often."""
        choice = decide_restart(restarts_left=self._restarts_left, ready=True)
        if choice.action == "give up" and not self._stop_reason:
            return RunResult(
                self.paths, "failed", error=error("SH618", f"{why}; {choice.why}", where=str(self.paths.logs))
            )
        self._restarts_left -= 1
        self._expected_exits |= self.worker_group.evict_all(why)
        return None

    def _death_error(self, one: Exit, why: str) -> ShoalError:
        log = self.paths.error_log(one.seat)
        hint = " (out of memory?)" if one.reason == "SIGKILL" else ""
        return error("SH603", f"worker-{one.seat} ended by {one.reason}{hint}; {why}", where=str(log))

    def _reported_error(self) -> ShoalError:
        row = self.state.error or {}
        if row["code"] == "BUG":
            return ShoalError(
                "SH603",
                row["message"],
                where=str(self.paths.logs),
                fix="This is a bug in Shoal: please report it.",
            )
        return error_from_fields(row)

    def _traceback(self) -> str:
        row = self.state.error or {}
        return row["where"] if row["code"] == "BUG" else ""

    def _finish(self, result: RunResult) -> RunResult:
        if result.receipt:
            write_atomically(self.paths.receipt, result.receipt.model_dump_json(indent=2) + "\n")
        self.worker_group.dismiss(f"the run is {result.status}")  # those from elsewhere: nobody will come back for them
        self._stream.emit("run_ended", status=result.status, refused=self.worker_group.refused)
        self._read_events()
        result = replace(result, saved_step=self.state.saved_step)
        self.close()
        return result

    def close(self) -> None:
        """Nothing that this run started is left."""
        self.engine.close()
        self.worker_group.close()
        self._stream.close()

    def _make_receipt(self) -> Receipt:
        p = self.state
        result = p.result
        worked = sum(p.times[name] for name in ("compute_s", "data_s", "exchange_s", "waiting_s"))
        worked /= max(p.peak_workers, 1)
        return Receipt(
            run=self.paths.name,
            job_sha256=self.job.sha256(),
            exact=not (self.job.inexact_reason or p.lost_residuals),
            why=_exactness_reason(self.job, p.lost_residuals, p.inexact),
            weights_sha256=result["weights_sha256"],
            state_sha256=result["state_sha256"],
            steps=p.step,
            epochs=round(p.epoch, 4),
            samples_seen=result["samples_seen"],
            parameters=p.facts.get("parameters", 0),
            workers=max(p.peak_workers, 1),
            lanes=self.job.lane_count,
            starts=p.starts,
            deaths_survived=p.deaths,
            redone=p.redone,
            servers=p.peak_servers,
            server_deaths_survived=p.server_deaths,
            staleness_mean=round(p.staleness[0], 3),
            staleness_max=p.staleness[1],
            views=p.views,
            carried={w.name: _worker_share(w) for w in p.workers.values() if w.steps},
            stopped=result["stopped"],
            total_s=round(p.last_event_t - (p.started_t or p.last_event_t), 3),
            samples_per_s=round(p.samples_computed / worked, 1) if worked else 0.0,
            bytes_sent=p.bytes_sent,
            bytes_plain=p.bytes_plain,
            bytes_saved=p.bytes_saved,
            metrics=p.metrics,
            best=p.best,
            platform=result["platform"],
            **{name: round(value, 3) for name, value in p.times.items()},
        )


def first_free_seat(names: Iterable[str]) -> int:
    """Behind all that workers and servers ever had."""
    seats = (re.fullmatch(r"(?:worker|server)-(\d+)", name) for name in names)
    return max((int(seat[1]) for seat in seats if seat), default=-1) + 1


def _exactness_reason(job: Job, lost_residuals: Sequence[str], reported: str = "") -> str:
    codec = f", codec: {job.codec.kind}" if job.codec.kind != "none" else ""
    shard = f", shard: {job.shard.kind} over {job.workers_per_replica}" if job.shard.kind != "none" else ""
    reasons = [reported or job.inexact_reason or (lost_residuals[0] if lost_residuals else "")]
    if len(lost_residuals) > 1:
        reasons[0] += f", and {len(lost_residuals) - 1} more times"
    return ": ".join(filter(None, [f"sync: {job.sync.kind}{codec}{shard}", *reasons]))


def _worker_share(worker: WorkerSummary) -> WorkerContribution:
    return WorkerContribution(
        host=worker.host,
        lanes=worker.lanes,
        steps=worker.steps,
        samples=worker.samples,
        work_s=round(worker.work_s, 3),
    )


EXIT_BY_STATUS = {"finished": 0, "interrupted": 130, "terminated": 143}


def exit_code(result: RunResult) -> int:
    if result.error is not None:
        return EXIT_BUG if result.traceback else result.error.exit_code
    return EXIT_BY_STATUS.get(result.status, 143)
