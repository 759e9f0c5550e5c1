"""Driving one run: start its worker, look at what it tells, decide when it dies, write the receipt."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait

from shoal.errors import EXIT_BUG, ShoalError, error, from_row
from shoal.events import Event, Lines, Picture, Reader, Stream
from shoal.events.picture import Worker
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import LocalEngine, Nursery
from shoal.jobs.harbour import SERVER, Harbour
from shoal.jobs.helm import WORKER, Helm
from shoal.jobs.kept import read_kept
from shoal.jobs.pilot import Pilot
from shoal.plan.recovery import decide
from shoal.spec.job import Job
from shoal.spec.paths import RunPaths, write_atomically
from shoal.spec.receipt import Carried, Receipt

OPTIMIZERS_NEED = "torch._dynamo"  # torch imports it when the first optimizer is made: a second of work
LEAVING_S = 10.0
"""How long workers may take to go when the run is finished."""
Watch = Callable[[Event, Picture], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a receipt, with an error, or stopped so that it can be resumed."""

    paths: RunPaths
    status: str
    receipt: Receipt | None = None
    error: ShoalError | None = None
    traceback: str = ""
    saved_step: int | None = None


def make_nursery(threads: int, *, modules: Sequence[str] = (), python: str = "") -> Nursery:
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
    return Nursery(environment, [WORKER, SERVER, OPTIMIZERS_NEED, *modules], python=python)


def heavy_modules(job: Job) -> list[str]:
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
def borrowed(nursery: Nursery | None, job: Job) -> Iterator[Nursery]:
    """The nursery that was brought, or one for this job alone."""
    if nursery is not None:
        yield nursery
    else:
        with make_nursery(job.threads, modules=heavy_modules(job)) as own:
            yield own


