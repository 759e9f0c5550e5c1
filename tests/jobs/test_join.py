"""Workers that come from elsewhere: another process, another directory, the same bits."""

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import EXIT_RUN, ShoalError
from shoal.events import read_events
from shoal.jobs import commands
from shoal.jobs import join as joining
from shoal.jobs.inspection.stacks import collect_stacks
from shoal.spec.load import make_job
from shoal.spec.trust import CodeTrust
from shoal.terminal.notes import note_lines
from tests.conftest import MLP
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import reference_receipt

LONG = {"steps": 600, "evaluate": {"every_steps": 200}}
TRUST = CodeTrust(everything=True)
ENDLESS = {"steps": 10**6, "evaluate": {"every_steps": 10**6}}


def joined(run_state):
    return any(w.name == "worker-1" and w.state == "training" for w in run_state.workers.values())


def test_a_process_joins_and_leaves_and_nothing_changes(run, job_dir, copied_job_dir):
    """In a process of its own, as a user starts it; SIGTERM is a planned leave."""
    ready = job_dir / "ready"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(ready)}}]
    with background_run(run, MLP, watchers=watchers, **LONG) as it:
        it.wait_for_workers(1)
        command = [
            sys.executable,
            "-c",
            "from shoal.cli import main; main()",
            "join",
            it.address,
            "--dir",
            ".",
            "--allow",
            "models.py,delays.py",
        ]
        token = commands.read_token(it.paths)
        environment = os.environ | {"SHOAL_TOKEN": token}
        with subprocess.Popen(
            command, cwd=copied_job_dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as other:
            it.wait_until(joined)
            seen = collect_stacks(it.paths)
            other.send_signal(signal.SIGTERM)
            said = other.stdout.read()
        ready.touch()
    assert other.returncode == 143, said
    assert [(one.who, one.problem) for one in seen] == [("worker-0", ""), ("worker-1", "")]
    assert all("shoal/train/" in one.text for one in seen)  # worker-1 answered through the driver
    assert "joined run mlp-1 as worker-1" in said
    assert "worker-1: left at step" in said
    assert token not in said
    receipt = it.outcome.result().receipt
    assert receipt.deaths_survived == 0
    assert receipt.carried["worker-1"].samples > 0
    assert receipt.weights_sha256 == reference_receipt(run, MLP, **LONG).weights_sha256
    assert token not in it.paths.events.read_text()


@pytest.mark.long
def test_two_workers_stay_until_the_run_is_finished(run, job_dir, copied_job_dir, second_fork_server):
    ready = job_dir / "ready"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(ready)}}]
    said = []

    def show(text):
        said.append(text)
        if sum("trains from step" in line for line in said) >= 2:
            ready.touch()

    with background_run(run, MLP, watchers=watchers, **LONG) as it:
        it.wait_for_workers(1)
        code = joining.join(
            it.address,
            commands.read_token(it.paths),
            base_dir=copied_job_dir,
            workers=2,
            trust=TRUST,
            show=show,
            fork_server=second_fork_server,
        )
    assert code == 0, said
    receipt = it.outcome.result().receipt
    assert (receipt.workers, receipt.deaths_survived) == (3, 0)
    assert sum("the run is finished" in line or "(finished)" in line for line in said) == 2
    assert receipt.weights_sha256 == reference_receipt(run, MLP, **LONG).weights_sha256


@pytest.mark.long
def test_a_job_that_cannot_be_built_here_is_told_and_the_run_goes_on(
    run, job_dir, tmp_path_factory, second_fork_server
):
    empty = tmp_path_factory.mktemp("empty")
    said = []
    with background_run(run, MLP, **ENDLESS) as it:
        it.wait_for_workers(1)
        code = joining.join(
            it.address,
            commands.read_token(it.paths),
            base_dir=empty,
            trust=TRUST,
            show=said.append,
            fork_server=second_fork_server,
        )
        it.wait_until(lambda run_state: any("SH201" in note or "models.py" in note for note in note_lines(run_state)))
        assert commands.stop(it.paths).status == "stopped"
    assert code == 2
    assert "SH201" in "\n".join(said)
    assert "models.py" in "\n".join(said)
    assert "Traceback" not in "\n".join(said)
    assert it.outcome.result().error is None


