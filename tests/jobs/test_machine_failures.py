"""What happens when the machine or the user's code fails: training goes on with the same bits, or an error says why."""

import json
import os
import re
import resource
import subprocess
import sys

import psutil
import pytest

from shoal.events import read_events
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import WORKER_MODULE
from shoal.spec.load import make_job
from tests.conftest import FIXTURES, MLP

DIGITS = {
    "source": {"kind": "python", "factory": "hostile.py:Digits"},
    "split": {"kind": "holdout", "validation": 0.2},
    "loader": {"workers": 2},
}


def line_of(function):
    """The line after `def function`, where it fails."""
    lines = (FIXTURES / "hostile.py").read_text().splitlines()
    return lines.index(f"def {function}():") + 2


# ---- the user's code ----


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("leave", "SH428", "SystemExit: 3"),
        ("leave_silently", "SH428", "SystemExit"),
        ("leave_hard", "SH428", "os._exit(0) was called"),
        ("interrupt", "SH428", "KeyboardInterrupt"),
        ("unheard", "SH428", "Unheard: mine"),
        ("unprintable", "SH401", "Unprintable (its message cannot be made: Unprintable)"),
        ("unpicklable", "SH401", "Unpicklable: with a lambda"),
        ("huge", "SH401", "ValueError: xxx"),
    ],
)
def test_code_that_misbehaves_is_told_at_its_line(run, job_dir, how, code, words):
    outcome = run(MLP, model={"name": "hostile.py:Misbehaving", "args": {"how": how}}, evaluate={"every_steps": 60})
    assert outcome.status == "failed"
    assert (outcome.error.code, outcome.error.where) == (code, f"{job_dir / 'hostile.py'}:{line_of(how)}")
    assert words in outcome.error.message
    assert len(outcome.error.message) < 3000
    assert not outcome.traceback, "it is no bug of Shoal"
    assert sum(1 for event in read_events(outcome.paths.events) if event.kind == "worker_started") == 1
    assert sum(file.stat().st_size for file in outcome.paths.logs.iterdir()) < 100_000


def test_a_model_that_leaves_when_it_is_made_is_told(run, job_dir):
    outcome = run(MLP, model="hostile.py:LeavingWhenMade")
    assert outcome.error.code == "SH208"
    assert "SystemExit: no licence" in outcome.error.message
    assert outcome.error.where.startswith(f"{job_dir / 'hostile.py'}:")


def test_code_that_fails_at_any_other_place_is_told_at_its_line(run, job_dir):
    job = {name: value for name, value in MLP.items() if name not in ("model", "loss", "metrics")}
    outcome = run(job, task="hostile.py:ForgetfulTask", checkpoint={"every": "1 steps"})
    assert (outcome.error.code, outcome.error.message) == ("SH429", "LookupError: forgotten")
    assert outcome.error.where.startswith(f"{job_dir / 'hostile.py'}:")
    assert not outcome.traceback


# ---- loader processes ----


def test_killed_loaders_change_no_bit(run):
    job = MLP | {"data": DIGITS, "steps": 20}
    undisturbed = run(job)
    watcher = {"name": "faults.py:KillLoaders", "args": {"steps": [3, 8, 9, 15]}}
    disturbed = run(job, watchers=[watcher])
    assert disturbed.receipt.weights_sha256 == undisturbed.receipt.weights_sha256
    assert disturbed.receipt.state_sha256 == undisturbed.receipt.state_sha256
    kinds = [event.kind for event in read_events(disturbed.paths.events)]
    assert kinds.count("loader_restarted") >= 4
    assert "worker_died" not in kinds


def test_a_sample_that_kills_every_loader_is_told_with_its_worker(run):
    data = DIGITS | {"source": {"kind": "python", "factory": "hostile.py:Deadly"}, "split": {"kind": "none"}}
    job = {name: value for name, value in MLP.items() if name not in ("evaluate", "metrics")}
    outcome = run(job, data=data)
    assert (outcome.error.code, outcome.error.where) == ("SH312", "worker-0")
    assert "sample 17: 3 loader processes died while they built it, the last one of SIGSEGV" in outcome.error.message
    assert sum(1 for event in read_events(outcome.paths.events) if event.kind == "loader_restarted") >= 2


# ---- the environment of workers ----


def test_a_worker_that_cannot_be_imported_is_told_at_once(job_dir):
    (job_dir / "shadow").mkdir()
    (job_dir / "shadow" / "safetensors.py").write_text(
        '"""In the way."""\nraise ImportError("built for another Python")\n'
    )
    shadowed = os.environ | {"PYTHONPATH": f"{job_dir / 'shadow'}:{os.environ.get('PYTHONPATH', '')}"}
    job = make_job(MLP, base_dir=str(job_dir))
    with ForkServer(shadowed, [WORKER_MODULE]) as broken:
        outcome = run_executor.run(job, runs=job_dir / "runs", fork_server=broken)
    assert (outcome.error.code, outcome.error.where) == ("SH629", f"{job_dir / 'shadow' / 'safetensors.py'}:2")
    assert "built for another Python" in outcome.error.message
    logs = list(outcome.paths.logs.glob("*.err"))
    assert len(logs) == 1, "it was tried once"
    assert "built for another Python" in logs[0].read_text()


# ---- the run directory ----


