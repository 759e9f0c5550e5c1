"""A live run that the API steers has the weights of the undisturbed one; a server that dies disturbs nobody."""

import gzip
import json
import os
import signal
import time
from collections import Counter

import pytest

from shoal.jobs.queue.access_tokens import TokenFile
from shoal.spec.receipt import read_receipt_file
from tests.jobs.past_run import TOLD, write_run
from tests.web.flood import Flood
from tests.web.live_run import serving, state_of, training, wait_until
from tests.web.test_serve import ask, web_process

pytestmark = pytest.mark.long
EPOCHS = 60


def act(url, token, path, body):
    found = outcome(url, token, path, body)
    assert found["state"] == "done", found
    return found["result"]


def outcome(url, token, path, body):
    found = json.loads(ask(f"{url}/api/v1/{path}", token, body).read())
    while found["state"] == "running":
        time.sleep(0.1)  # 50 questions per second are allowed
        found = json.loads(ask(f"{url}/api/v1/operations/{found['operation']}", token).read())
    return found


def finished_weights(paths):
    wait_until(lambda: read_receipt_file(paths.receipt).own is not None)
    return read_receipt_file(paths.receipt).own.weights_sha256


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    with training(directory / "job", directory / "runs", epochs=EPOCHS, workers="1") as paths:
        return finished_weights(paths)


def check_profile(paths, url, token, name):
    """The three workers are processes of one trace, and each made the same five steps."""
    (listed,) = json.loads(ask(f"{url}/api/v1/runs/digits-1/profiles", token).read())
    assert (listed["workers"], listed["missing"]) == ([f"worker-{n}" for n in range(3)], {})
    assert any(one["name"].startswith("aten::") for one in listed["operators"])
    sent = ask(f"{url}/api/v1/runs/digits-1/profiles/{name}", token).read()
    events = json.loads(gzip.decompress(sent))["traceEvents"]
    assert sorted({e["args"]["name"] for e in events if e["name"] == "process_name"}) == listed["workers"]
    steps = Counter(e["name"] for e in events if str(e["name"]).startswith("step "))
    assert steps == {f"step {listed['first_step'] + n}": 3 for n in range(5)}
    assert not (paths.profiles / name).exists()


def test_scaled_drained_stopped_and_resumed_by_the_api(tmp_path, undisturbed):
    with (
        training(tmp_path / "job", tmp_path / "runs", epochs=EPOCHS, workers="1") as paths,
        serving(tmp_path / "runs") as server,
    ):
        token = TokenFile(tmp_path / "runs").create("t", role="submit", runs=[], expires_t=None)
        assert act(server.url, token, "runs/digits-1/scale", {"workers": 3})["wanted"] == 3
        wait_until(lambda: len(state_of(paths).training_workers) == 3)
        told = act(server.url, token, "runs/digits-1/stacks", {})["processes"]
        assert [(one["who"], one["problem"]) for one in told] == [(f"worker-{n}", "") for n in range(3)]
        assert all("train" in one["text"] for one in told)
        name = act(server.url, token, "runs/digits-1/profile", {"steps": 5})["profile"]
        check_profile(paths, server.url, token, name)
        assert act(server.url, token, "runs/digits-1/drain", {"who": "worker-0"})["who"] == "worker-0"
        assert act(server.url, token, "runs/digits-1/stop", {})["status"] == "stopped"
        assert act(server.url, token, "runs/digits-1/resume", {})["pid"]
        assert finished_weights(paths) == undisturbed


@pytest.mark.parametrize(("name", "told"), [("finished", "SH622"), ("begun", "SH201")])
def test_a_run_that_cannot_be_resumed_tells_why(tmp_path, monkeypatch, name, told):
    """Its driver is another process, and nobody reads what that prints."""
    monkeypatch.setattr("shoal.web.acting.SETTLED_S", 600)  # it drives the run for a moment
    write_run(tmp_path / "mlp-1", TOLD if name == "finished" else TOLD[:20]).receipt.unlink()
    with serving(tmp_path) as server:
        token = TokenFile(tmp_path).create("t", role="submit", runs=[], expires_t=None)
        found = outcome(server.url, token, "runs/mlp-1/resume", {})
    assert (found["state"], found["error"]["code"]) == ("failed", told)
    assert found["error"]["message"]
    assert str(tmp_path) not in str(found)


def test_a_server_that_is_killed_or_frozen_is_not_noticed(tmp_path, undisturbed):
    with training(tmp_path / "job", tmp_path / "runs", epochs=EPOCHS, workers="2") as paths:
        token = TokenFile(tmp_path / "runs").create("t", role="read", runs=[], expires_t=None)
        with web_process(tmp_path / "runs") as (process, link):
            url = link.partition("/#")[0]
            for _ in range(100):
                ask(f"{url}/api/v1/runs/digits-1/series", token).read()
            os.kill(process.pid, signal.SIGSTOP)
            before = state_of(paths).step
            wait_until(lambda: state_of(paths).step > before + 50 or read_receipt_file(paths.receipt).own)
            process.kill()
        assert finished_weights(paths) == undisturbed
        assert state_of(paths).deaths == 0


def test_a_flood_of_the_server_is_not_noticed(tmp_path, undisturbed):
    """It begins before the run, and goes on until that has finished."""
    runs = tmp_path / "runs"
    runs.mkdir()
    tokens = [TokenFile(runs).create(role, role=role, runs=[], expires_t=None) for role in ("read", "operate")]
    with web_process(runs) as (process, link):
        url = link.partition("/#")[0]
        with Flood(url, tokens) as flood:
            wait_until(lambda: flood.counted.keys() >= {b"200", b"403", b"503"})  # 503: there are too many connections
            before = flood.counted.total()
            with training(tmp_path / "job", runs, epochs=EPOCHS, workers="2") as paths:
                assert finished_weights(paths) == undisturbed
            assert (state_of(paths).status, state_of(paths).deaths) == ("finished", 0)
            assert flood.counted.total() > before + 50
            assert process.poll() is None
        assert not flood.counted.keys() & {b"500", b"502"}, flood.counted
        wait_until(lambda: is_served(url, tokens[0]))


def is_served(url, token):
    """Afterwards it serves as before."""
    try:
        return ask(f"{url}/api/v1/runs/digits-1", token).status == 200
    except OSError:
        return False
