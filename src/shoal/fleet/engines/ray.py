"""Ray: a placement group per worker, or per gang of workers that can only run together, and in it an actor for each
that runs the agent. This module does not import Ray."""

from __future__ import annotations

import importlib.util
import json
import sys

from shoal.errors import ShoalError, error
from shoal.fleet.agents.agent_pipe import MAX_SILENCE_S, AttachCommand, SetupCommand
from shoal.fleet.engine import Node
from shoal.fleet.engines.host_link import AgentHost
from shoal.spec.engine import RayEngineConfig

BRIDGE_MODULE = "shoal.fleet.agents.ray_bridge"


def ray_nodes(config: RayEngineConfig) -> list[Node]:
    """Ray as one node with room for `seats` workers: it chooses the machine of each."""
    return [Node("ray", cores=config.seats, memory_bytes=0, gpus=0, shares_run_dir=False, seats=config.seats)]


def actor_host(
    config: RayEngineConfig,
    number: int,
    gang: range = range(1),
    *,
    keeper: str,
    threads: int,
    setup: SetupCommand | AttachCommand,
    patience_s: float = MAX_SILENCE_S,
) -> AgentHost:
    """A place for one worker, which waits until the cluster has room for its whole gang, or has grown. `gang`: the
    numbers of its members. With AttachCommand, a place that a run has already, by the same number and keeper."""
    if importlib.util.find_spec("ray") is None:
        raise error("SH607", "the package ray is missing", where="engine", fix="Install it: pip install 'shoal[ray]'.")
    node = Node(f"actor-{number}", cores=threads, memory_bytes=0, gpus=0, shares_run_dir=False, seats=1)
    options = {
        "address": config.address,
        "keeper": keeper,
        "name": f"{keeper}/{number}",
        "resources": {"CPU": float(threads)} | config.resources,
        "gang": gang.start,
        "gang_size": len(gang),
        "python": config.python or "",
        "patience_s": patience_s,
        "attach": isinstance(setup, AttachCommand),
    }
    command = (sys.executable, "-P", "-m", BRIDGE_MODULE, json.dumps(options))
    return AgentHost(node, command, setup, explain_ray, queued=True, detached=True)


def explain_ray(code: int, errors: str) -> ShoalError:
    lines = [line.strip() for line in errors.splitlines() if line.strip() and "+0x" not in line]  # no stack of C++
    told = (lines[-1:] or ["it said nothing"])[0][:300]
    if "No module named" in told:
        return error("SH653", f"the interpreter cannot run Shoal's agent on a node: {told}")
    return error("SH657", f"the actor could not be started: {told}")
