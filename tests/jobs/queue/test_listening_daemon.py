"""`shoal up --listen` and machines that offer their cores, as real processes: daemons are killed, machines leave."""

import json
import signal
import socket
from functools import partial

import pytest

from shoal.jobs import run_executor, verify
from shoal.jobs.compression.compress import CompressRequest, compress
from shoal.jobs.queue import client
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.verification import read_verdict
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.receipt import read_receipt
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import read_recipe
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from tests.jobs.queue.test_network import processes, wait_for, write_job
from tests.jobs.search.conftest import SEARCH

__all__ = ["processes"]
FOLDS = {"kind": "stratified", "folds": 2}
SHORT = {"steps": 8, "evaluate": {"every_steps": 4}, "lanes": 2, "metrics": ["accuracy"]}


class Cluster:
    """A queue of this machine for users and machines with tokens. Everything has a directory of its own."""

    def __init__(self, processes, tmp_path):
        self.processes, self.tmp_path = processes, tmp_path
        self.paths = QueuePaths.of(tmp_path / "head" / "runs")
        self.paths.runs.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        tokens = TokenFile(self.paths.runs)
        self.machine = tokens.create("boxes", role="machine", runs=[], expires_t=None)
        user = tokens.create("ann", role="submit", runs=[], expires_t=None)
        self.user = {"SHOAL_QUEUE": self.address, "SHOAL_QUEUE_TOKEN": user}
        self.daemons = 0

    def serve(self):
        self.daemons += 1
        name = "head" if self.daemons == 1 else f"head-{self.daemons}"
        served = self.processes.start(name, "up", "--listen", self.address, "--runs", self.paths.runs)
        self.processes.said(name, "serves")
        return served

    def offer(self, name, cores=1):
        words = ("offer", self.address, "--cores", cores, "--name", name)
        made = self.processes.start(name, *words, SHOAL_QUEUE_TOKEN=self.machine)
        self.processes.said(name, "offers")
        return made

    def submit(self, *words, job=None):
        where = f"user-{job.name}" if job else "user"
        if job:
            write_job(self.tmp_path / where, job)
        return json.loads(self.processes.ask(where, "submit", *words, "--json", **self.user))["id"]

    def entries(self):
        return client.look(self.paths.runs).entries

    def run_of(self, number):
        return RunPaths.at(self.paths.runs / self.entries()[number].run)

    def state_of(self, number):
        return run_executor.load_run_state(self.run_of(number))

    def wait_until_all_have_ended(self):
        return wait_for(self.entries, lambda found: all(e.has_ended or e.state == "held" for e in found.values()))

    def sha256_of(self, number):
        return read_receipt_file(self.run_of(number).receipt).own.weights_sha256


@pytest.fixture
def cluster(processes, tmp_path):
    return Cluster(processes, tmp_path)


@pytest.mark.long
def test_searches_folds_verifications_and_compressions_of_a_listening_queue_outlive_its_daemon(
    cluster, job, tmp_path, fork_server
):
    """The daemon is killed four times while machines are connected: in the search, the folds, the verification and the
    compression. What comes out is what each gives alone."""
    trained = job(name="trained", **SHORT)
    searched = job(name="searched", **SHORT, search=SEARCH, workers="1..2")
    folded = job(name="folded", **SHORT | {"data": job().data.model_dump(mode="json") | {"split": FOLDS}})
    verified = job(name="verified", **SHORT)
    alone = tmp_path / "alone"
    parent = run_executor.run(trained, runs=alone, fork_server=fork_server)
    best = run_search(searched, runs=alone, workers=1, fork_server=fork_server).receipt
    folds = run_executor.run(folded, runs=alone, fork_server=fork_server).receipts
    verdict = verify.verify(verified, [1, 2], runs=alone, fork_server=fork_server)
    small = compress(CompressRequest(parent.paths, alone), CompressConfig(steps=["lossless"]), fork_server=fork_server)

    served = cluster.serve()
    for name in ("first", "second"):
        cluster.offer(name)
    assert cluster.submit("job.yaml", job=trained) == 1
    assert cluster.submit("job.yaml", "--search", job=searched) == 2
    assert cluster.submit("job.yaml", job=folded) == 3
    assert cluster.submit("job.yaml", "--verify", "1,2", job=verified) == 4
    assert cluster.submit("1", "--compress", "--set", "compress.steps=[lossless]") == 5
    begun = {2: "trial-*/events.jsonl", 3: "fold-*/events.jsonl", 4: "run-*/events.jsonl", 5: "rungs"}
    for number, inside in begun.items():
        wait_for(cluster.entries, partial(has_begun, cluster.paths.runs, number, inside))
        served.kill()
        served.wait()
        cluster.processes.started.remove(served)
        served = cluster.serve()
    ended = cluster.wait_until_all_have_ended()
    assert [entry.state for entry in ended.values()] == ["finished"] * 5, [entry.reason for entry in ended.values()]
    assert len(list(cluster.paths.runs.glob("*-1"))) == 5, "each has one directory"
    assert cluster.sha256_of(1) == parent.receipt.weights_sha256
    found = read_receipt(cluster.run_of(2).root / "search.json")
    assert (found.search_sha256, found.weights_sha256) == (best.search_sha256, best.weights_sha256)
    receipts = [read_receipt_file(one.receipt).own for one in cluster.run_of(3).folds]
    assert [one.weights_sha256 for one in receipts] == [one.weights_sha256 for one in folds]
    said = read_verdict(cluster.run_of(4).root)
    assert said.same
    assert [r.state_sha256 for _, r in said.receipts] == [r.state_sha256 for _, r in verdict.receipts]
    made, direct = (read_recipe(one.root / "recipe.json") for one in (cluster.run_of(5), small.paths))
    assert (made.artefact_sha256, made.weights_sha256) == (direct.artefact_sha256, direct.weights_sha256)


def has_begun(runs, number, inside, entries):
    """And no job lost its daemon since its last new step: a job that loses three of them so is held, as it should."""
    entry = entries[number]
    if any(one.early_deaths for one in entries.values()):
        return False
    return entry.has_ended or (entry.run and any((runs / entry.run).glob(inside)))


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_machine_that_leaves_hands_its_work_over_as_a_planned_leave(cluster, job, tmp_path, fork_server, how):
    go_on = tmp_path / "go-on"
    slow = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(go_on)}}
    large = job(name="large", steps=300, workers="1..2", watchers=[slow])
    undisturbed = large.model_copy(update={"watchers": []})
    alone = run_executor.run(undisturbed, runs=tmp_path / "alone", fork_server=fork_server)
    cluster.serve()
    boxes = {name: cluster.offer(name) for name in ("first", "second")}
    cluster.submit("job.yaml", job=large)
    wait_for(cluster.entries, lambda entries: entries[1].run)
    wait_for(lambda: cluster.state_of(1), lambda state: state.step > 3 and state.peak_workers == 2)
    leaver = boxes.pop("second")
    leaver.send_signal(how)
    cluster.processes.started.remove(leaver)
    assert leaver.wait() == 0
    wait_for(lambda: cluster.state_of(1), lambda state: state.views > 2)
    go_on.touch()
    ended = cluster.wait_until_all_have_ended()
    assert ended[1].state == "finished", ended[1].reason
    own = read_receipt_file(cluster.run_of(1).receipt).own
    assert own.weights_sha256 == alone.receipt.weights_sha256
    assert (own.deaths_survived, own.redone) == (0, 0), "nobody died"
