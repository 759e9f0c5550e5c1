"""A queue for several machines: users and machines with tokens, in processes without a common directory."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from shoal.errors import ShoalError
from shoal.jobs import run_executor
from shoal.jobs.queue import client
from shoal.jobs.queue.access_tokens import TOKENS_FILE, TokenFile, name_of_key
from shoal.jobs.queue.network import frames, offer, server
from shoal.jobs.queue.network.machines import AgentChannel, Machine, MachinePool
from shoal.jobs.queue.network.messages import ANSWER, OfferHello, QueueHello, encode
from shoal.jobs.queue.network.remote_queue import QueueAddress, RemoteQueue
from shoal.jobs.queue.network.server import QueueServer
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.net.errors import LinkError
from shoal.net.file_transfer import send_content
from shoal.plan.queueing.work import CompressWork
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from tests.jobs.fault_injection import time_limit
from tests.jobs.network_namespaces import namespace_network
from tests.net.certificate_authority import CertificateAuthority, needs_openssl

POLL_S = 0.1
NO_CODE = {"sha256": "0" * 64, "size_bytes": 0}
COMMAND = "import sys; from shoal.cli import main; main()"


@pytest.fixture
def served(paths):
    """The port of a queue that no daemon serves, and addresses for it by token."""
    with contextlib.closing(QueueServer(paths, server.bind("127.0.0.1:0", tls=False), tls_contexts=None)) as made:
        yield made


def address(served, paths, name, role="submit"):
    token = TokenFile(paths.runs).create(name, role=role, runs=[], expires_t=None)
    return QueueAddress.of(served.address, token, None)


def code_of(call, *arguments, **named):
    with pytest.raises(ShoalError) as caught:
        call(*arguments, **named)
    return caught.value.code


def test_a_job_and_its_directory_arrive_and_the_user_is_that_of_the_token(served, paths, job, job_dir):
    ann = RemoteQueue(address(served, paths, "ann"))
    entry = ann.submit(job(name="far"), priority=3)
    assert (entry.user, entry.name, entry.priority, entry.state) == ("ann", "far", 3, "waiting")
    with QueueStore(paths) as store:
        kept = store.job(entry.id)
    assert kept.sha256() == job(name="far").sha256()
    assert Path(kept.base_dir) != job_dir
    for file in job_dir.glob("*.py"):
        assert (Path(kept.base_dir) / file.name).read_bytes() == file.read_bytes()
    assert ann.submit(job(name="again")).id == 2, "the directory is there already"
    assert [one.id for one in ann.look().entries.values()] == [1, 2]
    assert [row.state for row in ann.history(1)] == ["waiting"]
    assert code_of(ann.submit, job(), user="bob") == "SH609", "nobody chooses another name"


def test_users_change_their_own_jobs_and_operators_all(served, paths, job):
    ann, bob = (RemoteQueue(address(served, paths, name)) for name in ("ann", "bob"))
    reader = RemoteQueue(address(served, paths, "guest", "read"))
    operator = RemoteQueue(address(served, paths, "op", "operate"))
    first, second = ann.submit(job()).id, ann.submit(job()).id
    for other in (bob, reader):
        assert code_of(other.cancel, first) == "SH659"
        assert code_of(other.set_priority, first, 5) == "SH659"
        assert code_of(other.release, first) == "SH659"
    assert code_of(reader.submit, job()) == "SH659"
    assert code_of(operator.submit, job()) == "SH659"
    assert ann.set_priority(first, 7).priority == 7
    assert ann.cancel(first).state == "cancelled"
    assert operator.cancel(second).state == "cancelled"
    assert code_of(ann.cancel, second) == "SH647"
    assert code_of(ann.cancel, 99) == "SH646"
    assert {one.state for one in reader.look().entries.values()} == {"cancelled"}


def test_only_tokens_of_their_kind_are_let_in(served, paths, job):
    stranger = RemoteQueue(QueueAddress.of(served.address, "shoal_guessed", None))
    assert code_of(stranger.look) == "SH615"
    machine = RemoteQueue(address(served, paths, "box", "machine"))
    assert code_of(machine.look) == "SH610", "a machine asks for nothing"
    gone = address(served, paths, "gone")
    TokenFile(paths.runs).revoke("gone")
    assert code_of(RemoteQueue(gone).look) == "SH615"
    assert TokenFile(paths.runs).find(machine._address.token) is None, "the web page does not know machines"


@pytest.mark.parametrize(
    "change", [{"sha256": "é" * 64}, {"sha256": "ab"}, {"role": "king"}, {"expires_t": 1e999}, {"name": 7}]
)
def test_a_damaged_file_of_tokens_is_told(paths, change):
    tokens = TokenFile(paths.runs)
    token = tokens.create("ann", role="read", runs=[], expires_t=None)
    file = paths.runs / TOKENS_FILE
    file.write_text(json.dumps([json.loads(file.read_text())[0] | change]))
    assert code_of(TokenFile(paths.runs).find, token) == "SH626"


def test_off_this_machine_only_with_tls():
    for listen in ("10.1.2.3:7000", "0.0.0.0:7000", "nowhere", "127.0.0.1:99999"):
        assert code_of(server.bind, listen, tls=False) == "SH611"
    assert code_of(server.bind, "0.0.0.0:7000", tls=True) == "SH611"


def test_a_job_that_cannot_be_read_is_refused_and_nothing_is_queued(served, paths, job):
    ann = RemoteQueue(address(served, paths, "ann"))

    class Broken:
        base_dir = job().base_dir

        def dump(self):
            return {"model": 7}

    assert code_of(ann.submit, Broken()).startswith("SH")
    assert ann.look().entries == {}


def test_what_others_train_is_compressed_by_nobody_else(served, paths, job):
    ann, bob = (RemoteQueue(address(served, paths, name)) for name in ("ann", "bob"))
    mine = ann.submit(job())
    assert code_of(bob.submit_compression, str(mine.id), []) == "SH659"
    for work in (CompressWork(of=mine.id), CompressWork(run=str(paths.runs / "anything"))):
        with pytest.raises((ShoalError, ValidationError)):
            bob.submit(job(), work=work)
    request = {"kind": "submit", "job": job().dump(), "work": {"kind": "compress", "of": 1}, "code": NO_CODE}
    hello = encode(QueueHello(key=name_of_key(bob._address.key)))
    with contextlib.closing(bob._address.connect(hello)) as sock:
        send_content(sock, [json.dumps(request).encode()])
        with pytest.raises(LinkError):
            frames.receive(sock, ANSWER)
    assert set(ann.look().entries) == {mine.id}


@pytest.mark.parametrize("number", [2**63, 10**30])
def test_a_number_that_no_job_can_have_is_no_job(served, paths, job, number):
    ann = RemoteQueue(address(served, paths, "ann"))
    ann.submit(job())
    for call in (
        ann.cancel,
        ann.release,
        ann.history,
        partial(client.cancel, paths.runs),
        partial(client.read_history, paths.runs),
    ):
        assert code_of(call, number) == "SH646"
    assert code_of(ann.submit, job(), after=[number]) == "SH646"


# ---- which machine ----


def machine(pool, name, cores, told=None, owner="box", instance=""):
    told = [] if told is None else told
    made = Machine(name, owner, cores, 2**30, tell=told.append, leave=lambda: None, instance=instance)
    assert pool.join(made)
    return made


def opened(pool, run, cores=1):
    """As if the agent connected at once."""
    chosen = pool._choose(run, cores)
    if chosen is None:
        return None
    channel = AgentChannel(run, cores, chosen)
    chosen.channels.add(channel)
    pool._channels[channel.id] = channel
    return channel


def test_a_worker_gets_the_machine_that_the_policy_wants_and_no_core_is_given_twice():
    pool = MachinePool()
    machine(pool, "a", 2)
    machine(pool, "b", 4)
    pool.place({"one": ("a", "b"), "two": ("b",)})
    assert sorted(opened(pool, "one").machine.name for _ in range(2)) == ["a", "b"]
    assert opened(pool, "two").machine.name == "b"
    others = [opened(pool, "three") for _ in range(4)]
    assert sorted(one.machine.name for one in others if one) == ["a", "b", "b"]
    assert others[-1] is None, "all cores are used"
    pool.release(others[0])
    assert opened(pool, "three") is not None


def test_a_run_that_needs_more_cores_than_there_are_shares_them_if_it_is_alone():
    pool = MachinePool()
    machine(pool, "a", 2)
    pool.place({"large": ("a",) * 3})
    assert [opened(pool, "large").machine.name for _ in range(3)] == ["a"] * 3
    assert opened(pool, "other") is None


def test_machines_that_come_and_go_are_events_and_a_name_belongs_to_its_token():
    pool = MachinePool()
    first = machine(pool, "a", 2)
    assert pool.has_changed()
    assert not pool.has_changed()
    channel = opened(pool, "one")
    stranger = Machine("a", "thief", 64, 0, tell=lambda message: None, leave=lambda: None)
    assert not pool.join(stranger)
    again = machine(pool, "a", 3)
    assert pool.capacity().nodes == {"a": 3}
    assert channel not in first.channels
    pool.leaving(again)
    assert pool.capacity().nodes == {}
    assert pool.has_changed()
    pool.part(again)
    pool.part(first)
    assert pool.capacity().nodes == {}


def test_another_live_machine_of_the_same_name_is_refused_and_evicts_nobody():
    pool = MachinePool()
    first = machine(pool, "a", 2, instance="1")
    channel = opened(pool, "one")
    other = Machine("a", "box", 4, 0, tell=lambda message: None, leave=lambda: None, instance="2")
    assert not pool.join(other)
    assert channel in first.channels
    again = machine(pool, "a", 2, instance="1")
    assert channel not in first.channels, "its connection was broken, and it came again"
    pool.part(again)
    assert pool.join(other)


def test_the_second_offer_of_a_name_ends_with_the_reason_and_the_first_goes_on(served, paths, monkeypatch):
    monkeypatch.setattr(offer, "GIVE_UP_S", 0.0)
    box = address(served, paths, "boxes", "machine")
    said, asked = [], []
    with ThreadPoolExecutor() as pool:
        first = pool.submit(offering(box, said).run, asked)
        wait_for(lambda: said, bool)
        assert code_of(offering(box, []).run, []) == "SH659"
        assert served.pool.capacity().nodes == {"box": 2}
        asked.append("terminated")
        assert first.result() == 0
    assert said[0] == "offers 2 cores as box"
    assert "the queue is gone" not in said


def offering(address, said):
    key, instance = name_of_key(address.key), secrets.token_hex(16)
    hello = OfferHello(key=key, instance=instance, machine="box", cores=2, memory_bytes=0)
    return offer._Offer(address, hello, None, said.append)


@pytest.mark.parametrize("name", ["my box", "-x", "é", "a" * 64])
def test_a_name_that_no_machine_can_have_is_a_bad_command_line(served, paths, name):
    box = address(served, paths, "boxes", "machine")
    assert code_of(offer.offer, box, cores=1, machine=name, show=print) == "SH609"


# ---- real processes ----


class Processes:
    """`shoal` in directories of their own, each with its own home."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.started = []

    def environment(self, name, **more):
        home = self.tmp_path / name
        home.mkdir(exist_ok=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
        return kept | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "PYTHONUNBUFFERED": "1"} | more

    def start(self, name, *words, prefix=(), **environment):
        env = self.environment(name, **environment)
        log = (self.tmp_path / f"{name}.log").open("w")
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", COMMAND, *map(str, words)],
            cwd=self.tmp_path / name, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.started.append(process)
        return process

    def ask(self, name, *words, prefix=(), **environment):
        env = self.environment(name, **environment)
        command = [*prefix, sys.executable, "-c", COMMAND, *map(str, words)]
        done = subprocess.run(command, cwd=self.tmp_path / name, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def said(self, name, text):
        while text not in (read := (self.tmp_path / f"{name}.log").read_text()):
            assert all(one.poll() is None for one in self.started), read
            time.sleep(POLL_S)
        return read

    def close(self):
        for process in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                everybody = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                for one in everybody:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.kill()
            process.wait()


@pytest.fixture
def processes(tmp_path):
    made = Processes(tmp_path)
    with contextlib.closing(made), time_limit(900):
        yield made


def write_job(where, job):
    """A job file and its code in a directory of their own."""
    where.mkdir(exist_ok=True)
    for file in Path(job.base_dir).glob("*.py"):
        (where / file.name).write_bytes(file.read_bytes())
    data = job.dump()
    (where / "job.yaml").write_text(json.dumps({key: value for key, value in data.items() if key != "base_dir"}))


def wait_for(look, predicate):
    while not predicate(found := look()):
        time.sleep(POLL_S)
    return found


def check_weights(paths, entries, expected):
    for entry in entries:
        receipt = read_receipt_file(RunPaths.at(paths.runs / entry.run).receipt).own
        assert receipt.weights_sha256 == expected[entry.name]


def workers_of(paths, number):
    return {row.workers for row in client.read_history(paths.runs, number)}


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")
@needs_openssl
def test_machines_of_a_network_without_common_files_keep_every_promise_while_one_is_killed(
    processes, tmp_path, job, fork_server
):
    """One host serves, two offer a core each, a fourth submits for two users. A machine is killed while the large job
    trains on both and waits for a sign."""
    paths = QueuePaths.of(tmp_path / "head" / "runs")
    paths.runs.mkdir(parents=True)
    go_on = tmp_path / "go-on"
    slow = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(go_on)}}
    most = {"workers": {"least": 1, "most": 2}, "checkpoint": {"every": "20 steps"}}
    jobs = {
        "large": job(name="large", steps=300, watchers=[slow], **most),
        "small": job(name="small", steps=100, **most),
    }
    expected = {}
    for name, one in jobs.items():
        undisturbed = one.model_copy(update={"watchers": []})
        done = run_executor.run(undisturbed, runs=tmp_path / "undisturbed", fork_server=fork_server)
        expected[name] = done.receipt.weights_sha256
        write_job(tmp_path / f"user-{name}", one)
    tokens = {
        name: TokenFile(paths.runs).create(name, role=role, runs=[], expires_t=None)
        for name, role in (("ann", "submit"), ("bob", "submit"), ("boxes", "machine"))
    }
    authority = CertificateAuthority(tmp_path / "authority")
    with namespace_network(4) as (head, first, second, user):
        at = f"{head.address}:7411"
        inside = {host: ("ip", "netns", "exec", host.name) for host in (head, first, second, user)}
        own = authority.issue("head")
        processes.start("head", "up", "--listen", at, "--tls", own, "--quota", "bob=1", prefix=inside[head])
        processes.said("head", "serves")
        boxes = {}
        for name, host in (("first", first), ("second", second)):
            words = ("offer", at, "--cores", 1, "--name", name, "--tls", authority.issue(name))
            boxes[name] = processes.start(name, *words, prefix=inside[host], SHOAL_QUEUE_TOKEN=tokens["boxes"])
            processes.said(name, "offers 1 core")
        asks = {"SHOAL_QUEUE": at, "SHOAL_QUEUE_TLS": str(authority.issue("user")), "prefix": inside[user]}
        processes.ask("user-large", "submit", "job.yaml", **asks, SHOAL_QUEUE_TOKEN=tokens["ann"])

        def look():
            return client.look(paths.runs).entries

        large = wait_for(look, lambda entries: entries[1].run)[1]

        def train():
            return run_executor.load_run_state(RunPaths.at(paths.runs / large.run))

        wait_for(train, lambda state: state.step > 3 and state.peak_workers == 2)
        kill_all(boxes.pop("second"))
        processes.started.pop()
        wait_for(train, lambda state: state.deaths == 1)
        go_on.touch()
        processes.ask("user-small", "submit", "job.yaml", **asks, SHOAL_QUEUE_TOKEN=tokens["bob"])
        done = wait_for(look, lambda entries: all(one.has_ended for one in entries.values()))
        shown = json.loads(processes.ask("user-small", "queue", "--json", **asks, SHOAL_QUEUE_TOKEN=tokens["bob"]))
    assert [(one.name, one.user, one.state) for one in done.values()] == [
        ("large", "ann", "finished"), ("small", "bob", "finished"),
    ]  # fmt: skip
    assert [row["state"] for row in shown] == ["finished"] * 2
    assert max(workers_of(paths, 2)) == 1, "bob has a quota of one core"
    check_weights(paths, done.values(), expected)
    assert read_receipt_file(RunPaths.at(paths.runs / large.run).receipt).own.deaths_survived == 1


def kill_all(process):
    """A machine that loses its power: everything there ends at once."""
    everybody = psutil.Process(process.pid).children(recursive=True)
    for one in [psutil.Process(process.pid), *everybody]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
