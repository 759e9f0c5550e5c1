"""`shoal plan`: measure a job on this machine, then let `plan.costs` say what each way of running it would take."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from shoal.errors import error
from shoal.fleet.engines.local import Nursery
from shoal.jobs.ask import ask
from shoal.plan.costs import choose
from shoal.plan.costs.choose import Row
from shoal.plan.costs.facts import Choice, CodecTime, Host, LaneTime, Link, Machine, Measured
from shoal.spec import job as spec
from shoal.spec.job import Job, LocalSync, ServerSync

WORKERS_PER_CORE = 2
"""So many are looked at where nobody says how many."""


BUSY = 0.5
"""From this load per core on, measurements are not to be trusted."""

LEAST_ROUND_S = 100e-6
"""Where it was not measured, or drowned in the noise."""


@dataclass(frozen=True)
class Wanted:
    """What the plan is for. Other hosts are taken to be like this one; without `most`, the lanes and cores decide how
    many workers there may be."""

    latency_s: float
    bytes_s: float
    hosts: int = 1
    most: int = 0


@dataclass(frozen=True)
class Planned:
    """The plan, and what it was made from."""

    plan: choose.Plan
    own: Choice
    measured: Measured
    machine: Machine
    link: Link
    load: float

    @property
    def notes(self) -> list[str]:
        """What else is worth saying."""
        cores, slow = self.machine.hosts[0].cores, " and ".join(map(str, self.measured.slow_threads))
        said = {
            f"{slow} threads per worker were tried: no faster than fewer.": bool(slow),
            "The job has one lane, which one worker carries. Write `lanes: 8` for more: it is part of the result.":
                self.measured.lanes == 1,
            "Rows of sparse tables are not counted: they come on top.": bool(self.measured.only_servers),
            f"The machine had other work when this was measured (load {self.load:.1f}, {cores} cores): plan again when "
            "it has none.": self.load > BUSY * cores,
        }  # fmt: skip
        return [text for text, holds in said.items() if holds]

    def settings(self, choice: Choice) -> dict[str, Any]:
        """The fields of the job that this choice changes, besides `workers`."""
        its, own = _sync(choice), _sync(self.own)
        found: dict[str, Any] = {"sync": its} if its != own else {}
        if choice.codec != self.own.codec:
            found["codec"] = choice.codec
        if choice.threads != self.own.threads:
            found["threads"] = choice.threads
        return found

    def as_data(self) -> dict[str, Any]:
        """All of it, fit for JSON."""
        plan = self.plan
        return {
            "pick": self._row(plan.pick) if plan.pick else None,
            "offer": self._row(plan.offer) if plan.offer else None,
            "rows": [self._row(row) for row in plan.rows],
            "notes": self.notes,
            "measured": asdict(self.measured),
            "machine": asdict(self.machine),
            "link": asdict(self.link),
            "load": self.load,
        }

    def _row(self, row: Row) -> dict[str, Any]:
        it = row.prediction
        totals = {"step_s": it.step_s, "epoch_s": it.epoch_s}
        needs = {"changes": list(row.changes), "allowed": row.allowed, "reason": row.reason}
        choice = asdict(it.choice) | {"staleness": _staleness(it.choice)}
        settings = {"workers": it.choice.workers, **self.settings(it.choice)}
        return asdict(it) | totals | needs | {"choice": choice, "settings": settings}


def plan(job: Job, wanted: Wanted, *, nursery: Nursery | None = None) -> Planned:
    """Asks a process with torch to measure, which takes some seconds."""
    room = max(job.workers.most, WORKERS_PER_CORE * wanted.hosts * len(os.sched_getaffinity(0)))
    most = wanted.most or min(job.lane_count, room)
    if most < wanted.hosts:
        fix = f"Set `lanes` to at least {wanted.hosts}, or give --workers."
        raise error("SH107", f"{wanted.hosts} hosts, and {most} workers at most", where="--hosts", fix=fix)
    load = os.getloadavg()[0]
    facts = measure(job, nursery=nursery)
    own, measured = own_choice(job), read_measured(facts)
    machine, link = read_machine(facts, wanted), read_link(facts, wanted)
    found = choose.plan(own, measured, machine, link, most=most, allow=job.plan.allow)
    return Planned(found, own, measured, machine, link, load)


def measure(job: Job, *, nursery: Nursery | None = None) -> Mapping[str, Any]:
    """What the clerk finds out of the job and of this machine."""
    return ask("measure", job, nursery=nursery, codecs=_settings(job), threads=_threads(job))


def read_machine(facts: Mapping[str, Any], wanted: Wanted) -> Machine:
    """Two workers exchanged a stretch: without laying it down and adding both up, that is what a round takes."""
    adding_s = 3 * facts["stretch_bytes"] / facts["add_bytes_s"]
    round_s = max(facts["exchange_s"] - adding_s, LEAST_ROUND_S)
    host = Host(facts["cores"], facts["memory_bytes"])
    return Machine((host,) * wanted.hosts, round_s, facts["add_bytes_s"], facts["crowding"])


def read_link(facts: Mapping[str, Any], wanted: Wanted) -> Link:
    """No link is faster than the sockets at its ends."""
    speed = min(wanted.bytes_s, facts["socket_bytes_s"])
    return Link(wanted.latency_s + facts["latency_s"], speed, speed)


def own_choice(job: Job) -> Choice:
    """What the job says. Torch's own all-reduce is not modelled: it counts as lanes."""
    sync, codec, threads = job.sync, job.codec.kind, job.threads
    if isinstance(sync, ServerSync):
        return Choice(sync="server", servers=sync.servers, staleness=sync.bound, codec=codec, threads=threads)
    if isinstance(sync, LocalSync):
        return Choice(sync="local", every=sync.every, settle=sync.settle, codec=codec, threads=threads)
    return Choice(codec=codec, threads=threads)