def test_a_deleted_run_directory_ends_the_run(run):
    children = set(psutil.Process().children(recursive=True))
    watcher = {"name": "faults.py:DeleteRun", "args": {"step": 5}}
    outcome = run(MLP, steps=10**6, workers=2, checkpoint={"every": "1 steps"}, watchers=[watcher])
    assert outcome.status == "failed"
    assert (outcome.error.code, outcome.error.where) == ("SH627", str(outcome.paths.root))
    left = [child for child in psutil.Process().children(recursive=True) if child not in children]
    assert not [child for child in left if "forkserver_main" not in " ".join(child.cmdline())]


# ---- the disk ----


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory, cache):
    """What runs on a disk of 8 megabytes say. See small_disk.py."""
    command = [sys.executable, "-m", "tests.jobs.small_disk", str(tmp_path_factory.mktemp("disk"))]
    try:
        subprocess.run(["unshare", "-rm", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as failure:
        pytest.skip(f"no disk can be mounted here: {failure}")
    done = subprocess.run(["unshare", "-rm", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_training_goes_on_while_the_disk_is_full_and_saves_again_when_there_is_room(small_disk):
    found = small_disk["for a while"]
    assert (found["status"], found["exit"]) == ("finished", 0)
    assert found["weights"] == small_disk["undisturbed"]["weights"]
    assert found["save_failed"]
    assert not [step for step in found["save_failed"] if not 12 <= step <= 28], "only while there was no room"
    assert not [step for step in found["saved"] if 12 <= step <= 28]
    assert found["saved"][-1] == 40
    assert found["recovered"] == [next(step for step in found["saved"] if step > 28)]
    due = [5, 10, 15, 20, 25, 30, 35, 40]
    told = {*found["saved"], *found["save_failed"], *found["save_skipped"]}
    assert set(due) <= told, "a save that is due is written, fails, or finds the one before still being written"
    assert found["temporary"] == []


def test_a_disk_that_stays_full_ends_the_run_with_its_own_code_and_resume_goes_on(small_disk):
    found = small_disk["to the end"]
    assert (found["status"], found["error"]["code"], found["exit"]) == ("failed", "SH510", 5)
    assert found["saved"]
    assert set(found["saved"]) <= {5, 10}
    assert found["temporary"] == []
    resumed = small_disk["resumed"]
    assert resumed["status"] == "finished"
    assert resumed["weights"] == small_disk["undisturbed"]["weights"]


def test_events_wait_for_room_and_what_was_dropped_is_told(small_disk):
    found = small_disk["events"]
    assert found["damaged"] == 0
    assert found["unwritten"] == [0, 0]
    assert found["steps"][-1] == 2_999
    assert "important" in found["notes"], "rows of steps are dropped first"
    dropped = [re.fullmatch(r"the disk was full: (\d+) events of worker-\d were dropped", n) for n in found["notes"]]
    assert sum(int(one[1]) for one in dropped if one) == 3_000 - len(found["steps"]) > 0


# ---- descriptors ----


def run_cli(*arguments, files):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, files)

    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)


NEEDS = """
import resource, sys
from shoal.errors import ShoalError
from shoal.jobs.run_health import ensure_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (60, int(sys.argv[1])))
try:
    ensure_descriptors(4)
except ShoalError as failure:
    print(failure)
else:
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


NO_THREADS = """
import os, resource, threading
from shoal.errors import from_os_error
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.geteuid() == 0:
    os.setuid(65534)  # no limit holds for root
try:
    threading.Thread(target=print).start()
except RuntimeError as failure:
    print(from_os_error(failure))
"""


def test_a_thread_that_cannot_be_started_is_told():
    done = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True)
    assert "SH628" in done.stdout, done.stderr
    assert "ulimit -u" in done.stdout


@pytest.mark.parametrize(("hard", "says"), [("4096", "(88, 4096)"), ("60", "ulimit -n 88")])
def test_the_limit_of_descriptors_is_raised_or_told(hard, says):
    done = subprocess.run([sys.executable, "-c", NEEDS, hard], capture_output=True, text=True)
    assert says in done.stdout, done.stderr


@pytest.mark.long
def test_too_few_descriptors_are_told_at_the_start(job_dir):
    (job_dir / "job.yaml").write_text(json.dumps(MLP))
    done = run_cli("run", str(job_dir / "job.yaml"), "--workers", "4", "--runs", str(job_dir / "r"), files=(60, 60))
    assert done.returncode == 6, done.stderr
    assert "SH628" in done.stderr
    assert "ulimit -n 88" in done.stderr.replace("\n", " ")


@pytest.mark.long
def test_a_run_raises_the_limit_of_descriptors_where_that_is_allowed(job_dir):
    (job_dir / "job.yaml").write_text(json.dumps(MLP | {"steps": 2}))
    done = run_cli("run", str(job_dir / "job.yaml"), "--workers", "4", "--runs", str(job_dir / "r"), files=(60, 4096))
    assert done.returncode == 0, done.stderr


def test_a_worker_without_descriptors_says_so(run):
    watcher = {"name": "faults.py:OpenFiles", "args": {"step": 5, "most": 100}}
    outcome = run(MLP, checkpoint={"every": "2 steps"}, watchers=[watcher])
    assert outcome.error.code == "SH628", str(outcome.error)
    assert "of 100" in outcome.error.message
    assert "ulimit -n 4096" in outcome.error.fix
