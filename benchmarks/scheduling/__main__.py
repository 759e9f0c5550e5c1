"""python -m benchmarks.scheduling simulate|fidelity|decision|keep

simulate: a directory of workloads under a policy, on published profiles. fidelity: is the simulator the published one?
decision: the time of one decision by the size of the cluster. keep: all of it, into results/scheduling.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.scheduling import authors, decision, fidelity, output
from benchmarks.scheduling.application import Application, OutOfProfileError, load_applications
from benchmarks.scheduling.cluster import ClusterPolicy, Setting, Simulation
from benchmarks.scheduling.metrics import Isolated, load_isolated, makespan_bound, mean_bound, mean_summary, summary
from benchmarks.scheduling.published import Optimus, Tiresias
from benchmarks.scheduling.shoal_policy import ShoalPolicy, Sizes
from benchmarks.scheduling.workload import WorkloadError, load_workload
from shoal.plan.scheduling import SchedulingPolicy, Weighting

ADAPTIVE = ("shoal", "pf")
POLICIES = (*ADAPTIVE, "tiresias", "optimus")
SIZES: Sequence[Sizes] = ("blind", "declared", "warm")
SHOWN = ("mean_jct", "p50", "p99", "makespan", "rho_p99", "restarts", "decision_ms", "sim_cpu_s")
RESIZE_S = 0.3
"""How long Shoal stops for a change of its workers; measured by `benchmarks.recovery`."""
ROUNDS, EVENTS = Setting(), Setting(events=True)


@dataclass(frozen=True)
class Case:
    policy: str = "shoal"
    sizes: Sizes = "declared"
    load: float = 1.0
    setting: Setting = EVENTS
    exponent: float | None = None

    def make_policy(self) -> ClusterPolicy:
        if self.policy == "tiresias":
            return Tiresias(self.setting)
        if self.policy == "optimus":
            return Optimus(self.setting)
        return ShoalPolicy(self.setting, self.sizes, SchedulingPolicy(self._weighting()))

    def _weighting(self) -> Weighting:
        if self.exponent is not None:
            return Weighting(exponent=self.exponent)
        return Weighting(exponent=1.0) if self.policy == "pf" else Weighting()


@dataclass(frozen=True)
class Data:
    apps: Mapping[str, Application]
    alone: Isolated

    @classmethod
    def load(cls, directory: Path) -> Data:
        return cls(load_applications(directory), load_isolated(directory))

    def simulate(self, path: Path, case: Case, into: Path | None = None) -> dict[str, float]:
        began = time.process_time()
        adaptive, warm = case.policy in ADAPTIVE, case.sizes == "warm"
        jobs = load_workload(path, self.apps, adaptive=adaptive, warm=warm, load=case.load)
        simulation = Simulation(jobs, case.make_policy(), case.setting)
        simulation.run()
        found = summary(simulation, self.alone) | {"sim_cpu_s": time.process_time() - began}
        found["makespan_bound"] = makespan_bound(simulation, self.alone)
        found["mean_bound"] = mean_bound(simulation, self.alone)
        if into:
            output.write(into / path.stem, simulation, self.alone, found)
        return found

    def simulate_all(self, paths: Sequence[Path], case: Case, into: Path | None = None) -> dict[str, Any]:
        found = {path.stem: self.simulate(path, case, into) for path in paths}
        known = {"policy": case.policy, "sizes": case.sizes, "load": case.load, "restart_s": case.setting.restart_s}
        known |= {} if case.exponent is None else {"exponent": case.exponent}
        return known | {"events": case.setting.events} | mean_summary(list(found.values())) | {"workloads": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduling", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    simulate = _verb(verbs, "simulate", "simulate a directory of workloads")
    simulate.add_argument("--workloads", type=Path, required=True, help="a directory of CSV files, or one file")
    simulate.add_argument("--policy", choices=POLICIES, default="shoal")
    simulate.add_argument("--sizes", choices=SIZES, default="declared", help="what the policy knows of jobs")
    simulate.add_argument("--restart-s", type=float, default=30.0, help="how long a change of GPUs stops a job")
    simulate.add_argument("--rounds", action="store_true", help="decide every 60 s alone, as the published policies do")
    simulate.add_argument("--load", type=float, default=1.0, help="2: the same jobs arrive in half the time")
    simulate.add_argument("--exponent", type=float, help="of the weights: 1 treats jobs alike, 2 favours short ones")
    simulate.add_argument("--output", type=Path, help="write jobs.csv, decisions.csv, events.jsonl, summary.json here")
    _verb(verbs, "fidelity", "compare with golden points and with published completion times")
    timed = verbs.add_parser("decision", help="time decisions of clusters up to 10,240 GPUs")
    timed.add_argument("--rounds", type=int, default=10)
    timed.add_argument("--json", action="store_true")
    kept = _verb(verbs, "keep", "run everything and store results/scheduling.json")
    kept.add_argument("--rounds", type=int, default=10)
    kept.add_argument("--only", choices=[part for part, _, _ in KEPT], help="one part of the simulations, nothing else")
    asked = parser.parse_args()
    for part in ("profiles", "golden") if "data" in asked else ():
        if not (asked.data / part).is_dir():
            parser.error(f"{asked.data} has no directory `{part}`")
    {"simulate": _simulate, "fidelity": _fidelity, "decision": _decision, "keep": _keep}[asked.verb](parser, asked)


def _verb(verbs: Any, name: str, told: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(name, help=told)
    made.add_argument("--data", type=Path, required=True, help="a directory with profiles/ and golden/")
    made.add_argument("--json", action="store_true")
    return made


def _simulate(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    paths = sorted(asked.workloads.glob("*.csv")) if asked.workloads.is_dir() else [asked.workloads]
    if not paths or not paths[0].is_file():
        parser.error(f"no workloads (*.csv) in {asked.workloads}")
    if not (asked.load > 0 and asked.restart_s >= 0):
        parser.error("--load must be above 0, and --restart-s 0 or more")
    if asked.exponent is not None and not asked.exponent > 0:
        parser.error("--exponent must be above 0")
    setting = Setting(restart_s=asked.restart_s, events=asked.policy in ADAPTIVE and not asked.rounds)
    case = Case(asked.policy, asked.sizes, asked.load, setting, asked.exponent)
    try:
        found = Data.load(asked.data).simulate_all(paths, case, asked.output)
    except (WorkloadError, OutOfProfileError) as failure:
        parser.error(str(failure))
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        rows = [{"workload": key, **one} for key, one in (*found["workloads"].items(), ("mean", found))]
        rows = [{name: row[name] for name in ("workload", *SHOWN)} for row in rows]
        Console(width=140).print(report.table(f"{asked.policy}, sizes {asked.sizes}", rows))


def _fidelity(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    found = fidelity.report(asked.data)
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(f"throughput: {found['throughput_points']} points, largest relative error {found['throughput_worst']:.1e}")
    print(f"gradients: {found['gradient_points']} points, largest relative error {found['gradient_worst']:.1e}")
    for name, one in found["jobs"].items():
        print(f"{name}: {one['equal']} of {one['jobs']} jobs equal to the second")


def _decision(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    found = decision.report(asked.rounds)
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        Console(width=140).print(report.table("one decision with placement, CPU time", found))


def _keep(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> None:
    data = Data.load(asked.data)
    if asked.only is None:
        report.keep("scheduling", "fidelity", fidelity.report(asked.data))
        report.keep("scheduling", "decision", {"scales": decision.report(asked.rounds)})
        report.keep("scheduling", "authors", authors.report(asked.data, data.alone))
    for part, folder, cases in (one for one in KEPT if asked.only in (None, one[0])):
        paths = sorted((asked.data / folder).glob("*.csv"))
        report.keep("scheduling", part, {"rows": [data.simulate_all(paths, case) for case in cases]})


BY_SIZES = tuple(Case("shoal", sizes) for sizes in SIZES)
KEPT: Sequence[tuple[str, str, Sequence[Case]]] = (
    (
        "load 1.0",
        "workloads",
        (*BY_SIZES, Case("pf", "blind"), Case("tiresias", setting=ROUNDS), Case("optimus", setting=ROUNDS)),
    ),
    ("in rounds", "workloads", [replace(case, setting=ROUNDS) for case in BY_SIZES]),
    ("exponents", "workloads", [Case("shoal", "declared", exponent=one) for one in (1.0, 1.5, 2.0, 2.5, 3.0)]),
    ("load 0.5", "workloads-0.5", (Case("shoal", "declared"), Case("shoal", "warm"))),
    ("load 1.5", "workloads", (Case("shoal", "declared", 1.5),)),
    ("load 2.0", "workloads", (Case("shoal", "declared", 2.0), Case("pf", "blind", 2.0))),
    (
        "resize in 0.3 s",
        "workloads",
        [Case("shoal", "declared", setting=replace(one, restart_s=RESIZE_S)) for one in (ROUNDS, EVENTS)],
    ),
)


if __name__ == "__main__":
    main()
