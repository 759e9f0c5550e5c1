"""Real processes on one queue, killed at any time."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from shoal.errors import ShoalError
from shoal.jobs import run_executor
from shoal.jobs.queue import background, client, serve
from shoal.jobs.queue.daemon_lock import daemon_lock, is_served, take_lease
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.run_dir import list_runs
from shoal.plan.queueing.transitions import MAX_FRUITLESS
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from tests.jobs.fault_injection import time_limit
from tests.jobs.queue.test_network import wait_for

ROOT = Path(__file__).parents[3]
WHERE = """
import os, torch
def net():
    print("on", os.environ.get("SHOAL_MACHINE"), flush=True)
    return torch.nn.Linear(64, 10)
"""


def start(module, *words):
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_are_killed_lose_no_job_and_start_none_twice(store, paths, job):
    store.submit([job()] * 90, user="ann")
    chance = random.Random(3)
    with time_limit(120):
        for kills in range(3):
            process = start("tests.jobs.queue.claimer", paths.runs)
            assert process.stdout.readline() == "serves\n", process.stderr.read()
            done = sum(entry.state == "finished" for entry in store.entries())
            wanted = done + chance.randrange(1, 30)
            while kills < 2 and sum(entry.state == "finished" for entry in store.entries()) < wanted:
                pass
            if kills < 2:
                process.kill()
            process.communicate()
    entries = store.entries()
    assert [entry.state for entry in entries] == ["finished"] * 90
    assert len({entry.run for entry in entries}) == 90
    assert len(list(paths.runs.glob("run-*"))) == 90
    for entry in entries:
        starts = list((paths.runs / entry.run).glob("start-*"))
        assert len({path.name.split("-")[1] for path in starts}) == len(starts), "two starts in one epoch"
        assert len(starts) <= entry.attempts
    store.check()


def test_the_module_of_the_daemon_can_be_started_by_its_name():
    """The guard does so. Nothing else of Shoal is imported before it, so a circle of imports would show here."""
    process = start("shoal.jobs.queue.serve", "--help")
    shown, said = process.communicate()
    assert process.returncode == 0, said
    assert "--guard" in shown


def test_a_second_daemon_is_refused_while_the_first_lives_and_takes_over_when_it_is_killed(store, paths, job):
    first = start("tests.jobs.queue.claimer_that_waits", paths.runs)
    assert first.stdout.readline() == "serves\n", first.stderr.read()
    assert is_served(paths)
    with pytest.raises(ShoalError) as caught:
        serve.serve(paths.runs)
    assert caught.value.code == "SH641"
    first.kill()
    first.communicate()
    assert not is_served(paths)
    with daemon_lock(paths):
        assert take_lease(store).epoch == 2


def test_the_second_of_two_shoal_up_ends_with_the_reason_and_the_first_goes_on(paths):
    first = start("shoal", "up", "--runs", paths.runs)
    try:
        assert "serves" in first.stdout.readline()
        second = start("shoal", "up", "--runs", paths.runs)
        told = "".join(second.communicate())
        assert (second.returncode != 0, told[:5]) == (True, "SH641"), told
        assert (first.poll(), is_served(paths)) == (None, True)
        assert client.look(paths.runs).daemon_pid == first.pid
    finally:
        first.terminate()
        first.communicate()
    assert not is_served(paths)


def test_a_daemon_of_another_machine_that_counts_on_is_not_replaced(store, paths, monkeypatch):
    store.change_lease(lambda old: old.taken(holder="elsewhere/another-boot/7", pid=7))
    monkeypatch.setattr(time, "sleep", lambda s: store.change_lease(lambda old: old.renewed()))
    with daemon_lock(paths), pytest.raises(ShoalError) as caught:
        take_lease(store)
    assert caught.value.code == "SH641"
    assert store.lease().epoch == 1


def test_a_daemon_of_another_machine_that_stands_still_is_replaced(store, paths, monkeypatch):
    store.change_lease(lambda old: old.taken(holder="elsewhere/another-boot/7", pid=7))
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    with daemon_lock(paths):
        assert take_lease(store).epoch == 2
    assert now[0] >= 30


def test_down_also_ends_a_daemon_that_takes_over_while_it_waits(store, paths):
    """The lock is taken first, then the lease, which begins without the request to end."""
    with time_limit(30), ThreadPoolExecutor() as pool, daemon_lock(paths):
        store.change_lease(lambda old: old.taken(holder="killed", pid=7))
        asked = pool.submit(client.down, paths.runs)
        for _ in range(2):
            wait_for(store.lease, lambda lease: lease.stop_requested)
            store.change_lease(lambda old: old.taken(holder="next", pid=8))
        wait_for(store.lease, lambda lease: lease.stop_requested)
        store.release_lease_if_idle(3, is_idle=lambda: True)
    assert asked.result()


def test_the_guard_starts_a_killed_daemon_again_but_not_for_ever():
    assert background.restart_after(-9, 1)
    assert background.restart_after(1, MAX_FRUITLESS), "a bug counts like a kill: the job that causes it is held"
    assert not background.restart_after(-9, 100)
    assert not background.restart_after(0, 1)
    assert not background.restart_after(6, 1), "an error that it told would come again"


def shoal(*words, cwd):
    command = [sys.executable, "-m", "shoal", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.mark.long
def test_submit_alone_runs_a_job_and_its_daemon_ends_by_itself(job_dir, job, monkeypatch):
    monkeypatch.setenv("SHOAL_QUEUE_IDLE_S", "3")
    from shoal.spec.load import save_job

    save_job(job(steps=20), job_dir / "job.yaml")
    first, second = (json.loads(shoal("submit", "job.yaml", "--json", cwd=job_dir)) for _ in range(2))
    assert (first["id"], second["id"]) == (1, 2)
    with time_limit(240):
        while is_served(QueuePaths.of(job_dir / "runs")):
            time.sleep(0.2)
    rows = json.loads(shoal("queue", "--json", cwd=job_dir))
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert "no daemon" in shoal("queue", cwd=job_dir)


@pytest.mark.long
def test_jobs_of_a_queue_with_an_engine_use_all_its_hosts_with_the_same_bits(job_dir, job, fork_server):
    """`shoal up --engine FILE`: two jobs with a worker each on two machines that share nothing."""
    (job_dir / "cluster.yaml").write_text("engine: {kind: local, apart: true, machines: 2}\n")
    (job_dir / "where.py").write_text(WHERE)
    net = {"model": {"name": "where.py:net"}, "workers": 1, "steps": 4000}
    runs, jobs = job_dir / "runs", [job(name=f"j{n}", seed=n, **net) for n in range(2)]
    alone = [run_executor.run(one, runs=job_dir / "alone", fork_server=fork_server) for one in jobs]
    client.submit(jobs, runs=runs, user="ann", start=False)
    daemon = start("shoal", "up", "--engine", job_dir / "cluster.yaml", "--runs", runs)
    try:
        with time_limit(240):
            while any(not entry.has_ended for entry in client.look(runs).entries.values()):
                time.sleep(0.2)
        client.down(runs)
    finally:
        daemon.terminate()
        told = daemon.communicate()
    entries = list(client.look(runs).entries.values())
    assert [entry.state for entry in entries] == ["finished"] * 2, ([entry.reason for entry in entries], told)
    runs_of = [RunPaths.at(runs / entry.run) for entry in entries]
    for paths, undisturbed in zip(runs_of, alone, strict=True):
        assert read_receipt_file(paths.receipt).own.weights_sha256 == undisturbed.receipt.weights_sha256
    logs = [log.read_text() for paths in runs_of for log in paths.logs.glob("worker-*.log")]
    assert {line for log in logs for line in log.splitlines() if "machine-" in line} == {"on machine-0", "on machine-1"}


@pytest.mark.long
def test_a_damaged_queue_is_told_and_its_run_is_resumed_without_it(job_dir, job, fork_server):
    made = job(steps=4000, checkpoint={"every": "100 steps"})
    alone = run_executor.run(made, runs=job_dir / "alone", fork_server=fork_server)
    runs = job_dir / "runs"
    paths = QueuePaths.of(runs)
    client.submit([made], runs=runs, user="ann", start=False)
    daemon = start("shoal", "up", "--runs", runs)
    with time_limit(240):
        while not (run := client.look(runs).entries[1].run) or not step_of(runs / run):
            time.sleep(0.05)
        daemon.kill()
        daemon.wait()
        assert step_of(runs / run) < made.steps, "it has ended before the kill"
        damaged = os.urandom(paths.file.stat().st_size)
        for file in paths.root.glob("queue.sqlite*"):
            file.unlink()
        paths.file.write_bytes(damaged)
        for words in (("up",), ("queue",), ("cancel", "1")):
            told = "".join(start("shoal", *words, "--runs", runs).communicate())
            assert told[:5] == "SH644", told
        assert paths.file.read_bytes() == damaged
        shoal("resume", runs / run, cwd=job_dir)
    receipt = read_receipt_file(RunPaths.at(runs / run).receipt).own
    assert (receipt.weights_sha256, receipt.starts) == (alone.receipt.weights_sha256, 2)


def step_of(root):
    paths = RunPaths.at(root)
    return run_executor.load_run_state(paths).step if paths.events.exists() else 0


@pytest.mark.long
def test_kills_of_daemon_guard_and_workers_lose_no_job_and_change_no_bit(job_dir, job, fork_server, monkeypatch):
    """Six jobs; every few seconds something is killed at random. The daemon is spared until every job has made a step
    since the last kill: three kills in a row before that would hold a job, as they should."""
    monkeypatch.setenv("SHOAL_QUEUE_IDLE_S", "5")
    jobs = [job(name=f"j{n}", seed=n, steps=2500, workers="1..2", checkpoint={"every": "200 steps"}) for n in range(6)]
    alone = [run_executor.run(one, runs=job_dir / "alone", fork_server=fork_server) for one in jobs]
    runs = job_dir / "runs"
    client.submit(jobs, runs=runs, user="ann")
    chance, kills = random.Random(1), {"daemon": 0, "worker": 0, "guard": 0}
    paths = QueuePaths.of(runs)
    with time_limit(900):
        while any(not entry.has_ended for entry in client.look(runs).entries.values()):
            time.sleep(chance.uniform(0.5, 4))
            kill_something(paths, chance, kills)
            background.ensure_served(paths)
        background.ensure_served(paths)
        client.down(runs)
    assert kills["daemon"] > 1, kills
    assert kills["worker"] > 1, kills
    with QueueStore(paths) as store:
        store.check()
        entries = store.entries()
        assert [entry.state for entry in entries] == ["finished"] * 6, [entry.reason for entry in entries]
    assert len(list_runs(runs)) == 6, "a job was started twice"
    for entry, undisturbed in zip(entries, alone, strict=True):
        receipt = read_receipt_file(RunPaths.at(runs / entry.run).receipt).own
        assert receipt.weights_sha256 == undisturbed.receipt.weights_sha256


def kill_something(paths, chance, kills):
    what = chance.choice(["daemon", "daemon", "worker", "worker", "guard"])
    with QueueStore(paths) as store:
        daemon_pid = store.lease().pid
        if what == "daemon" and any(entry.early_deaths and not entry.has_ended for entry in store.entries()):
            return
    if not daemon_pid or not psutil.pid_exists(daemon_pid):
        return
    victim = daemon_pid
    if what == "guard":
        victim = psutil.Process(daemon_pid).ppid()
        if "--guard" not in psutil.Process(victim).cmdline():
            return
    elif what == "worker":
        found = worker_pids(paths)
        if not found:
            return
        victim = chance.choice(found)
    os.kill(victim, signal.SIGKILL)
    kills[what] += 1


def worker_pids(paths):
    """Living workers of all runs, also those that outlived a daemon: the locks of their seats have their pids."""
    texts = [lock.read_text() for lock in paths.runs.glob("*/.seat-*.worker.lock")]
    return [int(text) for text in texts if text.isdecimal() and psutil.pid_exists(int(text))]
