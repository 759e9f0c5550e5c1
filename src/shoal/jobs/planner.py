"""`shoal plan`: measure a job on this machine, and predict with `plan.costs` the speed of each way of running it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, get_args

from shoal.errors import error, plural
from shoal.fleet.forkserver import ForkServer
from shoal.jobs.coroutines import Steps, in_thread, run_steps
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.probes import probe_steps
from shoal.plan.costs import select
from shoal.plan.costs.inputs import (
    PlanRequest,
    job_choice,
    read_cluster,
    read_link,
    read_measured,
    staleness_setting,
    sync_section,
)
from shoal.plan.costs.model import Cluster, MeasuredJob, NetworkLink, RunChoice
from shoal.plan.costs.price import cheapest, epoch_price
from shoal.plan.costs.select import PlanCandidate
from shoal.spec import job as spec
from shoal.spec.job import Job

WORKERS_PER_CORE = 2
"""Workers per core up to which plans are made, unless the user or the job asks for more."""


WORTH_TELLING = 0.01
"""The share of the price that another way must save to be named."""
BUSY_LOAD_PER_CORE = 0.5
"""Load average per core above which the user is warned that measurements are unreliable."""


@dataclass(frozen=True)
class PlanResult:
    """The plan and its inputs; `facts` are the probe's measurements. `lanes_follow_workers`: the job leaves `lanes`
    out, so it equals `workers`. A command for another number of workers must then set `lanes`, or it would describe a
    different job. `sync_is_auto`: the job leaves the choice of `sync` to the planner. `seat_price`: what the place of a
    worker or server costs an hour; None if the job does not say."""

    plan: select.ExecutionPlan
    job_choice: RunChoice
    measured: MeasuredJob
    machine: Cluster
    link: NetworkLink
    load_average: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    lanes_follow_workers: bool = False
    sync_is_auto: bool = False
    seat_price: float | None = None

    @property
    def notes(self) -> list[str]:
        """Warnings and hints about the plan, for the user."""
        cores, slow = self.machine.hosts[0].cores, " and ".join(map(str, self.measured.slow_threads))
        said = {
            f"{slow} threads per worker were tried: no faster than fewer.": bool(slow),
            "The job has one lane, which one worker carries. Write `lanes: 8` for more: it is part of the result.":
                self.measured.lanes == 1,
            "Other hosts were not asked: they and the link are what --speeds, --link and --latency say.":
                len(self.machine.hosts) > 1,
            "Rows of sparse tables are not counted: they come on top.": bool(self.measured.only_servers),
            f"The machine had other work when this was measured (load {self.load_average:.1f}, {cores} cores): "
            "plan again when it has none.": self.load_average > BUSY_LOAD_PER_CORE * cores,
        }  # fmt: skip
        return [*self._price_notes(), *(text for text, holds in said.items() if holds)]

    def _price_notes(self) -> list[str]:
        """What the pick costs, and what would cost less."""
        if self.seat_price is None or self.plan.pick is None:
            return []
        pick, least = self.plan.pick.prediction, cheapest(self.plan.candidates, self.seat_price)
        price = epoch_price(pick, self.seat_price)
        said = f"An epoch costs {price:.3g} at {self.seat_price:g} for a worker's hour."
        if least is None or (saved := 1 - epoch_price(least.prediction, self.seat_price) / price) < WORTH_TELLING:
            return [f"{said} No other way is cheaper."]
        it, times = least.prediction.choice, least.prediction.epoch_s / pick.epoch_s
        workers = plural(it.workers, "worker")
        return [f"{said} Cheapest: {workers}, {it.name}: {saved:.0%} less, and {times:.3g} times as long."]

    @property
    def speeds(self) -> dict[int, float]:
        """Steps per second on this machine by number of workers, if nothing else of the job is changed. With
        `sync: auto`: in the fastest way that is allowed."""
        own, found = self.job_choice, dict[int, float]()
        for row in self.plan.candidates:  # from fast to slow
            choice = row.prediction.choice
            same = replace(choice, workers=own.workers) == own
            may = self.sync_is_auto and row.allowed and choice.hosts == 1 and choice.threads == own.threads
            if row.feasible and (same or may):
                found.setdefault(choice.workers, 1 / row.prediction.step_s)
        return found

    def job_overrides(self, choice: RunChoice) -> dict[str, Any]:
        """The fields of the job that this choice changes, besides `workers`."""
        its, own = sync_section(choice), sync_section(self.job_choice)
        found: dict[str, Any] = {"sync": its} if its != own or self.sync_is_auto else {}
        if self.lanes_follow_workers and (choice.hosts > 1 or choice.workers != self.measured.lanes):
            found["lanes"] = self.measured.lanes
        if choice.codec != self.job_choice.codec:
            found["codec"] = choice.codec
        if choice.threads != self.job_choice.threads:
            found["threads"] = choice.threads
        if choice.shard != self.job_choice.shard:
            found["shard"] = choice.shard
        return found

    def to_json_data(self) -> dict[str, Any]:
        """The complete result as JSON data."""
        plan = self.plan
        return {
            "pick": self.row_data(plan.pick) if plan.pick else None,
            "offer": self.row_data(plan.offer) if plan.offer else None,
            "rows": [self.row_data(row) for row in plan.candidates],
            "notes": self.notes,
            "measured": asdict(self.measured),
            "machine": asdict(self.machine),
            "link": asdict(self.link),
            "load": self.load_average,
        }

    def row_data(self, row: PlanCandidate) -> dict[str, Any]:
        it = row.prediction
        price = epoch_price(it, self.seat_price) if self.seat_price and row.feasible else None
        totals = {"step_s": it.step_s, "epoch_s": it.epoch_s, "epoch_price": price}
        needs = {"changes": list(row.changes), "allowed": row.allowed, "reason": row.reason}
        choice = asdict(it.choice) | {"staleness": staleness_setting(it.choice), "name": it.choice.name}
        settings = {"workers": it.choice.workers, **self.job_overrides(it.choice)}
        return asdict(it) | totals | needs | {"choice": choice, "settings": settings}


def plan(job: Job, wanted: PlanRequest, *, fork_server: ForkServer | None = None) -> PlanResult:
    """Measure and plan. Measuring needs a process with torch and takes some seconds."""
    with ForkServerPool(fork_server) as fork_servers:
        return run_steps(plan_steps(job, wanted, fork_servers))


def plan_steps(job: Job, wanted: PlanRequest, fork_servers: ForkServerPool) -> Steps[PlanResult]:
    """`plan` as steps that do not block."""
    room = max(job.workers.most, WORKERS_PER_CORE * wanted.hosts * len(os.sched_getaffinity(0)))
    most = wanted.most or min(max(job.lane_count, job.workers_per_replica), room)
    if most < wanted.hosts:
        fix = f"Set `lanes` to at least {wanted.hosts}, or give --workers."
        raise error("SH107", f"{wanted.hosts} hosts, and {most} workers at most", where="--hosts", fix=fix)
    load = os.getloadavg()[0]
    facts = yield from measure_steps(job, fork_servers)
    own, measured = job_choice(job), read_measured(facts)
    machine, link = read_cluster(facts, wanted), read_link(facts, wanted)
    bounds: dict[str, Any] = {"least": wanted.least, "most": most, "allow": job.plan.allow}
    found = yield from in_thread(partial(select.make_plan, own, measured, machine, link, **bounds))
    open_ = {"lanes_follow_workers": job.lanes is None, "sync_is_auto": job.sync.kind == "auto"}
    return PlanResult(found, own, measured, machine, link, load, facts, seat_price=job.engine.price, **open_)


def measure_steps(job: Job, fork_servers: ForkServerPool) -> Steps[Mapping[str, Any]]:
    """The measurements of the job and of this machine, made by a probe."""
    fork_server = fork_servers.for_job(job)
    return probe_steps("measure", job, fork_server, codecs=_codec_settings(job), threads=_thread_counts(job))


def _codec_settings(job: Job) -> list[dict[str, Any]]:
    """Every codec with its default settings; the job's own codec with the job's settings."""
    kinds: list[Any] = [kind for kind in get_args(get_args(spec.CodecConfig)[0]) if kind is not spec.NoCodecConfig]
    named = [kind(kind=get_args(kind.model_fields["kind"].annotation)[0]) for kind in kinds]
    return [(job.codec if codec.kind == job.codec.kind else codec).model_dump() for codec in named]


def _thread_counts(job: Job) -> list[int]:
    """The job's thread count, and the powers of two up to the number of cores."""
    cores = len(os.sched_getaffinity(0))
    return sorted({job.threads, *(1 << k for k in range(cores.bit_length()))})
