"""The only worker is asked to go: another takes its place, and nothing is lost."""

import os
import signal

import pytest

from shoal.events import read_events
from tests.conftest import MLP


@pytest.mark.parametrize(("lanes", "how"), [(1, "resumed"), (4, "caught_up")], ids=["by checkpoint", "from memory"])
def test_the_only_worker_leaves(run, job_dir, lanes, how):
    """One lane cannot be carried by two, so its state goes by checkpoint; else the newcomer gets it from memory."""
    asked = []

    def look(paths, event, run_state):
        if event.kind == "step" and event.step >= 20 and not asked:
            asked.append(os.kill(run_state.training_workers[0].pid, signal.SIGTERM))
        if event.kind == how:
            (job_dir / "done").touch()

    slow_steps = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.02, "until": str(job_dir / "done")}}
    outcome = run(MLP, look, lanes=lanes, steps=400, watchers=[slow_steps])
    undisturbed = run(MLP, lanes=lanes, steps=400)
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.weights_sha256 == undisturbed.receipt.weights_sha256
    assert outcome.receipt.state_sha256 == undisturbed.receipt.state_sha256
    assert outcome.receipt.deaths_survived == 0
    (row,) = [event for event in read_events(outcome.paths.events) if event.kind == how]
    assert row.step >= 20
