"""Machines that offer their cores to the daemon of a queue. The daemon decides which of them a worker gets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from shoal.errors import ShoalError, error
from shoal.fleet.agents.agent_pipe import SetupCommand
from shoal.fleet.engine import Node
from shoal.fleet.engines.host_link import AgentHost
from shoal.fleet.engines.slurm import TIED_MODULE
from shoal.spec.engine import MachinesEngineConfig
from shoal.spec.run_paths import RunPaths

BRIDGE_MODULE = "shoal.fleet.agents.machine_bridge"
MAX_SEATS = 1024


def machine_nodes() -> list[Node]:
    """The machines as one node: the queue's daemon chooses one for each worker. A run begins with its least workers,
    and the daemon makes it larger."""
    return [Node("machines", cores=1, memory_bytes=0, gpus=0, shares_run_dir=False, seats=1)]


def run_of_queue(config: MachinesEngineConfig, paths: RunPaths) -> str:
    """The run of the queue that a run is, or is a part of: a fold, a trial, a tuning."""
    runs = Path(config.daemon).parent.parent
    return paths.root.relative_to(runs).parts[0] if paths.root.is_relative_to(runs) else paths.name


def machine_host(
    config: MachinesEngineConfig, number: int, *, run: str, threads: int, setup: SetupCommand
) -> AgentHost:
    """One worker's place, which waits until a machine has the cores."""
    node = Node(f"place-{number}", cores=threads, memory_bytes=0, gpus=0, shares_run_dir=False, seats=1)
    tie = (sys.executable, "-P", "-m", TIED_MODULE, str(os.getpid()))
    command = (*tie, sys.executable, "-P", "-m", BRIDGE_MODULE, config.daemon, run, str(threads))
    return AgentHost(node, command, setup, explain_bridge, queued=True)


def explain_bridge(code: int, errors: str) -> ShoalError:
    said = (errors.strip().splitlines()[-1:] or ["it said nothing"])[0][:300]
    fix = "`shoal up --listen` must run beside it, or continue elsewhere: shoal resume RUN --set engine.kind=local."
    return error("SH651", f"no machine of the queue can be had: {said}", where="engine", fix=fix)
