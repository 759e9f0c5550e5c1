"""python -m benchmarks.planner [part ...] [--models gpt,cnn] [--links 100,1000] [--rounds 3] [--quick]

`host`: workers, servers and codecs on this machine. `links` (needs root and `tc`): two network namespaces as hosts that
share its cores. Each turn measures the job again and then runs every side.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.links import measure
from benchmarks.links.hosts import Hosts, two_hosts
from benchmarks.links.models import BATCH, USUAL, job
from benchmarks.links.samples import prepare
from benchmarks.links.sides import CODECS, ForkServers, open_fork_server, sides
from shoal.events import Event, RunState
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import planner, run_dir
from shoal.jobs.coroutines import run_steps
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.run_driver import RunDriver
from shoal.plan.costs.inputs import PlanRequest, read_cluster, read_link, read_measured
from shoal.plan.costs.model import Cluster, HostResources, RunChoice
from shoal.plan.costs.predict import predict
from shoal.spec.load import make_job

PARTS = ("host", "links")
HERE: Mapping[str, RunChoice] = {
    "1 worker": RunChoice(),
    "2 workers": RunChoice(workers=2),
    "2 workers, bf16": RunChoice(workers=2, codec="bf16"),
    "2 workers, int8": RunChoice(workers=2, codec="int8"),
    "2 workers, 1 server": RunChoice(workers=2, sync="server", servers=1),
}
BETWEEN: Mapping[str, RunChoice] = {
    **{f"lanes, {codec}": RunChoice(workers=2, hosts=2, codec=codec) for codec in ("none", "bf16", "int8", "topk")},
    "server, 0, none": RunChoice(workers=2, hosts=2, sync="server", servers=1),
}
LATENCY_S = 30e-6  # of a virtual wire


@dataclass(frozen=True)
class Bench:
    data: Path
    scratch: Path
    rounds: int
    window_s: float

    def host(self, model: str, fork_server: ForkServer) -> list[dict[str, Any]]:
        going = {name: partial(self._steps_per_s, model, it, fork_server) for name, it in HERE.items()}
        wanted = PlanRequest(LATENCY_S, 125e6)
        return self._compare(model, HERE, going, wanted, fork_server, lambda machine: machine)

    def links(self, model: str, mbit: float, hosts: Hosts, fork_servers: ForkServers) -> list[dict[str, Any]]:
        starts = sides(model, self.data, list(CODECS), (), fork_servers)
        asked: dict[str, Any] = {"mbit": mbit, "window_s": self.window_s, "batch": BATCH[model]}
        going = {
            name: lambda name=name: measure.speed(starts[name], hosts, self.scratch, **asked)["steps/s"]
            for name in BETWEEN
        }
        wanted = PlanRequest(LATENCY_S, mbit * 125e3, hosts=2)
        return self._compare(model, BETWEEN, going, wanted, fork_servers[0], _halved)

    def _compare(
        self,
        model: str,
        choices: Mapping[str, RunChoice],
        going: Mapping[str, Callable[[], float]],
        wanted: PlanRequest,
        fork_server: ForkServer,
        there: Callable[[Cluster], Cluster],
    ) -> list[dict[str, Any]]:
        said: dict[str, list[float]] = {name: [] for name in choices}
        true: dict[str, list[float]] = {name: [] for name in choices}
        for _ in range(self.rounds):
            facts = run_steps(planner.measure_steps(make_job(dict(job(model, self.data))), ForkServerPool(fork_server)))
            measured, link = read_measured(facts), read_link(facts, wanted)
            machine = there(read_cluster(facts, wanted))
            for name, choice in choices.items():
                said[name].append(1 / predict(choice, measured, machine, link).step_s)
                true[name].append(going[name]())
        return list(rows(said, true))

    def _steps_per_s(self, model: str, choice: RunChoice, fork_server: ForkServer) -> float:
        """Speed of a full run, from the moment when all its workers train."""
        sync = {"kind": "server", "servers": choice.servers} if choice.servers else "lanes"
        plain = job(model, self.data, workers=choice.workers, sync=sync, codec=CODECS[choice.codec])
        made = make_job(dict(plain))
        seen: list[tuple[float, int]] = []

        def look(event: Event, state: RunState) -> None:
            if event.kind == "step" and event.who == "worker-0":
                seen.append((event.t, int(event.step or 0)))

        with contextlib.closing(
            RunDriver(made, run_dir.create(made, self.scratch / "runs"), fork_server, on_event=look)
        ) as run:
            run.start()
            while not seen:
                run.wait(0.05)
                run.tick()
            began = time.monotonic()
            while time.monotonic() < began + self.window_s or len(seen) < 3:
                run.wait(0.05)
                run.tick()
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def rows(said: Mapping[str, Sequence[float]], true: Mapping[str, Sequence[float]]) -> Iterator[dict[str, Any]]:
    """`off`: median over the rounds of predicted over measured. `gain`: speed-up over the first side."""
    first = next(iter(said))
    for name in said:
        pairs = list(zip(said[name], true[name], strict=True))
        yield {
            "side": name,
            "said, steps/s": median(said[name]),
            "true, steps/s": median(true[name]),
            "off": median(a / b for a, b in pairs),
            "said gain": median(a / b for a, b in zip(said[name], said[first], strict=True)),
            "true gain": median(a / b for a, b in zip(true[name], true[first], strict=True)),
        }


def _halved(machine: Cluster) -> Cluster:
    """Both hosts share the cores of one machine, and slow each other down as its workers would."""
    host = machine.hosts[0]
    half = HostResources(max(host.cores // 2, 1), host.memory_bytes / 2, speed=1 / machine.crowding)
    return replace(machine, hosts=(half, half))


def main() -> None:
    asked = _asked()
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        data = prepare(asked.data, Path(scratch, "data"))
        bench = Bench(data, Path(scratch), 1 if asked.quick else asked.rounds, 2.0 if asked.quick else asked.window)
        for title, found in _parts(bench, asked):
            console.print(report.table(title, found))
            if not asked.quick:
                report.keep("planner", title, {"rows": found})


def _parts(bench: Bench, asked: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    parts = asked.parts or PARTS
    if "host" in parts:
        with open_fork_server() as fork_server:
            for model in asked.models:
                yield f"{model}: one host", bench.host(model, fork_server)
    if "links" in parts:
        with two_hosts() as hosts, contextlib.ExitStack() as stack:
            with hosts.on_remote():
                far = stack.enter_context(open_fork_server())
            fork_servers = stack.enter_context(open_fork_server()), far
            for model in asked.models:
                for mbit in asked.links:
                    yield f"{model}: {mbit:g} Mbit/s", bench.links(model, mbit, hosts, fork_servers)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    report.take_names(parser, "part", PARTS)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(USUAL))
    parser.add_argument("--links", type=lambda text: list(map(float, text.split(","))), default=[100.0, 1000.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window", type=float, default=8.0, help="seconds in which a side's steps are counted")
    parser.add_argument("--data", type=Path, help="a directory with MNIST's IDX files and a shakespeare text")
    parser.add_argument("--quick", action="store_true", help="one turn, nothing written: does it work?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
