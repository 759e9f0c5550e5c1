"""The worker group with an engine and a control server that only write down what they are asked."""

import copy
import json

import pytest

from shoal.events import EventWriter
from shoal.events.stream import parse_event
from shoal.fleet.control_server import ControlMessage
from shoal.fleet.engine import Exit, Node
from shoal.fleet.roster import SeatNumbers
from shoal.jobs.remote.seat_launches import WORKER_MODULE, DirectoryLaunches
from shoal.jobs.worker_group import WorkerGroup
from shoal.plan.members import StartWorkers
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from tests.conftest import MLP
from tests.fleet.test_roster import FakeConnections

ADDRESS = {"host": "127.0.0.1", "port": 1, "host_id": "here", "unix": ""}


class FakeEngine:
    def __init__(self):
        self.seats, self.started, self.stopped = [], [], []

    def capacity(self):
        return [Node("here", cores=8, memory_bytes=1 << 30, gpus=0, shares_run_dir=True)]

    def start(self, launches):
        self.started += launches
        self.seats += [launch.seat.number for launch in launches]

    def running(self):
        return self.seats

    def waiting(self):
        return []

    def stop(self, seats):
        self.stopped += seats


class FakeControl(FakeConnections):
    def __init__(self):
        super().__init__()
        self.sent, self.views = [], []

    def key(self, name):
        return f"key of {name}"

    def holds_key(self, name, key):
        return key == self.key(name)

    def send(self, connection, /, kind, **fields):
        self.sent.append((connection, kind, fields))

    def publish_view(self, view, connections):
        self.views.append((view, list(connections)))


class Harness:
    def __init__(self, job_dir, **changes):
        self.engine, self.control, self.rows = FakeEngine(), FakeControl(), []
        self.group = WorkerGroup(
            make_job(copy.deepcopy(MLP) | {"workers": 2} | changes, base_dir=str(job_dir)),
            RunPaths(job_dir / "runs" / "mlp-1"),
            self.engine,
            self.control,
            EventWriter.to_callback(self.rows.append, "driver"),
            seat_numbers=SeatNumbers(3),
            server_group=None,
        )

    def connect(self, connection, *, seat, local=True, **fields):
        attachment = {"managed": local, "can_save": local, "needs_job": not local}
        hello = {"role": "worker", "seat": seat, "attachment": attachment, "pid": 7, "host": "h", "address": ADDRESS}
        hello |= {"key": self.control.key(f"worker-{seat}")}
        self.group.handle_hello(ControlMessage(connection, "here", hello | {"view": 0, "training": False} | fields))

    def say(self, connection, kind, **fields):
        self.group.handle(ControlMessage(connection, kind, fields))

    def events(self, kind):
        return [event for row in self.rows if (event := parse_event(row)) and event.kind == kind]


@pytest.fixture
def harness(job_dir):
    return Harness(job_dir)


@pytest.fixture
def training(harness):
    """Two workers that have been given a view."""
    harness.group.tick()
    for seat in (3, 4):
        harness.connect(seat, seat=seat)
        harness.say(seat, "standing", view=0, position=None)
    harness.group.tick()
    for seat in (3, 4):
        harness.say(seat, "standing", view=harness.control.views[-1][0].number, position=0)
    harness.group.tick()
    return harness


def test_it_starts_the_workers_that_are_wanted(harness):
    assert StartWorkers(2) in harness.group.tick()
    assert harness.engine.seats == harness.group.seats == [3, 4]
    assert {(one.entry, one.arguments[0]) for one in harness.engine.started} == {(WORKER_MODULE, "--run")}
    assert harness.group.tick() == [], "they are on their way"


def test_seats_are_on_record_before_their_processes_start(harness):
    harness.group.tick()
    (launched,) = harness.events("seats_given")
    assert launched["seats"] == ["worker-3", "worker-4"]


def test_a_process_that_waited_for_anothers_seat_does_not_get_its_place(harness):
    """An earlier driver may have started two with one seat: the second one holds no state."""
    harness.group.tick()
    harness.connect(10, seat=3, pid=7)
    harness.say(10, "lost")
    harness.connect(11, seat=3, pid=8)
    assert harness.control.dropped[-1] == 11
    assert 11 not in harness.group.roster.connections
    harness.connect(12, seat=3, pid=7)
    assert harness.group.roster.seat_of(12) == 3


