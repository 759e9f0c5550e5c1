"""Whatever is killed or lost, and wherever a search goes on: it decides and finds the same, and leaves no process."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from shoal.events import read_events
from shoal.jobs.search.search_dir import find
from shoal.jobs.search.summary import compare_searches, read_search
from tests.conftest import long_only
from tests.jobs.fault_injection import processes_of
from tests.jobs.search.test_search import POLICIES, PROMOTE, SHORT_UNITS, job_file, start_process  # noqa: F401

MODEL = {"policy": {"kind": "promote", "first": 1}, "budget": "20 trials", "slots": 3}
"""The default sampler: it proposes by its model from the ninth trial on."""
SLOW = {"faults": {"pause_probability": 1.0, "pause_s": 0.05}}


def last_line(process):
    """The receipt that the process prints at its end."""
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    return json.loads(lines[-1])


def lives(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_a_journal_that_lost_its_end_is_written_again_without_training(policy, search, resume):
    """A resumed search reads finished results from its trials, also where only the receipt is lost."""
    whole = search(2, search=POLICIES[policy], **SHORT_UNITS)
    rows = whole.paths.journal.read_bytes().splitlines(keepends=True)
    trained = {file: file.stat().st_size for file in whole.paths.root.glob("trial-*/events.jsonl")}
    assert len(trained) == whole.receipt.trials
    for length in [*range(0, len(rows), len(rows) // 6), len(rows)]:
        whole.paths.receipt.unlink()
        torn = rows[length][: len(rows[length]) // 2] if length < len(rows) else b""
        whole.paths.journal.write_bytes(b"".join(rows[:length]) + torn)
        assert resume(whole.paths, workers=1 + length % 3).receipt.search_sha256 == whole.receipt.search_sha256
    assert {file: file.stat().st_size for file in trained} == trained


@pytest.mark.long
def test_in_the_order_of_the_clock_a_journal_goes_on_again_and_again(search, resume):
    """Each driver finds results that were not written down, and what it writes leads the next one to the same place."""
    found = search(2, search=PROMOTE | {"order": "clock", "budget": "8 trainings"}, **SHORT_UNITS)
    for _ in range(6):
        rows = found.paths.journal.read_bytes().splitlines(keepends=True)
        found.paths.receipt.unlink()
        found.paths.journal.write_bytes(b"".join(rows[: 2 * len(rows) // 3]))
        found = resume(found.paths, workers=2)
        assert found.receipt.winner is not None
    assert found.receipt.why == "order: clock counts results when they come"


@pytest.mark.long
def test_a_search_goes_on_on_another_machine(search, job_dir, tmp_path_factory):
    """In other directories, with other numbers of threads and workers, another hash seed and an empty cache."""
    undisturbed, asked = search(2, search=MODEL), []

    def interrupt(progress):
        if len(progress.table.told) >= 12 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGINT))

    stopped = search(2, look=interrupt, search=MODEL)
    assert stopped.status == "interrupted"
    there = tmp_path_factory.mktemp("there")
    shutil.copytree(stopped.paths.root, there / "runs" / stopped.paths.name)
    shutil.rmtree(stopped.paths.root)
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7", "XDG_CACHE_HOME": str(there / "cache")}
    command = [sys.executable, "-m", "shoal", "search", "resume", "last", "--json", "--workers", "3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=there, env=environment)
    receipt = last_line(process)
    found = read_search(find("last", there / "runs"))
    assert compare_searches(found, read_search(undisturbed.paths)).difference == ""
    assert receipt["search_sha256"] == undisturbed.receipt.search_sha256
    assert (receipt["exact"], receipt["starts"]) == (True, 2), receipt["why"]


@pytest.mark.long
def test_a_search_by_the_model_is_killed_and_goes_on(search, job_file, job_dir):  # noqa: F811
    """Three times, when the model proposes: what it has learnt is not lost."""
    undisturbed, file, runs = search(2, search=MODEL), job_file(search=MODEL), job_dir / "killed"
    arguments = [str(file)]
    for results in (11, 2, 2):
        process = start_process(file, runs, *arguments)
        for line in process.stdout:
            results -= json.loads(line).get("kind") == "told"
            if not results:
                break
        process.kill()
        process.wait()
        arguments = ["resume", "last"]
    receipt = last_line(start_process(file, runs, *arguments))
    found = read_search(find("last", runs))
    assert compare_searches(found, read_search(undisturbed.paths)).difference == ""
    assert receipt["search_sha256"] == undisturbed.receipt.search_sha256
    assert (receipt["exact"], receipt["starts"]) == (True, 4), receipt["why"]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["promote", "population"])
def test_any_process_of_a_search_may_be_killed(policy, search, job_file, job_dir):  # noqa: F811
    """Workers, the processes that find out shapes, and the fork server, which the next process starts again."""
    asked = {"search": POLICIES[policy], **SHORT_UNITS}
    undisturbed, rng, killed, kinds = search(2, **asked), random.Random(3), [], set()
    file = job_file(**asked, **SLOW)
    process = start_process(file, job_dir / "killed", str(file))
    while process.poll() is None and len(killed) < 9:
        time.sleep(0.5)
        with contextlib.suppress(psutil.NoSuchProcess):
            fork_servers = psutil.Process(process.pid).children()
            forked = [one for parent in fork_servers for one in parent.children()]
            if forked:
                one = rng.choice(forked if len(killed) % 3 else fork_servers)
                if lives(one):
                    one.kill()
                    killed.append(one)
                    kinds.add("fork server" if one in fork_servers else "forked")
    receipt = last_line(process)
    assert kinds == {"fork server", "forked"}
    assert receipt["decisions_sha256"] == undisturbed.receipt.decisions_sha256
    assert receipt["weights_sha256"] == undisturbed.receipt.weights_sha256
    assert receipt["search_sha256"] == undisturbed.receipt.search_sha256
    assert receipt["exact"] is True, receipt["why"]
    assert not processes_of(job_dir / "killed")


MORTAL = """
import os
import signal
from pathlib import Path

