"""Rows of earlier versions are read, and the version of a stream stands in it."""

from shoal.events import EventWriter, read_events, replay
from shoal.events.schema import FORMER_FIELDS, FORMER_KINDS, KINDS, SCHEMA_VERSION, from_row, to_row

OLD_ROWS = [
    {"t": 1, "who": "driver", "kind": "run_started", "run": "old-1"},
    {"t": 2, "who": "driver", "kind": "put_out", "worker": "worker-1", "host": "", "reason": "frozen"},
    {"t": 3, "who": "worker-0", "kind": "memory_lost", "step": 5, "lane": 1, "worker": "worker-1"},
    {"t": 4, "who": "driver", "kind": "table", "number": 7, "servers": {"server-2": {"primary_bytes": 5}}},
    {"t": 5, "who": "driver", "kind": "served", "server": "server-2", "served": {"pushes": 3}},
    {"t": 6, "who": "worker-0", "kind": "evaluated", "step": 5, "part": "test", "metrics": {"loss": 0.5}},
]


def test_rows_with_former_names_are_read():
    events = [from_row(dict(row)) for row in OLD_ROWS]
    assert [event.kind for event in events] == [FORMER_KINDS.get(row["kind"], row["kind"]) for row in OLD_ROWS]
    state = replay(events)
    assert [note.kind for note in state.notes] == ["evicted", "residual_lost"]
    assert (state.lost_residuals[0].lane, state.lost_residuals[0].worker) == (1, "worker-1")
    assert (state.chunk_table_number, state.servers["server-2"].stats) == (7, {"pushes": 3})
    assert state.metrics == {"test/loss": 0.5}


def test_former_names_are_names_of_nothing_else():
    assert FORMER_KINDS.keys().isdisjoint(KINDS)
    assert set(FORMER_KINDS.values()) <= set(KINDS)
    for kind, names in FORMER_FIELDS.items():
        assert names.keys().isdisjoint(KINDS[kind].hints)
        assert set(names.values()) <= set(KINDS[kind].hints)


def test_a_run_says_which_version_its_rows_have(tmp_path):
    stream = EventWriter(tmp_path / "e.jsonl", "driver")
    stream.emit("run_started", run="a-1")
    stream.close()
    (event,) = read_events(tmp_path / "e.jsonl")
    assert event["schema"] == SCHEMA_VERSION
    assert KINDS["run_started"].typed({"run": "old-1"}).schema == 1
    assert from_row(to_row(event)) == event
