"""Events as lines: every sentence once."""

import pytest

from shoal.events import Event, replay
from shoal.events.run_state import _HANDLERS
from shoal.events.schema import KINDS
from shoal.terminal.notes import _LINES, describe_event, describe_layout, event_line, note_lines

CHOICE = {"workers": 2, "hosts": 1, "threads": 3, "how": "lanes"}
PREDICTION = {"step_s": 0.002, "compute_s": 0.001, "encode_s": 0.0, "exchange_s": 0.001, "apply_s": 0.0}
REPLAN = {"choice": CHOICE, "prediction": PREDICTION, "truth": {"step_s": 0.0041, "lane_s": [[0.1]]},
          "expected": PREDICTION, "moves": None, "best": None, "reason": "nothing is faster"}  # fmt: skip
LINES = [
    ("plan", {"choice": CHOICE, "prediction": PREDICTION, "reason": "it is faster"},
     "plan: 2 workers (lanes) with 3 threads each: it is faster"),
    ("replan", REPLAN, "plan: a step takes 4.1 ms instead of 2 ms; nothing is faster"),
    ("resumed", {"source": "a checkpoint"}, "the run resumed at step 5 from a checkpoint"),
    ("steps_lost", {"steps": 9}, "no checkpoint was saved: the workers make 9 steps again"),
    ("view", {"number": 1, "why": "worker-2 is gone"}, "worker-2 is gone"),
    ("view", {"number": 1, "why": "finished"}, ""),
    ("caught_up", {"source": "worker-1"}, "worker-0 got step 5 from the memory of worker-1"),
    ("caught_up", {"source": "the memory of workers"}, "worker-0 got step 5 from the memory of workers"),
    ("evaluated", {"split": "test", "metrics": {"loss": 0.5}}, "step 5: evaluated on test: loss 0.5000"),
    ("save_failed", {"reason": "full"}, "the checkpoint of step 5 could not be saved: full; training goes on"),
    ("saved", {"recovered": True}, "step 5: saving works again"),
    ("saved", {}, ""),
    (
        "loader_restarted",
        {"reason": "died of SIGKILL"},
        "a loader process of worker-0 died of SIGKILL; another one builds its batch again",
    ),
    ("self_checked", {"lanes": 2}, ""),
    ("self_checked", {"lanes": 2, "why": "lane 1 differs", "objects": ["task.seen"]},
     "not exact: lane 1 differs (not in a checkpoint, and different: task.seen)"),
    ("save_skipped", {}, "no checkpoint at step 5: the last one is still being written"),
    ("checkpoint_invalid", {"reason": "a blob is missing"}, "the checkpoint of step 5 is invalid: a blob is missing"),
    ("cleanup_failed", {"reason": "denied"}, "old checkpoints could not be removed: denied"),
    ("export_skipped", {"what": "model.pt2", "reason": "a loop"}, "model.pt2 was not exported: a loop"),
    ("note", {"message": "anything"}, "anything"),
    ("alert", {"when": "disk", "text": "1.0 GB are free", "about": ""}, "alert: 1.0 GB are free"),
    ("weights_loaded", {"path": "a-1", "loaded": 4, "tensors": 4}, "initialised from a-1: 4 of 4 tensors"),
    ("weights_loaded", {"path": "w", "loaded": 3, "tensors": 12, "missing": list("abcdefg"), "missing_count": 8,
                        "left_over": ["old"], "left_over_count": 1, "mismatched": ["'x' is [1]"],
                        "mismatched_count": 1},
     "initialised from w: 3 of 12 tensors; 8 not in the file: a, b, c, d, e and 3 more; 1 not in the model: old; "
     "1 of another shape: 'x' is [1]"),
    ("evicted", {"worker": "worker-1", "host": "there", "reason": "frozen"}, "worker-1 on there was evicted: frozen"),
    ("evicted", {"server": "server-3", "reason": "frozen"}, "server-3 was evicted: frozen"),
    ("worker_died", {"worker": "worker-1", "reason": "SIGKILL"}, "worker-1 died: SIGKILL"),
    ("servers_wanted", {"number": 2, "why": "scaled"}, "the run wants 2 servers: scaled"),
    ("servers_wanted", {"number": 2}, ""),
    ("server_died", {"server": "server-3", "reason": "SIGKILL"}, "server-3 died: SIGKILL"),
    ("server_left", {"server": "server-3"}, "server-3 left"),
    ("servers_lost", {"reason": "both copies are gone"}, "the servers lost parameters: both copies are gone"),
    ("residual_lost", {"lane": 1, "worker": "worker-1"}, "the residual of lane 1 was lost with worker-1 at step 5"),
    ("residual_lost", {"lane": 1}, "the residual of lane 1 was lost at step 5"),
    ("left", {"why": "drained"}, "worker-0 left at step 5 (drained)"),
    ("printed", {"text": "hello"}, "hello"),
    ("joined", {"lanes": [0]}, ""),
    (
        "refused",
        {"reason": "it claims seat 7", "name": "a worker", "address": "10.0.0.7:99"},
        "a worker at 10.0.0.7:99 was refused: it claims seat 7",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields", "line"), LINES)
def test_the_line_of_an_event(kind, fields, line):
    assert KINDS[kind].problems(fields) == {}
    assert describe_event(Event(kind, 1.0, "worker-0", 5, fields)) == line


def test_every_kind_with_a_line_is_in_the_schema_and_tried():
    assert set(_LINES) <= set(KINDS)
    assert set(_LINES) - {kind for kind, _, _ in LINES} == {"run_started", "built"}, "test_display.py tries these"


def test_every_note_of_a_run_has_a_line():
    noted = [(kind, fields) for kind, fields, line in LINES if kind in _HANDLERS and line]
    state = replay(Event(kind, 1.0, "worker-0", 5, fields) for kind, fields in noted)
    kinds = {note.kind for note in state.notes}
    assert kinds - set(_LINES) == set()
    assert {"plan", "replan"} < kinds
    assert len(note_lines(state)) == len(state.notes) - 2, "those of the plan are shown elsewhere"


def test_what_a_new_saver_repeats_is_not_shown_again():
    event = Event("evaluated", 1.0, "worker-0", 5, {"split": "validation", "metrics": {"loss": 0.5}, "again": True})
    state = replay([event])
    assert event_line(event, state) == ""


def test_a_layout_in_words():
    layout = {"shard": "pipeline", "ways": 2, "replicas": 1, "cuts": ["layers.1", "layers.3"]}
    assert describe_layout(layout) == "shard: pipeline over 2, 1 replica, cut at layers.1, layers.3"
    assert describe_layout(layout | {"replicas": 3, "cuts": []}) == "shard: pipeline over 2, 3 replicas"
