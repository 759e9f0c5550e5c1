"""The time of one decision, with placement, in clusters up to 10,240 GPUs. Jobs, curves and changes are generated."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from typing import Any

from shoal.plan.scheduling import Allocation, JobView, MeasuredSpeed, NodeView, SchedulingPolicy

SCALES = ((64, 22), (1024, 350), (10240, 3500))
"""GPUs, and jobs."""
GPUS_PER_NODE = 4
LANES = 64
FRESH_SHARE = 0.02
"""Between two decisions so many jobs end, and so many new ones arrive."""


def measure(gpus: int, jobs: int, rounds: int, seed: int = 0) -> dict[str, Any]:
    rng = random.Random(seed)
    nodes = {node: NodeView(GPUS_PER_NODE) for node in range(gpus // GPUS_PER_NODE)}
    policy = SchedulingPolicy()
    views = {view.id: view for view in (_view(rng, number, 0.0) for number in range(jobs))}
    times, changed = [], []
    current: Allocation = {}
    for number in range(rounds + 2):
        now = 60.0 * number
        began = time.process_time()
        found = policy.decide(now, views, nodes, current).allocation
        times.append(1e3 * (time.process_time() - began))
        changed.append(sum(found.get(key) != current.get(key) for key in views))
        current = found
        views = _later(rng, views, current, now)
    warm = times[2:]
    return {
        "gpus": gpus,
        "jobs": jobs,
        "cpu_ms": statistics.median(warm),
        "slowest_ms": max(warm),
        "first_ms": times[0],
        "changed_jobs": statistics.median(changed[2:]),
    }


def _view(rng: random.Random, number: int, now: float) -> JobView:
    seconds, overhead = rng.uniform(0.2, 5.0), rng.uniform(0.01, 0.3)
    sizes = ((1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (32, 8))
    measured = {(gpus, nodes): seconds * (1 / gpus + overhead * (gpus > 1)) for gpus, nodes in sizes}
    return JobView(
        id=f"job-{number}",
        curve=MeasuredSpeed(LANES, measured),
        most=LANES,
        user=f"user-{number % 50}",
        submitted_s=now,
        remaining=rng.lognormvariate(7.0, 1.5),
        resize_s=0.3,
    )


def _later(rng: random.Random, views: dict[str, JobView], current: Allocation, now: float) -> dict[str, JobView]:
    kept, number = {}, max(int(key.split("-")[1]) for key in views)
    for key, view in views.items():
        if rng.random() >= FRESH_SHARE:
            served = view.served_s + (60.0 if current.get(key) else 0.0)
            kept[key] = replace(view, remaining=(view.remaining or 0.0) * 0.98, served_s=served)
    for fresh in range(number + 1, number + 1 + len(views) - len(kept)):
        view = _view(rng, fresh, now)
        kept[view.id] = view
    return kept


def report(rounds: int) -> list[dict[str, Any]]:
    return [measure(gpus, jobs, rounds) for gpus, jobs in SCALES]