APART = {"managed": True, "can_save": True, "needs_job": True}


class RecordingLaunches(DirectoryLaunches):
    def __init__(self, paths):
        super().__init__(paths)
        self.said = []

    def welcome(self):
        return {"remote": {"code": "here"}}

    def admit(self, seat):
        self.said.append(("admit", seat))

    def dismiss(self, seat):
        self.said.append(("dismiss", seat))


@pytest.fixture
def apart(harness, job_dir):
    harness.group._launches = RecordingLaunches(RunPaths(job_dir / "runs" / "mlp-1"))
    harness.group.tick()
    harness.connect(10, seat=3, attachment=APART, nonce="one")
    return harness


def test_a_second_incarnation_of_a_seat_is_refused(apart):
    """Also with the pid that the first one has on another machine, and whether the first one is heard or not."""
    for connection in (11, 12):
        apart.connect(connection, seat=3, attachment=APART, nonce="two")
        assert apart.control.dropped[-1] == connection
        apart.say(10, "lost")
    apart.connect(13, seat=3, attachment=APART, nonce="one")
    assert apart.group.roster.seat_of(13) == 3


def test_a_worker_whose_end_was_not_seen_is_not_heard_any_more(apart):
    apart.engine.seats.remove(3)
    apart.group.handle_exit(Exit(3, None, "the loss of host a"))
    assert 10 in apart.control.dropped
    assert apart.group._launches.said == [("admit", 3), ("dismiss", 3)]
    apart.connect(14, seat=3, attachment=APART, nonce="one")
    assert apart.control.dropped[-1] == 14
    (died,) = apart.events("worker_died")
    assert died["reason"] == "the loss of host a"


def test_a_worker_apart_gets_the_job_and_is_believed_like_one_with_the_directory(apart):
    (_, _, welcome) = next(sent for sent in apart.control.sent if sent[0] == 10)
    assert welcome["job"]["name"] == "mlp"
    assert welcome["remote"] == {"code": "here"}
    row = {"kind": "failed", "t": 1.0, "who": "worker-3", "code": "SH603", "message": "m", "where": "", "fix": ""}
    apart.say(10, "event", row=json.dumps(row))
    (failed,) = apart.events("failed")
    assert failed["message"] == "m"


@pytest.mark.parametrize("kind", ["run_ended", "view", "worker_died", "seats_given"])
def test_a_worker_apart_does_not_speak_for_the_driver_or_for_others(apart, kind):
    row = {"kind": kind, "t": 1.0, "who": "worker-3", "status": "finished", "seats": [], "worker": "worker-4"}
    apart.say(10, "event", row=json.dumps(row))
    assert apart.control.dropped[-1] == 10
    assert apart.events("run_ended") == apart.events("worker_died") == []


def test_an_evicted_worker_apart_cannot_write_any_more(apart):
    apart.group.evict(3, "too slow")
    assert apart.group._launches.said[-1] == ("dismiss", 3)


def test_a_worker_is_welcomed_into_its_seat(harness):
    harness.group.tick()
    harness.connect(10, seat=3)
    ((connection, kind, fields),) = harness.control.sent
    assert (connection, kind, fields["seat"]) == (10, "welcome", 3)
    assert "job" not in fields, "it has the run's directory"
    assert harness.group.roster.seat_of(10) == 3


@pytest.mark.parametrize(
    "wrong", [{"seat": 99}, {"seat": None}, {"seat": 3, "address": "nowhere"}, {"seat": 3, "view": "new"}]
)
def test_a_greeting_that_makes_no_sense_is_dropped(harness, wrong):
    harness.group.tick()
    harness.connect(10, **wrong)
    assert harness.control.dropped == [10]
    assert harness.control.sent == []
    assert 10 not in harness.group.roster.connections


def test_a_message_that_makes_no_sense_costs_the_connection_alone(harness):
    harness.group.tick()
    harness.connect(10, seat=3)
    harness.connect(11, seat=4)
    harness.say(10, "standing", view="new", position=None)
    assert 10 in harness.control.dropped
    assert 11 not in harness.control.dropped
    assert harness.events("worker_died") == [], "its process lives, and may connect again"


