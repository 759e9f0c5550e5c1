"""The same search on any number of workers, and through any kill: one SHA-256 over all that it decided and found."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest
import yaml

from shoal.errors import ShoalError
from shoal.events import read_events
from shoal.jobs.resume import job_to_resume
from shoal.jobs.run_dir import find
from shoal.jobs.run_index import list_summaries
from shoal.jobs.search.journal import DecidedRow, ForgottenRow, ToldRow, read_rows, rows_of
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.shared_files import file_sizes, total_bytes
from shoal.jobs.search.summary import best_job_text, compare_searches, read_search
from shoal.spec.load import load_job
from shoal.spec.receipt import read_receipt_file
from tests.conftest import long_only
from tests.jobs.fault_injection import processes_of

PROMOTE = {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "budget": "4 trainings", "slots": 3}
HYPERBAND = {"policy": {"kind": "hyperband", "sampler": "random", "factor": 2, "brackets": 2}, "budget": "5 trainings"}
POPULATION = {
    "space": {"optimizer.args.lr": {"low": 1e-4, "high": 1e-1, "log": True}},
    "policy": {"kind": "population", "size": 4, "every": 1, "quantile": 0.5},
    "budget": "8 trainings",
    "slots": 3,
}
POLICIES = {"promote": PROMOTE, "hyperband": HYPERBAND, "population": POPULATION}
SHORT_UNITS = {"evaluate": {"every_steps": 2}}


def told(paths):
    return rows_of(read_rows(paths.journal)[0], ToldRow)


def kept_bytes(outcome):
    return total_bytes(file_sizes(outcome.paths.trial(n)) for n in range(outcome.receipt.trials))


def test_one_and_two_workers_decide_and_find_the_same(search, run, make):
    one, two = search(1), search(2)
    assert one.receipt.search_sha256 == two.receipt.search_sha256
    assert compare_searches(read_search(one.paths), read_search(two.paths)).same
    assert one.receipt.exact is True, one.receipt.why
    assert one.receipt.trials == 4
    stored = read_search(one.paths)
    assert stored.summary.history[-1].value == stored.judge.value(stored.best)
    winner = read_receipt_file(one.paths.trial(one.receipt.winner).receipt).own
    assert (winner.steps, winner.weights_sha256) == (12, one.receipt.weights_sha256)
    assert winner.best["accuracy"] == stored.judge.value(stored.best)
    with pytest.raises(ShoalError) as caught:
        job_to_resume(one.paths.run, [])
    assert caught.value.code == "SH632"


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_the_same_on_any_number_of_workers(policy, search):
    found = [search(workers, search=POLICIES[policy], **SHORT_UNITS) for workers in (1, 2, 3)]
    assert len({outcome.receipt.search_sha256 for outcome in found}) == 1
    assert found[0].receipt.exact is True, found[0].receipt.why
    assert found[0].receipt.winner is not None
    table = read_search(found[0].paths).table
    assert any(decision.start for decision in table.decisions.values()), "no trial was paused and resumed"
    assert any(trial.copy_of for trial in table.trials.values()) == (policy == "population")


@pytest.mark.long
def test_eight_workers_with_eight_slots_decide_and_find_what_one_does(search):
    asked = PROMOTE | {"slots": 8, "budget": "16 trials"}
    one, eight = (search(workers, search=asked, **SHORT_UNITS) for workers in (1, 8))
    assert one.receipt.search_sha256 == eight.receipt.search_sha256
    assert one.receipt.weights_sha256 == eight.receipt.weights_sha256
    assert compare_searches(read_search(one.paths), read_search(eight.paths)).same


@pytest.mark.long
@pytest.mark.parametrize("policy", ["promote", "population"])
def test_killed_workers_change_nothing(policy, search):
    undisturbed = search(2, search=POLICIES[policy], **SHORT_UNITS)
    rng, kills = random.Random(1), []

    def look(progress):
        if len(kills) < 12 and rng.random() < 0.5 and (living := processes_of(progress.paths.root)):
            kills.append(rng.choice(living))
            os.kill(kills[-1], signal.SIGKILL)

    disturbed = search(2, look=look, search=POLICIES[policy], **SHORT_UNITS)
    assert len(kills) >= 4
    assert disturbed.receipt.search_sha256 == undisturbed.receipt.search_sha256


def start_process(job_file, runs, *arguments, workers=2):
    command = [sys.executable, "-m", "shoal", "search", *arguments, "--runs", str(runs), "--json"]
    command += ["--workers", str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=job_file.parent, env=environment)


@pytest.fixture
def job_file(make, job_dir):
    def go(**changes):
        data = make(**changes).dump()
        del data["base_dir"]
        (job_dir / "job.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
        return job_dir / "job.yaml"

    return go


@pytest.mark.long
@pytest.mark.parametrize("policy", ["promote", "population"])
def test_a_search_that_is_killed_again_and_again_goes_on(policy, search, job_file, job_dir):
    """Also its workers are killed while nobody drives them."""
    asked = {"search": POLICIES[policy]} | (SHORT_UNITS if policy == "population" else {})
    undisturbed, rng = search(2, **asked), random.Random(2)
    file, runs = job_file(**asked), job_dir / "killed"
    arguments = [str(file)]
    for kill in range(4):
        process = start_process(file, runs, *arguments)
        for rows, line in enumerate(process.stdout):
            if json.loads(line).get("kind") in ("told", "decided") and rows > kill:
                break
        process.kill()
        process.wait()
        paths = SearchPaths(find("last", runs))
        for pid in processes_of(paths.root)[: rng.randrange(2)]:
            os.kill(pid, signal.SIGKILL)
        arguments = ["resume", "last"]
    process = start_process(file, runs, *arguments)
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0
    receipt = json.loads(lines[-1])
    assert compare_searches(read_search(paths), read_search(undisturbed.paths)).difference == ""
    assert receipt["search_sha256"] == undisturbed.receipt.search_sha256
    assert receipt["starts"] == 5
    assert not processes_of(paths.root)
    numbers = [row.number for row in told(paths)]
    assert len(numbers) == len(set(numbers)) == receipt["decisions"]


@pytest.mark.long
def test_ctrl_c_pauses_everything_and_resume_goes_on(search, resume, make, job_dir):
    undisturbed = search(2, search=PROMOTE)

    asked = []

    def interrupt(progress):
        if len(progress.table.told) >= 2 and not asked:
            asked.append(os.kill(os.getpid(), signal.SIGINT))

    stopped = search(2, look=interrupt, search=PROMOTE)
    assert (stopped.status, stopped.receipt, stopped.exit_code) == ("interrupted", None, 130)
    assert resume(stopped.paths, workers=1).receipt.search_sha256 == undisturbed.receipt.search_sha256


@pytest.mark.long
def test_a_trial_that_fails_is_recorded_and_the_search_goes_on(search):
    wide = {"optimizer.args.lr": [0.01, 1e30], "batch_size": [16, 32]}
    asked = {"space": wide, "policy": {"kind": "full", "sampler": "grid"}}
    outcome, other = (search(workers, search=asked, optimizer={"name": "SGD"}) for workers in (2, 1))
    assert other.receipt.search_sha256 == outcome.receipt.search_sha256
    failed = [row.failure for row in told(outcome.paths) if row.failure]
    assert len(failed) == outcome.receipt.failed == 2
    assert all(failure.startswith("SH403: the loss is") for failure in failed)
    assert outcome.receipt.exact is True
    assert outcome.receipt.changes["optimizer.args.lr"] == 0.01


@pytest.mark.long
def test_values_that_make_no_model_are_recorded(search):
    space = {"model.args.inputs": [64, 63], "optimizer.args.lr": [0.01, 0.001]}
    outcome = search(1, search={"space": space, "policy": {"kind": "full", "sampler": "grid"}})
    trials = read_search(outcome.paths).table.trials.values()
    assert [trial.state for trial in trials] == ["complete", "complete", "failed", "failed"]
    assert [*trials][2].failure.startswith("SH715: a layer expects 63 features and gets 64")


@pytest.mark.long
def test_what_keep_forgets_is_trained_again_to_the_same_bits(search):
    plenty, tight = search(1, search=PROMOTE), search(1, search=PROMOTE | {"keep": "1 KB"})
    rows = read_rows(tight.paths.journal)[0]
    forgotten = {row.trial: rows.index(row) for row in rows_of(rows, ForgottenRow)}
    again = [row for row in rows_of(rows, DecidedRow) if row.start and row.trial in forgotten]
    assert any(rows.index(row) > forgotten[row.trial] for row in again), "none of them was promoted"
    assert tight.receipt.search_sha256 == plenty.receipt.search_sha256
    assert kept_bytes(tight) < kept_bytes(plenty)


@pytest.mark.long
def test_a_population_keeps_what_may_be_copied(search):
    """States that no member can need any more are deleted. The search decides and finds the same."""
    plenty, tight = (search(2, search=POPULATION | {"keep": keep}, **SHORT_UNITS) for keep in ("all", "1 KB"))
    assert tight.receipt.search_sha256 == plenty.receipt.search_sha256
    assert kept_bytes(tight) < kept_bytes(plenty) / 2


@pytest.mark.long
def test_the_best_job_trains_the_winners_weights(search, job_dir, fork_server):
    from shoal.jobs import run_executor

    outcome = search(2, search=PROMOTE)
    (job_dir / "best.yaml").write_text(best_job_text(read_search(outcome.paths)))
    again = run_executor.run(load_job(job_dir / "best.yaml"), runs=job_dir / "again", fork_server=fork_server)
    assert again.receipt.weights_sha256 == outcome.receipt.weights_sha256


@pytest.mark.long
def test_searches_are_listed_and_trials_are_runs(search, job_dir):
    outcome = search(1)
    rows = list_summaries(job_dir / "runs")
    assert [(row["run"], row["status"], row["step"]) for row in rows] == [("small-1", "search finished", 4)]
    trial = find("small-1/trial-2", job_dir / "runs")
    assert {event.kind for event in read_events(trial.events)} >= {"run_started", "finished", "run_ended"}
    assert outcome.paths.trial(2) == trial


@pytest.mark.long
@pytest.mark.parametrize("order", ["virtual", *long_only("clock")])
def test_a_later_search_may_begin_with_the_best_of_an_earlier_one(order, search):
    first = search(1)
    second = search(1, search={"start": [first.paths.name], "order": order})
    trials = read_search(second.paths).table.trials
    assert dict(trials[0].changes) == first.receipt.changes
    assert (second.receipt.exact is True) == (order == "virtual")


@pytest.mark.long
def test_folds_are_the_units_of_a_job_with_folds(search, make):
    data = make().dump()["data"] | {"split": {"kind": "stratified", "folds": 3}}
    found = [search(workers, data=data, search=PROMOTE) for workers in (1, 2)]
    assert found[0].receipt.search_sha256 == found[1].receipt.search_sha256
    assert found[0].receipt.weights_sha256
    assert set(found[0].receipt.values) == {"accuracy", "loss"}
    assert {trial.units for trial in read_search(found[0].paths).table.trials.values()} == {3}


@pytest.mark.long
def test_idle_workers_help_the_stretch_that_the_search_waits_for(search):
    """Every step pauses, so that a trial lasts for some seconds."""
    slow = {"faults": {"pause_probability": 1.0, "pause_s": 0.04}, "steps": 120, "evaluate": {"every_steps": 60}}
    alone, helped = (search(workers, search={"slots": 1, "budget": "2 trials"}, **slow) for workers in (1, 2))
    peaks = [[read_receipt_file(found.paths.trial(n).receipt).own.workers for n in (0, 1)] for found in (alone, helped)]
    assert peaks == [[1, 1], [2, 2]]
    assert helped.receipt.search_sha256 == alone.receipt.search_sha256


@pytest.mark.long
def test_workers_that_a_trial_frees_help_the_others_at_once(search):
    """Two trials at once, the second one ten times as long: it trains alone until the first has ended."""
    slow = {"faults": {"pause_probability": 1.0, "pause_s": 0.04}, "evaluate": {"every_steps": 8}}
    asked = {
        "space": {"steps": [16, 160]},
        "policy": {"kind": "full", "sampler": "grid"},
        "budget": "2 trials",
        "slots": 2,
    }
    alone, helped = (search(workers, search=asked, **slow) for workers in (1, 2))
    short, long = (list(read_events(helped.paths.trial(n).events)) for n in (0, 1))
    together = [event for event in long if event.kind == "view" and len(event.fields.get("carries", ())) == 2]
    assert together, "nobody helped"
    done = max(event.t for event in short if event.kind == "evaluated")
    ended = max(event.t for event in long if event.kind == "evaluated")
    assert done < together[0].t < ended
    assert helped.receipt.search_sha256 == alone.receipt.search_sha256
