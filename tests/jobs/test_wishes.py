"""Wishes of a user's process: more workers, fewer, one of them gone, the end."""

import json
import os
import signal
import subprocess
import sys

import pytest

from shoal.errors import ShoalError
from shoal.fleet.contact import read_contact
from shoal.fleet.survivors import survivors
from shoal.jobs import wishes
from shoal.wire.door import call_host
from tests.conftest import MLP
from tests.jobs.disturbed import calm
from tests.jobs.driven import driven
from tests.jobs.test_cli import shoal, write

ENDLESS = {"steps": 10**6, "evaluate": {"every_steps": 10**6}, "export": []}


def test_scaling_and_stopping(run, resume):
    with driven(run, MLP, **ENDLESS) as it:
        it.trains(1)
        answer = wishes.scale(it.paths, 3)
        assert (answer.wanted, answer.lanes) == (3, 4)
        assert answer.notes == ["the job says workers: 1..1; this counts until the run ends"]
        it.trains(3)
        with pytest.raises(ShoalError, match=r"SH609.*has no servers: its sync is lanes"):
            wishes.scale(it.paths, servers=2)
        assert wishes.scale(it.paths, 6).notes[0] == "there are 4 lanes: 2 of 6 workers will stand by"
        wishes.scale(it.paths, 1)
        it.trains(1)
        picture = wishes.stop(it.paths)
        assert picture.status == "stopped"
        assert picture.saved_step == picture.step > 0
    assert it.outcome.result().status == "stopped"
    with pytest.raises(ShoalError, match=r"SH612.*nobody drives 'mlp-1'"):
        wishes.scale(it.paths, 2)


def test_a_drained_worker_leaves_and_changes_nothing(run, place):
    changes = {"steps": 400, "evaluate": {"every_steps": 200}}
    drained = place / "drained"
    watch = [{"name": "pace.py:Dawdle", "args": {"seconds": 0.2, "until": str(drained)}}]
    with driven(run, MLP, workers=3, watch=watch, **changes) as it:
        it.trains(3)
        with pytest.raises(ShoalError, match=r"SH613.*no worker-7 now.*It has: worker-0, worker-1, worker-2"):
            wishes.drain(it.paths, "7")
        with pytest.raises(ShoalError, match=r"SH613.*Write worker-2, or 2"):
            wishes.drain(it.paths, "the second")
        seat, answer = wishes.drain(it.paths, "worker-1")
        assert (seat.name, answer.wanted) == ("worker-1", 2)
        assert wishes.departure(it.paths, seat).startswith("left at step ")
        drained.touch()
    receipt = it.outcome.result().receipt
    assert receipt.deaths_survived == 0
    assert receipt.weights_sha256 == calm(run, MLP, **changes).weights_sha256


def test_draining_the_only_worker_brings_another(run):
    with driven(run, MLP, **ENDLESS) as it:
        it.trains(1)
        seat, _ = wishes.drain(it.paths, "0")
        assert wishes.departure(it.paths, seat).startswith("left at step ")
        it.until(lambda picture: [w.name for w in picture.training] == ["worker-1"])
        wishes.stop(it.paths)


def test_garbage_from_somebody_who_knows_the_token_disturbs_nothing(run):
    with driven(run, MLP, **ENDLESS) as it:
        it.trains(1)
        contact = read_contact(it.paths.control)
        for wish in (
            {"kind": "scale"},
            {"kind": "scale", "wanted": "many"},
            {"kind": "scale", "servers": 2},
            {"kind": "drain", "seat": 0, "role": "server"},
            {"kind": "drain", "seat": []},
            {"kind": "x"},
        ):
            with call_host(contact.host, contact.port, contact.token, b'{"role": "user"}') as sock:
                sock.settimeout(10)
                sock.sendall(json.dumps(wish).encode() + b"\n")
                with sock.makefile("rb") as lines:
                    assert b"answer" not in b"".join(lines)
        assert wishes.stop(it.paths).status == "stopped"


def test_folds_are_named_one_by_one_and_stopped_together(run):
    data = MLP["data"] | {"split": {"kind": "kfold", "folds": 3}}
    with driven(run, MLP, data=data, **ENDLESS) as it:
        it.trains(1)
        whole = it.paths.whole
        for wish in (lambda: wishes.scale(whole, 2), lambda: wishes.drain(whole, "0"), lambda: wishes.token(whole)):
            with pytest.raises(ShoalError, match=r"SH614.*mlp-1/fold-0"):
                wish()
        wishes.scale(it.paths, 2)
        it.trains(2)
        assert wishes.stop(whole).status == "stopped"
    assert it.outcome.result().status == "stopped"


@pytest.mark.parametrize("number", [0, -1, 5000])
def test_a_number_that_makes_no_sense(run, number):
    outcome = run(MLP, steps=1)
    with pytest.raises(ShoalError, match=r"SH609"):
        wishes.scale(outcome.paths, number)
    with pytest.raises(ShoalError, match=r"SH609"):
        wishes.scale(outcome.paths, servers=number)


@pytest.mark.long
def test_workers_whose_driver_is_gone_are_told_of(place):
    write(place, **ENDLESS)
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "run", "job.yaml", "--json"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True) as driver:
        next(line for line in driver.stdout if '"step"' in line)
        driver.kill()
        driver.stdout.read()
    (left,) = survivors(wishes.RunPaths.at(place / "runs" / "mlp-1"))
    pid = left.pid
    handle = os.pidfd_open(pid)
    try:
        done = shoal("stop", "mlp-1", cwd=place)
        assert done.returncode == 6
        assert f"worker-0 (process {pid})" in done.stderr
        assert "shoal resume mlp-1" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
