"""A state from a snapshot is the state of the whole stream; whatever is wrong with either file does no harm."""

import io
import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.events import Event, EventReader, RunStateReader, RunSummary, load_state, load_summary, read_events, replay
from shoal.events import snapshot as snapshots
from shoal.events.snapshot import IDLE_S, encode_state
from shoal.events.stream import MAX_LINE_BYTES, format_event
from shoal.terminal import reports
from shoal.terminal.console import make_console
from shoal.terminal.live import _panel
from shoal.terminal.notes import event_line
from tests.events.random_events import damaged_lines, events


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    return directory / "events.jsonl", directory / ".state.json"


def write(files, lines, *, append=False):
    with files[0].open("ab" if append else "wb") as file:
        file.writelines(lines)
    if not append:
        files[1].unlink(missing_ok=True)


def save(files):
    reader = RunStateReader(*files)
    reader.catch_up()
    reader.save()


@settings(max_examples=150)
@given(st.lists(events(), max_size=20), st.integers(0, 20))
def test_a_fold_from_a_snapshot_in_the_middle_is_the_fold_of_all(files, told, middle):
    lines = [format_event(event) for event in told]
    write(files, lines[:middle])
    save(files)
    assert files[1].exists() == bool(lines[:middle])
    write(files, lines[middle:], append=True)
    state = load_state(*files)
    reader = EventReader(files[0])
    whole = replay(reader.read_new())
    assert reader.skipped_rows == 0, "what may be written can be read"
    assert encode_state(state) == encode_state(whole)


@settings(max_examples=150)
@given(st.lists(damaged_lines(), max_size=12), st.integers(0, 12))
def test_a_damaged_stream_is_always_readable(files, lines, middle):
    """Folded, from a snapshot too, and shown."""
    ended = [line + b"\n" for line in lines]
    write(files, ended[:middle])
    save(files)
    write(files, ended[middle:], append=True)
    state, whole = load_state(*files), RunStateReader(files[0], files[0].with_name("none")).catch_up()
    assert encode_state(state) == encode_state(whole)
    read = list(read_events(files[0]))
    assert len(read) + state.skipped_rows == len([line for line in b"".join(ended).split(b"\n") if line])
    console = make_console(file=io.StringIO(), width=100)
    reports.print_run(console, state, width=100)
    console.print(_panel(state))
    shown = replay([])
    for event in read:
        shown.apply(event)
        event_line(event, shown)


@given(st.data())
def test_a_damaged_snapshot_is_ignored_and_replaced(files, data):
    write(files, [format_event(Event("step", 1.0, "worker-0", n, {"loss": 0.5, "samples": 3})) for n in range(5)])
    save(files)
    sound = files[1].read_bytes()
    place = data.draw(st.integers(0, len(sound) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "noise", "empty"]))
    damaged = {
        "flip": sound[:place] + bytes([sound[place] ^ (1 << data.draw(st.integers(0, 7)))]) + sound[place + 1 :],
        "cut": sound[:place],
        "noise": data.draw(st.binary(max_size=100)),
        "empty": b"",
    }[how]
    files[1].write_bytes(damaged)
    os.utime(files[0], (0, time.time() - 2 * IDLE_S))
    assert encode_state(load_state(*files)) == encode_state(replay(read_events(files[0])))
    assert files[1].read_bytes().rstrip(b"\n") == sound.rstrip(b"\n")


STEPS = [format_event(Event("step", float(n), "worker-0", n, {"loss": 0.5, "samples": 3})) for n in range(1, 9)]


def signed(files, **changes):
    """The snapshot with other values, and digests that fit them."""
    first, content = files[1].read_bytes().rstrip(b"\n").split(b"\n")
    header = json.loads(first.partition(b" ")[2])
    state = json.loads(content) | changes.pop("state", {})
    content = json.dumps(state).encode()
    first = json.dumps(header | {"state": snapshots.content_digest(content)} | changes).encode()
    files[1].write_bytes(snapshots.content_digest(first).encode() + b" " + first + b"\n" + content + b"\n")