def test_all_that_stand_get_a_view_of_the_same_number(training):
    view, connections = training.control.views[-1]
    assert sorted(view.carries) == connections == [3, 4]


def test_a_process_that_died_is_reported_and_replaced(training):
    assert training.group.was_ready(4)
    training.engine.seats.remove(4)
    assert training.group.handle_exit(Exit.with_code(4, -9)) == "SIGKILL"
    (died,) = training.events("worker_died")
    assert (died["worker"], died["reason"]) == ("worker-4", "SIGKILL")
    assert StartWorkers(1) in training.group.tick()
    assert training.engine.seats == [3, 5], "a seat number is never used again"


def test_a_worker_that_left_as_it_should_is_no_death(training):
    training.engine.seats.remove(4)
    assert training.group.handle_exit(Exit.with_code(4, 0)) == ""
    assert training.events("worker_died") == []


def test_a_worker_that_joins_is_told_what_the_others_compute_with(harness):
    harness.group.tick()
    harness.connect(3, seat=3, platform={"torch": "2.13.0"})
    harness.connect(20, seat=None, local=False, platform={"torch": "2.12.0"})
    (welcome,) = [fields for to, kind, fields in harness.control.sent if (to, kind) == (20, "welcome")]
    assert welcome["platform"] == {"torch": "2.13.0"}


def test_an_evicted_process_is_stopped_and_its_exit_says_why(training):
    training.group.evict(4, "it hangs")
    assert training.engine.stopped == [4]
    assert training.events("evicted")[0]["reason"] == "it hangs"
    assert training.group.handle_exit(Exit.with_code(4, -9)) == "it hangs"


def test_a_remote_worker_gets_the_job_and_a_seat(harness):
    harness.connect(20, seat=None, local=False)
    ((_, kind, fields),) = harness.control.sent
    assert (kind, fields["seat"]) == ("welcome", 3)
    assert fields["job"]["batch_size"] == MLP["batch_size"]


@pytest.mark.parametrize("said_bye", [False, True])
def test_a_remote_worker_whose_connection_is_lost_does_not_get_its_seat_back(harness, said_bye):
    harness.connect(20, seat=None, local=False)
    if said_bye:
        harness.say(20, "bye")
    harness.say(20, "lost")
    assert len(harness.events("worker_died")) == (not said_bye)
    assert 3 not in harness.group.roster
    harness.connect(21, seat=3, local=False)
    assert harness.control.sent[-1][2]["seat"] == 4


def test_workers_that_outlived_a_driver_are_expected_back(harness):
    harness.engine.seats.append(1)
    harness.group.start([1])
    assert StartWorkers(1) in harness.group.tick(), "one is there already"
    assert harness.group.evict_all("what the servers held is lost") >= {1}
    assert 1 in harness.engine.stopped


def test_a_worker_that_connects_after_the_end_is_sent_away(training):
    training.group.dismiss("finished")
    training.group.dismiss("once more")
    ends = [view for view, _ in training.control.views if view.stop]
    assert [view.stop for view in ends] == ["finished"]
    training.connect(30, seat=3)
    assert training.control.views[-1] == (ends[0], [30])


def test_a_stop_lets_one_worker_save_before_all_leave(training):
    training.group.stop("pruned")
    training.group.tick()
    halt, _ = training.control.views[-1]
    assert halt.halt == "boundary"
    for seat in (3, 4):
        training.say(seat, "standing", view=halt.number, position=5)
    training.group.tick()
    last, connections = training.control.views[-1]
    assert last.stop == "pruned"
    assert last.saver in (3, 4)
    assert connections == [last.saver], "the other one leaves after it"


def test_the_events_of_a_remote_worker_are_relayed_and_its_failure_is_its_own(harness):
    harness.connect(20, seat=None, local=False)
    harness.say(20, "event", row='{"t": 1.0, "who": "worker-3", "kind": "note", "message": "hello"}')
    harness.say(20, "event", row='{"t": 1.0, "who": "worker-9", "kind": "note", "message": "not mine"}')
    failed = {
        "t": 1.0,
        "who": "worker-3",
        "kind": "failed",
        "message": "no data",
        "code": "SH1",
        "where": "",
        "fix": "",
    }
    harness.say(20, "event", row=json.dumps(failed))
    assert [event["message"] for event in harness.events("note")] == ["hello", "worker-3 (h) failed: no data"]
    assert harness.events("failed") == []


