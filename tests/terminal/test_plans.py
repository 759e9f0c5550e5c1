"""How a plan looks, wide and narrow."""

import io
from dataclasses import replace

from rich.console import Console

from shoal.jobs.planning import Planned
from shoal.plan.costs.choose import plan
from shoal.plan.costs.facts import Choice, Host
from shoal.terminal import plans
from tests.plan.costs_cases import FAST, GB, HOST, LARGE, SLOW, machine


def planned(measured=LARGE, there=None, link=FAST, most=8, allow=(), load=0.0):
    there, own = there or machine(), Choice()
    return Planned(plan(own, measured, there, link, most=most, allow=allow), own, measured, there, link, load)


def shown(made, width=200, every=False):
    console = Console(file=io.StringIO(), width=width)
    plans.show(console, made, command="shoal run job.yaml", every=every)
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
    one_core = Host(1, 16 * GB)
    text = shown(planned(there=machine(one_core, one_core), link=SLOW, allow=["local"]))
    assert "12.5 MB/s each way, 0.2 ms one way" in text
    command = 'shoal run job.yaml --workers 1 --set "sync={kind: local, every: 128, settle: 8}" --listen ADDRESS'
    assert f"  {command}    # and elsewhere: shoal join HOST:PORT --workers 1\n" in text


def test_hosts_that_are_not_alike_have_other_numbers():
    strong, weak = Host(4, 16 * GB), Host(4, 16 * GB, speed=0.25)
    made = planned(there=machine(strong, weak), most=4)
    two = next(row.prediction.choice for row in made.plan.rows if row.prediction.choice == Choice(workers=4, hosts=2))
    assert plans._run(two, made, "shoal run job.yaml").endswith(
        "--workers 3 --listen ADDRESS    # and elsewhere: shoal join HOST:PORT --workers 1"
    )


def test_lanes_that_follow_the_workers_are_named_also_with_other_hosts():
    one_core = Host(1, 16 * GB)
    two = planned(replace(LARGE, lanes=2), there=machine(one_core, one_core), most=2)
    assert '--workers 1 --set "lanes=2" --listen ADDRESS' in shown(replace(two, follows=True))


def test_lanes_that_follow_the_workers_are_named():
    made = replace(planned(most=4), follows=True)
    assert '\n  shoal run job.yaml --workers 4 --set "lanes=8"\n' in shown(made)


def test_a_plan_of_a_job_that_leaves_it_open_says_how():
    assert '\n  shoal run job.yaml --workers 4 --set "sync={kind: lanes}"\n' in shown(replace(planned(), opens=True))


def test_few_rows_unless_all_are_wanted():
    made = planned(there=machine(HOST, HOST))
    few, every = shown(made), shown(made, every=True)
    assert f"{len(made.plan.rows) - plans.MOST_ROWS} others were looked at" in few
    assert len(every.splitlines()) > len(made.plan.rows)
    assert "others were looked at" not in every
    assert made.plan.pick in plans.chosen(made)
    assert made.plan.offer in plans.chosen(made)


def test_nothing_fits():
    text = shown(planned(there=machine(Host(4, 0.1 * GB))))
    assert "needs 0.5 GB, the machine has 0.1 GB" in text
    assert "None of these can be." in text


def test_notes():
    assert "The machine had other work when this was measured (load 3.2, 4 cores)" in shown(planned(load=3.2))
    assert "other work" not in shown(planned(load=1.0))
    assert "2 and 4 threads per worker were tried" in shown(planned(replace(LARGE, slow_threads=(2, 4))))
    assert "Rows of sparse tables" in shown(planned(replace(LARGE, only_servers="sparse tables")))