class Run:
    """One run being driven. `tick` is called until it returns an outcome; `stop` asks the workers to leave."""

    def __init__(
        self, job: Job, paths: RunPaths, nursery: Nursery, *, watch: Watch | None = None, trace: bool = False
    ) -> None:
        self.job = job
        self.paths = paths
        self.picture = Picture()
        self._watch = watch
        self._trace = trace
        self._stream = Stream(paths.events, "driver")
        self._reader = Reader(paths.events)
        self._printed: dict[int, tuple[str, Lines]] = {}
        self.engine = LocalEngine(nursery, name=str(paths.root), logs=paths.logs)
        self._kept = read_kept(paths)
        self._pilot: Pilot | None = None
        self._restarts_left = job.engine.restarts
        self._excused: set[int] = set()  # seats whose end is counted elsewhere
        self._stopping = ""
        self._ending_s = 0.0

    def start(self) -> None:
        """From the beginning, or from where an earlier driver left it."""
        for event in self._reader.new():  # what an earlier driver showed is not shown again
            self.picture.add(event)
        already = bool(self.picture.result)
        first_seat = first_free_seat([*self.picture.workers, *self.picture.servers])
        self.helm = Helm(self.job, self.paths, self.engine, self._stream, first_seat=first_seat, trace=self._trace)
        if not already:  # its workers finished it without a driver
            tls = self.job.engine.tls is not None
            self._stream.emit("run_started", run=self.paths.name, pid=os.getpid(), listens=self.helm.address, tls=tls)
        if self._kept and self.job.ways == 1:  # it may have been given a shard since
            if not self.picture.plan:
                self._stream.emit("plan", **self._kept.told)
            crew, grants = self.helm.crew, self.helm.grants
            self._pilot = Pilot(self.job, self._kept, crew, grants, self._stream, self.picture)
        self.helm.start()

    def stop(self, why: str) -> None:
        if not self._stopping:
            self._stopping = why
            self.helm.stop(why)

    @property
    def asked_to_stop(self) -> str:
        """By a user, from another process."""
        return self.helm.grants.stop_asked

    def filenos(self) -> list[int]:
        """For select(): `tick` has something to do when one of them is readable."""
        return self.helm.filenos()

    def tick(self, timeout_s: float) -> Outcome | None:
        """Take in what happened, waiting up to the time given for something to happen; decide; act."""
        wait(self.filenos(), timeout_s)
        exits = self.engine.poll(0)
        self.helm.hear()
        self._look()
        for one in exits:
            outcome = self._exited(one)
            if outcome is not None:
                return self._end(outcome)
        if self.picture.result:
            return self._wind_up()
        wanted = self.helm.steer()
        if self._stopping and not self.helm.working:
            return self._end(Outcome(self.paths, self._stopping))
        if wanted:
            self.helm.fill(wanted)
        if (lost := self.helm.tend()) and (outcome := self._go_back(lost)):
            return self._end(outcome)
        if self._pilot:  # at the end: it may think for a second, in which nobody is listened to
            self._pilot.steer(self.picture.step)
        return None

    def _wind_up(self) -> Outcome | None:
        """It is finished: let everybody go."""
        now = time.monotonic()
        self._ending_s = self._ending_s or now + LEAVING_S
        if self.helm.working and now < self._ending_s:
            self.helm.dismiss("finished")
            return None
        if self.helm.harbour:
            self.helm.harbour.conclude()
            self._look()
        return self._end(Outcome(self.paths, "finished", receipt=self._receipt()))

    def _look(self) -> None:
        for number in self.engine.seats:
            if number not in self._printed:
                seat = self.helm.seat(number)
                self._printed[number] = seat.name, Lines(self.paths.log(number, seat.role))
        for name, lines in self._printed.values():
            for line in lines.new():
                self._show(Event("printed", time.time(), name, fields={"text": line}))
        for event in self._reader.new():
            self.picture.add(event)
            if self._pilot:
                self._pilot.look(event, self.picture)
            self._show(event)

    def _show(self, event: Event) -> None:
        if self._watch:
            self._watch(event, self.picture)

    def _exited(self, one: Exit) -> Outcome | None:
        """A process is gone. An outcome if the run cannot go on."""
        if self.helm.harbour and one.seat in self.helm.harbour.seats:
            return self._server_exited(self.helm.harbour, one)
        member = self.helm.crew.members.get(one.seat)
        was_ready = member is not None and (member.standing or member.training)
        why = self.helm.ended(one)
        self._printed.pop(one.seat, None)
        if self.picture.result:
            return None
        if self.picture.error:
            return Outcome(self.paths, "failed", error=self._failure(), traceback=self._traceback())
        if self._stopping:
            return None if self.helm.working else Outcome(self.paths, self._stopping)
        if one.seat in self._excused:
            return None
        if not why:
            left_for_good = not self.helm.crew.members and not self.helm.working
            return Outcome(self.paths, "stopped") if left_for_good else None
        if was_ready and self.helm.alive:
            return None  # the others go on, and its place is filled
        choice = decide(restarts_left=self._restarts_left, ready=was_ready)
        if choice.action == "restart":
            self._restarts_left -= 1
            return None
        return Outcome(self.paths, "failed", error=self._death(one, choice.why))

    def _server_exited(self, harbour: Harbour, one: Exit) -> Outcome | None:
        why = harbour.ended(one)
        self._printed.pop(one.seat, None)
        if self.picture.result:
            return None
        if self.picture.error:
            return Outcome(self.paths, "failed", error=self._failure(), traceback=self._traceback())
        where = str(self.paths.errors(one.seat, "server"))
        return Outcome(self.paths, "failed", error=error("SH618", why, where=where)) if why else None

    def _go_back(self, why: str) -> Outcome | None:
        """What the servers held is lost: as if all workers had died together. An outcome if that was once too often."""
        choice = decide(restarts_left=self._restarts_left, ready=True)
        if choice.action == "give up" and not self._stopping:
            return Outcome(
                self.paths, "failed", error=error("SH618", f"{why}; {choice.why}", where=str(self.paths.logs))
            )
        self._restarts_left -= 1
        self._excused |= self.helm.put_all_out(why)
        return None

    def _death(self, one: Exit, why: str) -> ShoalError:
        log = self.paths.errors(one.seat)
        hint = " (out of memory?)" if one.reason == "SIGKILL" else ""
        return error("SH603", f"worker-{one.seat} ended by {one.reason}{hint}; {why}", where=str(log))

    def _failure(self) -> ShoalError:
        row = self.picture.error or {}
        if row["code"] == "BUG":
            return ShoalError(
                "SH603",
                row["message"],
                where=str(self.paths.logs),
                fix="This is a bug in Shoal: please report it.",
            )
        return from_row(row)

    def _traceback(self) -> str:
        row = self.picture.error or {}
        return row["where"] if row["code"] == "BUG" else ""

    def _end(self, outcome: Outcome) -> Outcome:
        if outcome.receipt:
            write_atomically(self.paths.receipt, outcome.receipt.model_dump_json(indent=2) + "\n")
        self.helm.dismiss(f"the run is {outcome.status}")  # those from elsewhere: nobody will come back for them
        self._stream.emit("run_ended", status=outcome.status, refused=self.helm.refused)
        self._look()
        outcome = replace(outcome, saved_step=self.picture.saved_step)
        self.close()
        return outcome

    def close(self) -> None:
        """Nothing that this run started is left."""
        self.engine.close()
        self.helm.close()
        self._stream.close()

    def _receipt(self) -> Receipt:
        p = self.picture
        result = p.result
        worked = sum(p.times[name] for name in ("compute_s", "data_s", "exchange_s", "waiting_s"))
        worked /= max(p.most_workers, 1)
        return Receipt(
            run=self.paths.name,
            job_sha256=self.job.sha256(),
            exact=not (self.job.inexact or p.lost),
            why=_why(self.job, p.lost, p.inexact),
            weights_sha256=result["weights_sha256"],
            state_sha256=result["state_sha256"],
            steps=p.step,
            epochs=round(p.epoch, 4),
            samples_seen=result["samples_seen"],
            parameters=p.facts.get("parameters", 0),
            workers=max(p.most_workers, 1),
            lanes=self.job.lane_count,
            starts=p.starts,
            deaths_survived=p.deaths,
            redone=p.redone,
            servers=p.most_servers,
            server_deaths_survived=p.server_deaths,
            staleness_mean=round(p.staleness[0], 3),
            staleness_max=p.staleness[1],
            views=p.views,
            carried={w.name: _carried(w) for w in p.workers.values() if w.steps},
            stopped=result["stopped"],
            total_s=round(p.seen_t - (p.started_t or p.seen_t), 3),
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


def _why(job: Job, lost: Sequence[str], found: str = "") -> str:
    codec = f", codec: {job.codec.kind}" if job.codec.kind != "none" else ""
    shard = f", shard: {job.shard.kind} over {job.ways}" if job.shard.kind != "none" else ""
    reasons = [found or job.inexact or (lost[0] if lost else "")]
    if len(lost) > 1:
        reasons[0] += f", and {len(lost) - 1} more times"
    return ": ".join(filter(None, [f"sync: {job.sync.kind}{codec}{shard}", *reasons]))


def _carried(worker: Worker) -> Carried:
    return Carried(
        host=worker.host,
        lanes=worker.lanes,
        steps=worker.steps,
        samples=worker.samples,
        work_s=round(worker.work_s, 3),
    )


EXIT_BY_STATUS = {"finished": 0, "interrupted": 130, "terminated": 143}


def exit_code(outcome: Outcome) -> int:
    if outcome.error is not None:
        return EXIT_BUG if outcome.traceback else outcome.error.exit_code
    return EXIT_BY_STATUS.get(outcome.status, 143)