def test_what_listeners_of_workers_refused_is_added_up(harness):
    harness.group.tick()
    harness.connect(10, seat=3)
    harness.connect(11, seat=4)
    for connection, refused in ((10, 2), (11, 1), (10, 3)):
        harness.say(connection, "beat", phase="compute", refused=refused)
    assert harness.group.refused == 4


def test_a_kill_for_lack_of_memory_is_named(training, monkeypatch):
    counted = [7]
    monkeypatch.setattr("shoal.jobs.worker_group.oom_kills", lambda: counted[0])
    training.group._oom_kills = 7
    for seat in (3, 4):
        training.engine.seats.remove(seat)
    assert training.group.handle_exit(Exit.with_code(3, -9)) == "SIGKILL"  # somebody's kill -9
    counted[0] = 8
    why = training.group.handle_exit(Exit.with_code(4, -9))
    assert why == "SIGKILL (the kernel's out-of-memory killer was at work)"
    assert training.events("worker_died")[1]["reason"] == why


def test_usage_becomes_an_event_at_most_once_a_second(training):
    usage = {"cpu": 1.5, "rss_bytes": 10, "room_bytes": 20}
    for _ in range(50):
        training.say(3, "beat", phase="compute", usage=usage)
    told = training.events("usage")
    assert told[0]["worker"] == "worker-3"
    assert len(told) < 50
    training.say(4, "beat", phase="compute", usage=usage | {"cpu": -1.0})  # costs its connection
    assert all(event["worker"] == "worker-3" for event in training.events("usage"))


def welcomes(harness, connection):
    return [fields for to, kind, fields in harness.control.sent if (to, kind) == (connection, "welcome")]


def stand(harness, *connections):
    for connection in connections:
        harness.say(connection, "standing", view=0, position=None)


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_worker_that_joins_and_would_compute_other_bits_is_told_and_gets_no_view(harness, comes_first):
    """Whoever comes first: the engine's first worker says what the run computes with."""
    harness.group.tick()
    if comes_first:
        harness.connect(20, seat=None, local=False, platform={"torch": "2.12.0"})
        assert welcomes(harness, 20)[-1]["platform"] == {}, "nothing is known yet"
        stand(harness, 20)
        harness.group.tick()
    for seat in (3, 4):
        harness.connect(seat, seat=seat, platform={"torch": "2.13.0"})
    if not comes_first:
        harness.connect(20, seat=None, local=False, platform={"torch": "2.12.0"})
    assert welcomes(harness, 20)[-1]["platform"] == {"torch": "2.13.0"}
    seat = welcomes(harness, 20)[-1]["seat"]
    stand(harness, 3, 4, 20)
    harness.group.tick()
    assert harness.control.views
    assert all(20 not in connections for _, connections in harness.control.views)
    assert seat not in harness.group.membership.members
    row = {"kind": "failed", "t": 1.0, "who": f"worker-{seat}", "code": "SH654", "message": "m", "where": "", "fix": ""}
    harness.say(20, "event", row=json.dumps(row))
    harness.say(20, "bye")
    harness.say(20, "lost")
    (note,) = harness.events("note")
    assert "failed: m" in note["message"]
    assert harness.group.membership.wanted_workers == 2
    assert harness.events("worker_died") == []


def test_a_worker_that_joins_before_the_first_of_the_engine_trains_if_it_computes_the_same(harness):
    harness.group.tick()
    harness.connect(20, seat=None, local=False, platform={"torch": "2.13.0"})
    for seat in (3, 4):
        harness.connect(seat, seat=seat, platform={"torch": "2.13.0"})
    assert len(welcomes(harness, 20)) == 1
    stand(harness, 3, 4, 20)
    harness.group.tick()
    harness.say(3, "standing", view=harness.control.views[-1][0].number, position=0)
    harness.group.tick()
    assert sorted(harness.control.views[-1][0].carries) == [3, 4, 5]
