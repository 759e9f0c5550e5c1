"""The stream survives its writers."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from shoal.events import EventReader, EventWriter, read_events, replay
from shoal.events.stream import MAX_LINE_BYTES, STRICT_VARIABLE, parse_event


def test_rows_come_back_as_they_were_told(tmp_path):
    stream = EventWriter(tmp_path / "e.jsonl", "worker-0")
    told = stream.emit("evaluated", step=3, split="validation", metrics={"loss": 0.5})
    stream.close()
    (event,) = read_events(tmp_path / "e.jsonl")
    assert (event.kind, event.who, event.step, event.fields) == ("evaluated", "worker-0", 3, told.fields)


def test_a_stream_may_go_through_a_function_a_line_at_a_time():
    lines = []
    stream = EventWriter.to_callback(lines.append, "worker-7", flush_s=1000)
    stream.emit("step", step=1, loss=0.5)
    assert lines == [], "steps wait for each other"
    stream.emit("note", step=1, message="two\nlines")
    stream.emit("step", step=2)
    stream.close()
    events = [parse_event(line) for line in lines]
    assert [(e.kind, e.who, e.step, e.fields) for e in events] == [
        ("step", "worker-7", 1, {"loss": 0.5}),
        ("note", "worker-7", 1, {"message": "two\nlines"}),
        ("step", "worker-7", 2, {}),
    ]
    assert all(line.endswith(b"\n") for line in lines)


def test_a_half_written_row_is_passed_over_and_the_next_writer_starts_afresh(tmp_path):
    path = tmp_path / "e.jsonl"
    stream = EventWriter(path, "a")
    stream.emit("note", message="one")
    stream.close()
    with path.open("ab") as file:
        file.write(b'{"t": 1, "who": "a", "kind": "no')
    reader = EventReader(path)
    assert [e["message"] for e in reader.read_new()] == ["one"]
    again = EventWriter(path, "a")
    again.emit("note", message="three")
    again.close()
    assert [e["message"] for e in reader.read_new()] == ["three"]
    assert reader.skipped_rows == 1


def test_a_reader_follows_a_writer(tmp_path):
    path = tmp_path / "e.jsonl"
    reader = EventReader(path)
    assert list(reader.read_new()) == []
    stream = EventWriter(path, "a")
    for number in range(3):
        stream.emit("note", step=number, message="x")
        assert [e.step for e in reader.read_new()] == [number]
    stream.close()


def test_a_reader_begins_where_another_ended(tmp_path):
    path = tmp_path / "e.jsonl"
    stream = EventWriter(path, "a")
    stream.emit("note", step=1, message="x")
    first = EventReader(path)
    assert [e.step for e in first.read_new()] == [1]
    stream.emit("note", step=2, message="x")
    stream.close()
    assert [e.step for e in EventReader(path, offset=first.offset).read_new()] == [2]


GOOD = json.dumps({"kind": "note", "t": 0, "who": "x", "message": "ok"}).encode()


def test_garbage_is_counted_not_raised(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'\x00\xff\n[1,2]\n{"kind":1}\nnull\n' + GOOD + b"\n")
    reader = EventReader(path)
    assert [e["message"] for e in reader.read_new()] == ["ok"]
    assert reader.skipped_rows == 4


def test_a_line_without_an_end_is_one_damaged_row(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(GOOD + b"\n" + b"x" * (2 * MAX_LINE_BYTES + 5))
    reader = EventReader(path)
    assert [e["message"] for e in reader.read_new()] == ["ok"]
    with path.open("ab") as file:
        file.write(GOOD + b"\n" + GOOD + b"\n")
    assert [e["message"] for e in reader.read_new()] == ["ok"]
    assert reader.skipped_rows == 1


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "unheard_of"}, {"kind": ["step"]}, {"t": "now"}, {"t": float("nan")}, {"t": 1e300}, {"who": 3},
        {"step": "3"}, {"step": -1}, {"step": 1.5}, {"wall_s": float("inf")}, {"wall_s": "1"}, {"samples": True},
        {"samples": 10**30}, {"loss": "0.5"}, {"steps": None},
    ],
)  # fmt: skip
def test_a_row_that_breaks_the_schema_is_passed_over(change):
    row = {"kind": "step", "t": 1.0, "who": "worker-0", "step": 3, "loss": float("nan"), "later_field": {"x": [1]}}
    assert parse_event(json.dumps(row).encode()).fields.keys() == {"loss", "later_field"}
    assert parse_event(json.dumps(row | change).encode()) is None


def test_deep_nesting_and_halves_of_characters_do_no_harm():
    assert parse_event(b"[" * 100_000) is None
    assert parse_event(GOOD.replace(b"ok", b"a\\udc80b"))["message"] == "a?b"
    assert parse_event(GOOD.replace(b"ok", b"\\ud83d\\udc1f"))["message"] == "\N{FISH}"


def test_in_tests_an_event_that_breaks_the_schema_is_an_error():
    stream = EventWriter.to_callback(lambda row: None, "a")
    for kind, fields, why in [
        ("unheard_of", {}, "the kind is not in the schema"),
        ("note", {}, "message is missing"),
        ("note", {"message": "x", "text": "y"}, "text is not in the schema"),
        ("step", {"loss": np.float32(1)}, "loss is .*, not float"),
        ("step", {"wall_s": float("nan")}, "wall_s is nan, not s"),
        ("step", {"step": 1.0}, "step is 1.0"),
    ]:
        with pytest.raises(TypeError, match=why):
            stream.emit(kind, **fields)


def test_elsewhere_it_stops_nothing_and_what_fits_is_written(monkeypatch):
    monkeypatch.delenv(STRICT_VARIABLE)
    lines = []
    stream = EventWriter.to_callback(lines.append, "a", flush_s=0)
    stream.emit("step", step=np.int64(4), loss=np.float32(0.5), lr="fast", samples=3, new=1)
    stream.emit("unheard_of", x=1)
    stream.emit("note", message="fine")
    stream.emit("saved", step=np.int64(5))
    assert stream.invalid_rows == 3
    assert parse_event(lines[0]).step == 4
    assert parse_event(lines[0]).fields == {"loss": 0.5, "samples": 3, "new": 1}
    assert parse_event(lines[1]) is None
    assert parse_event(lines[2])["message"] == "fine"
    assert parse_event(lines[3]).step == 5


def test_a_text_that_is_too_long_is_cut():
    lines = []
    stream = EventWriter.to_callback(lines.append, "a")
    stream.emit("failed", code="BUG", message="first " + "x" * MAX_LINE_BYTES + " last", where="here", fix="")
    message = parse_event(lines[0])["message"]
    assert message.startswith("first ")
    assert message.endswith(" last")
    assert len(message) < 11_000


def test_several_processes_share_one_stream_and_a_killed_one_spoils_nothing(tmp_path):
    path = tmp_path / "e.jsonl"
    program = (
        "import sys, pathlib\nfrom shoal.events import EventWriter\n"
        "s = EventWriter(pathlib.Path(sys.argv[1]), sys.argv[2], flush_s=0)\nprint('go', flush=True)\n"
        "n = 0\nwhile True:\n    s.emit('note', step=n, message='x' * 500); n += 1\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(path), f"w{i}"], stdout=subprocess.PIPE) for i in range(2)
    ]
    for writer in writers:
        writer.stdout.readline()
    reader = EventReader(path)
    seen = {"w0": 0, "w1": 0}
    while min(seen.values()) < 50:
        for event in reader.read_new():
            assert event.step == seen[event.who]
            seen[event.who] += 1
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    for event in reader.read_new():
        assert event.step == seen[event.who]
        seen[event.who] += 1
    assert reader.skipped_rows == 0


def test_a_resumed_run_writes_its_curve_again_not_twice(tmp_path):
    path = tmp_path / "e.jsonl"
    stream = EventWriter(path, "worker-0")
    stream.emit("run_started", run="r-1")
    for step in (1, 2, 3, 4, 3, 4, 5):
        stream.emit("step", step=step, steps=1, loss=float(step), lr=0.1, samples=8, wall_s=0.5)
    stream.close()
    state = replay(read_events(path))
    assert state.curves["loss"].steps == [1, 2, 3, 4, 5]
    assert state.step == 5
    assert state.samples_per_s == 16
