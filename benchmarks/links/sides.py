"""The sides of the comparison. A running side has rows: worker, time, step, samples and loss."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.links.hosts import ADDRESSES
from benchmarks.links.models import job
from benchmarks.links.two_host_engine import TwoHostEngine
from benchmarks.report import environment
from shoal.events import Event, RunState
from shoal.fleet.engine import Launch
from shoal.fleet.engines.local import LocalEngine
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_dir
from shoal.jobs.fork_servers import make_fork_server
from shoal.jobs.run_driver import RunDriver
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

PLAIN = "benchmarks.links.plain"
CODECS: Mapping[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "bf16": {"kind": "bf16"},
    "fp16": {"kind": "fp16"},
    "int8": {"kind": "int8"},
    "int4": {"kind": "int4"},
    "int3": {"kind": "int3"},
    "sign": {"kind": "sign"},
    "topk": {"kind": "topk", "keep": 0.01},
    "topk 10 %": {"kind": "topk", "keep": 0.1},
    "lowrank": {"kind": "lowrank", "rank": 4},
    "lowrank 16": {"kind": "lowrank", "rank": 16},
}
LOCALS = (
    "local 8, none",
    "local 16, int4",
    "local 32, none",
    "local 32, bf16",
    "local 32, int4",
    "local 128, none",
    "local 128, int8",
)
"""Names of the local SGD sides: steps per round, and codec."""
PERIOD = 512
"""Steps between full synchronisations of local SGD."""
EXACT, STALENESS = "0", ("4", "inf")
TIME_FIELDS = ("compute_s", "exchange_s", "waiting_s", "data_s")
ForkServers = tuple[ForkServer, ForkServer]


@dataclass(frozen=True)
class StepRow:
    t: float
    samples: int
    step: int = 0
    loss: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)
    inner: bool = False
    """A step of one worker; the other workers may be behind."""


class RunningSide(Protocol):
    @property
    def workers(self) -> int: ...

    @property
    def rows(self) -> dict[str, list[StepRow]]:
        """Rows by worker."""

    def tick(self) -> None:
        """Read new rows. RuntimeError if the side has failed."""

    def pids(self) -> list[int]:
        """The pids of workers and servers."""

    def close(self) -> None: ...


Start = Callable[[Path], RunningSide]
"""Starts a side in a directory of its own."""


def open_fork_server() -> ForkServer:
    """One fork server per host, for all sides."""
    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]  # it imports the plain side at once
    return make_fork_server(1, modules=[PLAIN])


class ShoalSide:
    """A full run with default settings, on both hosts."""

    def __init__(self, plain_job: Mapping[str, Any], fork_servers: ForkServers, place: Path) -> None:
        made = make_job(dict(plain_job))
        self.workers = made.workers.most
        paths = run_dir.create(made, place / "runs")
        self.rows: dict[str, list[StepRow]] = defaultdict(list)
        self._run = RunDriver(made, paths, fork_servers[0], on_event=self._on_event)
        self._engine = TwoHostEngine(fork_servers, paths)
        self._run.engine = self._engine
        self._run.start()

    def _on_event(self, event: Event, state: RunState) -> None:
        if event.kind == "step":
            spent = {name: float(event.get(name) or 0) for name in TIME_FIELDS}
            inner = bool(event.get("inner"))
            step = StepRow(event.t, event["samples"], int(event.step or 0), event["loss"], spent, inner)
            self.rows[event.who].append(step)

    def tick(self) -> None:
        self._run.wait(0.05)
        if outcome := self._run.tick():
            raise outcome.error or RuntimeError(f"the run is {outcome.status}: {outcome.paths.root}")

    def pids(self) -> list[int]:
        return _pids([self._engine])

    def pid(self, seat: int) -> int | None:
        return self._engine.pid(seat)

    def close(self) -> None:
        self._run.close()


class PlainTorchSide:
    """A process of plain torch on each host."""

    workers = 2

    def __init__(self, asked: Mapping[str, Any], fork_servers: ForkServers, place: Path) -> None:
        self._place = place
        self._engines = [LocalEngine(it, RunPaths.at(place)) for it in fork_servers]
        for rank, engine in enumerate(self._engines):
            engine.start([Launch(Seat(number=rank), PLAIN, (json.dumps({**asked, "reports": str(place)}),))])

    @property
    def rows(self) -> dict[str, list[StepRow]]:
        return {path.stem: _read(path) for path in self._place.glob("*.rows")}

    def tick(self) -> None:
        if any(engine.poll(0.05) for engine in self._engines):
            raise RuntimeError(f"a process of plain torch ended, see {self._place}")

    def pids(self) -> list[int]:
        return _pids(self._engines)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


def _pids(engines: Sequence[LocalEngine | TwoHostEngine]) -> list[int]:
    return [pid for engine in engines for seat in engine.running() if (pid := engine.pid(seat))]


def _read(path: Path) -> list[StepRow]:
    lines = path.read_text().split("\n")[:-1]  # the last may be half a line
    return [StepRow(float(t), int(samples)) for t, samples in map(str.split, lines)]


ALONE, BUSY, MEETING, RIVAL = "alone", "alone, a busy wire", "in step", "ddp"
"""No communication; no communication beside traffic; one byte per step (the cost of waiting alone); plain DDP."""


def sides(
    model: str, data: Path, codecs: Sequence[str], locals_: Sequence[str], fork_servers: ForkServers
) -> dict[str, Start]:
    """All sides by name."""

    def plain(*, talk: bool = False, traffic: bool = False, meet: bool = False) -> Start:
        asked = {"model": model, "data": str(data), "talk": talk, "traffic": traffic, "meet": meet}
        return lambda place: PlainTorchSide(asked, fork_servers, place)

    def shoal(**changes: Any) -> Start:
        how = {"network": {"listen": ADDRESSES[0]}, "elastic": {"balance": False, "patience_s": 5}}
        return lambda place: ShoalSide(job(model, data, **how, **changes), fork_servers, place)

    def server(staleness: str, codec: str) -> Start:
        return shoal(sync={"kind": "server", "staleness": _number(staleness)}, codec=CODECS[codec])

    found = {ALONE: plain(), BUSY: plain(traffic=True), MEETING: plain(meet=True), RIVAL: plain(talk=True)}
    found |= {f"lanes, {codec}": shoal(codec=CODECS[codec]) for codec in codecs}
    found |= {name: shoal(**local(name)) for name in locals_}
    found |= {f"server, {EXACT}, {codec}": server(EXACT, codec) for codec in codecs}
    return found | {f"server, {it}, none": server(it, "none") for it in STALENESS}


def local(name: str) -> dict[str, Any]:
    """The sync and codec sections of a side in LOCALS."""
    every, codec = name.removeprefix("local ").split(", ")
    return {
        "sync": {"kind": "local", "every": int(every), "rounds_per_sync": PERIOD // int(every)},
        "codec": CODECS[codec],
    }


def period(name: str) -> int:
    """Steps between synchronisations of a side."""
    return PERIOD if name in LOCALS else 1


def _number(staleness: str) -> int | str:
    return staleness if staleness == "inf" else int(staleness)


def has_staleness(side: str) -> bool:
    """Whether the bits of this side depend on the speed of workers."""
    return side.startswith("server") and not side.startswith(f"server, {EXACT}")
