"""What keeps the workers of a run on a cluster of Ray while the run has no driver: one actor on the head node.

It is detached, so it outlives its driver. It owns the placement group of each worker and the actor in it, and Ray ends
both with it. A worker that no bridge asks for in a while is given back; a keeper that has nothing to keep ends.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from shoal.fleet.agents.ray_actor import actor_class, end_with_parent

WATCH_S = 1.0
EMPTY_S = 10.0
"""How long a keeper without a worker stays: the next request does not wait for another one."""
LET_GO_S = 15.0
"""How long an agent has to end that was told to."""


@dataclass
class KeptAgent:
    group: Any
    actor: Any
    heard_s: float
    patience_s: float


class SeatKeeper:
    """Each method is called by one thread at a time; the watch is another one."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._kept: dict[str, KeptAgent] = {}
        self._given_back: set[str] = set()
        self._lock = threading.Lock()
        self._empty_since_s = time.monotonic()
        threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def ask(self, name: str, resources: dict[str, float], python: str, module: str) -> tuple[Any, Any]:
        """Ask Ray for a placement group with an agent in it. Returns the actor and the group, which may wait."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with self._lock:
            if name in self._given_back:
                return None, None
            group = placement_group([resources], name=name)
            rest = dict(resources)
            placed = actor_class(ray).options(
                num_cpus=rest.pop("CPU", 0),
                num_gpus=rest.pop("GPU", 0),
                resources=rest,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=group),
            )
            actor = placed.remote(python, module)
            self._kept[name] = KeptAgent(group, actor, time.monotonic(), self._patience_s)
        return actor, group

    def find(self, name: str) -> tuple[Any, Any]:
        """The actor and the group of this name; (None, None) if they were given back."""
        kept = self._kept.get(name)
        return (kept.actor, kept.group) if kept else (None, None)

    def hear(self, name: str) -> None:
        """A driver still wants it."""
        if kept := self._kept.get(name):
            kept.heard_s = time.monotonic()

    def let_go(self, name: str) -> None:
        """The agent was told to end. Whoever told it may not live to see that."""
        if kept := self._kept.get(name):
            kept.patience_s = LET_GO_S

    def give_back(self, name: str) -> None:
        """End the actor, and with it the agent and its processes; remove the group. It cannot be asked for again."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            kept = self._kept.pop(name, None)
            self._given_back.add(name)
            self._empty_since_s = time.monotonic()
        if kept:
            ray.kill(kept.actor)
            remove_placement_group(kept.group)

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            now = time.monotonic()
            for name, kept in list(self._kept.items()):
                if now > kept.heard_s + kept.patience_s:
                    self.give_back(name)
            with self._lock:
                if not self._kept and now > self._empty_since_s + EMPTY_S:
                    os._exit(0)


def keeper_class(ray: Any) -> Any:
    """On the head: without it there is no cluster. A keeper that starts again would own nothing."""
    return ray.remote(num_cpus=0, resources={"node:__internal_head__": 0.001}, max_restarts=0, max_task_retries=0)(
        SeatKeeper
    )
