"""`python -m shoal.fleet.agents.ray_bridge OPTIONS`: an agent on a node of Ray, as a process with pipes here.

It lets the keeper of the run ask Ray for a place with an agent in it, and passes on what engine and agent say. If its
input ends without a word, its driver was killed: it leaves the agent to the keeper, for another driver. Otherwise
nothing outlives it. The one module of the driver's machine that imports Ray.
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

from shoal.fleet.agents.agent_pipe import END
from shoal.fleet.agents.host_agent import unreachable_reason
from shoal.fleet.agents.ray_actor import REPLACED
from shoal.fleet.agents.ray_keeper import keeper_class
from shoal.fleet.engines.ssh import AGENT_MODULE
from shoal.net.wakeup import Wakeup

NAMESPACE = "shoal"
POLL_S = 1.0
GIVE_BACK_TIMEOUT_S = 10.0
_READ_BYTES = 1 << 16


def main() -> None:
    options = json.loads(sys.argv[1])
    reports = os.dup(1)
    os.dup2(2, 1)  # Ray prints to standard output
    check_address(options["address"])
    ray.init(
        address=options["address"], namespace=NAMESPACE, log_to_driver=False, configure_logging=False, logging_level=40
    )
    withdrawn = Wakeup()
    signal.signal(signal.SIGTERM, lambda *_: withdrawn.notify())
    code = Bridge(find_keeper(options), options, reports, withdrawn).run()
    sys.stderr.flush()
    os._exit(code)


def find_keeper(options: dict[str, Any]) -> Any:
    """The keeper of this run. Only a new run makes one."""
    name = options["keeper"]
    if options["attach"]:
        try:
            return ray.get_actor(name)
        except ValueError:
            sys.exit("no worker of the run lives any more")
    made = keeper_class(ray).options(name=name, lifetime="detached", get_if_exists=True)
    return made.remote(options["patience_s"])


def check_address(address: str) -> None:
    """Ray itself tries for minutes."""
    if address != "auto" and (why := unreachable_reason(address)):
        sys.exit(f"no cluster of Ray answers at {address}: {why}")


def describe(failure: Exception) -> str:
    """One line. The error of an actor's own start stands at the end of what Ray says."""
    lines = [line for line in str(failure).splitlines() if line.strip()] or [""]
    return f"{type(failure).__name__}: {lines[-1 if 'creation task' in lines[0] else 0].strip()}"


class Bridge:
    """One actor. `run` returns the exit code for this process when the agent has ended, or is left to the keeper.

    A thread waits for Ray, so that the main one hears the engine at any time.
    """

    def __init__(self, keeper: Any, options: dict[str, Any], reports: int, withdrawn: Wakeup) -> None:
        self._keeper = keeper
        self._options = options
        self._name = options["name"]
        self._reports = reports
        self._withdrawn = withdrawn
        self._progress = Wakeup()
        self._ended = threading.Event()
        self._actor: Any = None
        self._group: Any = None
        self._bundle = 0
        self._number: int | None = None  # of this bridge; None until the agent runs
        self._input = b""
        self._told_to_end = self._told_to_leave = self._is_replaced = False
        self._code = 1

    def run(self) -> int:
        threading.Thread(target=self._pass_reports, daemon=True).start()
        sources: list[Any] = [self._withdrawn, self._progress, 0]
        while not self._ended.is_set():
            readable, _, _ = select.select(sources, [], [], POLL_S)
            self._progress.clear()
            if 0 in readable and not self._take_input():
                sources.remove(0)
            # asked for again: a signal that came before the end of the input may be seen after it
            if self._withdrawn in select.select([self._withdrawn], [], [], 0)[0]:
                break
            if 0 not in sources and not self._told_to_end:  # the driver was killed
                if self._number is None:
                    break
                return 1
            self._send()
            self._keeper.hear.remote(self._name)
            self._check_draining()
        if not self._is_replaced:
            ray.wait([self._keeper.give_back.remote(self._name)], timeout=GIVE_BACK_TIMEOUT_S)
        return self._code

    # ---- engine to agent ----

    def _take_input(self) -> bool:
        """False at the end."""
        data = os.read(0, _READ_BYTES)
        self._input += data
        self._told_to_end = self._told_to_end or self._input.endswith(END + b"\n")
        return bool(data)

    def _send(self) -> None:
        """Send whole lines: what the agent gets is never half of a command, whoever is killed."""
        if self._number is None or not self._input:
            return
        lines, end, self._input = self._input.rpartition(b"\n")
        self._actor.write.remote(self._number, (lines + end).removesuffix(END + b"\n"))
        if self._told_to_end:
            self._actor.write.remote(self._number, b"")
            self._keeper.let_go.remote(self._name)

    def _check_draining(self) -> None:
        """Ask the workers to leave if Ray takes the node of the actor away."""
        if self._number is None or self._told_to_leave:
            return
        draining = ray._private.state.state.get_draining_nodes()
        if not draining:
            return
        table = ray.util.placement_group_table(self._group)
        if table.get("bundles_to_node_id", {}).get(self._bundle) in draining:
            self._told_to_leave = True
            self._actor.terminate.remote()

    # ---- agent to engine, in a thread of its own ----

    def _pass_reports(self) -> None:
        try:
            self._attach()
            self._code, errors = self._read_reports()
            sys.stderr.write(errors)
        except (ray.exceptions.RayError, OSError) as failure:
            sys.stderr.write(f"{describe(failure)}\n")
        finally:
            sys.stderr.flush()
            self._ended.set()
            self._progress.notify()

    def _attach(self) -> None:
        """Get the actor, and wait until it runs. That may take hours."""
        options = self._options
        if options["attach"]:
            found = self._keeper.find.remote(self._name)
        else:
            gang = options["gang"], options["gang_size"]
            found = self._keeper.ask.remote(self._name, options["resources"], gang, options["python"], AGENT_MODULE)
        self._actor, self._group, self._bundle = ray.get(found)
        if self._actor is None:
            raise OSError("the agent was given back")
        self._number = ray.get(self._actor.attach.remote())
        self._progress.notify()

    def _read_reports(self) -> tuple[int, str]:
        """Exit code and last words of the agent."""
        received = -1 if self._options["attach"] else 0
        while True:
            received, data = ray.get(self._actor.read.remote(self._number, received))
            if data is None:
                break
            while data:
                data = data[os.write(self._reports, data) :]
        if received == REPLACED:
            self._is_replaced = True
            return 1, "another driver took over\n"
        code, errors = ray.get(self._actor.end.remote())
        return code, errors.decode(errors="replace")


if __name__ == "__main__":
    main()
