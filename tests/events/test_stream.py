"""The stream survives its writers."""

import json
import os
import signal
import subprocess
import sys

from shoal.events import EventReader, EventWriter, read_events, replay
from shoal.events.stream import parse_event


def test_rows_come_back_as_they_were_told(tmp_path):
    stream = EventWriter(tmp_path / "e.jsonl", "worker-0")
    emitted = stream.emit("step", step=3, loss=0.5, nested={"a": [1, 2]})
    stream.close()
    (event,) = read_events(tmp_path / "e.jsonl")
    assert (event.kind, event.who, event.step, event.fields) == ("step", "worker-0", 3, emitted.fields)


def test_a_stream_may_go_through_a_function_a_line_at_a_time():
    lines = []
    stream = EventWriter.to_callback(lines.append, "worker-7", flush_s=1000)
    stream.emit("step", step=1, loss=0.5)
    assert lines == [], "steps wait for each other"
    stream.emit("note", step=1, text="two\nlines")
    stream.emit("step", step=2)
    stream.close()
    events = [parse_event(line) for line in lines]
    assert [(e.kind, e.who, e.step, e.fields) for e in events] == [
        ("step", "worker-7", 1, {"loss": 0.5}),
        ("note", "worker-7", 1, {"text": "two\nlines"}),
        ("step", "worker-7", 2, {}),
    ]
    assert all(line.endswith(b"\n") for line in lines)


def test_a_half_written_row_is_passed_over_and_the_next_writer_starts_afresh(tmp_path):
    path = tmp_path / "e.jsonl"
    stream = EventWriter(path, "a")
    stream.emit("one")
    stream.close()
    with path.open("ab") as file:
        file.write(b'{"t": 1, "who": "a", "kind": "tw')
    reader = EventReader(path)
    assert [e.kind for e in reader.read_new()] == ["one"]
    again = EventWriter(path, "a")
    again.emit("three")
    again.close()
    assert [e.kind for e in reader.read_new()] == ["three"]
    assert reader.damaged_lines == 1


def test_a_reader_follows_a_writer(tmp_path):
    path = tmp_path / "e.jsonl"
    reader = EventReader(path)
    assert list(reader.read_new()) == []
    stream = EventWriter(path, "a")
    for number in range(3):
        stream.emit("note", step=number)
        assert [e.step for e in reader.read_new()] == [number]
    stream.close()


def test_garbage_is_counted_not_raised(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(
        b'\x00\xff\n[1,2]\n{"kind":1}\nnull\n' + json.dumps({"kind": "ok", "t": 0, "who": "x"}).encode() + b"\n"
    )
    reader = EventReader(path)
    assert [e.kind for e in reader.read_new()] == ["ok"]
    assert reader.damaged_lines == 4


def test_several_processes_share_one_stream_and_a_killed_one_spoils_nothing(tmp_path):
    path = tmp_path / "e.jsonl"
    program = (
        "import sys, pathlib\nfrom shoal.events import EventWriter\n"
        "s = EventWriter(pathlib.Path(sys.argv[1]), sys.argv[2], flush_s=0)\nprint('go', flush=True)\n"
        "n = 0\nwhile True:\n    s.emit('note', step=n, text='x' * 500); n += 1\n"
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
    assert reader.damaged_lines == 0


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
