"""Shoal trains PyTorch models on whatever machines there are: the same weights, bit for bit, through any crash.

    import shoal
    outcome = shoal.run(shoal.Job(...))      # or shoal.load_job("job.yaml")
    model = shoal.load(outcome.paths.root)

Nothing heavy is imported before it is used: `shoal.Task`, `shoal.Batch` and `shoal.load` need torch, the rest does not.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "Job": "shoal.spec.job",
    "load_job": "shoal.spec.load",
    "make_job": "shoal.spec.load",
    "run": "shoal.api",
    "resume": "shoal.api",
    "search": "shoal.api",
    "load": "shoal.api",
    "predict": "shoal.api",
    "connect": "shoal.web.client",
    "Task": "shoal.tasks.task",
    "SparseTable": "shoal.lanes.sparse.embedding",
    "Batch": "shoal.data.batch",
    "Event": "shoal.events",
    "ShoalError": "shoal.errors",
}
__all__ = [
    "Batch",
    "Event",
    "Job",
    "ShoalError",
    "SparseTable",
    "Task",
    "connect",
    "load",
    "load_job",
    "make_job",
    "predict",
    "resume",
    "run",
    "search",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'shoal' has no attribute '{name}'")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
