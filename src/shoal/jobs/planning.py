"""`shoal plan`: measure a job on this machine, then let `plan.costs` say what each way of running it would take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from shoal.errors import error
from shoal.fleet.engines.local import Nursery
from shoal.jobs.ask import ask
from shoal.plan.costs import choose
from shoal.plan.costs.choose import Row
from shoal.plan.costs.facts import Choice, Link, Machine, Measured
from shoal.plan.costs.reading import (
    Wanted,
    own_choice,
    read_link,
    read_machine,
    read_measured,
    staleness_word,
    sync_section,
)
from shoal.spec import job as spec
from shoal.spec.job import Job

WORKERS_PER_CORE = 2
"""So many are looked at where nobody says how many."""


BUSY = 0.5
"""From this load per core on, measurements are not to be trusted."""


@dataclass(frozen=True)
class Planned:
    """The plan, and what it was made from; `facts` are the clerk's own words. `follows`: the job's lanes are as many as
    its workers, so that another number of workers needs the lanes by name to be the same job. `opens`: the job leaves
    it open how workers agree."""

    plan: choose.Plan
    own: Choice
    measured: Measured
    machine: Machine
    link: Link
    load: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    follows: bool = False
    opens: bool = False

    @property
    def notes(self) -> list[str]:
        """What else is worth saying."""
        cores, slow = self.machine.hosts[0].cores, " and ".join(map(str, self.measured.slow_threads))
        said = {
            f"{slow} threads per worker were tried: no faster than fewer.": bool(slow),
            "The job has one lane, which one worker carries. Write `lanes: 8` for more: it is part of the result.":
                self.measured.lanes == 1,
            "Other hosts were not asked: they and the link are what --speeds, --link and --latency say.":
                len(self.machine.hosts) > 1,
            "Rows of sparse tables are not counted: they come on top.": bool(self.measured.only_servers),
            f"The machine had other work when this was measured (load {self.load:.1f}, {cores} cores): plan again when "
            "it has none.": self.load > BUSY * cores,
        }  # fmt: skip
        return [text for text, holds in said.items() if holds]

    def settings(self, choice: Choice) -> dict[str, Any]:
        """The fields of the job that this choice changes, besides `workers`."""
        its, own = sync_section(choice), sync_section(self.own)
        found: dict[str, Any] = {"sync": its} if its != own or self.opens else {}
        if self.follows and (choice.hosts > 1 or choice.workers != self.measured.lanes):
            found["lanes"] = self.measured.lanes
        if choice.codec != self.own.codec:
            found["codec"] = choice.codec
        if choice.threads != self.own.threads:
            found["threads"] = choice.threads
        if choice.shard != self.own.shard:
            found["shard"] = choice.shard
        return found

    def as_data(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
        plan = self.plan
        return {
            "pick": self.row(plan.pick) if plan.pick else None,
            "offer": self.row(plan.offer) if plan.offer else None,
            "rows": [self.row(row) for row in plan.rows],
            "notes": self.notes,
            "measured": asdict(self.measured),
            "machine": asdict(self.machine),
            "link": asdict(self.link),
            "load": self.load,
        }

    def row(self, row: Row) -> dict[str, Any]:
        it = row.prediction
        totals = {"step_s": it.step_s, "epoch_s": it.epoch_s}
        needs = {"changes": list(row.changes), "allowed": row.allowed, "reason": row.reason}
        choice = asdict(it.choice) | {"staleness": staleness_word(it.choice), "name": it.choice.name}
        settings = {"workers": it.choice.workers, **self.settings(it.choice)}
        return asdict(it) | totals | needs | {"choice": choice, "settings": settings}


def plan(job: Job, wanted: Wanted, *, nursery: Nursery | None = None) -> Planned:
    """Asks a process with torch to measure, which takes some seconds."""
    room = max(job.workers.most, WORKERS_PER_CORE * wanted.hosts * len(os.sched_getaffinity(0)))
    most = wanted.most or min(max(job.lane_count, job.ways), room)
    if most < wanted.hosts:
        fix = f"Set `lanes` to at least {wanted.hosts}, or give --workers."
        raise error("SH107", f"{wanted.hosts} hosts, and {most} workers at most", where="--hosts", fix=fix)
    load = os.getloadavg()[0]
    facts = measure(job, nursery=nursery)
    own, measured = own_choice(job), read_measured(facts)
    machine, link = read_machine(facts, wanted), read_link(facts, wanted)
    found = choose.plan(own, measured, machine, link, least=wanted.least, most=most, allow=job.plan.allow)
    open_ = {"follows": job.lanes is None, "opens": job.sync.kind == "auto"}
    return Planned(found, own, measured, machine, link, load, facts, **open_)


def measure(job: Job, *, nursery: Nursery | None = None) -> Mapping[str, Any]:
    """What the clerk finds out of the job and of this machine."""
    return ask("measure", job, nursery=nursery, codecs=_settings(job), threads=_threads(job))


def _settings(job: Job) -> list[dict[str, Any]]:
    """Every codec as a job has it that only names it; the job's own with its own settings."""
    kinds: list[Any] = [kind for kind in get_args(get_args(spec.Codec)[0]) if kind is not spec.NoCodec]
    named = [kind(kind=get_args(kind.model_fields["kind"].annotation)[0]) for kind in kinds]
    return [(job.codec if codec.kind == job.codec.kind else codec).model_dump() for codec in named]


def _threads(job: Job) -> list[int]:
    """The job's own, and powers of two up to the number of cores."""
    cores = len(os.sched_getaffinity(0))
    return sorted({job.threads, *(1 << k for k in range(cores.bit_length()))})
