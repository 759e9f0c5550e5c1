"""What a replanner makes of what it hears: events go in, and somebody leaves or comes."""

import json
import threading
from dataclasses import replace

import pytest

from shoal.events import Event, EventWriter, RunState
from shoal.jobs import replanner
from shoal.jobs.command_handler import CommandHandler
from shoal.jobs.plan_file import PlanFile
from shoal.jobs.replanner import Replanner, StepTimes
from shoal.plan.costs.inputs import PlanRequest, read_cluster, read_link, read_measured
from shoal.plan.costs.model import RunChoice
from shoal.plan.costs.select import make_plan
from shoal.plan.costs.serialise import plan_fields
from shoal.plan.membership_policy import MembershipPolicy
from shoal.spec.load import make_job
from shoal.spec.view import Address, Attachment, View
from tests.conftest import MLP
from tests.jobs.job_profile import JOB_PROFILE

WANTED = PlanRequest(most=4)
LANE_S = 0.06


def plan_file(**changes):
    facts = JOB_PROFILE | changes
    found = make_plan(RunChoice(), read_measured(facts), read_cluster(facts, WANTED), read_link(facts, WANTED), most=4)
    return PlanFile(facts, WANTED, plan_fields(found, found.pick, []))


class ReplannerHarness:
    """A membership that trains; `hosts` are by seat, those of the driver are "here"."""

    def __init__(self, job_dir, hosts, lane_s, *, kept=None, replans=(), workers=None):
        self.membership = MembershipPolicy(lanes=4, wanted_workers=sum(host == "here" for host in hosts))
        for seat, host in enumerate(hosts):
            address = Address(host="127.0.0.1", port=1, host_id=host)
            here = host == "here"
            attachment = Attachment(managed=here, can_save=here, needs_job=not here)
            self.membership.arrived(seat, attachment, address=address, training=True)
            self.membership.record_lane_time(seat, lane_s[seat])
        self.membership.view = View(number=1, carries={seat: [seat] for seat in range(len(hosts))}, saver=0)
        self.command_handler = CommandHandler(self.membership, None)
        self.rows = []
        stream = EventWriter.to_callback(self.rows.append, "driver")
        self.run_state = RunState(replans=list(replans))
        workers = workers or kept.told["choice"]["workers"]
        job = make_job(MLP | {"workers": workers}, base_dir=str(job_dir))
        self.replanner = Replanner(job, kept, self.membership, self.command_handler, stream, self.run_state)

    def feed_event(self, kind, who="worker-0", step=None, **fields):
        event = Event(kind, 0.0, who, step, fields)
        self.run_state.apply(event)
        self.replanner.observe(event, self.run_state)

    def train(self, steps, step_s, *, waits=True):
        """`waits`: a plan that is begun is made before the next step."""
        start = self.run_state.step
        if not start:
            self.feed_event("joined", step=0, lanes=[0])
        for step in range(start + 1, start + steps + 1):
            self.feed_event("step", step=step, steps=1, wall_s=step_s)
            self.replanner.replan_if_needed(step)
            while waits and self.replanner.planning:
                self.replanner.replan_if_needed(step)

    @property
    def emitted(self):
        return [json.loads(row) for row in self.rows]

    @property
    def leaving(self):
        return [m.seat for m in self.membership.members.values() if m.leaving]


@pytest.fixture
def slow_plan(monkeypatch):
    """A plan takes until this event is set."""
    may_end = threading.Event()
    real = replanner.replan
    monkeypatch.setattr(replanner, "replan", lambda *now, **bounds: may_end.wait(30) and real(*now, **bounds))
    yield may_end
    may_end.set()


def test_steps_go_on_while_a_plan_is_made(job_dir, slow_plan):
    harness = ReplannerHarness(job_dir, ["here"], [10 * LANE_S], kept=plan_file())
    harness.train(300, 41 * LANE_S, waits=False)
    assert harness.replanner.planning
    assert harness.emitted == []
    slow_plan.set()
    while harness.replanner.planning:
        harness.replanner.replan_if_needed(300)
    (row,) = harness.emitted
    assert row["step"] == 300


