"""What a driver decides when a process ends: a real driver, with an engine whose exits are written down."""

import contextlib
import copy
import json
import re
from types import SimpleNamespace

import pytest
from torch import nn

from shoal.checkpoint.export import export_model
from shoal.events import EventWriter, read_events
from shoal.fleet.engine import Exit
from shoal.jobs import run_dir
from shoal.jobs.run_driver import RunDriver, first_free_seat
from shoal.net.wakeup import Wakeup
from shoal.spec.load import make_job
from tests.conftest import MLP
from tests.jobs.test_receipt import FINISHED
from tests.jobs.test_worker_group import FakeEngine

BUG = {"code": "BUG", "message": "ZeroDivisionError: 1/0", "where": "Traceback: here", "fix": ""}
USER_ERROR = {"code": "SH401", "message": "the loss is NaN", "where": "step 3", "fix": "Lower the rate."}


class ScriptedEngine(FakeEngine):
    """Seats end when a test says so."""

    def __init__(self):
        super().__init__()
        self.exits, self.closed = [], False
        self._wakeup = Wakeup()

    def end(self, seat, code):
        self.seats.remove(seat)
        self.exits.append(Exit.with_code(seat, code))

    def reattach(self):
        return []

    def poll(self, timeout_s):
        found, self.exits = self.exits, []
        return found

    def fileno(self):
        return self._wakeup.fileno()

    def close(self):
        self.closed = True
        self._wakeup.close()


class Harness:
    def __init__(self, job_dir, restarts, on_event):
        job = make_job(copy.deepcopy(MLP) | {"workers": 1}, base_dir=str(job_dir))
        job = job.model_copy(update={"elastic": job.elastic.model_copy(update={"restarts": restarts})})
        self.paths = run_dir.create(job, job_dir / "runs")
        self.driver = RunDriver(job, self.paths, SimpleNamespace(environment={}), on_event=on_event)
        self.engine = self.driver.engine = ScriptedEngine()
        self.driver.start()
        assert self.driver.tick() is None
        assert self.engine.seats == [0]

    def tell(self, kind, **fields):
        with contextlib.closing(EventWriter(self.paths.events, "worker-0")) as stream:
            stream.emit(kind, **fields)

    def result(self):
        """The driver's, who ends in a thread of its own."""
        while (found := self.driver.tick()) is None:
            self.driver.wait(1.0)
        return found

    def events(self, kind):
        return [event for event in read_events(self.paths.events) if event.kind == kind]


@pytest.fixture
def begin(job_dir):
    with contextlib.ExitStack() as stack:

        def go(*, restarts=0, on_event=None):
            made = Harness(job_dir, restarts, on_event)
            stack.callback(made.driver.close)
            return made

        yield go


def test_a_worker_that_dies_before_it_can_train_and_no_restart_is_left(begin):
    harness = begin()
    harness.engine.end(0, -9)
    result = harness.result()
    assert (result.status, result.error.code, result.traceback) == ("failed", "SH603", "")
    assert "worker-0 ended by SIGKILL (out of memory?); no restarts left" in result.error.message
    assert "before it could train" in result.error.message
    assert harness.engine.closed
    assert harness.events("run_ended")[0]["status"] == "failed"


def test_a_restart_uses_a_new_seat_and_is_counted(begin):
    harness = begin(restarts=1)
    harness.engine.end(0, 1)
    assert harness.driver.tick() is None
    assert harness.engine.seats == [1]
    harness.engine.end(1, 1)
    assert "worker-1 ended by exit code 1; no restarts left" in harness.result().error.message


def test_a_worker_that_left_without_being_asked_and_nobody_is_left(begin):
    harness = begin(restarts=3)
    harness.engine.end(0, 0)
    assert harness.result().status == "stopped"


@pytest.mark.parametrize(("said", "code", "traceback"), [(USER_ERROR, "SH401", ""), (BUG, "SH603", "Traceback: here")])
def test_an_error_that_a_worker_reported_ends_the_run_whatever_restarts_are_left(begin, said, code, traceback):
    harness = begin(restarts=3)
    harness.tell("failed", **said)
    harness.engine.end(0, 1)
    result = harness.result()
    assert (result.status, result.error.code, result.traceback) == ("failed", code, traceback)
    assert said["message"] in result.error.message


def test_a_stop_ends_when_the_last_worker_is_gone(begin):
    harness = begin()
    harness.driver.stop("preempted")
    harness.driver.stop("too late")
    assert harness.driver.tick() is None, "its worker has not left yet"
    harness.engine.end(0, -15)
    assert harness.result().status == "preempted"


