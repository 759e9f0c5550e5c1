"""The cost of the planner's choice compared with the best candidate.

The planner gets what it would measure itself: the job on this machine, and the link over the shaped wire. It is given
the slowdown of the slow host, because short measurements cannot see a process that is stopped and continued.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.links import measure
from benchmarks.links.hosts import ADDRESSES, Hosts
from benchmarks.links.models import BATCH, job
from benchmarks.links.sides import CODECS, ForkServers, RunningSide, ShoalSide
from benchmarks.overhead.side_by_side import Numbers
from benchmarks.unequal.cpu_throttle import CpuThrottle
from shoal.collectives.transport.bandwidth import answer_link_test, measure_link
from shoal.events import Event, RunState
from shoal.jobs import planner
from shoal.jobs.coroutines import run_steps
from shoal.jobs.fork_servers import ForkServerPool
from shoal.plan.costs.inputs import PlanRequest, read_cluster, read_measured, sync_section
from shoal.plan.costs.model import Cluster, CostPrediction, HostResources, MeasuredJob, NetworkLink, RunChoice
from shoal.plan.costs.predict import predict
from shoal.plan.costs.select import select_plan
from shoal.spec.load import make_job

LANES, PERIOD = 4, 128
SAMPLES = BATCH | {"gpt": 8}
"""Batch sizes. With the larger one a period would take a minute with a slow worker."""
BALANCE_S, MAX_BALANCE_S = 8.0, 90.0
"""Seconds until lanes have moved to the faster worker. With local SGD lanes move only at a synchronisation."""

CLOSE = 0.8
"""Sides within this fraction of the best are measured again."""
ALLOW = ("codecs", "local")
TITLE = "regret: "
_PAIR = RunChoice(workers=2, hosts=2)
SIDES: Mapping[str, RunChoice] = {
    "one worker": RunChoice(),
    **{f"lanes, {codec}": replace(_PAIR, codec=codec) for codec in ("none", "bf16", "int8", "int4")},
    **{
        f"local {every}, bf16": replace(_PAIR, sync="local", every=every, settle=PERIOD // every, codec="bf16")
        for every in (8, 32, 128)
    },
    "server, 0, none": replace(_PAIR, sync="server", servers=1),
}
SLOW_MBIT = 10.0
SLOW_LINK_SIDES: Mapping[str, RunChoice] = {
    "local 128, int4": replace(_PAIR, sync="local", every=128, settle=4, codec="int4"),
}
"""Candidates that help only on slow links, and whose periods take long to measure."""


@dataclass(frozen=True)
class Cell:
    """`slow`: slowdown of the far host."""

    model: str
    mbit: float
    slow: int = 1

    @property
    def title(self) -> str:
        link = f"{self.mbit:g} Mbit/s" if self.mbit < float("inf") else "unshaped"
        return f"{TITLE}{self.model}, {link}, {'equal' if self.slow == 1 else f'one {self.slow} times slower'}"

    @property
    def sides(self) -> Mapping[str, RunChoice]:
        """The candidates of the cell."""
        return {**SIDES, **SLOW_LINK_SIDES} if self.mbit <= SLOW_MBIT else SIDES


class UnequalShoalSide(ShoalSide):
    """A run whose second worker is throttled as soon as both workers train."""

    def __init__(self, slow: int, *made: Any) -> None:
        self._slow = slow
        self._slowed: CpuThrottle | None = None
        self.moved = False
        super().__init__(*made)

    def _on_event(self, event: Event, state: RunState) -> None:
        super()._on_event(event, state)
        self.moved |= event.kind == "joined" and self._slowed is not None and len(event["lanes"]) != LANES // 2

    def tick(self) -> None:
        super().tick()
        both = self.workers == len(self.rows) == 2
        if self._slow > 1 and both and self._slowed is None and (pid := self.pid(1)):
            self._slowed = CpuThrottle(pid, self._slow)
            self._slowed.start()

    def close(self) -> None:
        if self._slowed:
            self._slowed.stop()
        super().close()


@dataclass(frozen=True)
class Bench:
    hosts: Hosts
    fork_servers: ForkServers
    data: Path
    scratch: Path
    window_s: float

    def speed(self, cell: Cell, side: str) -> Numbers:
        choice = cell.sides[side]
        period = choice.every * choice.settle
        most_s = BALANCE_S if period == 1 else MAX_BALANCE_S * max(period / (2 * PERIOD), 1)
        asked: dict[str, Any] = {"mbit": cell.mbit, "window_s": self.window_s, "batch": SAMPLES[cell.model]}
        plain = self._job(cell, choice)
        return measure.speed(
            lambda place: UnequalShoalSide(cell.slow, plain, self.fork_servers, place),
            self.hosts,
            self.scratch,
            period=period,
            settled=partial(balanced, most_s=most_s) if cell.slow > 1 else None,
            **asked,
        )

    def planned(self, cell: Cell) -> dict[str, Any]:
        """What the planner would take, and what it said of every side."""
        pool = ForkServerPool(self.fork_servers[0])
        facts = run_steps(planner.measure_steps(make_job(dict(self._job(cell, RunChoice()))), pool))
        link = measured_link(self.hosts, cell.mbit)
        measured, machine = read_measured(facts), read_cluster(facts, PlanRequest())
        said = predictions(cell.sides, measured, machine, link, cell.slow)
        pick = select_plan(list(said.values()), own=RunChoice(), allow=ALLOW).pick
        assert pick is not None, "one worker always fits"
        return {
            "choice": next(name for name, it in cell.sides.items() if it == pick.prediction.choice),
            "reason": pick.reason,
            "said": {name: 1 / it.step_s for name, it in said.items()},
            "link, Mbit/s": [link.send_bytes_s / 125e3, link.receive_bytes_s / 125e3],
            "latency_s": link.latency_s,
        }

    def _job(self, cell: Cell, choice: RunChoice) -> Mapping[str, Any]:
        how = {"network": {"listen": ADDRESSES[0]}, "elastic": {"patience_s": 5}}  # not long without us
        way = {"sync": sync_section(choice), "codec": CODECS[choice.codec], "workers": choice.workers}
        return job(cell.model, self.data, **how, lanes=LANES, batch_size=SAMPLES[cell.model], **way)


def balanced(going: RunningSide, shaped_t: float, *, most_s: float) -> bool:
    """Whether lanes have had time to move."""
    assert isinstance(going, UnequalShoalSide)
    return time.time() > shaped_t + (BALANCE_S if going.moved else most_s)


def predictions(
    sides: Mapping[str, RunChoice], measured: MeasuredJob, machine: Cluster, link: NetworkLink, slow: int
) -> dict[str, CostPrediction]:
    """Both hosts share the cores of one machine: two busy hosts slow each other down, a single one does not."""
    memory, crowding = machine.hosts[0].memory_bytes / 2, machine.crowding
    alone = replace(machine, hosts=(HostResources(1, memory),))
    both = replace(
        machine, hosts=(HostResources(1, memory, 1 / crowding), HostResources(1, memory, 1 / (crowding * slow)))
    )
    return {
        name: predict(choice, measured, alone if choice.hosts == 1 else both, link) for name, choice in sides.items()
    }


def measured_link(hosts: Hosts, mbit: float) -> NetworkLink:
    """The link as two workers would measure it."""
    hosts.shape(mbit) if mbit < float("inf") else hosts.unshape()
    with socket.create_server((ADDRESSES[0], 0)) as listener:
        with hosts.on_remote():
            far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    answering = threading.Thread(target=answer_link_test, args=(far,), daemon=True)
    answering.start()
    with near:
        found = measure_link(near)
    answering.join()
    far.close()
    return NetworkLink(found.latency_s, found.send_bytes_s, found.receive_bytes_s)


def with_kept(cell: Cell, planned: Mapping[str, Any], found: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The cell with these and all earlier measurements."""
    kept = report.kept("links").get(cell.title, {"rows": []})
    turns = {row["side"]: row["turns"] for row in kept["rows"]} | dict(found)
    return {"planner": dict(planned), "rows": rows(planned, turns)}


