"""The quick summary of a stream is that of the whole fold, whatever the rows."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.events import Event, RunState, RunSummary, quick_summary
from shoal.events.quick_summary import _SOUND_STEP, summarise_rows
from shoal.events.snapshot import MIN_NEW_BYTES
from shoal.events.stream import format_event, parse_event
from tests.events.random_events import damaged_lines, events

STEPS = st.builds(
    lambda who, step, loss, samples: Event(
        "step", 1.7e9 + step, f"worker-{who}", step, {"loss": loss, "samples": samples, "wall_s": 0.5}
    ),
    st.integers(0, 2), st.integers(0, 50), st.floats(-9, 9) | st.just(float("nan")), st.integers(-1, 5),
)  # fmt: skip
ROWS = st.lists(
    st.one_of(STEPS.map(format_event), STEPS.map(format_event), events().map(format_event), damaged_lines())
)


def whole(content):
    state = RunState()
    for line in filter(None, content.split(b"\n")[:-1]):
        event = parse_event(line)
        if event is None:
            state.skipped_rows += 1
        else:
            state.apply(event)
    return RunSummary.of(state)


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_it_is_the_summary_of_all_events(rows):
    content = b"".join(row if row.endswith(b"\n") else row + b"\n" for row in rows)
    assert repr(summarise_rows(content)) == repr(whole(content))  # NaN is not equal to itself
    assert repr(summarise_rows(content[:-3])) == repr(whole(content[:-3]))


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["steps", "loss", "lr", "samples", "wall_s", "bytes_sent"]),
                       st.one_of(st.integers(-1, 2**64), st.floats(), st.text(max_size=2), st.none())))  # fmt: skip
def test_rows_that_are_believed_fit_the_schema(fields):
    line = json.dumps(
        {"t": 1.5, "who": "worker-1", "kind": "step", "step": 3, **fields}, separators=(",", ":")
    ).encode()
    assert not _SOUND_STEP.fullmatch(line) or parse_event(line) is not None
    assert not _SOUND_STEP.fullmatch(line.replace(b":3", b":03"))


def test_a_long_stream_is_left_to_the_snapshot(tmp_path):
    row = format_event(Event("note", 1.0, "driver", None, {"message": "x" * 1000}))
    (tmp_path / "events").write_bytes(row * (MIN_NEW_BYTES // len(row)))
    assert quick_summary(tmp_path / "events") is not None
    (tmp_path / "events").write_bytes(row * (MIN_NEW_BYTES // len(row) + 1))
    assert quick_summary(tmp_path / "events") is None
