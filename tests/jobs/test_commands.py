"""Commands of a user's process: more workers, fewer, one of them gone, the end."""

import json
import os
import signal
import subprocess
import sys

import pytest

from shoal.errors import ShoalError
from shoal.fleet.driver_address import read_driver_address
from shoal.fleet.orphans import find_orphans
from shoal.jobs import commands
from shoal.net.listener import connect_host
from tests.conftest import MLP
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import reference_receipt
from tests.jobs.test_cli import shoal, write

ENDLESS = {"steps": 10**6, "evaluate": {"every_steps": 10**6}, "export": []}


def test_scaling_and_stopping(run, resume):
    with background_run(run, MLP, **ENDLESS) as it:
        it.wait_for_workers(1)
        answer = commands.scale(it.paths, 3)
        assert (answer.wanted, answer.lanes) == (3, 4)
        assert answer.notes == ["the job says workers: 1..1; this counts until the run ends"]
        it.wait_for_workers(3)
        with pytest.raises(ShoalError, match=r"SH609.*has no servers: its sync is lanes"):
            commands.scale(it.paths, servers=2)
        assert commands.scale(it.paths, 6).notes[0] == "the run has 4 lanes: 2 of 6 workers will stand by"
        commands.scale(it.paths, 1)
        it.wait_for_workers(1)
        run_state = commands.stop(it.paths)
        assert run_state.status == "stopped"
        assert run_state.saved_step == run_state.step > 0
    assert it.outcome.result().status == "stopped"
    with pytest.raises(ShoalError, match=r"SH612.*no driver runs 'mlp-1'"):
        commands.scale(it.paths, 2)


def test_a_drained_worker_leaves_and_changes_nothing(run, job_dir):
    changes = {"steps": 400, "evaluate": {"every_steps": 200}}
    drained = job_dir / "drained"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(drained)}}]
    with background_run(run, MLP, workers=3, watchers=watchers, **changes) as it:
        it.wait_for_workers(3)
        with pytest.raises(ShoalError, match=r"SH613.*no worker-7 now.*It has: worker-0, worker-1, worker-2"):
            commands.drain(it.paths, "7")
        with pytest.raises(ShoalError, match=r"SH613.*Write worker-2, or 2"):
            commands.drain(it.paths, "the second")
        seat, answer = commands.drain(it.paths, "worker-1")
        assert (seat.name, answer.wanted) == ("worker-1", 2)
        assert commands.wait_for_departure(it.paths, seat).startswith("left at step ")
        drained.touch()
    receipt = it.outcome.result().receipt
    assert receipt.deaths_survived == 0
    assert receipt.weights_sha256 == reference_receipt(run, MLP, **changes).weights_sha256


def test_draining_the_only_worker_brings_another(run):
    with background_run(run, MLP, **ENDLESS) as it:
        it.wait_for_workers(1)
        seat, _ = commands.drain(it.paths, "0")
        assert commands.wait_for_departure(it.paths, seat).startswith("left at step ")
        it.wait_until(lambda run_state: [w.name for w in run_state.training_workers] == ["worker-1"])
        commands.stop(it.paths)


def test_garbage_from_somebody_who_knows_the_token_disturbs_nothing(run):
    with background_run(run, MLP, **ENDLESS) as it:
        it.wait_for_workers(1)
        address = read_driver_address(it.paths.driver_address)
        for command in (
            {"kind": "scale"},
            {"kind": "scale", "wanted": "many"},
            {"kind": "scale", "servers": 2},
            {"kind": "drain", "seat": 0, "role": "server"},
            {"kind": "drain", "seat": []},
            {"kind": "x"},
        ):
            with connect_host(address.host, address.port, address.token, b'{"role": "user"}') as sock:
                sock.settimeout(10)
                sock.sendall(json.dumps(command).encode() + b"\n")
                with sock.makefile("rb") as lines:
                    assert b"answer" not in b"".join(lines)
        assert commands.stop(it.paths).status == "stopped"


def test_folds_are_named_one_by_one_and_stopped_together(run):
    data = MLP["data"] | {"split": {"kind": "kfold", "folds": 3}}
    with background_run(run, MLP, data=data, **ENDLESS) as it:
        it.wait_for_workers(1)
        parent_run = it.paths.parent_run
        for command in (
            lambda: commands.scale(parent_run, 2),
            lambda: commands.drain(parent_run, "0"),
            lambda: commands.read_token(parent_run),
        ):
            with pytest.raises(ShoalError, match=r"SH614.*mlp-1/fold-0"):
                command()
        commands.scale(it.paths, 2)
        it.wait_for_workers(2)
        assert commands.stop(parent_run).status == "stopped"
    assert it.outcome.result().status == "stopped"


@pytest.mark.parametrize("number", [0, -1, 5000])
def test_a_number_that_makes_no_sense(run, number):
    outcome = run(MLP, steps=1)
    with pytest.raises(ShoalError, match=r"SH609"):
        commands.scale(outcome.paths, number)
    with pytest.raises(ShoalError, match=r"SH609"):
        commands.scale(outcome.paths, servers=number)


@pytest.mark.long
def test_workers_whose_driver_is_gone_are_told_of(job_dir):
    write(job_dir, **ENDLESS)
    command = [sys.executable, "-c", "from shoal.cli import main; main()", "run", "job.yaml", "--json"]
    with subprocess.Popen(command, cwd=job_dir, stdout=subprocess.PIPE, text=True) as driver:
        next(line for line in driver.stdout if '"step"' in line)
        driver.kill()
        driver.stdout.read()
    (left,) = find_orphans(commands.RunPaths.at(job_dir / "runs" / "mlp-1"))
    pid = left.pid
    handle = os.pidfd_open(pid)
    try:
        done = shoal("stop", "mlp-1", cwd=job_dir)
        assert done.returncode == 6
        assert f"worker-0 (process {pid})" in done.stderr
        assert "shoal resume mlp-1" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
