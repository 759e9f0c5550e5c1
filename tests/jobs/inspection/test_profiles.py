"""Profiles: merging traces of workers, and what is refused. Live runs are in tests/web/test_live_run.py."""

import fcntl
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.fleet.profile_request import ProfileRequest, read_profile_request
from shoal.jobs import run_dir
from shoal.jobs.inspection import profiles
from shoal.jobs.inspection.trace_merge import merge_traces, operator_times
from shoal.spec.private_file import open_lock_file
from shoal.train.step_profiler import StepProfiler
from tests.jobs.past_run import TOLD, write_run

KEYS = st.sampled_from(["ph", "ts", "dur", "name", "pid", "id", "cat", "args"])
VALUES = st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3), st.just("cpu_op"))


def call(name, start, duration, pid=7, tid=1):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": duration}


def test_workers_stand_on_one_clock():
    named = {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}}
    arrow = {"ph": "s", "id": 3, "pid": 7, "tid": 1, "ts": 5}
    first = {"baseTimeNanoseconds": 2_000_000, "traceEvents": [named, call("a", 10, 1), arrow]}
    second = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [named, call("b", 1010, 1), arrow, {"pid": "Spans"}]}
    merged = merge_traces({"worker-0": first, "worker-1": second})["traceEvents"]
    assert [e["args"]["name"] for e in merged if e.get("name") == "process_name"] == ["worker-0", "worker-1"]
    times = {e["name"]: e["ts"] for e in merged if e.get("cat") == "cpu_op"}
    assert times["a"] == times["b"]  # 2 ms + 10 us, and 1 ms + 1010 us
    assert len({(e["pid"], e["id"]) for e in merged if e["ph"] == "s"}) == 2


def test_operators_without_what_they_called():
    nested = [call("outer", 0, 100), call("inner", 10, 30), call("inner", 50, 20), call("other", 0, 5, tid=2)]
    found = {one.name: (one.calls, one.total_us, one.self_us) for one in operator_times(nested)}
    assert found == {"outer": (1, 100, 50), "inner": (2, 50, 50), "other": (1, 5, 5)}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(KEYS, VALUES)))
def test_damaged_traces_are_merged_or_left_out(rows):
    merged = merge_traces({"worker-0": {"traceEvents": rows}, "worker-1": {"traceEvents": "x"}})
    json.dumps(merged)
    assert all(one.self_us >= 0 or one.total_us < 0 for one in operator_times(merged["traceEvents"]))


def test_a_run_that_does_not_train_has_no_profile(tmp_path):
    paths = write_run(tmp_path / "mlp-1")
    for steps, code in ((5, "SH612"), (0, "SH609"), (201, "SH609")):
        with pytest.raises(ShoalError) as caught:
            profiles.profile_run(paths, steps=steps)
        assert caught.value.code == code
    assert not paths.profile_request.exists()
    for name in ("0", "../job", "x" * 50):
        with pytest.raises(ShoalError) as caught:
            profiles.trace_file(paths, name)
        assert caught.value.code == "SH678"


def test_a_run_is_profiled_once_at_a_time(tmp_path, monkeypatch):
    """The second does not take the place of the first one's request."""
    paths = write_run(tmp_path / "mlp-1", TOLD[:20])
    paths.profiles.mkdir()
    monkeypatch.setattr(profiles.commands, "inspect", lambda paths, request: None)
    with run_dir.driver_lock(paths):
        with open_lock_file(paths.profiles / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(ShoalError) as caught:
                profiles.profile_run(paths, steps=5)
        assert (caught.value.code, paths.profile_request.exists()) == ("SH602", False)
        with pytest.raises(ShoalError) as caught:
            profiles.profile_run(paths, steps=5, stopping=lambda: True)
    assert caught.value.code == "SH679"
    assert [path.name for path in paths.profiles.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"name": "../x", "first_step": 1, "steps": 2}', '{"name": "a", "steps": 1e9}']
)
def test_what_is_no_request_is_ignored(tmp_path, text):
    (tmp_path / "r").write_text(text)
    assert read_profile_request(tmp_path / "r") is None


def test_a_worker_profiles_the_steps_that_were_asked_for(tmp_path):
    import torch

    paths = write_run(tmp_path / "mlp-1")
    notes = []
    profiler = StepProfiler(paths, who=lambda: "worker-0", note=notes.append)
    profiler.at_boundary(1)
    paths.profile_request.write_text(ProfileRequest(name="ab", first_step=3, steps=2).model_dump_json())
    for step in range(2, 8):
        profiler.at_boundary(step)
        torch.ones(3).sum()
    trace = json.loads((paths.profiles / "ab" / "worker-0.json").read_bytes())
    assert sorted(e["name"] for e in trace["traceEvents"] if e["name"].startswith("step ")) == ["step 3", "step 4"]
    assert notes == []
    paths.profiles.joinpath("cd").write_text("in the way")
    paths.profile_request.unlink()
    paths.profile_request.write_text(ProfileRequest(name="cd", first_step=8, steps=1).model_dump_json())
    for step in range(8, 12):
        profiler.at_boundary(step)  # a failure is told, and training goes on
    assert "no profile" in notes[0]
