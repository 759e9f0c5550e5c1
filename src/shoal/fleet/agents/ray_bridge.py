"""`python -m shoal.fleet.agents.ray_bridge OPTIONS`: an agent on a node of Ray, as a process with pipes here.

It asks Ray for a placement group of one bundle, starts an actor there, and passes on what engine and agent say. Nothing
outlives it: Ray removes the group and the actor of a job whose driver is gone, and the agent ends with the actor.
The one module that imports Ray.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.fleet.agents.host_agent import unreachable_reason
from shoal.fleet.agents.ray_actor import actor_class

NAMESPACE = "shoal"
POLL_S = 1.0
_READ_BYTES = 1 << 16
AGENT_MODULE = "shoal.fleet.agents.host_agent"


def main() -> None:
    options = json.loads(sys.argv[1])
    reports = os.dup(1)
    os.dup2(2, 1)  # Ray prints to standard output
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    check_address(options["address"])
    ray.init(
        address=options["address"], namespace=NAMESPACE, log_to_driver=False, configure_logging=False, logging_level=40
    )
    group = placement_group([options["resources"]], name=options["name"])
    wait_for_group(group)
    strategy = PlacementGroupSchedulingStrategy(placement_group=group)
    resources = dict(options["resources"])
    placed = actor_class(ray).options(
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
        scheduling_strategy=strategy,
        name=options["name"],
    )
    code = Bridge(placed.remote(options["python"], AGENT_MODULE), group, reports).run()
    remove_placement_group(group)
    os._exit(code)


def wait_for_group(group: Any) -> None:
    """It may take hours. Meanwhile the engine may close this process's input."""
    ready = group.ready()
    while not ray.wait([ready], timeout=POLL_S)[0]:
        if os.getppid() == 1:
            os._exit(1)
    ray.get(ready)


def check_address(address: str) -> None:
    """Ray itself tries for minutes."""
    if address != "auto" and (why := unreachable_reason(address)):
        sys.exit(f"no cluster of Ray answers at {address}: {why}")


def describe(failure: Exception) -> str:
    """One line. The error of an actor's own start stands at the end of what Ray says."""
    lines = [line for line in str(failure).splitlines() if line.strip()] or [""]
    return f"{type(failure).__name__}: {lines[-1 if 'creation task' in lines[0] else 0].strip()}"


class Bridge:
    """One actor. `run` returns the exit code for this process when the agent has ended."""

    def __init__(self, actor: Any, group: Any, reports: int) -> None:
        self._actor = actor
        self._group = group
        self._reports = reports
        self._ended = threading.Event()
        self._code = 1
        self._told_to_leave = False

    def run(self) -> int:
        threading.Thread(target=self._pass_reports, daemon=True).start()
        is_open = True
        while not self._ended.is_set():
            readable, _, _ = select.select([0] if is_open else [], [], [], POLL_S if is_open else 0.05)
            if readable:
                data = os.read(0, _READ_BYTES)
                is_open = bool(data)
                self._actor.write.remote(data)
            if not self._told_to_leave and self._is_draining():
                self._told_to_leave = True
                self._actor.terminate.remote()
        return self._code

    def _pass_reports(self) -> None:
        try:
            while (data := ray.get(self._actor.read.remote())) is not None:
                while data:
                    data = data[os.write(self._reports, data) :]
            self._code, errors = ray.get(self._actor.end.remote())
            sys.stderr.write(errors.decode(errors="replace"))
        except (ray.exceptions.RayError, OSError) as failure:
            sys.stderr.write(f"{describe(failure)}\n")
        finally:
            os.close(self._reports)
            self._ended.set()

    def _is_draining(self) -> bool:
        """Whether Ray takes the node of the actor away."""
        draining = ray._private.state.state.get_draining_nodes()
        if not draining:
            return False
        table = ray.util.placement_group_table(self._group)
        return any(node in draining for node in table.get("bundles_to_node_id", {}).values())


if __name__ == "__main__":
    main()
