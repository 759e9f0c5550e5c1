"""Workers that come from elsewhere: another process, another directory, the same bits."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import ShoalError
from shoal.jobs import join as joining
from shoal.jobs import wishes
from shoal.spec.load import make_job
from tests.conftest import MLP
from tests.jobs.disturbed import calm
from tests.jobs.driven import driven

LONG = {"steps": 600, "evaluate": {"every_steps": 200}}
ENDLESS = {"steps": 10**6, "evaluate": {"every_steps": 10**6}}


def joined(picture):
    return any(w.name == "worker-1" and w.state == "training" for w in picture.workers.values())


def test_a_process_joins_and_leaves_and_nothing_changes(run, place, elsewhere):
    """In a process of its own, as a user starts it; SIGTERM is a planned leave."""
    ready = place / "ready"
    watch = [{"name": "pace.py:Dawdle", "args": {"seconds": 0.2, "until": str(ready)}}]
    with driven(run, MLP, watch=watch, **LONG) as it:
        it.trains(1)
        command = [sys.executable, "-c", "from shoal.cli import main; main()", "join", it.address, "--dir", "."]
        token = wishes.token(it.paths)
        environment = os.environ | {"SHOAL_TOKEN": token}
        with subprocess.Popen(
            command, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as other:
            it.until(joined)
            other.send_signal(signal.SIGTERM)
            said = other.stdout.read()
        ready.touch()
    assert other.returncode == 143, said
    assert "joined run mlp-1 as worker-1" in said
    assert "worker-1: left at step" in said
    assert token not in said
    receipt = it.outcome.result().receipt
    assert receipt.deaths_survived == 0
    assert receipt.carried["worker-1"].samples > 0
    assert receipt.weights_sha256 == calm(run, MLP, **LONG).weights_sha256
    assert token not in it.paths.events.read_text()


@pytest.mark.long
def test_two_workers_stay_until_the_run_is_finished(run, place, elsewhere, their_nursery):
    ready = place / "ready"
    watch = [{"name": "pace.py:Dawdle", "args": {"seconds": 0.2, "until": str(ready)}}]
    said = []

    def show(text):
        said.append(text)
        if sum("trains from step" in line for line in said) >= 2:
            ready.touch()

    with driven(run, MLP, watch=watch, **LONG) as it:
        it.trains(1)
        code = joining.join(
            it.address, wishes.token(it.paths), base_dir=elsewhere, workers=2, show=show, nursery=their_nursery
        )
    assert code == 0, said
    receipt = it.outcome.result().receipt
    assert (receipt.workers, receipt.deaths_survived) == (3, 0)
    assert sum("the run is finished" in line or "(finished)" in line for line in said) == 2
    assert receipt.weights_sha256 == calm(run, MLP, **LONG).weights_sha256


@pytest.mark.long
def test_a_job_that_cannot_be_built_here_is_told_and_the_run_goes_on(run, place, tmp_path_factory, their_nursery):
    empty = tmp_path_factory.mktemp("empty")
    said = []
    with driven(run, MLP, **ENDLESS) as it:
        it.trains(1)
        code = joining.join(it.address, wishes.token(it.paths), base_dir=empty, show=said.append, nursery=their_nursery)
        it.until(lambda picture: any("SH201" in note or "models.py" in note for note in picture.notes))
        assert wishes.stop(it.paths).status == "stopped"
    assert code == 2
    assert "SH201" in "\n".join(said)
    assert "models.py" in "\n".join(said)
    assert "Traceback" not in "\n".join(said)
    assert it.outcome.result().error is None


def test_a_stop_sends_those_home_who_came_from_elsewhere(run, elsewhere, their_nursery):
    """At once: they do not wait for a driver that will not come back."""
    said = []
    with driven(run, MLP, **ENDLESS) as it, ThreadPoolExecutor() as pool:
        it.trains(1)
        token = wishes.token(it.paths)
        there = {"base_dir": elsewhere, "show": said.append, "nursery": their_nursery}
        code = pool.submit(joining.join, it.address, token, **there)
        it.until(joined)
        wishes.stop(it.paths)
        assert code.result() == 0
    assert "no driver came back" not in "\n".join(said)


def test_a_wrong_token_and_a_wrong_address_are_told_at_once(run, their_nursery):
    def join(where, token):
        joining.join(where, token, base_dir=".", show=print, nursery=their_nursery)

    with driven(run, MLP, **ENDLESS) as it:
        it.trains(1)
        with pytest.raises(ShoalError, match=r"SH615.*another token"):
            join(it.address, "0" * 32)
        with pytest.raises(ShoalError, match=r"SH615.*no token"):
            join(it.address, "")
        address, token = it.address, wishes.token(it.paths)
        wishes.stop(it.paths)
    with pytest.raises(ShoalError, match="SH610"):
        join(address, token)
    for where in ("nowhere", "host:", ":1", "host:port"):
        with pytest.raises(ShoalError, match="SH609"):
            join(where, token)


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "[::]", "", "*"])
def test_listening_everywhere_is_refused(place, listen):
    with pytest.raises(ShoalError, match=r"SH106 engine\.listen.*192\.168\.1\.5"):
        make_job(MLP | {"engine": {"listen": listen}}, base_dir=str(place))
