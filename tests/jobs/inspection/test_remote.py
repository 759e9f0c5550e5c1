"""Stacks and profiles of workers without the run's directory: through the driver, and nothing else."""

import base64
import gzip
import json

import pytest

from shoal.errors import ShoalError
from shoal.fleet import remote_inspection
from shoal.fleet.messages import InspectRequest, parse_worker_message
from shoal.fleet.profile_request import ProfileRequest, read_profile_request
from shoal.fleet.remote_inspection import InspectedWorker, InspectionDesk
from shoal.jobs import commands
from shoal.jobs.inspection import profiles, stacks
from shoal.net.errors import ProtocolError
from shoal.spec.run_paths import RunPaths
from tests.conftest import MLP
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, reference_receipt

STACKS = InspectRequest(kind="inspect")
LONG = MLP | {"steps": 1000, "evaluate": {"every_steps": 500}}  # a minute while steps are slow
PROFILE = ProfileRequest(name="ab-1", first_step=3, steps=2)


def slow_until(ready):
    return [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.05, "until": str(ready)}}]


class Pair:
    """A worker and its driver's desk, with the messages between them as they are on the wire."""

    def __init__(self, tmp_path):
        self.run, self.own = RunPaths.at(tmp_path / "run"), RunPaths.at(tmp_path / "own")
        for paths in (self.run, self.own):
            paths.root.mkdir()
        self.worker = InspectedWorker(self, self.own)
        self.desk = InspectionDesk(self.run, lambda seat, fields: self.worker.answer(json.loads(json.dumps(fields))))

    def send(self, kind, **fields):
        self.desk.take(4, parse_worker_message(kind, json.loads(json.dumps(fields))))


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path)


def test_stacks_come_into_the_runs_directory(pair):
    for count in (1, 2):
        pair.desk.ask(STACKS, [4])
        text = pair.run.stacks(4).read_text()
        assert text.count("in test_stacks_come_into_the_runs_directory") == count


def test_a_profile_comes_in_pieces(pair, monkeypatch):
    monkeypatch.setattr(remote_inspection, "_PIECE_BYTES", 300)
    pair.desk.ask(InspectRequest(kind="inspect", profile=PROFILE), [4])
    assert read_profile_request(pair.own.profile_request) == PROFILE
    (pair.run.profiles / PROFILE.name).mkdir(parents=True)
    trace = pair.own.root / "trace.json"
    content = json.dumps({"traceEvents": [{"name": str(n * n)} for n in range(500)]}).encode()
    trace.write_bytes(content)
    pair.worker.send_trace(PROFILE.name, trace)
    assert gzip.decompress((pair.run.profiles / PROFILE.name / "worker-4.json.gz").read_bytes()) == content
    assert not trace.exists()


def test_a_trace_that_is_too_large_is_not_sent(pair, monkeypatch):
    monkeypatch.setattr(remote_inspection, "MAX_TRACE_BYTES", 10)
    pair.desk.ask(InspectRequest(kind="inspect", profile=PROFILE), [4])
    (pair.own.root / "trace").write_bytes(b"0123456789")
    with pytest.raises(ValueError, match="profile fewer steps"):
        pair.worker.send_trace(PROFILE.name, pair.own.root / "trace")


def test_nothing_is_taken_that_nobody_asked_for(pair, monkeypatch):
    piece = base64.b64encode(b"x" * 30).decode()
    with pytest.raises(ProtocolError):
        pair.send("found", piece=piece, is_last=True)
    pair.desk.ask(InspectRequest(kind="inspect", profile=PROFILE), [4])
    for wrong in (
        {"profile": ""},
        {"profile": "ab-2"},
        {"profile": "../x"},
        {"piece": "*"},
        {"piece": "é"},
        {"is_last": 1},
    ):
        with pytest.raises(ProtocolError):
            pair.send("found", **({"profile": PROFILE.name, "piece": piece, "is_last": True} | wrong))
    monkeypatch.setattr(remote_inspection, "MAX_TRACE_BYTES", 59)
    pair.send("found", profile=PROFILE.name, piece=piece, is_last=False)
    with pytest.raises(ProtocolError):
        pair.send("found", profile=PROFILE.name, piece=piece, is_last=False)
    assert sorted(pair.run.root.iterdir()) == []


def test_two_who_ask_at_once_cost_the_worker_nothing(tmp_path, monkeypatch):
    """A worker answers in its own time: also what was asked before the newest question."""
    monkeypatch.setattr(remote_inspection, "_PIECE_BYTES", 300)
    pair, asked = Pair(tmp_path), []
    pair.desk = InspectionDesk(pair.run, lambda seat, fields: asked.append(fields))
    for _ in range(30):
        pair.desk.ask(STACKS, [4])
    pair.desk.ask(InspectRequest(kind="inspect", profile=PROFILE), [5])
    assert len(asked) == remote_inspection.MAX_OWED_ANSWERS + 1
    for fields in asked[:-1]:
        pair.worker.answer(fields)
    text = pair.run.stacks(4).read_text()
    assert text.count("in test_two_who_ask_at_once_cost_the_worker_nothing") == remote_inspection.MAX_OWED_ANSWERS
    with pytest.raises(ProtocolError):
        pair.worker.answer(asked[0])


def test_a_profile_that_nobody_waits_for_any_more_is_dropped(pair):
    pair.desk.ask(InspectRequest(kind="inspect", profile=PROFILE), [4])
    pair.send("found", profile=PROFILE.name, piece=base64.b64encode(b"late").decode(), is_last=True)
    assert not pair.run.profiles.exists()


@pytest.mark.long
def test_workers_of_other_machines_show_stacks_and_profiles_and_keep_their_bits(run, job_dir):
    """Agents and workers are real processes that get no path of the run."""
    engine, ready = {"kind": "local", "apart": True, "machines": 2}, job_dir / "ready"
    with background_run(run, LONG, workers=2, engine=engine, watchers=slow_until(ready)) as one:
        one.wait_for_workers(2)
        found = stacks.collect_stacks(one.paths)
        assert [(row.who, row.problem) for row in found] == [("worker-0", ""), ("worker-1", "")]
        assert all("shoal/train/" in row.text for row in found)
        made = profiles.profile_run(one.paths, steps=3)
        assert (made.workers, made.missing) == (["worker-0", "worker-1"], {})
        trace = json.loads(gzip.decompress(profiles.trace_file(one.paths, made.name).read_bytes()))
        names = [row["name"] for row in trace["traceEvents"] if str(row.get("name")).startswith("step ")]
        assert sorted(names) == sorted(2 * [f"step {made.first_step + n}" for n in range(3)])
        assert [path.name for path in one.paths.profiles.iterdir() if path.is_dir()] == []
        ready.touch()
    assert_same(one.outcome.result(), reference_receipt(run, LONG))
    with pytest.raises(ShoalError) as caught:
        commands.inspect(one.paths)
    assert caught.value.code == "SH604"
