"""What a pilot makes of what it hears: events go in, and somebody leaves or comes."""

import json
from dataclasses import replace

import pytest

from shoal.events import Event, Picture, Stream
from shoal.jobs.grants import Grants
from shoal.jobs.kept import Kept
from shoal.jobs.pilot import Pilot, Taken
from shoal.plan.costs.choose import plan
from shoal.plan.costs.facts import Choice
from shoal.plan.costs.reading import Wanted, read_link, read_machine, read_measured
from shoal.plan.costs.telling import plan_told
from shoal.plan.crew import Crew
from shoal.spec.load import make_job
from shoal.spec.view import Address, View
from tests.conftest import MLP
from tests.jobs.facts import FACTS

WANTED = Wanted(most=4)
LANE_S = 0.06


def kept(**changes):
    facts = FACTS | changes
    found = plan(Choice(), read_measured(facts), read_machine(facts, WANTED), read_link(facts, WANTED), most=4)
    return Kept(facts, WANTED, plan_told(found, found.pick, []))


class Sea:
    """A crew that trains; `hosts` are by seat, those of the driver are "here"."""

    def __init__(self, place, hosts, lane_s, *, kept=None, replans=(), workers=None):
        self.crew = Crew(lanes=4, wanted=sum(host == "here" for host in hosts))
        for seat, host in enumerate(hosts):
            address = Address(host="127.0.0.1", port=1, host_id=host)
            self.crew.arrived(seat, local=host == "here", address=address, training=True)
            self.crew.measured(seat, lane_s[seat])
        self.crew.view = View(number=1, carries={seat: [seat] for seat in range(len(hosts))}, saver=0)
        self.grants = Grants(self.crew, None)
        self.rows = []
        stream = Stream.through(self.rows.append, "driver")
        self.picture = Picture(replans=list(replans))
        workers = workers or kept.told["choice"]["workers"]
        job = make_job(MLP | {"workers": workers}, base_dir=str(place))
        self.pilot = Pilot(job, kept, self.crew, self.grants, stream, self.picture)

    def hear(self, kind, who="worker-0", step=None, **fields):
        event = Event(kind, 0.0, who, step, fields)
        self.picture.add(event)
        self.pilot.look(event, self.picture)

    def train(self, steps, step_s):
        start = self.picture.step
        if not start:
            self.hear("joined", step=0, lanes=[0])
        for step in range(start + 1, start + steps + 1):
            self.hear("step", step=step, steps=1, wall_s=step_s)
            self.pilot.steer(step)

    @property
    def told(self):
        return [json.loads(row) for row in self.rows]

    @property
    def leaving(self):
        return [m.seat for m in self.crew.members.values() if m.leaving]


def test_as_expected_nothing_happens(place):
    plan = kept()
    sea = Sea(place, ["here"] * 4, [LANE_S] * 4, kept=plan)
    sea.train(300, plan.told["prediction"]["step_s"])
    assert (sea.told, sea.leaving, sea.crew.wanted) == ([], [], 4)


def test_the_slowest_go(place):
    sea = Sea(place, ["here"] * 4, [LANE_S, 3 * LANE_S, LANE_S, 2 * LANE_S], kept=kept())
    sea.train(150, 2.0)
    (row,) = sea.told
    assert row["kind"] == "replan"
    assert row["moves"]["workers"] < 4
    assert row["truth"]["lane_s"] == [[0.06, 0.06, 0.12, 0.18]]
    assert 1 in sea.leaving
    assert 0 not in sea.leaving or 2 not in sea.leaving


def test_more_are_started(place):
    sea = Sea(place, ["here"], [10 * LANE_S], kept=kept())
    sea.train(150, 40.5 * LANE_S)
    assert sea.told[0]["moves"]["workers"] == 4
    assert (sea.crew.wanted, sea.leaving) == (4, [])


def test_no_more_are_started_where_one_stands_by(place):
    sea = Sea(place, ["here"] * 2, [10 * LANE_S, 100 * LANE_S], kept=kept())
    sea.crew.view = View(number=2, carries={0: [0, 1, 2, 3]}, saver=0)
    sea.train(150, 40.5 * LANE_S)
    (row,) = sea.told
    assert (row["choice"]["workers"], row["moves"]) == (1, None)
    assert (sea.crew.wanted, sea.leaving) == (2, [])


