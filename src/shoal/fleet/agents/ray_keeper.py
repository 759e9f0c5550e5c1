"""What keeps the workers of a run on a cluster of Ray while the run has no driver: one actor on the head node.

It is detached, so it outlives its driver. It owns the placement groups and the actors in them, and Ray ends both with
it. A worker that no bridge asks for in a while is given back; a keeper that has nothing to keep ends.
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


@dataclass(eq=False)
class KeptGroup:
    """A placement group: Ray gives all its bundles at once, or none. Each has the same resources and is for one agent.
    `free`: those without an agent."""

    group: Any
    resources: dict[str, float]
    bundles: int
    free: list[int]

    def usable(self, resources: dict[str, float]) -> list[int]:
        """The free bundles with these resources. Nothing starts on a node that Ray takes away; once it is gone, Ray
        puts its bundles elsewhere."""
        import ray

        if not self.free or self.resources != resources:
            return []
        draining = ray._private.state.state.get_draining_nodes()
        nodes = ray.util.placement_group_table(self.group).get("bundles_to_node_id", {})
        return [bundle for bundle in self.free if nodes.get(bundle) not in draining]


@dataclass
class KeptAgent:
    kept_group: KeptGroup
    bundle: int
    actor: Any
    heard_s: float
    patience_s: float


class SeatKeeper:
    """Each method is called by one thread at a time; the watch is another one."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._kept: dict[str, KeptAgent] = {}
        self._groups: list[KeptGroup] = []
        self._missing: dict[int, int] = {}  # by gang: members that have no place yet
        self._given_back: set[str] = set()
        self._lock = threading.Lock()
        self._empty_since_s = time.monotonic()
        threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def ask(
        self, name: str, resources: dict[str, float], gang: tuple[int, int], python: str, module: str
    ) -> tuple[Any, Any, int]:
        """Ask Ray for a place with an agent in it. `gang`: its number and size. Returns the actor, the placement group,
        which may wait, and the number of the bundle in it."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        with self._lock:
            if name in self._given_back:
                return None, None, 0
            kept_group, bundle = self._take_bundle(name, resources, gang)
            rest = dict(resources)
            placed = actor_class(ray).options(
                num_cpus=rest.pop("CPU", 0),
                num_gpus=rest.pop("GPU", 0),
                resources=rest,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=kept_group.group, placement_group_bundle_index=bundle
                ),
            )
            actor = placed.remote(python, module)
            self._kept[name] = KeptAgent(kept_group, bundle, actor, time.monotonic(), self._patience_s)
        return actor, kept_group.group, bundle

    def _take_bundle(self, name: str, resources: dict[str, float], gang: tuple[int, int]) -> tuple[KeptGroup, int]:
        """One that is free, or the first of a new placement group for all members of the gang that have no place."""
        from ray.util.placement_group import placement_group

        number, size = gang
        missing = self._missing.get(number, size)
        self._missing[number] = max(1, missing - 1)
        for kept_group in self._groups:
            if usable := kept_group.usable(resources):
                kept_group.free.remove(usable[0])
                return kept_group, usable[0]
        made = placement_group([resources] * missing, name=name)
        self._groups.append(KeptGroup(made, resources, missing, list(range(1, missing))))
        return self._groups[-1], 0

    def find(self, name: str) -> tuple[Any, Any, int]:
        """What `ask` returned for this name; (None, None, 0) if it was given back."""
        kept = self._kept.get(name)
        return (kept.actor, kept.kept_group.group, kept.bundle) if kept else (None, None, 0)

    def hear(self, name: str) -> None:
        """A driver still wants it."""
        if kept := self._kept.get(name):
            kept.heard_s = time.monotonic()

    def let_go(self, name: str) -> None:
        """The agent was told to end. Whoever told it may not live to see that."""
        if kept := self._kept.get(name):
            kept.patience_s = LET_GO_S

    def give_back(self, name: str) -> None:
        """End the actor, and with it the agent and its processes. It cannot be asked for again. The group is removed
        with its last agent; until then the place is kept for another."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            self._given_back.add(name)
            self._empty_since_s = time.monotonic()
            if (kept := self._kept.pop(name, None)) is None:
                return
            ray.kill(kept.actor)
            left = kept.kept_group
            left.free.append(kept.bundle)
            if len(left.free) == left.bundles:
                self._groups.remove(left)
                remove_placement_group(left.group)

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
