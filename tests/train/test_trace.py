"""A trace shows after which step, and in which tensor, two runs diverge."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.events import Event
from shoal.spec.run_paths import RunPaths
from shoal.train.reporting import Reporter
from shoal.train.run_output import DirectoryOutput
from shoal.train.trace import DIGEST_BYTES, StateTrace
from tests.train.fake_strategy import RecordingStream


def rows(path):
    return [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []


def append_to(path):
    def append(row):
        with path.open("a") as file:
            file.write(row)

    return append


def traced(path, *states):
    """The rows for these states, one after each step."""
    path.unlink(missing_ok=True)
    coming = iter(states)
    trace = StateTrace(append_to(path), lambda: next(coming))
    for step in range(1, len(states) + 1):
        assert trace.watch(Event("step", step=step)) is None
    return rows(path)


def test_a_row_names_the_step_and_each_tensor(tmp_path):
    state = {"model": {"0.weight": torch.ones(2), "0.bias": torch.zeros(1)}, "loop": {"step": 3}}
    first, second = traced(tmp_path / "trace.jsonl", state, state)
    assert (first["step"], second["step"]) == (1, 2)
    assert set(first["tensors"]) == {"model/0.weight", "model/0.bias"}
    assert first["tensors"] == second["tensors"]
    assert {len(digest) for digest in first["tensors"].values()} == {2 * DIGEST_BYTES}


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8), data=st.data())
def test_a_digest_changes_with_any_bit(tmp_path_factory, values, data):
    one = torch.tensor(values, dtype=torch.float32)
    other = one.clone()
    other.view(torch.int32)[data.draw(st.integers(0, len(values) - 1))] ^= 1 << data.draw(st.integers(0, 30))
    path = tmp_path_factory.getbasetemp() / "bits.jsonl"
    first, second, third = (row["tensors"] for row in traced(path, *({"w": w, "same": one} for w in (one, other, one))))
    assert first == third
    assert first["w"] != second["w"]
    assert first["same"] == second["same"]


@pytest.mark.parametrize("kind", ["evaluated", "joined", "finished"])
def test_only_steps_have_rows(tmp_path, kind):
    trace = StateTrace(DirectoryOutput(RunPaths(tmp_path)).append_trace, lambda: pytest.fail("the state is not needed"))
    trace.watch(Event(kind, step=3))
    assert rows(tmp_path / "trace.jsonl") == []


def test_without_a_whole_state_there_are_no_rows(tmp_path):
    assert traced(tmp_path / "trace.jsonl", None, None) == []


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_traces(tmp_path, leads):
    reporter = Reporter(
        RecordingStream(), [StateTrace(DirectoryOutput(RunPaths(tmp_path)).append_trace, lambda: {"w": torch.ones(1)})]
    )
    reporter.is_leader = leads
    reporter.notify_watchers(Event("step", step=1))
    assert len(rows(tmp_path / "trace.jsonl")) == leads