@pytest.mark.parametrize("change", ["another view", "a stop"])
def test_a_plan_for_workers_that_no_longer_train_is_dropped(job_dir, slow_plan, change):
    harness = ReplannerHarness(job_dir, ["here"] * 2, [10 * LANE_S] * 2, kept=plan_file())
    harness.train(300, 41 * LANE_S, waits=False)
    assert harness.replanner.planning
    if change == "a stop":
        harness.membership.stop("pruned")
    else:
        harness.membership.view = View(number=2, carries={0: [0, 1, 2], 1: [3]}, saver=0)
    slow_plan.set()
    while harness.replanner.planning:
        harness.replanner.replan_if_needed(300)
    assert harness.emitted == []
    assert harness.leaving == []


def test_as_expected_nothing_happens(job_dir):
    plan = plan_file()
    harness = ReplannerHarness(job_dir, ["here"] * 4, [LANE_S] * 4, kept=plan)
    harness.train(300, plan.told["prediction"]["step_s"])
    assert (harness.emitted, harness.leaving, harness.membership.wanted_workers) == ([], [], 4)


def test_the_slowest_go(job_dir):
    harness = ReplannerHarness(job_dir, ["here"] * 4, [LANE_S, 3 * LANE_S, LANE_S, 2 * LANE_S], kept=plan_file())
    harness.train(150, 2.0)
    (row,) = harness.emitted
    assert row["kind"] == "replan"
    assert row["moves"]["workers"] < 4
    assert row["truth"]["lane_s"] == [[0.06, 0.06, 0.12, 0.18]]
    assert 1 in harness.leaving
    assert 0 not in harness.leaving or 2 not in harness.leaving


def test_more_are_started(job_dir):
    harness = ReplannerHarness(job_dir, ["here"], [10 * LANE_S], kept=plan_file())
    harness.train(150, 40.5 * LANE_S)
    assert harness.emitted[0]["moves"]["workers"] == 4
    assert (harness.membership.wanted_workers, harness.leaving) == (4, [])


def test_no_more_are_started_where_one_stands_by(job_dir):
    harness = ReplannerHarness(job_dir, ["here"] * 2, [10 * LANE_S, 100 * LANE_S], kept=plan_file())
    harness.membership.view = View(number=2, carries={0: [0, 1, 2, 3]}, saver=0)
    harness.train(150, 40.5 * LANE_S)
    (row,) = harness.emitted
    assert (row["choice"]["workers"], row["moves"]) == (1, None)
    assert (harness.membership.wanted_workers, harness.leaving) == (2, [])


def test_a_host_behind_a_slow_link_is_let_go(job_dir):
    harness = ReplannerHarness(job_dir, ["here", "there"], [LANE_S, LANE_S], kept=plan_file(cores=1))
    link = {"latency_s": 0.05, "send_bytes_s": 1e5, "receive_bytes_s": 1e5}
    harness.feed_event("link_measured", who="worker-1", peer="worker-0", **link)
    harness.train(150, 0.6)
    (row,) = harness.emitted
    assert row["prediction"]["step_s"] > 0.4, "the link was known"
    assert (row["choice"]["hosts"], row["moves"]["hosts"]) == (2, 1)
    assert harness.leaving == [1]


@pytest.mark.parametrize("gone", ["left", "worker_died"])
def test_a_link_is_forgotten_with_its_host(job_dir, gone):
    harness = ReplannerHarness(job_dir, ["here", "there"], [LANE_S, LANE_S], kept=plan_file(cores=1))
    assumed = harness.replanner._setting.link
    harness.feed_event(
        "link_measured", who="worker-1", peer="worker-0", latency_s=0.05, send_bytes_s=1e5, receive_bytes_s=1e5
    )
    assert harness.replanner._setting.link != assumed
    harness.feed_event(gone, who="worker-1", worker="worker-1", reason="gone")
    assert harness.replanner._setting.link == assumed