def test_a_snapshot_is_used(files):
    """Else the tests of those that are not would say nothing."""
    write(files, STEPS)
    save(files)
    signed(files, state={"deaths": 77})
    assert load_state(*files).deaths == 77


@pytest.mark.parametrize(
    "changes",
    [
        {"version": [1, 0]},
        {"version": "new"},
        {"offset": 10**9},
        {"offset": -1},
        {"offset": 5},
        {"sample": ""},
        {"state": {"deaths": "77"}},
        {"state": {"deaths": 77, "more": 1}},
        {"state": {"deaths": 77, "workers": {"a": 1}}},
        {"state": {"deaths": 77, "notes": [{"kind": "x"}]}},
        {"state": {"deaths": 77, "curves": {"loss": {"steps": [1]}}}},
    ],
)
def test_a_snapshot_with_other_values_than_ours_is_not(files, changes):
    write(files, STEPS)
    save(files)
    signed(files, **({"state": {"deaths": 77}} | changes))
    assert load_state(*files).deaths == 0


def test_a_snapshot_of_another_stream_is_not(files):
    write(files, STEPS)
    save(files)
    foreign = files[1].read_bytes()
    for other in (STEPS[:4], STEPS[1:], [*STEPS[:7], STEPS[7].replace(b"0.5", b"0.7")], []):
        write(files, other)
        files[1].write_bytes(foreign)
        assert load_summary(*files) is None
        assert encode_state(load_state(*files)) == encode_state(replay(read_events(files[0])))


def test_a_summary_is_given_only_where_it_covers_the_stream(files):
    write(files, STEPS[:4])
    assert load_summary(*files) is None
    save(files)
    assert load_summary(*files) == RunSummary.of(load_state(*files))
    write(files, STEPS[4:5], append=True)
    assert load_summary(*files) is None
    save(files)
    assert load_summary(*files).step == 5


def test_half_a_line_at_the_end_is_covered_until_it_grows(files):
    write(files, [*STEPS[:4], STEPS[4][:20]])
    save(files)
    assert load_summary(*files).step == 4
    write(files, [STEPS[4][20:30]], append=True)
    assert load_summary(*files) is None
    save(files)
    assert load_summary(*files).step == 4
    write(files, [STEPS[4][30:]], append=True)
    assert load_state(*files).step == 5


def test_a_long_line_without_an_end_is_counted_once(files):
    write(files, [*STEPS[:4], b"x" * (MAX_LINE_BYTES + 9)])
    save(files)
    write(files, [b"x\n", STEPS[4]], append=True)
    state = load_state(*files)
    assert (state.step, state.skipped_rows) == (5, 1)


def test_rows_that_come_while_a_snapshot_is_written_are_not_taken_for_read(files):
    write(files, STEPS[:4])
    reader = RunStateReader(*files)
    reader.catch_up()
    write(files, STEPS[4:5], append=True)
    reader.save()
    assert load_summary(*files) is None
    assert load_state(*files).step == 5


def test_a_reader_leaves_a_snapshot_when_the_stream_is_still(files):
    write(files, STEPS)
    load_state(*files)
    assert not files[1].exists(), "it may grow in a moment"
    os.utime(files[0], (0, time.time() - 2 * IDLE_S))
    load_state(*files)
    assert load_summary(*files).step == 8


def test_a_directory_that_cannot_be_written_is_no_error(files):
    write(files, STEPS)
    missing = files[1].parent / "none" / ".state.json"
    reader = RunStateReader(files[0], missing)
    assert reader.catch_up().step == 8
    reader.save()
    assert RunStateReader(missing, missing).catch_up().step == 0


def test_rows_that_cannot_be_read_are_counted_once(files):
    write(files, [STEPS[0], b"noise\n"])
    save(files)
    write(files, [b"more noise\n", STEPS[1]], append=True)
    state = load_state(*files)
    assert (state.step, state.skipped_rows) == (2, 2)
    console = make_console(file=io.StringIO(), width=100)
    reports.print_run(console, state, width=100)
    assert "2 damaged rows in events.jsonl were passed over" in console.file.getvalue()
