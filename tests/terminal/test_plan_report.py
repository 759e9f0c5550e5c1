"""How a plan looks, wide and narrow."""

import io
from dataclasses import replace

import pytest

from shoal.jobs.planner import PlanResult
from shoal.plan.costs.model import HostResources, RunChoice
from shoal.plan.costs.price import epoch_price
from shoal.plan.costs.select import make_plan
from shoal.terminal import plan_report
from shoal.terminal.console import make_console
from tests.plan.cost_model_cases import FAST_LINK, GB, HOST, LARGE_MODEL, SLOW_LINK, machine


def planned(measured=LARGE_MODEL, there=None, link=FAST_LINK, most=8, allow=(), load=0.0):
    there, own = there or machine(), RunChoice()
    return PlanResult(make_plan(own, measured, there, link, most=most, allow=allow), own, measured, there, link, load)


def shown(made, width=200, every=False):
    console = make_console(file=io.StringIO(), width=width)
    plan_report.print_plan(console, made, command="shoal run job.yaml", show_all=every)
    return console.file.getvalue()


def test_wide_and_narrow_say_the_same():
    made = planned()
    wide, narrow = shown(made), shown(made, width=80)
    assert " ".join(wide.split()) == " ".join(narrow.split())
    assert len(narrow.splitlines()) > len(wide.splitlines())


def test_the_pick_is_marked_and_its_command_is_there():
    text = shown(planned())
    (picked,) = [line for line in text.splitlines() if line.startswith("→")]
    assert picked.split()[1:3] == ["4", "lanes"]
    assert "Take 4 workers: 3.3 times as fast as one worker: " in text
    assert "\n  shoal run job.yaml --workers 4\n" in text
    assert "hosts" not in text.splitlines()[5]
    assert "If the job had `plan: {allow: [local]}`: 4 workers (local, every 128)." in text


def test_two_hosts_name_the_way_there():
    one_core = HostResources(1, 16 * GB)
    text = shown(planned(there=machine(one_core, one_core), link=SLOW_LINK, allow=["local"]))
    assert "12.5 MB/s each way, 0.2 ms one way" in text
    command = (
        'shoal run job.yaml --workers 1 --set "sync={kind: local, every: 128, rounds_per_sync: 8}" --listen ADDRESS'
    )
    assert f"  {command}    # and elsewhere: shoal join HOST:PORT --workers 1 --trust-code\n" in text


def test_hosts_that_are_not_alike_have_other_numbers():
    strong, weak = HostResources(4, 16 * GB), HostResources(4, 16 * GB, speed=0.25)
    made = planned(there=machine(strong, weak), most=4)
    two = next(
        row.prediction.choice for row in made.plan.candidates if row.prediction.choice == RunChoice(workers=4, hosts=2)
    )
    assert plan_report._command_line(two, made, "shoal run job.yaml").endswith(
        "--workers 3 --listen ADDRESS    # and elsewhere: shoal join HOST:PORT --workers 1 --trust-code"
    )


def test_lanes_that_follow_the_workers_are_named_also_with_other_hosts():
    one_core = HostResources(1, 16 * GB)
    two = planned(replace(LARGE_MODEL, lanes=2), there=machine(one_core, one_core), most=2)
    assert '--workers 1 --set "lanes=2" --listen ADDRESS' in shown(replace(two, lanes_follow_workers=True))


def test_lanes_that_follow_the_workers_are_named():
    made = replace(planned(most=4), lanes_follow_workers=True)
    assert '\n  shoal run job.yaml --workers 4 --set "lanes=8"\n' in shown(made)


def test_a_plan_of_a_job_that_leaves_it_open_says_how():
    assert '\n  shoal run job.yaml --workers 4 --set "sync={kind: lanes}"\n' in shown(
        replace(planned(), sync_is_auto=True)
    )


def test_few_rows_unless_all_are_wanted():
    made = planned(there=machine(HOST, HOST))
    few, every = shown(made), shown(made, every=True)
    assert f"{len(made.plan.candidates) - plan_report.MAX_ROWS} others were looked at" in few
    assert len(every.splitlines()) > len(made.plan.candidates)
    assert "others were looked at" not in every
    assert made.plan.pick in plan_report.rows_to_show(made)
    assert made.plan.offer in plan_report.rows_to_show(made)


def test_nothing_fits():
    text = shown(planned(there=machine(HostResources(4, 0.1 * GB))))
    assert "needs 0.5 GB, the machine has 0.1 GB" in text
    assert "None of these can be." in text


def test_notes():
    assert "The machine had other work when this was measured (load 3.2, 4 cores)" in shown(planned(load=3.2))
    assert "other work" not in shown(planned(load=1.0))
    assert "2 and 4 threads per worker were tried" in shown(planned(replace(LARGE_MODEL, slow_threads=(2, 4))))
    assert "Rows of sparse tables" in shown(planned(replace(LARGE_MODEL, only_servers="sparse tables")))


def test_a_price_of_a_seat_is_shown_for_every_way_and_what_is_cheaper_is_named():
    made = replace(planned(), seat_price=0.9)
    text = shown(made)
    pick = made.plan.pick.prediction
    price = 4 * 0.9 * pick.epoch_s / 3600
    assert f"An epoch costs {price:.3g} at 0.9 for a worker's hour. Cheapest: 1 worker, lanes: " in text
    (picked,) = [line for line in text.splitlines() if line.startswith("→")]
    assert f" {price:.3g} " in picked
    assert "price" not in shown(planned())
    rows = made.to_json_data()["rows"]
    assert made.to_json_data()["pick"]["epoch_price"] == price
    assert all((row["epoch_price"] is None) == bool(row["refused"]) for row in rows)
    alone = [row for row in rows if row["choice"]["workers"] == 1 and row["choice"]["servers"] == 0]
    assert min(row["epoch_price"] for row in alone) < price


def test_servers_cost_as_much_as_workers():
    made = planned()
    serving = [row for row in made.plan.candidates if row.prediction.choice.servers and row.feasible]
    for row in serving:
        it = row.prediction
        seats = it.choice.workers + it.choice.servers
        assert epoch_price(it, 3600.0) == pytest.approx(seats * it.epoch_s)
    assert serving
