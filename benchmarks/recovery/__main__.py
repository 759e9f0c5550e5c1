"""python -m benchmarks.recovery [rival ...] [--kills N] [--rivals-python PATH] [--quick]"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.recovery.killing import Job, Killer, Tail
from benchmarks.recovery.measure import summary
from benchmarks.recovery.workload import Workload

HERE = Path(__file__).parent
VERSIONS = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"


def torchrun(workload: Workload, *, python: str, own_store: bool = True) -> Job:
    """One agent: when a worker dies, the agent stops the others and starts all workers again.

    With the defaults of torch 2.13 restarted workers use the store of the previous attempt, and with gloo most restarts
    hang there. A separate store for each attempt is a setting; without it the row is `torchrun, defaults`.
    """
    command = [*_torchrun(python, workload.workers), f"--master-port={_free_port()}"]
    if own_store:
        command = [*_torchrun(python, workload.workers), "--standalone"]
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(own_store))}
    command += [str(HERE / "rivals" / "torchrun_job.py"), workload.as_text()]
    return Job(workload, [_spawn(workload, "torchrun", command, store)], Tail(workload))


def torchft(workload: Workload, *, python: str, hook: str = "torchft") -> Job:
    """A lighthouse, and an agent for each replica group, as torchft's README starts them."""
    port = _free_port()
    lighthouse = Path(python).with_name("torchft_lighthouse")
    asked = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--bind", f"[::]:{port}"]
    processes = [_spawn(workload, "lighthouse", [lighthouse, *asked])]
    for replica in range(workload.workers):
        command = [*_torchrun(python, 1), f"--master-port={_free_port()}", HERE / "rivals" / "torchft_job.py"]
        place = {"REPLICA_GROUP_ID": str(replica), "TORCHFT_LIGHTHOUSE": f"http://localhost:{port}"}
        processes.append(_spawn(workload, f"replica-{replica}", [*command, hook, workload.as_text()], place))
    return Job(workload, processes, Tail(workload))


def shoal(workload: Workload, *, python: str) -> Job:
    """The command line with defaults. At the end the run is stopped, and its checkpoint is verified."""
    from benchmarks.recovery.shoal_job import write_job
    from benchmarks.reference_run import same_weights
    from shoal.jobs import commands
    from shoal.spec.run_paths import RunPaths

    job, runs = write_job(workload), Path(workload.directory, "runs")
    driver = _spawn(workload, "shoal", [sys.executable, "-m", "shoal", "run", job, "--quiet", "--runs", runs])
    paths = RunPaths.at(runs / "recovery-1")

    def prove() -> bool:
        commands.stop(paths)
        driver.wait()
        return same_weights(job, paths)

    return Job(workload, [driver], Tail(workload), prove)


# How each side starts its job. A new side is a function here: it starts a job that writes rows, and returns them.
SIDES: dict[str, Callable[..., Job]] = {
    "shoal": shoal,
    "torchrun": torchrun,
    "torchrun, defaults": functools.partial(torchrun, own_store=False),
    "torchft": torchft,
    "torchft, mended": functools.partial(torchft, hook="mended"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description="What a killed worker costs.")
    report.take_names(parser, "side", SIDES)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of workers and times to kill")
    parser.add_argument("--rivals-python", default=sys.executable, help="the python of an environment with torchft")
    parser.add_argument("--keep", type=Path, help="a directory for rows and logs; a temporary one if none is named")
    parser.add_argument("--quick", action="store_true", help="two kills, nothing written: does it work?")
    asked = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        rows = [measure(side, asked, asked.keep or Path(scratch), console) for side in asked.sides or SIDES]
    shown = [{name: value for name, value in row.items() if not isinstance(value, list)} for row in rows]
    console.print(report.table("recovery", shown))
    if not asked.quick:
        for row in rows:  # replaces earlier results of the same side
            report.keep("recovery", row["rival"], {"rivals": versions(asked.rivals_python), **row})


def measure(side: str, asked: argparse.Namespace, directory: Path, console: Console) -> dict[str, Any]:
    killer = Killer(2 if asked.quick else asked.kills, random.Random(asked.seed), console.print)
    console.print(f"{side}: {killer.kills} kills, {asked.workers} workers")
    numbers = itertools.count()

    def workload() -> Workload:
        run = (directory / f"{side.replace(', ', '-')}-{next(numbers)}").absolute()
        run.mkdir(parents=True)
        return Workload(str(run), workers=asked.workers)

    start = functools.partial(SIDES[side], python=asked.rivals_python)
    traces = killer.runs(start, workload)
    shape = Workload("", workers=asked.workers)
    return summary(side, traces, samples=shape.samples, steps_per_epoch=shape.steps_per_epoch)


def versions(python: str) -> dict[str, str]:
    """Versions of the rivals, in their environment."""
    found = json.loads(subprocess.check_output([python, "-c", VERSIONS]))
    return {name: found[name] for name in ("torch", "torchft") if name in found}


def _torchrun(python: str, workers: int) -> list[str]:
    return [python, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={workers}", "--max-restarts=100"]


def _spawn(
    workload: Workload, name: str, command: list[Any], changes: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    with Path(workload.directory, f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [str(word) for word in command],
            env={**report.environment(), **(changes or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
