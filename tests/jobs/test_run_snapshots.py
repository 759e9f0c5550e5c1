"""Real runs leave a snapshot of their state behind, and go on from it."""

import os
import signal
import time

from shoal.events import RunStateReader, load_summary, read_events, replay
from shoal.events.snapshot import encode_state
from shoal.jobs import run_index
from shoal.jobs.run_executor import load_run_state
from tests.conftest import MLP

SHORT = {"steps": 8, "evaluate": {"every_steps": 4}}


def test_a_finished_run_is_listed_and_shown_from_its_snapshot(run):
    paths = run(MLP, **SHORT).paths
    summary = load_summary(paths.events, paths.state_snapshot)
    assert (summary.status, summary.step) == ("finished", 8)
    listed = run_index.run_summary(paths)
    state = encode_state(load_run_state(paths))
    assert state == encode_state(replay(read_events(paths.events)))
    paths.state_snapshot.unlink()
    assert run_index.run_summary(paths) == listed
    assert encode_state(load_run_state(paths)) == state


def test_a_run_that_goes_on_has_the_state_of_its_whole_stream(run, resume):
    """Its driver goes on from the snapshot of the one before; the receipt counts what both saw."""

    asked = []

    def stop_once(paths, event, state):
        if event.kind == "step" and not asked:
            asked.append(event.step)
            os.kill(os.getpid(), signal.SIGINT)

    first = run(MLP | {"checkpoint": {"every": "1 step"}}, stop_once, **(SHORT | {"steps": 600}))
    assert first.status == "interrupted"
    paths = first.paths
    before = RunStateReader(paths.events, paths.state_snapshot).state
    assert (before.starts, before.status) == (1, "interrupted")
    second = resume(paths)
    assert second.receipt, (second.status, second.error, second.traceback)
    assert second.receipt.starts == 2
    assert second.receipt.steps == 600
    whole = replay(read_events(paths.events))
    assert second.receipt.carried["worker-0"].samples == whole.workers["worker-0"].samples
    assert encode_state(load_run_state(paths)) == encode_state(whole)


def test_folds_are_listed_with_their_means(run):
    folds = {"data": MLP["data"] | {"split": {"kind": "kfold", "folds": 2}}}
    paths = run(MLP | folds, **SHORT).folds[0].paths.parent_run
    long_ago = time.time() - 100
    os.utime(paths.events, (long_ago, long_ago))
    for has_snapshot in (False, True):
        assert paths.state_snapshot.exists() is has_snapshot
        assert run_index.run_summary(paths)["metrics"] == run_index.fold_means(paths) != {}
        load_run_state(paths)
