"""Verify that faults changed nothing: compare with the weights of one undisturbed worker after as many steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.report import environment
from shoal.checkpoint.export import load_weights
from shoal.checkpoint.sha256 import weights_sha256
from shoal.checkpoint.store import CheckpointStore
from shoal.spec.run_paths import RunPaths


def same_weights(job: Path, disturbed: RunPaths) -> bool:
    """Whether a stopped run of this job has the weights of an undisturbed run of as many steps."""
    step, weights = saved_weights(disturbed)
    return weights == reference_weights(job, steps=step, runs=disturbed.root.parent)


def saved_weights(paths: RunPaths) -> tuple[int, str]:
    """Step of the newest checkpoint, and SHA-256 of its weights."""
    store = CheckpointStore(str(paths.checkpoints), job_sha256=None)
    found = store.latest()
    store.close()
    if found is None:
        raise RuntimeError(f"nothing was saved in {paths.root}")
    return found.step, weights_sha256(load_weights(paths.checkpoints))


def reference_weights(job: Path, *, steps: int, runs: Path, workers: int = 1) -> str:
    """The SHA-256 of the weights after so many steps. The job must say its lanes, and its length in steps."""
    changes = [f"steps={steps}", "name=undisturbed", f"workers={workers}", "watchers=[]"]
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "shoal", "run", str(job), "--json", "--quiet", "--runs", str(runs), *words]
    rows = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True).stdout
    return str(json.loads(rows.splitlines()[-1])["weights_sha256"])
