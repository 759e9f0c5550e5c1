"""A compression that is killed goes on where it was: the same steps and bytes, and nothing is done twice."""

import itertools
import json
import random
import signal
import subprocess
import sys

import pytest

from shoal.errors import ShoalError
from shoal.jobs.compression.compress import resume
from shoal.jobs.resume import job_to_resume
from shoal.jobs.run_executor import load_run_state
from shoal.spec.compression.measured import read_recipe, read_report
from shoal.spec.run_paths import RunPaths
from tests.conftest import long_only
from tests.jobs.compression.conftest import PARENT

LOSSLESS = {"steps": ["lossless"]}
BITS = {"steps": ["lossless", "low_bits"], "max_drop": 0.9, "tune": {"epochs": 1, "teacher": False}}
STEPS_PER_TUNING = 22
NAME = "parent-compressed-1"


@pytest.fixture
def begin(job_dir):
    """Compress in a process of its own; returns its exit code and how many answers it was given. See mortal.py."""

    def go(run, where="never", config=LOSSLESS, runs="runs"):
        words = [sys.executable, "mortal.py", run, job_dir / runs, str(where), json.dumps(config)]
        done = subprocess.run([str(one) for one in words], cwd=job_dir, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout.count("answer")

    return go


@pytest.fixture
def command(job_dir):
    def go(*words):
        words = [sys.executable, "-m", "shoal", *words, "--runs", "runs"]
        return subprocess.run(words, cwd=job_dir, capture_output=True, text=True)

    return go


def result_of(root):
    """What must not depend on kills: the steps, the digests, and what was decided about each rung."""
    recipe, report = read_recipe(root / "recipe.json"), read_report(root / "compression.json")
    assert not (root / "rungs").exists()
    return recipe.model_dump(exclude={"parent"}), [(row.name, row.kept, row.artefact) for row in report.rungs]


@pytest.mark.parametrize(("config", "seed"), [(LOSSLESS, 0), *long_only((BITS, 1), (BITS, 2))])
def test_killed_between_two_answers_again_and_again(run, begin, command, job_dir, config, seed):
    """Each life ends after a random number of answers; the last one is that of `shoal resume`."""
    parent = run(PARENT).paths.root
    _, whole = begin(parent, config=config, runs="undisturbed")
    drawn, given = random.Random(seed), []
    for name in itertools.chain([parent], itertools.repeat(NAME)):
        end = drawn.randint(1, 3)
        if sum(given) + end >= whole:
            break
        code, answers = begin(name, end, config)
        assert (code, answers) == (-signal.SIGKILL, end)
        given.append(answers)
    assert len(given) >= 2
    made = RunPaths.at(job_dir / "runs" / NAME)
    assert load_run_state(made).status == "broken off"
    kept = (made.root / "rungs" / "answers.jsonl").read_bytes()
    assert len(kept.splitlines()) == sum(given), "no answer was given twice"
    with pytest.raises(ShoalError, match="is a compression") as refused:
        job_to_resume(made, ())
    assert f"shoal resume {NAME}" in refused.value.fix

    done = command("resume", NAME)
    assert done.returncode == 0, done.stderr
    assert "Written" in done.stdout
    assert result_of(made.root) == result_of(job_dir / "undisturbed" / NAME)
    assert load_run_state(made).status == "finished"
    again = command("resume", NAME)
    assert (again.returncode, "SH604" in again.stderr) == (6, True)


@pytest.mark.long
def test_killed_in_the_middle_of_a_rung_the_training_goes_on(run, begin, command, job_dir):
    """The driver dies while the second of three trainings takes its eighth step."""
    watcher = {"name": "faults.py:KillDriver", "args": {"after": STEPS_PER_TUNING + 8, "folder": str(job_dir)}}
    parent = run(PARENT | {"watchers": [watcher], "checkpoint": {"every": "2 steps"}}).paths.root
    assert not (job_dir / "steps").exists()
    assert begin(parent, config=BITS)[0] == -signal.SIGKILL
    done = command("resume", NAME)
    assert done.returncode == 0, done.stderr
    steps = list(map(int, (job_dir / "steps").read_text().split()))
    assert set(steps) == set(range(1, STEPS_PER_TUNING + 1))
    assert steps.count(1) == 3, "no training began again"
    begin(parent, config=BITS, runs="undisturbed")
    assert result_of(job_dir / "runs" / NAME) == result_of(job_dir / "undisturbed" / NAME)


@pytest.mark.parametrize("where", ["_place_artefact", *long_only("save_job", "write_receipt")])
def test_killed_while_the_result_is_written(run, begin, fork_server, job_dir, where):
    parent = run(PARENT).paths.root
    made = RunPaths.at(job_dir / "runs" / NAME)
    assert begin(parent, where)[0] == -signal.SIGKILL
    resume(made, fork_server=fork_server)
    begin(parent, runs="undisturbed")
    assert result_of(made.root) == result_of(job_dir / "undisturbed" / NAME)
    assert load_run_state(made).status == "finished"


def test_killed_after_the_receipt_it_has_finished(run, compressed):
    made = compressed(run(PARENT), **LOSSLESS).paths
    made.asked_compression.parent.mkdir()
    with pytest.raises(ShoalError, match="has finished"):
        resume(made)
    assert not made.asked_compression.parent.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"parent": 3}', b"\xff"])
def test_what_was_asked_for_is_damaged(tmp_path, content):
    paths = RunPaths.at(tmp_path / NAME)
    paths.asked_compression.parent.mkdir(parents=True)
    paths.asked_compression.write_bytes(content)
    with pytest.raises(ShoalError) as refused:
        resume(paths)
    assert (refused.value.code, refused.value.where) == ("SH661", str(paths.asked_compression))
