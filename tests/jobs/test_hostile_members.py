"""Members that lie: a real driver, a real socket, and the token. A bad member costs itself and nobody else."""

import contextlib
import json
import threading
import time

import pytest

from shoal.events.run_state import RunState
from shoal.fleet.driver_address import read_driver_address
from shoal.jobs import run_driver
from shoal.jobs.run_driver import first_free_seat
from shoal.net import handshake
from shoal.net import listener as listener_module
from tests.conftest import MLP
from tests.fuzz.foe import HELLO, STARTED, TIMEOUT_S, Foe
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, events_of_kind, reference_receipt
from tests.jobs.test_receipt import BUILT, FINISHED
from tests.jobs.test_run_driver import Harness


class HostileHarness(Harness):
    """A real driver whose engine starts nothing, and the connections of foes."""

    def __init__(self, job_dir):
        super().__init__(job_dir, 0, None)
        self.address = read_driver_address(self.paths.driver_address)
        self.foes = contextlib.ExitStack()

    def foe(self, **hello):
        return self.foes.enter_context(contextlib.closing(Foe(self.address, HELLO | hello)))

    def honest_worker(self, **hello):
        """In the engine's seat 0, with its key."""
        return self.foe(seat=0, key=self.address.key("worker-0"), attachment=STARTED, **hello)

    def welcomed(self, foe):
        """The driver's answer, and what it sends afterwards."""
        self.tick_until(lambda: len(self.driver.worker_group.roster.connections) > self.present)
        return next(foe.rows())

    @property
    def present(self):
        return getattr(self, "_present", 0)

    def join(self, **hello):
        """A worker that joins, and its seat."""
        self._present = len(self.driver.worker_group.roster.connections)
        foe = self.foe(**hello)
        return foe, self.welcomed(foe)["seat"]

    def tick_until(self, predicate):
        until = time.monotonic() + TIMEOUT_S
        while not predicate():
            assert time.monotonic() < until
            assert self.driver.tick() is None
            self.driver.wait(0.05)

    def refusal(self):
        """The reason of the next refusal, once its event is written."""
        known = getattr(self, "_refusals", 0)
        self.tick_until(lambda: len(self.events("refused")) > known)
        self._refusals = known + 1
        return self.events("refused")[known]

    def close(self):
        self.foes.close()
        self.driver.close()


@pytest.fixture
def harness(job_dir):
    with contextlib.closing(HostileHarness(job_dir)) as made:
        yield made


def row(seat, kind, step=None, **fields):
    return json.dumps({"t": 1.0, "who": f"worker-{seat}", "kind": kind, "step": step} | fields)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "beat", "lane_s": Infinity}', b'{"kind": "beat", "lane_s": 1e999}', b'{"kind": "beat", "step": NaN}',
        b'{"kind": "beat", "since_s": -1}', b'{"kind": "beat", "units": {"a": [1]}}',
        b'{"kind": "standing", "view": 1e999, "position": 0}', b'{"kind": "standing", "view": 0, "position": Infinity}',
        b'{"kind": "standing", "view": 0, "position": -4}', b'{"kind": "what"}', b'{"kind": 7}', b"[]", b"{", b"\xff",
        b'{"kind": "beat", "phase": "' + b"x" * 70_000 + b'"}', b'{"kind": "beat", "phase": ' + b"[" * 9000,
    ],
)  # fmt: skip
def test_a_row_that_makes_no_sense_costs_its_sender_the_connection(harness, line):
    """Also that of a worker that the engine started: it may connect again."""
    honest = harness.honest_worker()
    harness.tick_until(lambda: 0 in harness.driver.worker_group.roster)
    assert next(honest.rows())["seat"] == 0
    foe, seat = harness.join()
    foe.send(line + b"\n")
    refused = harness.refusal()
    assert refused["address"].startswith("127.0.0.1:")
    assert refused["reason"].isprintable()
    harness.tick_until(lambda: seat not in harness.driver.worker_group.roster)
    assert list(foe.rows()) == []
    assert harness.driver.control.refused == 1
    honest.say("standing", view=0, position=None)
    harness.tick_until(lambda: harness.driver.worker_group.membership.view_number)
    assert next(honest.rows())["kind"] == "view", "the honest worker is asked to load"


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"pid": float("inf")}, "pid"),
        ({"seat": 2**40}, "seat"),
        ({"seat": -1}, "seat"),
        ({"view": 10**6}, "claims view"),
        ({"attachment": STARTED}, "not its seat"),
        ({"attachment": STARTED, "seat": 0}, "not its seat"),
        ({"attachment": STARTED, "seat": 0, "key": "0" * 64}, "not its seat"),
        ({"attachment": {"managed": False, "can_save": True, "needs_job": True}}, "cannot save"),
        ({"role": "server", "seat": 0, "view": 0, "training": False}, "no servers"),
        ({"role": "boss"}, "role"),
        ({"host": "\x1b[2J" * 100}, "host"),
        ({"address": {"host": [], "port": 1}}, "address"),
    ],
)
def test_a_greeting_that_claims_what_nobody_gave_is_refused(harness, hello, reason):
    foe = harness.foe(**hello)
    assert reason in harness.refusal()["reason"]
    assert list(foe.rows()) == []
    assert list(harness.driver.worker_group.roster) == []