def test_the_reason_of_a_watcher_stops_the_run(begin):
    harness = begin(on_event=lambda event, state: "pruned" if event.kind == "note" else None)
    harness.tell("note", message="hopeless")
    assert harness.driver.tick() is None
    assert harness.driver.stop_reason == "pruned"
    harness.engine.end(0, 0)
    assert harness.result().status == "pruned"


def write_model(paths, **info):
    """A small model in the run's directory. Returns the SHA-256 of its weights."""
    emitted = []
    content = export_model(
        paths.model,
        nn.Linear(3, 2),
        info=info,
        example_inputs=None,
        program=False,
        emit=lambda *event, **fields: emitted.append(event),
    )
    assert emitted == []
    return content["weights_sha256"]


def test_a_run_that_finished_has_a_receipt_whatever_happens_to_its_workers(begin):
    harness = begin()
    sha256 = write_model(harness.paths)
    harness.tell("finished", step=60, **FINISHED | {"weights_sha256": sha256})
    assert harness.driver.tick() is None, "its worker leaves first"
    harness.engine.end(0, -9)
    result = harness.result()
    assert (result.status, result.receipt.weights_sha256) == ("finished", sha256)
    assert json.loads(harness.paths.receipt.read_text())["run"] == harness.paths.name
    (verified,) = harness.events("verified")
    assert verified["weights_sha256"] == sha256
    assert verified["size_bytes"] == (harness.paths.model / "model.safetensors").stat().st_size


def remove_model(paths):
    (paths.model / "model.safetensors").unlink()


def flip_a_bit(paths):
    file = paths.model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def truncate_model(paths):
    file = paths.model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def empty_model(paths):
    (paths.model / "model.safetensors").write_bytes(b"")


def damage_info(paths):
    (paths.model / "model.json").write_text('{"tensors": 7}')


def damage_offsets(paths):
    file = paths.model / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = re.sub(rb"\[\d+,\d+\]", b"[0,1e999]", content[8 : 8 + length])
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


@pytest.mark.parametrize("damage", [remove_model, flip_a_bit, truncate_model, empty_model, damage_info, damage_offsets])
def test_a_result_that_the_files_do_not_have_is_none(begin, damage):
    harness = begin()
    sha256 = write_model(harness.paths)
    damage(harness.paths)
    assert_refuted(harness, sha256)


def test_a_result_of_zeros_is_none_whether_there_is_a_model_or_not(begin):
    harness = begin()
    assert_refuted(harness, "0" * 64)
    write_model(harness.paths)
    second = begin()
    write_model(second.paths, run_weights_sha256="1" * 64)
    assert_refuted(second, "0" * 64)


def assert_refuted(harness, sha256):
    harness.tell("finished", step=60, **FINISHED | {"weights_sha256": sha256})
    harness.driver.tick()
    harness.engine.end(0, 0)
    result = harness.result()
    assert (result.status, result.error.code, result.receipt) == ("failed", "SH622", None)
    assert not harness.paths.receipt.exists()
    assert harness.events("verified") == []
    assert "model" in result.error.where


def test_a_refuted_run_goes_on_when_it_is_resumed(begin):
    harness = begin()
    assert_refuted(harness, "0" * 64)
    second = RunDriver(harness.driver.job, harness.paths, SimpleNamespace(environment={}))
    second.engine = ScriptedEngine()
    with contextlib.closing(second):
        second.start()
        assert second.tick() is None
        assert second.engine.seats, "it starts a worker"


def test_sparse_rows_are_part_of_the_reported_hash_and_not_of_the_file(begin):
    harness = begin()
    write_model(harness.paths, run_weights_sha256="5" * 64)
    harness.tell("finished", step=60, **FINISHED | {"weights_sha256": "5" * 64})
    harness.driver.tick()
    harness.engine.end(0, 0)
    assert harness.result().receipt.weights_sha256 == "5" * 64


def test_a_driver_that_is_closed_leaves_nothing(begin):
    harness = begin()
    harness.driver.close()
    harness.driver.close()
    assert harness.engine.closed
    assert harness.events("run_ended") == [], "the run can be resumed"


def test_a_later_driver_does_not_use_the_seats_of_an_earlier_one(begin, job_dir):
    harness = begin(restarts=1)
    harness.tell("worker_started", pid=1, host="here")
    harness.driver.tick()
    harness.driver.close()
    second = RunDriver(harness.driver.job, harness.paths, SimpleNamespace(environment={}))
    second.engine = ScriptedEngine()
    with contextlib.closing(second):
        second.start()
        second.tick()
        assert second.engine.seats == [1]


def test_seats_are_counted_over_workers_and_servers():
    assert first_free_seat([]) == 0
    assert first_free_seat(["worker-0", "server-7", "worker-3", "driver"]) == 8