@contextlib.contextmanager
def frozen(fork_server):
    """It starts nothing, as a cluster that has no machine yet."""
    os.kill(fork_server._process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(fork_server._process.pid, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("order", ["after the first worker", "before any worker"])
def test_a_machine_that_would_compute_other_bits_is_told_and_the_run_goes_on(run, copied_job_dir, fork_server, order):
    """torch uses older instructions there, as on another processor."""
    comes_first = order == "before any worker"
    with contextlib.ExitStack() as no_worker_starts, background_run(run, MLP, **ENDLESS) as it:
        if comes_first:
            no_worker_starts.enter_context(frozen(fork_server))
        else:
            it.wait_for_workers(1)
        it.wait_until(lambda run_state: any(event.kind == "seats_given" for event in it.events))
        command = [sys.executable, "-c", "from shoal.cli import main; main()", "join", it.address, "--trust-code"]
        environment = os.environ | {"SHOAL_TOKEN": commands.read_token(it.paths), "ATEN_CPU_CAPABILITY": "default"}
        with subprocess.Popen(
            command, cwd=copied_job_dir, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as other:
            it.wait_until(lambda run_state: sum(event.kind == "seats_given" for event in it.events) == 2)
            no_worker_starts.close()
            said = other.stdout.read()
        it.wait_until(lambda run_state: any("differ: processor" in note for note in note_lines(run_state)))
        it.wait_for_workers(1)
        assert commands.stop(it.paths).status == "stopped"
    assert other.returncode == 6, said
    assert "SH654" in said
    assert ("joined run" in said) == comes_first
    assert it.outcome.result().error is None
    assert all("worker-1" not in (event.get("carries") or ()) for event in it.events if event.kind == "view")


@pytest.mark.long
def test_a_machine_that_trusts_nothing_executes_nothing(run, copied_job_dir, second_fork_server):
    """The refusal names what was asked for and what to write; the run goes on."""
    (copied_job_dir / "models.py").write_text(f"open({str(copied_job_dir / 'executed')!r}, 'w')\n")
    said = []
    with background_run(run, MLP, **ENDLESS) as it:
        it.wait_for_workers(1)
        token = commands.read_token(it.paths)
        there = {"base_dir": copied_job_dir, "show": said.append, "fork_server": second_fork_server}
        code = joining.join(it.address, token, trust=CodeTrust(modules=("other",)), **there)
        it.wait_until(lambda run_state: any("models.py is not allowed" in note for note in note_lines(run_state)))
        assert commands.stop(it.paths).status == "stopped"
    assert code == 2
    text = "\n".join(said)
    assert "SH209 model: the run asks this machine to execute 'models.py:" in text
    assert "--allow models.py" in text
    assert "Traceback" not in text
    assert not (copied_job_dir / "executed").exists()
    assert it.outcome.result().error is None


@pytest.mark.long
def test_a_stop_sends_those_home_who_came_from_elsewhere(run, copied_job_dir, second_fork_server):
    """At once: they do not wait for a driver that will not come back."""
    said = []
    with background_run(run, MLP, **ENDLESS) as it, ThreadPoolExecutor() as pool:
        it.wait_for_workers(1)
        token = commands.read_token(it.paths)
        there = {"base_dir": copied_job_dir, "trust": TRUST, "show": said.append, "fork_server": second_fork_server}
        code = pool.submit(joining.join, it.address, token, **there)
        it.wait_until(joined)
        commands.stop(it.paths)
        assert code.result() == 0
    assert "no driver came back" not in "\n".join(said)


def test_the_driver_learns_which_signal_ended_a_joined_worker(run, copied_job_dir, second_fork_server):
    said = []
    with background_run(run, MLP, **ENDLESS) as it, ThreadPoolExecutor() as pool:
        it.wait_for_workers(1)
        token = commands.read_token(it.paths)
        there = {"base_dir": copied_job_dir, "trust": TRUST, "show": said.append, "fork_server": second_fork_server}
        code = pool.submit(joining.join, it.address, token, **there)
        it.wait_until(joined)
        pid = next(e["pid"] for e in read_events(it.paths.events) if (e.kind, e.who) == ("worker_started", "worker-1"))
        os.kill(pid, signal.SIGKILL)
        it.wait_until(
            lambda state: any("worker-1" in note and "ended by SIGKILL" in note for note in note_lines(state))
        )
        assert code.result() == EXIT_RUN
        commands.stop(it.paths)
    assert any("worker-1: ended by SIGKILL" in line for line in said)


def test_a_wrong_token_and_a_wrong_address_are_told_at_once(run, second_fork_server):
    def join(where, token):
        joining.join(where, token, base_dir=".", show=print, fork_server=second_fork_server)

    with background_run(run, MLP, **ENDLESS) as it:
        it.wait_for_workers(1)
        with pytest.raises(ShoalError, match=r"SH615.*another token"):
            join(it.address, "0" * 32)
        with pytest.raises(ShoalError, match=r"SH615.*no token"):
            join(it.address, "")
        address, token = it.address, commands.read_token(it.paths)
        commands.stop(it.paths)
    with pytest.raises(ShoalError, match="SH610"):
        join(address, token)
    for where in ("nowhere", "host:", ":1", "host:port"):
        with pytest.raises(ShoalError, match="SH609"):
            join(where, token)


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "[::]", "", "*"])
def test_listening_everywhere_is_refused(job_dir, listen):
    with pytest.raises(ShoalError, match=r"SH106 network\.listen.*192\.168\.1\.5"):
        make_job(MLP | {"network": {"listen": listen}}, base_dir=str(job_dir))
