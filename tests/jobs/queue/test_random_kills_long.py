"""One history under load in which everything is killed at random: the daemon, what belongs to its drivers, the machines
that joined and their workers. Real processes, `kill -9`."""

import contextlib
import os
import random
import signal
import time
from collections import Counter, defaultdict
from itertools import pairwise

import psutil
import pytest

from shoal.events import read_events
from shoal.jobs import run_executor
from shoal.jobs.queue import client
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.run_dir import list_runs
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from tests.jobs.queue.test_listening_daemon import cluster
from tests.jobs.queue.test_network import kill_all, processes, write_job

__all__ = ["cluster", "processes"]
SEED = int(os.environ.get("SHOAL_KILLS_SEED", "1"))
MACHINES, UNFINISHED, EACH_KILLED = 2, 4, 2
INSIDE = ("agent", "fork server", "worker")
KINDS = ("daemon", "machine", "offer", "bridge", *INSIDE)
FOLDS = {"kind": "stratified", "folds": 2}


class Killer:
    """Kills something at random and starts again what nobody else would: the daemon and the machines."""

    def __init__(self, cluster, chance):
        self.cluster, self.chance = cluster, chance
        self.kills = Counter()
        self.died_t = {}
        """When each daemon was killed, by its process id, in the clock of the events."""
        self.offers = 0
        self.daemon = cluster.serve()
        self.machines = [self._offer() for _ in range(MACHINES)]

    def _offer(self):
        self.offers += 1
        return self.cluster.offer(f"box-{self.offers}")

    @property
    def missing(self):
        """What was not killed often enough yet."""
        return [kind for kind in KINDS if self.kills[kind] < EACH_KILLED]

    def strike(self):
        kind = self.chance.choice(self.missing)
        whole = {"daemon": self.kill_daemon, "machine": self.kill_machine, "offer": self.kill_offer}
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
            self.kills[kind] += whole[kind]() if kind in whole else self.kill_inside(kind)

    def kill_daemon(self):
        """With the drivers of all runs, which live in it."""
        self.died_t[self.daemon.pid] = time.time()
        self._end(self.daemon)
        self.daemon = self.cluster.serve()
        return True

    def kill_machine(self):
        """All processes of a machine at once."""
        return self._replace_machine(kill_all)

    def kill_offer(self):
        """Only the process that joined: its agents must end by themselves."""
        return self._replace_machine(self._end)

    def _replace_machine(self, how):
        machine = self.chance.choice(self.machines)
        self.machines.remove(machine)
        how(machine)
        self._forget(machine)
        self.machines.append(self._offer())
        return True

    def _end(self, process):
        process.kill()
        process.wait()
        self._forget(process)

    def _forget(self, process):
        if process in self.cluster.processes.started:
            self.cluster.processes.started.remove(process)

    def kill_inside(self, kind):
        """One process of a machine (an agent, its fork server, a worker), or the end of an agent at its driver."""
        found = bridges(self.daemon.pid) if kind == "bridge" else self._descendants(kind)
        if found:
            self.chance.choice(found).send_signal(signal.SIGKILL)
        return bool(found)

    def _descendants(self, kind):
        depth = INSIDE.index(kind)
        found = [psutil.Process(machine.pid) for machine in self.machines]
        for _ in range(depth + 1):
            found = [child for one in found for child in children(one)]
        return sorted(found, key=lambda process: process.pid)


def children(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children()
    return []


def bridges(pid):
    return [one for one in psutil.Process(pid).children() if any("machine_bridge" in word for word in one.cmdline())]


@pytest.mark.long
def test_kills_of_daemon_drivers_machines_and_workers_in_one_history_lose_no_job_and_change_no_bit(
    cluster, job, tmp_path, fork_server
):
    """Jobs of three users are submitted until everything was killed often enough; mostly the next is killed once a new
    step was made. Nothing is killed while a job has lost an attempt without one: three in a row would hold it."""
    code = tmp_path / "code"
    write_job(code, job())
    most = {"workers": "1..2", "checkpoint": {"every": "100 steps"}}
    split = job().data.model_dump(mode="json") | {"split": FOLDS}
    kinds = [
        job(name="short", seed=1, steps=200, **most),
        job(name="middle", seed=2, steps=600, **most),
        job(name="long", seed=3, steps=1200, **most),
        job(name="folded", seed=4, steps=200, data=split, **most),
    ]
    kinds = [one.model_copy(update={"base_dir": str(code)}) for one in kinds]
    alone = [run_executor.run(one, runs=tmp_path / "alone", fork_server=fork_server) for one in kinds]
    expected = {one.name: weights_of(done.paths) for one, done in zip(kinds, alone, strict=True)}
    runs, chance = cluster.paths.runs, random.Random(SEED)
    killer = Killer(cluster, chance)
    stepped = 0
    while killer.missing or any(not entry.has_ended for entry in cluster.entries().values()):
        entries = list(cluster.entries().values())
        assert not [entry.reason for entry in entries if entry.state in ("held", "failed")], (SEED, killer.kills)
        if not killer.missing:
            time.sleep(0.2)
            continue
        for one in chance.choices(kinds, k=max(UNFINISHED - sum(not entry.has_ended for entry in entries), 0)):
            client.submit([one], runs=runs, user=chance.choice(["ann", "bob", "eve"]), start=False)
        time.sleep(chance.uniform(0.1, 1))
        steps = sum(map(steps_of, runs.glob("*/**/events.jsonl")))
        is_in_danger = any(entry.early_deaths for entry in entries if not entry.has_ended)
        if not is_in_danger and (steps > stepped or chance.random() < 0.05):
            stepped = steps
            killer.strike()
    entries = cluster.entries()
    print(f"seed {SEED}: {len(entries)} jobs, {dict(killer.kills)}")
    with QueueStore(cluster.paths) as store:
        store.check()
    assert [entry.state for entry in entries.values()] == ["finished"] * len(entries)
    assert sorted(entry.run for entry in entries.values()) == sorted(one.name for one in list_runs(runs))
    for entry in entries.values():
        paths = cluster.run_of(entry.id)
        assert weights_of(paths) == expected[entry.name], (SEED, paths.root)
        check_claims(client.read_history(runs, entry.id))
        for part in paths.folds or [paths]:
            check_drivers(read_events(part.events), killer.died_t)


def steps_of(events):
    return run_executor.load_run_state(RunPaths.at(events.parent)).step


def weights_of(paths):
    return [read_receipt_file(part.receipt).own.weights_sha256 for part in paths.folds or [paths]]


def check_claims(rows):
    """Between two daemons that ran it, the job was waiting: no daemon took it while another had it."""
    holders = [row.epoch for row in rows if row.state in ("running", "waiting")]
    for former, later in pairwise(holders):
        assert former == later or not former or not later, holders
    claimed = [epoch for before, epoch in pairwise([0, *holders]) if epoch and not before]
    assert claimed == sorted(claimed), claimed


def check_drivers(events, died_t):
    """A driver began only after its former had ended or was killed, and gave nobody a seat that another had."""
    seats, driver, ended = defaultdict(int), 0, True
    for event in events:
        if event.kind == "run_started":
            assert ended or died_t.get(driver, float("inf")) <= event.t, "two drivers at once"
            driver, ended = event["pid"], False
        elif event.kind == "run_ended":
            ended = True
        elif event.kind == "seats_given":
            for seat in event["seats"]:
                seats[seat] += 1
    assert driver
    assert ended
    assert max(seats.values()) == 1, seats