def test_seats_are_given_by_the_driver(harness):
    """A joiner gets the next number whatever it asks for, and nobody takes the seat of another."""
    one, first = harness.join(seat=999_999_999, key="guessed")
    second = harness.join(seat=first)[1]
    assert (first, second) == (1, 2), "0 is the engine's"
    assert harness.driver.worker_group.roster.get(first).disconnected_at_s is None
    one.say("event", row=row(first, "worker_started", pid=1, host="h"))
    harness.tick_until(lambda: "worker-1" in harness.driver.state.workers)
    assert first_free_seat(harness.driver.state.workers) == 2


def test_only_the_driver_finishes_a_run(harness):
    foe, seat = harness.join()
    foe.say("event", row=row(seat, "finished", 60, **FINISHED | {"weights_sha256": "0" * 64}))
    assert "may not report 'finished'" in harness.refusal()["reason"]
    assert harness.driver.state.result == {}
    assert harness.events("finished") == []
    assert not harness.paths.receipt.exists()


LIES = [
    ("saved", 3, {"size_bytes": 7}),
    ("evaluated", 3, {"split": "test", "metrics": {"accuracy": 1.0}}),
    ("best", 3, {"metric": "accuracy", "value": 1.0}),
    ("resumed", 3, {"redone": 10**6}),
    ("run_started", None, {"run": "another"}),
    ("run_ended", None, {"status": "finished"}),
    ("view", None, {"number": 10**6}),
    ("worker_died", None, {"worker": "worker-0", "reason": "murder"}),
    ("evicted", None, {"worker": "worker-0", "reason": "murder"}),
    ("joined", 3, {"lanes": [0], "saves": True}),
    ("joined", 3, {"lanes": [99], "saves": False}),
    ("step", 10**6, {"steps": 1}),
    ("step", 3, {"steps": 10**6}),
    ("step", 3, {"steps": 1, "samples": 10**12}),
    ("step", 3, {"steps": 1, "compute_s": 1e300}),
    ("nonsense", 3, {}),
]


@pytest.mark.parametrize(("kind", "step", "fields"), LIES)
def test_what_a_joined_worker_cannot_know_is_refused(harness, kind, step, fields):
    harness.tell("built", **BUILT)
    harness.tick_until(lambda: harness.driver.state.steps_total)
    foe, seat = harness.join()
    foe.say("event", row=row(seat, kind, step, **fields))
    harness.refusal()
    told = {(event.kind, event.who) for event in harness.events(kind)}
    assert (kind, f"worker-{seat}") not in told


def test_rows_about_others_and_rows_that_go_back_are_ignored(harness):
    harness.tell("built", **BUILT)
    harness.tick_until(lambda: harness.driver.state.steps_total)
    foe, seat = harness.join()
    say = [
        row(0, "note", message="not mine"),
        row(seat, "built", **BUILT | {"steps": 10**9}),
        row(seat, "joined", 4, lanes=[0], saves=False, view=1),
        row(seat, "step", 6, steps=2, samples=20),
        row(seat, "step", 5, steps=1, samples=20),
        row(seat, "note", message="the \x1b[2Jend"),
    ]
    for one in say:
        foe.say("event", row=one)
    harness.tick_until(lambda: harness.events("note"))
    assert [note["message"] for note in harness.events("note")] == ["the ?[2Jend"]
    assert [event.step for event in harness.events("step")] == [6]
    assert harness.driver.state.steps_total == BUILT["steps"]
    assert harness.driver.control.refused == 0