def read_measured(facts: Mapping[str, Any]) -> Measured:
    """The clerk's answer as the cost model wants it."""
    codecs = [CodecTime(row["settings"], row["encode_s"], row["decode_s"]) for row in facts["codecs"]]
    return Measured(
        lanes=facts["lanes"],
        steps_per_epoch=facts["steps_per_epoch"],
        times={r["threads"]: LaneTime(r["forward_s"], r["backward_s"], r["apply_s"]) for r in facts["times"]},
        shapes=tuple(tuple(shape) for shape in facts["shapes"]),
        stretch_bytes=facts["stretch_bytes"],
        optimizer_bytes=facts["optimizer_bytes"],
        base_bytes=facts["base_bytes"],
        worker_bytes=facts["worker_bytes"],
        slow_threads=tuple(facts["slow_threads"]),
        codecs={codec.settings["kind"]: codec for codec in codecs},
        no_codecs=facts["no_codecs"],
        no_servers=facts["no_servers"],
        only_servers=facts["only_servers"],
    )


def _sync(choice: Choice) -> dict[str, Any]:
    """The job's section."""
    if choice.sync == "server":
        stale = {"staleness": _staleness(choice)} if choice.staleness else {}
        return {"kind": "server", "servers": choice.servers, **stale}
    if choice.sync == "local":
        return {"kind": "local", "every": choice.every, "settle": choice.settle}
    return {"kind": "lanes"}


def _staleness(choice: Choice) -> int | str:
    return "inf" if math.isinf(choice.staleness) else int(choice.staleness)


def _settings(job: Job) -> list[dict[str, Any]]:
    """Every codec as a job has it that only names it; the job's own with its own settings."""
    kinds: list[Any] = [kind for kind in get_args(get_args(spec.Codec)[0]) if kind is not spec.NoCodec]
    named = [kind(kind=get_args(kind.model_fields["kind"].annotation)[0]) for kind in kinds]
    return [(job.codec if codec.kind == job.codec.kind else codec).model_dump() for codec in named]


def _threads(job: Job) -> list[int]:
    """The job's own, and powers of two up to the number of cores."""
    cores = len(os.sched_getaffinity(0))
    return sorted({job.threads, *(1 << k for k in range(cores.bit_length()))})