def test_a_host_that_helps_stays(job_dir):
    harness = ReplannerHarness(job_dir, ["here", "there"], [LANE_S, LANE_S], kept=plan_file(cores=1))
    harness.train(150, 2.2 * LANE_S)
    (row,) = harness.emitted
    assert row["moves"] is None
    assert harness.leaving == []


def test_another_driver_takes_up_what_was_made_of_the_plan(job_dir):
    first = ReplannerHarness(job_dir, ["here"], [10 * LANE_S], kept=plan_file())
    first.train(150, 40.5 * LANE_S)
    (row,) = first.emitted
    told = {name: value for name, value in row.items() if name not in ("kind", "t", "who", "step")}
    second = ReplannerHarness(job_dir, ["here"] * 4, [10 * LANE_S] * 4, kept=plan_file(), replans=[told])
    assert second.membership.wanted_workers == 4
    second.train(300, told["expected"]["step_s"])
    assert second.emitted == []


def emitted_by(harness):
    return [
        {name: value for name, value in row.items() if name not in ("kind", "t", "who", "step")}
        for row in harness.emitted
    ]


def test_all_that_was_made_of_the_plan_is_taken_up(job_dir):
    """A look that led to nothing does not undo the move before it."""
    first = ReplannerHarness(job_dir, ["here"], [10 * LANE_S], kept=plan_file())
    first.train(150, 40.5 * LANE_S)
    (moved,) = emitted_by(first)
    stayed = moved | {"choice": moved["moves"], "moves": None}
    second = ReplannerHarness(job_dir, ["here"], [10 * LANE_S], kept=plan_file(), replans=[moved, stayed])
    assert second.membership.wanted_workers == 4


def test_who_resumes_with_other_workers_has_them(job_dir):
    first = ReplannerHarness(job_dir, ["here"], [10 * LANE_S], kept=plan_file())
    first.train(150, 40.5 * LANE_S)
    second = ReplannerHarness(
        job_dir, ["here"] * 2, [10 * LANE_S] * 2, kept=plan_file(), replans=emitted_by(first), workers=2
    )
    assert second.membership.wanted_workers == 2
    second.train(600, 100 * LANE_S)
    assert "a user chose the number of workers" in second.emitted[0]["reason"]
    assert (second.membership.wanted_workers, second.leaving) == (2, [])


def test_steps_of_those_who_are_gone_say_nothing_of_those_who_are_left(job_dir):
    plan = plan_file()
    harness = ReplannerHarness(job_dir, ["here"] * 4, [LANE_S] * 4, kept=plan)
    harness.train(150, plan.told["prediction"]["step_s"])
    harness.membership.gone(3)
    harness.train(150, plan.told["prediction"]["step_s"])
    assert harness.emitted == [], "nobody knows yet"
    harness.membership.view = View(number=2, carries={0: [0], 1: [1], 2: [2, 3]}, saver=0)
    harness.replanner.replan_if_needed(harness.run_state.step)
    assert harness.emitted == [], "no step was made yet"
    harness.train(150, 2.1 * LANE_S)
    (row,) = harness.emitted
    assert (row["choice"]["workers"], row["truth"]["step_s"]) == (3, pytest.approx(2.1 * LANE_S))


def test_fewer_than_the_job_wants(job_dir):
    wanted = replace(WANTED, least=4)
    plan = replace(plan_file(), wanted=wanted)
    harness = ReplannerHarness(job_dir, ["here"] * 4, [LANE_S] * 4, kept=plan)
    harness.membership.gone(3)
    harness.membership.view = View(number=2, carries={0: [0], 1: [1], 2: [2, 3]}, saver=0)
    harness.train(150, 2.1 * LANE_S)
    assert [row["choice"]["workers"] for row in harness.emitted] == [3]


@pytest.mark.parametrize("period", [1, 8])
def test_rows_are_as_long_as_a_period(period):
    taken = StepTimes(period)
    for _ in range(25 * period):
        taken.add(1, 0.5)
    assert taken.typical == 0.5
    taken.clear()
    assert taken.typical is None