def test_a_host_behind_a_slow_link_is_let_go(place):
    sea = Sea(place, ["here", "there"], [LANE_S, LANE_S], kept=kept(cores=1))
    link = {"latency_s": 0.05, "send_bytes_s": 1e5, "receive_bytes_s": 1e5}
    sea.hear("link_measured", who="worker-1", peer="worker-0", **link)
    sea.train(150, 0.6)
    (row,) = sea.told
    assert row["prediction"]["step_s"] > 0.4, "the link was known"
    assert (row["choice"]["hosts"], row["moves"]["hosts"]) == (2, 1)
    assert sea.leaving == [1]


@pytest.mark.parametrize("gone", ["left", "worker_died"])
def test_a_link_is_forgotten_with_its_host(place, gone):
    sea = Sea(place, ["here", "there"], [LANE_S, LANE_S], kept=kept(cores=1))
    assumed = sea.pilot._setting.link
    sea.hear("link_measured", who="worker-1", peer="worker-0", latency_s=0.05, send_bytes_s=1e5, receive_bytes_s=1e5)
    assert sea.pilot._setting.link != assumed
    sea.hear(gone, who="worker-1", worker="worker-1", reason="gone")
    assert sea.pilot._setting.link == assumed


def test_a_host_that_helps_stays(place):
    sea = Sea(place, ["here", "there"], [LANE_S, LANE_S], kept=kept(cores=1))
    sea.train(150, 2.2 * LANE_S)
    (row,) = sea.told
    assert row["moves"] is None
    assert sea.leaving == []


def test_another_driver_takes_up_what_was_made_of_the_plan(place):
    first = Sea(place, ["here"], [10 * LANE_S], kept=kept())
    first.train(150, 40.5 * LANE_S)
    (row,) = first.told
    told = {name: value for name, value in row.items() if name not in ("kind", "t", "who", "step")}
    second = Sea(place, ["here"] * 4, [10 * LANE_S] * 4, kept=kept(), replans=[told])
    assert second.crew.wanted == 4
    second.train(300, told["expected"]["step_s"])
    assert second.told == []


def told_by(sea):
    return [
        {name: value for name, value in row.items() if name not in ("kind", "t", "who", "step")} for row in sea.told
    ]


def test_all_that_was_made_of_the_plan_is_taken_up(place):
    """A look that led to nothing does not undo the move before it."""
    first = Sea(place, ["here"], [10 * LANE_S], kept=kept())
    first.train(150, 40.5 * LANE_S)
    (moved,) = told_by(first)
    stayed = moved | {"choice": moved["moves"], "moves": None}
    second = Sea(place, ["here"], [10 * LANE_S], kept=kept(), replans=[moved, stayed])
    assert second.crew.wanted == 4


def test_who_resumes_with_other_workers_has_them(place):
    first = Sea(place, ["here"], [10 * LANE_S], kept=kept())
    first.train(150, 40.5 * LANE_S)
    second = Sea(place, ["here"] * 2, [10 * LANE_S] * 2, kept=kept(), replans=told_by(first), workers=2)
    assert second.crew.wanted == 2
    second.train(600, 100 * LANE_S)
    assert "a user chose the number of workers" in second.told[0]["reason"]
    assert (second.crew.wanted, second.leaving) == (2, [])


def test_steps_of_those_who_are_gone_say_nothing_of_those_who_are_left(place):
    plan = kept()
    sea = Sea(place, ["here"] * 4, [LANE_S] * 4, kept=plan)
    sea.train(150, plan.told["prediction"]["step_s"])
    sea.crew.gone(3)
    sea.train(150, plan.told["prediction"]["step_s"])
    assert sea.told == [], "nobody knows yet"
    sea.crew.view = View(number=2, carries={0: [0], 1: [1], 2: [2, 3]}, saver=0)
    sea.pilot.steer(sea.picture.step)
    assert sea.told == [], "no step was made yet"
    sea.train(150, 2.1 * LANE_S)
    (row,) = sea.told
    assert (row["choice"]["workers"], row["truth"]["step_s"]) == (3, pytest.approx(2.1 * LANE_S))


def test_fewer_than_the_job_wants(place):
    wanted = replace(WANTED, least=4)
    plan = replace(kept(), wanted=wanted)
    sea = Sea(place, ["here"] * 4, [LANE_S] * 4, kept=plan)
    sea.crew.gone(3)
    sea.crew.view = View(number=2, carries={0: [0], 1: [1], 2: [2, 3]}, saver=0)
    sea.train(150, 2.1 * LANE_S)
    assert [row["choice"]["workers"] for row in sea.told] == [3]


@pytest.mark.parametrize("period", [1, 8])
def test_rows_are_as_long_as_a_period(period):
    taken = Taken(period)
    for _ in range(25 * period):
        taken.add(1, 0.5)
    assert taken.typical == 0.5
    taken.forget()
    assert taken.typical is None
