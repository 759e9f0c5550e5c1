"""Servers for programs of any kind: real processes, counters for each key, whoever is killed."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import shoal.server
from shoal.errors import ShoalError
from shoal.server import supervisor
from tests.conftest import long_only
from tests.jobs.fault_injection import time_limit
from tests.server.conftest import events_of_kind, read_word, server_pids, worker_losses, zero_values


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(120):
        yield


def connect(servers, worker=0, **options):
    return shoal.server.connect(servers.address, token=servers.token, worker=worker, **options)


def negative_gradients(values, by=1):
    return {name: np.full_like(value, -by) for name, value in values.items()}


def counts(values):
    """The one number that all elements of all keys have."""
    (number,) = {float(x) for value in values.values() for x in np.unique(value)}
    return number


def fully_replicated(servers, copies, *, servers_wanted, deaths):
    """After so many deaths were noticed: do all servers hold chunks, and has every chunk its copies?"""
    tables, living = events_of_kind(servers, "chunk_table"), server_pids(servers)
    if len(events_of_kind(servers, "server_died")) != deaths or len(living) != servers_wanted:
        return False
    return bool(tables) and tables[-1]["copies"] == copies and tables[-1]["servers"].keys() == living.keys()


def until(holds, *, every_s=0.02):
    while not holds():
        threading.Event().wait(every_s)


# ---- one worker ----


def test_values_come_back_as_they_were_given(start):
    given = {"w": np.random.default_rng(0).normal(size=(70, 90)), "b": np.float32(3), "e": np.zeros((0, 4), np.float16)}
    servers = start(given, workers=1, servers=2)
    with connect(servers) as client:
        for found in (servers.pull(), client.pull()):
            assert list(found) == list(given)
            for name, value in given.items():
                np.testing.assert_array_equal(found[name], value)
                assert found[name].dtype == np.asarray(value).dtype


def test_what_comes_back_is_ones_own(start):
    servers = start()
    with connect(servers) as client:
        first = client.pull()
        client.push(negative_gradients(first))
        assert counts(first) == 0
        assert client.push(negative_gradients(first), out=first) is first
        assert counts(first) == 2


def test_a_step_counts_once(start):
    servers = start()
    with connect(servers) as client:
        for _ in range(3):
            client.push(negative_gradients(zero_values()))
        assert counts(client.push(negative_gradients(zero_values()), step=1)) == 3  # it was applied long ago
        assert client.step == 3
        with pytest.raises(ShoalError, match="step 5 is pushed, but step 3 is next") as caught:
            client.push(negative_gradients(zero_values()), step=5)
        assert caught.value.code == "SH706"
        assert counts(client.push(negative_gradients(zero_values()), lr=0.5)) == 3.5


def test_the_same_as_adam_of_torch(start):
    torch = pytest.importorskip("torch")
    chance = np.random.default_rng(1)
    begin, grads = chance.normal(size=(40, 30)), chance.normal(size=(5, 40, 30))
    servers = start({"w": begin}, optimizer={"name": "Adam", "args": {"lr": 0.01, "betas": [0.8, 0.9]}}, servers=2)
    parameter = torch.nn.Parameter(torch.tensor(begin))
    adam = torch.optim.Adam([parameter], lr=0.01, betas=(0.8, 0.9))
    with connect(servers) as client:
        for grad in grads:
            found = client.push({"w": grad})
            parameter.grad = torch.tensor(grad)
            adam.step()
            np.testing.assert_array_equal(found["w"], parameter.detach().numpy())


# ---- many workers, and deaths ----


def test_nothing_of_torch_in_a_worker(start, worker):
    servers = start(workers=2, servers=2)
    both = [worker(servers, number, 20) for number in range(2)]
    for process in both:
        assert read_word(process, "values") == ["20.0", "20.0", "False"]
    command = "import shoal.server, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, *long_only(3), "inf"])
def test_counters_through_deaths_of_servers(staleness, start, worker):
    steps = 400
    servers = start(workers=2, servers=3, backups=1, staleness=staleness)
    both = [worker(servers, number, steps) for number in range(2)]
    for deaths, at in enumerate((60, 180, 300)):
        until(lambda deaths=deaths: fully_replicated(servers, 2, servers_wanted=3, deaths=deaths))
        while int(read_word(both[0], "did")[0]) < at:
            pass
        os.kill(sorted(server_pids(servers).values())[at % 3], signal.SIGKILL)
    for process in both:
        read_word(process, "values")
        assert process.wait() == 0
    assert counts(servers.pull()) == steps
    assert len(events_of_kind(servers, "server_died")) == 3


def test_together_means_the_mean_of_all(start):
    servers = start(workers=3)
    clients = [connect(servers, number) for number in range(3)]
    found = {}

    def push(client):
        found[client.worker] = client.push(negative_gradients(zero_values(), by=3 * client.worker))

    threads = [threading.Thread(target=push, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [counts(values) for values in found.values()] == [3, 3, 3]
    for client in clients:
        client.close()


def test_a_new_process_goes_on_where_a_dead_worker_was(start, worker):
    servers = start(workers=2)
    other = worker(servers, 1, 50)
    dead = worker(servers, 0, 50)
    while int(read_word(dead, "did")[0]) < 20:
        pass
    dead.kill()
    dead.wait()
    until(lambda: worker_losses(servers, 0))
    heir = worker(servers, 0, 0)
    at = int(read_word(heir, "at")[0])
    assert heir.wait() == 0
    assert at >= 20
    until(lambda: worker_losses(servers, 0) == 2)
    heir = worker(servers, 0, 50 - at)
    assert read_word(heir, "values")[:2] == read_word(other, "values")[:2] == ["50.0", "50.0"]


# ---- staleness ----


def test_nobody_gets_too_far_ahead(start):
    servers = start(workers=2, staleness=2)
    with connect(servers, 0, timeout_s=1) as fast, connect(servers, 1) as slow:
        for _ in range(2):
            fast.push(negative_gradients(zero_values()))
        with pytest.raises(ShoalError, match="no answer in 1 s") as caught:
            fast.push(negative_gradients(zero_values()))
        assert caught.value.code == "SH707"
        slow.push(negative_gradients(zero_values()))
        fast.push(negative_gradients(zero_values()))  # the same step again: it was applied once
        assert (fast.step, slow.step) == (3, 1)
        assert counts(servers.pull()) == 2


@pytest.mark.parametrize("how", ["lost", "leave"])
def test_nobody_waits_for_one_that_is_gone(how, start, worker):
    servers = start(workers=2, staleness=2)
    gone = worker(servers, 1, 1 if how == "lost" else 0)
    if how == "lost":
        read_word(gone, "did")
        gone.kill()
    else:
        read_word(gone, "at")
        servers.leave(1)
    with connect(servers, 0) as client:
        for _ in range(30):
            client.push(negative_gradients(zero_values()))
        until(lambda: worker_losses(servers, 1))
        with connect(servers, 1) as back:
            assert back.step == 30  # beside the slowest of those who are here
            back.push(negative_gradients(zero_values()))
            client.push(negative_gradients(zero_values()))


def test_a_frozen_worker_is_given_up_and_comes_back(start, worker, monkeypatch):
    monkeypatch.setattr(supervisor, "HEARTBEAT_TIMEOUT_S", 1.0)
    servers = start(workers=2, staleness=2)
    frozen = worker(servers, 1, 40)
    with connect(servers, 0) as client:
        for _ in range(10):
            client.push(negative_gradients(zero_values()))
        frozen.send_signal(signal.SIGSTOP)
        while client.step < 60:
            client.push(negative_gradients(zero_values()))
        frozen.send_signal(signal.SIGCONT)
        while client.step < 100 and frozen.poll() is None:
            client.push(negative_gradients(zero_values()))
    assert read_word(frozen, "values")
    assert frozen.wait() == 0
    assert counts(servers.pull()) == (client.step + 40) / 2


def test_one_that_has_not_come_yet_is_waited_for(start):
    servers = start(workers=2, staleness=1)
    with connect(servers, 0, timeout_s=0.5) as client:
        client.push(negative_gradients(zero_values()))
        with pytest.raises(ShoalError, match="not connected: worker 1"):
            client.push(negative_gradients(zero_values()))


# ---- what is kept ----


@pytest.mark.parametrize("staleness", [0, "inf"])
def test_saved_and_gone_on_with(staleness, start, tmp_path):
    adam = {"name": "Adam", "args": {"lr": 0.1}}
    grads = [
        {name: np.random.default_rng(i).normal(size=v.shape).astype(v.dtype) for name, v in zero_values().items()}
        for i in range(6)
    ]
    servers = start(optimizer=adam, servers=2, staleness=staleness)
    with connect(servers) as client:
        for grad in grads[:3]:
            client.push(grad)
        (client if staleness == 0 else servers).save(tmp_path / "kept.safetensors")
        for grad in grads[3:]:
            expected = client.push(grad)
    again = start(from_=tmp_path / "kept.safetensors", servers=3, staleness=staleness)
    with connect(again) as client:
        assert client.step == 3
        for grad in grads[3:]:
            found = client.push(grad)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_servers_come_and_go(start, worker):
    servers = start(workers=1, servers=1)
    process = worker(servers, 0, 300)
    read_word(process, "did")
    servers.scale(3)
    until(lambda: len(events_of_kind(servers, "chunk_table")[-1]["servers"]) == 3)
    servers.scale(2)
    until(lambda: len(server_pids(servers)) - len(events_of_kind(servers, "server_left")) == 2)
    assert read_word(process, "values")[:2] == ["300.0", "300.0"]


# ---- ends ----


def push_for_ever(client):
    while True:
        client.push(negative_gradients(zero_values()))


def test_without_a_backup_a_death_is_told(start):
    servers = start(servers=2, backups=0)
    with connect(servers) as client:
        client.push(negative_gradients(zero_values()))
        os.kill(next(iter(server_pids(servers).values())), signal.SIGKILL)
        with pytest.raises(ShoalError, match="lost") as caught:
            push_for_ever(client)
        assert caught.value.code == "SH703"
        with pytest.raises(ShoalError, match="lost"):
            servers.pull()


def test_closing_ends_those_who_wait(start):
    servers = start(workers=2)
    with connect(servers) as client:
        failures = []

        def push():
            try:
                client.push(negative_gradients(zero_values()))
            except ShoalError as failure:
                failures.append(failure.code)

        thread = threading.Thread(target=push)
        thread.start()
        servers.close()
        thread.join()
        assert failures == ["SH703"]
    with pytest.raises(ShoalError, match="closed"):
        servers.pull()


# ---- wrong input ----


def test_gradients_that_do_not_fit(start):
    servers = start()
    good = negative_gradients(zero_values())
    wrong = {
        "no gradient of 'b'": {k: v for k, v in good.items() if k != "b"},
        "a gradient of 'ww'": good | {"ww": good["w"]},
        r"'w': the shape is \(3,\), and the servers have \(200, 80\)": good | {"w": np.zeros(3, np.float32)},
        "'w': the dtype is float64, and the servers have float32": good | {"w": np.zeros((200, 80))},
        "must be a dict of arrays": [1, 2],
    }
    with connect(servers) as client:
        for message, gradients in wrong.items():
            with pytest.raises(ShoalError, match=message) as caught:
                client.push(gradients)
            assert caught.value.code == "SH702"
        assert counts(client.push(good)) == 1


def test_who_may_connect(start):
    servers = start(workers=2)
    with connect(servers, 1):
        for number, message in ((1, "worker 1 is here already"), (2, "worker 2, and there are 2"), (-1, "worker -1")):
            with pytest.raises(ShoalError, match=message) as caught:
                connect(servers, number)
            assert caught.value.code == "SH704"
    with pytest.raises(ShoalError) as caught:
        shoal.server.connect(servers.address, token="wrong", worker=0)
    assert caught.value.code == "SH615"
    with pytest.raises(ShoalError) as caught:
        shoal.server.connect("127.0.0.1:1", token="any", worker=0)
    assert caught.value.code == "SH610"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "LBFGS"}, "cannot use the optimizer LBFGS"),
        ({"optimizer": {"name": "SGD"}}, "no learning rate"),
        ({"optimizer": {"name": "SGD", "args": {"lr": 0.1, "speed": 3}}}, "unexpected keyword argument 'speed'"),
        ({"optimizer": {"name": "Adam", "args": {"lr": -1.0}}}, "Invalid learning rate"),
        ({"servers": 2, "backups": 2}, "2 servers cannot hold 3 copies"),
        ({"servers": 0}, "greater than 0"),
        ({"workers": 0}, "greater than 0"),
        ({"staleness": -1}, "staleness"),
        ({"values": {}}, "no values"),
        ({"values": {"n": np.zeros(3, np.int64)}}, "'n' is of dtype int64"),
        ({"values": {3: np.zeros(3)}}, "the name 3 is no text"),
        ({"values": {"empty": np.zeros(0)}}, "no elements"),
    ],
)
def test_what_cannot_be_started(options, message, start):
    with pytest.raises(ShoalError, match=message) as caught:
        start(**options)
    assert caught.value.code == "SH701"


def test_files_that_are_none(start, tmp_path):
    noise = tmp_path / "noise"
    noise.write_bytes(b"noise")
    for path in (noise, tmp_path / "nowhere"):
        with pytest.raises(ShoalError) as caught:
            start(from_=path)
        assert caught.value.code == "SH705"


def test_a_file_of_another_optimizer(start, tmp_path):
    servers = start()
    servers.save(tmp_path / "kept")
    with pytest.raises(ShoalError, match="saved with SGD, not Adam"):
        start(from_=tmp_path / "kept", optimizer={"name": "Adam", "args": {"lr": 0.1}})