from torch import nn

DEATHS = Path(__file__).with_name("deaths")


class Net(nn.Sequential):
    def __init__(self, inputs=64, classes=10):
        deaths = len(DEATHS.read_text())
        if deaths:
            DEATHS.write_text("x" * (deaths - 1))
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(nn.Linear(inputs, classes))
"""


@pytest.mark.parametrize("deaths", [2, *long_only(3)])
def test_a_killed_process_that_finds_out_a_shape_is_no_failure_of_the_trial(deaths, search, job_dir):
    """The model is first made there. Three kills in a row are a failure of this machine."""
    (job_dir / "mortal.py").write_text(MORTAL)
    found = []
    for count in (0, deaths):
        (job_dir / "deaths").write_text("x" * count)
        found.append(search(1, model={"name": "mortal.py:Net"}, search={"budget": "2 trials"}))
        assert (job_dir / "deaths").read_text() == ""
    undisturbed, disturbed = found
    if deaths < 3:
        assert disturbed.receipt.search_sha256 == undisturbed.receipt.search_sha256
        assert disturbed.receipt.exact is True, disturbed.receipt.why
    else:
        first = read_search(disturbed.paths).table.trials[0]
        assert (first.state, disturbed.receipt.failed, disturbed.receipt.exact) == ("failed", 1, False)
        assert first.failure.startswith("SH603")


@pytest.mark.long
def test_a_worker_that_waits_at_its_pause_for_a_killed_driver_is_taken_over(search, resume, job_file, job_dir):  # noqa: F811
    """Its result is there already. It waits for a minute; the search ends long before."""
    asked = {"budget": "4 trials", "policy": {"kind": "promote", "sampler": "random", "first": 1}}
    undisturbed = search(1, search=asked)
    file = job_file(search=asked, faults={"pause_probability": 1.0, "pause_s": 0.3})
    process = start_process(file, job_dir / "killed", str(file))
    wait_for(lambda: "joined" in kinds_of(job_dir / "killed" / "small-1" / "trial-0"))
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: "evaluated" in kinds_of(job_dir / "killed" / "small-1" / "trial-0"))
    process.kill()
    process.wait()
    paths = find("last", job_dir / "killed")
    assert processes_of(paths.root)
    (paths.job).write_text(paths.job.read_text().replace("pause_probability: 1.0", "pause_probability: 0.0"))
    found = resume(paths, workers=2)
    assert found.receipt.decisions_sha256 == undisturbed.receipt.decisions_sha256


def kinds_of(root):
    return [event.kind for event in read_events(root / "events.jsonl")] if (root / "events.jsonl").exists() else []


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.long
def test_a_killed_search_that_nobody_resumes_leaves_no_process(search, resume, job_file, job_dir):  # noqa: F811
    undisturbed = search(2, search=PROMOTE)
    file = job_file(search=PROMOTE, elastic={"patience_s": 0.5}, **SLOW)
    process = start_process(file, job_dir / "killed", str(file))
    for line in process.stdout:
        if json.loads(line).get("kind") == "told":
            break
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    paths = find("last", job_dir / "killed")
    assert started
    until = time.monotonic() + 60
    while any(map(lives, started)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(lives, started))
    assert not processes_of(paths.root)
    assert resume(paths).receipt.decisions_sha256 == undisturbed.receipt.decisions_sha256