def rows(planned: Mapping[str, Any], turns: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The rows of the table, from fast to slow."""
    true = {name: level for name, level in levels(turns).items() if name in planned["said"]}
    in_turn = sorted(true, key=lambda name: -true[name])
    return [
        {
            "side": name,
            "steps/s": true[name],
            "said, steps/s": planned["said"][name],
            "of the best": true[name] / true[in_turn[0]],
            "choice": "→" if name == planned["choice"] else "",
            "turns": [round(turn, 3) for turn in turns[name]],
        }
        for name in in_turn
    ]


def levels(turns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each side, corrected for changes in the speed of the machine that most sides share. Changes of one
    or two sides, and factors of two, are kept: they may be real (for example, lanes have moved)."""
    drift = [1.0]
    for number in range(1, max(map(len, turns.values()), default=0)):
        changes = [its[number] / its[0] for its in turns.values() if len(its) > number]
        changes = [change for change in changes if 0.5 <= change <= 2]
        drift.append(statistics.median(changes) if len(changes) > 2 else 1.0)
    return {name: statistics.median(map(truediv, its, drift)) for name, its in turns.items()}


def regrets(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For every measured cell: the planner's choice, the best side, and their ratio."""
    found = []
    for title, cell in kept.items():
        if title.startswith(TITLE) and (true := {row["side"]: row["steps/s"] for row in cell["rows"]}):
            best, choice = max(true, key=lambda name: true[name]), cell["planner"]["choice"]
            regret = true[best] / true[choice] if choice in true else ""
            row = {"cell": title.removeprefix(TITLE), "choice": choice, "best": best, "regret": regret}
            found.append(row | {"sides": f"{len(true)} of {len(cell['planner']['said'])}"})
    return found


def run(bench: Bench, cells: Sequence[Cell], sides: Sequence[str], rounds: int, *, keep: bool, show: Any) -> None:
    """Measure cell by cell and side by side; finished measurements are kept if the rest is interrupted. After the first
    round only the planner's choice and the sides that may be the best continue, because one round cannot rank close
    sides. If no side has such a name, the cell is only planned again."""
    for cell in cells:
        wanted = [name for name in cell.sides if not sides or name.startswith(tuple(sides))]
        planned, found = bench.planned(cell), dict[str, list[float]]()
        if keep:
            report.keep("links", cell.title, with_kept(cell, planned, found))
        for number in range(rounds if wanted else 0):
            for side in wanted if number == 0 else contenders(found, planned["choice"]):
                found.setdefault(side, []).append(bench.speed(cell, side)["steps/s"])
                if keep:
                    report.keep("links", cell.title, with_kept(cell, planned, found))
        show(cell.title, with_kept(cell, planned, found)["rows"] if keep else rows(planned, found))


def contenders(found: Mapping[str, Sequence[float]], choice: str) -> list[str]:
    best = max(turns[0] for turns in found.values())
    return [name for name, turns in found.items() if turns[0] > CLOSE * best or name == choice]