def test_a_position_without_a_view_or_beyond_the_end_is_not_believed(harness):
    foe, _ = harness.join()
    foe.say("standing", view=0, position=8)
    assert "had no view to get it from" in harness.refusal()["reason"]
    harness.tell("built", **BUILT)
    harness.tick_until(lambda: harness.driver.state.steps_total)
    survivor, seat = harness.join(view=5, training=True)
    members = harness.driver.worker_group.membership.members
    survivor.say("standing", view=members[seat].last_view_sent, position=10**9)
    assert "beyond the end" in harness.refusal()["reason"]
    late, _ = harness.join()
    late.say("standing", view=700, position=None)
    assert "reports view 700" in harness.refusal()["reason"]
    beating, _ = harness.join()
    beating.say("beat", phase="compute", step=10**9)
    assert "beyond the end" in harness.refusal()["reason"]


def test_commands_need_the_run_directory(harness):
    """The token lets a worker in. It does not stop the run."""
    for kind, fields in (("stop", {}), ("scale", {"wanted": 1000}), ("drain", {"seat": 0})):
        user = bare_user(harness)
        user.say(kind, **fields)
        assert "need the run's directory" in harness.refusal()["reason"]
        assert [one["kind"] for one in user.rows()] == ["welcome"]
    assert harness.driver.stop_requested == ""
    owner = bare_user(harness, key=harness.address.key("user"))
    owner.say("stop")
    harness.tick_until(lambda: harness.driver.stop_requested)


def bare_user(harness, **fields):
    return harness.foes.enter_context(contextlib.closing(Foe(harness.address, {"role": "user"} | fields)))


def test_a_flood_of_refusals_is_counted_and_told_in_few_rows(harness):
    for _ in range(60):
        harness.foe(seat=-1)
    harness.tick_until(lambda: harness.driver.control.refused == 60)
    assert len(harness.events("refused")) < 2 * run_driver.REFUSALS_AT_ONCE
    harness.driver.stop("enough")
    harness.engine.end(0, 0)
    harness.result()
    assert harness.events("run_ended")[0]["refused"] == 60


def test_half_open_connections_do_not_keep_a_worker_out(harness, monkeypatch):
    monkeypatch.setattr(handshake, "TIMEOUT_S", 30.0)
    monkeypatch.setattr(listener_module, "MAX_CONCURRENT_HANDSHAKES", 16)
    crowd = [
        harness.foes.enter_context(
            listener_module.socket.create_connection((harness.address.host, harness.address.port))
        )
        for _ in range(2 * listener_module.MAX_CONCURRENT_HANDSHAKES)
    ]
    honest = harness.honest_worker()
    harness.tick_until(lambda: 0 in harness.driver.worker_group.roster)
    assert next(honest.rows())["seat"] == 0
    assert len(crowd) > listener_module.MAX_CONCURRENT_HANDSHAKES


def test_a_flood_of_events_costs_its_sender_the_connection(harness, monkeypatch):
    monkeypatch.setattr("shoal.fleet.event_relay.ROW_BURST_BYTES", 10_000)
    monkeypatch.setattr("shoal.fleet.event_relay.ROW_BYTES_S", 1)  # however slowly it is sent
    foe, seat = harness.join()
    for n in range(200):
        foe.say("event", row=row(seat, "note", message=f"{n} {'x' * 500}"))
    assert "too many events" in harness.refusal()["reason"]
    assert len(harness.events("note")) < 30


# ---- with workers that train ----


class Liar(threading.Thread):
    """Joins, claims to be at the end of the job, and serves nothing."""

    def __init__(self, address, position):
        super().__init__(daemon=True)
        self.foe = Foe(address, HELLO)
        self.position = position
        self.views = 0

    def run(self):
        seat = None
        for said in self.foe.rows():
            if said["kind"] == "welcome":
                seat = said["seat"]
                self.foe.say("standing", view=0, position=None)
            elif said["kind"] == "view":
                self.views += 1
                view = said["view"]
                if seat in view["followers"] or view["halt"]:
                    self.foe.say("standing", view=view["number"], position=self.position)
                if view["stop"]:
                    return


def test_a_member_that_claims_the_highest_position_and_serves_nothing_is_evicted(run, job_dir):
    job, ready = MLP | {"lanes": 4, "steps": 80}, job_dir / "ready"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.05, "until": str(ready)}}]
    liars = []
    with background_run(run, job, workers=2, watchers=watchers) as it:
        it.wait_for_workers(2)
        liars.append(Liar(read_driver_address(it.paths.driver_address), 2 * 80))
        liars[0].start()
        it.wait_until(lambda state: any(note.kind == "evicted" for note in state.notes))
        ready.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, job))
    (evicted,) = events_of_kind(outcome, "evicted")
    assert evicted["reason"] == "2 views in a row made no step from its state"
    assert evicted["worker"] == "worker-2"
    assert outcome.receipt.views < 20
    assert isinstance(it.state, RunState)
    liars[0].join(30)
    assert liars[0].views < 20
