"""Many workers give the bits of one, whatever happens to them."""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from shoal.checkpoint.export import load_weights
from shoal.checkpoint.manifest import list_manifests
from shoal.events import read
from shoal.fleet.contact import read_contact
from shoal.jobs import drive
from shoal.spec.load import make_job
from shoal.spec.paths import RunPaths
from shoal.wire.door import call_host
from shoal.wire.rows import pack
from tests.conftest import CNN, MLP
from tests.jobs.disturbed import (
    JOBS,
    assert_nothing_left,
    assert_same,
    calm,
    fired,
    holdings,
    in_time,
    processes_of,
    rows,
    script,
)
from tests.jobs.nuisance import Nuisance
from tests.jobs.test_exact import Command

RESTARTS = {"kind": "local", "restarts": 9}


@pytest.fixture(autouse=True)
def soon():
    with in_time(60):
        yield


# ---- any number of workers ----


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_any_number_of_workers_gives_the_same_bits(name, workers, run):
    outcome = run(JOBS[name], workers=workers, lanes=8)
    assert_same(outcome, calm(run, JOBS[name], lanes=8))
    assert outcome.receipt.workers == workers
    assert_nothing_left(outcome)


@pytest.mark.parametrize("lanes", [3, 5, 7])
def test_lanes_that_are_no_power_of_two(lanes, run):
    assert_same(run(JOBS["cnn"], workers=3, lanes=lanes), calm(run, JOBS["cnn"], lanes=lanes))


def test_half_precision(run):
    job = MLP | {"precision": "bf16", "steps": 6, "lanes": 4}
    assert_same(run(job, workers=3), calm(run, job))


def test_short_last_batches_and_several_epochs(run):
    """1438 samples in batches of 400: the last has 238, and some of its 7 lanes fewer than others."""
    job = {k: v for k, v in CNN.items() if k not in ("steps", "evaluate")}
    job |= {"epochs": 3, "batch_size": 400, "lanes": 7}
    outcome = run(job, workers=4)
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.samples_seen == 3 * 1438


def test_workers_without_samples(run):
    """The last batch of 1438 samples has 2, for 8 lanes."""
    job = MLP | {"batch_size": 359, "lanes": 8, "steps": 10}
    assert_same(run(job, workers=8), calm(run, job))


def test_a_loss_with_a_divisor_of_its_own(run):
    job = {k: v for k, v in MLP.items() if k not in ("model", "loss", "metrics")}
    job |= {"task": "models.py:TokenTask", "lanes": 5, "steps": 20}
    assert_same(run(job, workers=3), calm(run, job))


# ---- faults ----

SCRIPTS = {
    "in compute": ["kill worker 0 at step 9 in compute"],
    "in data": ["kill worker 2 at step 9 in data"],
    "in exchange": ["kill worker 2 at step 7 in exchange"],
    "in the middle of an exchange": ["kill worker 1 at step 7 in exchange after 1 ms"],
    "before applying": ["kill worker 1 at step 6 while applying"],
    "all but one before applying": [f"kill worker {n} at step 6 while applying" for n in (0, 1)],
    "after the commit": ["kill worker 0 at step 6 in telling"],
    "the first step": ["kill worker 0 at step 0 in compute"],
    "before the first step": ["kill worker 1 while joining"],
    "the last step": ["kill worker 0 at step 13 in exchange", "kill worker 2 at step 13 in exchange after 1 ms"],
    "after the last step": ["kill worker 1 at step 14 in telling"],
    "in evaluation": ["kill worker 1 at step 10 in evaluation"],
    "the saver in evaluation": ["kill worker 0 at step 10 in evaluation"],
    "in the gathering of an evaluation": ["kill worker 1 at step 10 in exchange"],
    "in export": ["kill worker 0 in export"],
    "in export, twice": ["kill worker 0 in export", "kill worker 1 in export"],
    "while others wait for the export": ["kill worker 0 in export", "kill worker 2 at step 14 in exchange after 1 ms"],
    "two at once": ["kill worker 0 at step 7 in compute", "kill worker 1 at step 7 in compute"],
    "one after the other": [f"kill worker {n} at step {4 + n} in exchange" for n in range(5)],
    "in building": ["kill worker 1 at step 4 in compute", "kill worker 3 at step 0 in building"],
    "a newcomer while it follows": ["kill worker 2 at step 4 in compute", "kill worker 3 in following"],
    "a newcomer when it joins": ["kill worker 2 at step 4 in compute", "kill worker 3 while joining"],
    "whom newcomers follow": ["kill worker 2 at step 4 in compute", "kill worker 1 while feeding"],
    "whom they follow, then a newcomer that catches up": [
        "kill worker 2 at step 4 in compute", "kill worker 1 while feeding", "kill worker 3 while catching up",
    ],
    "in a save": ["kill worker 0 in save"],
    "in the middle of a save": ["kill worker 0 in save after 2 ms", "kill worker 1 in save after 2 ms"],
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_kills(name, run, place):
    """Steps are slow enough for newcomers to come in."""
    job = JOBS["gpt"] | {"evaluate": {"every_steps": 5, "batch_size": 4}, "lanes": 6}
    lines = SCRIPTS[name]
    saves = {"every": "3 steps" if "save" in name else "never", "keep_best": 0}
    watch = script(place, *lines)
    if any("worker 3" in line or "feeding" in line for line in lines):
        watch.append({"name": "pace.py:Dawdle", "args": {"seconds": 0.2}})
    outcome = run(job, workers=3, watch=watch, engine=RESTARTS, checkpoint=saves)
    assert_same(outcome, calm(run, job))
    assert fired(place) == set(lines), "else the test says nothing"
    assert not rows(outcome, "resumed"), "somebody was alive: its memory counts, not a file"
    assert_nothing_left(outcome)


def test_many_kills_leave_no_memory_behind(run, place):
    """Many views later a worker has its own arena and those of two peers, and few sockets."""
    seen = []

    def look(paths, event, picture):
        if event.kind == "evaluated" and event.step == 300:
            seen.append(holdings(picture.workers[event.who].pid))

    lines = [f"kill worker {n} in exchange after 20 ms" for n in range(1, 7)]
    job = JOBS["mlp"] | {"evaluate": {"every_steps": 300}, "lanes": 6, "steps": 310}
    outcome = run(job, look=look, workers=3, watch=script(place, *lines), engine=RESTARTS)
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.deaths_survived >= 4
    assert seen[0]["mapped"] <= 3
    assert seen[0]["arenas"] <= 4, "Python keeps a descriptor for each that it maps"
    assert seen[0]["sockets"] <= 20


def test_when_all_die_the_checkpoint_counts(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    lines = ["delay worker 0 at step 11 in data by 2000 ms", "kill all at step 12"]  # a save takes its time
    outcome = run(job, workers=3, watch=script(place, *lines), engine=RESTARTS, checkpoint={"every": "5 steps"})
    assert_same(outcome, calm(run, job))
    (row,) = rows(outcome, "resumed")
    assert row.step in (5, 10), "the last save may have been in the making"
    assert outcome.receipt.deaths_survived == 3


def test_when_all_die_and_nothing_is_saved_it_begins_again(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watch=script(place, "kill all at step 12"), engine=RESTARTS)
    assert_same(outcome, calm(run, job))
    assert not rows(outcome, "resumed")


def test_nothing_is_left_of_a_run_that_failed(run, place):
    kill = script(place, "kill all at step 5")
    outcome = run(JOBS["mlp"], workers=3, lanes=6, watch=kill, engine={"kind": "local", "restarts": 0})
    assert outcome.error.code == "SH603"
    assert_nothing_left(outcome)


def test_an_error_in_the_model_ends_all_workers(run):
    outcome = run(JOBS["mlp"], workers=3, lanes=6, model={"name": "models.py:Sinks"})
    assert outcome.error.code == "SH403"
    assert_nothing_left(outcome)


# ---- frozen, hanging, slow ----


def test_a_frozen_worker_is_put_out_and_replaced(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watch=script(place, "freeze worker 1 at step 5 in data"))
    assert_same(outcome, calm(run, job))
    (row,) = rows(outcome, "put_out")
    assert row["worker"] == "worker-1"
    assert "frozen" in row["reason"]
    assert outcome.receipt.deaths_survived == 1


def test_a_worker_that_is_frozen_before_it_trains_is_put_out(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watch=script(place, "freeze worker 1 in building"))
    assert_same(outcome, calm(run, job))
    assert [row["worker"] for row in rows(outcome, "put_out")] == ["worker-1"]


def test_a_newcomer_that_is_frozen_is_put_out(run, place):
    """While the others train."""
    job = JOBS["mlp"] | {"lanes": 6, "steps": 60}
    lines = ["kill worker 1 at step 5 in compute", "freeze worker 3 in building"]
    dawdle = {"name": "pace.py:Dawdle", "args": {"seconds": 0.1}}
    outcome = run(job, workers=3, watch=[*script(place, *lines), dawdle])
    assert_same(outcome, calm(run, job))
    assert [row["worker"] for row in rows(outcome, "put_out")] == ["worker-3"]


def test_a_stop_finds_a_frozen_worker(run, resume, place):
    """The others cannot come to the next boundary without it."""

    def stop(paths, event, picture):
        if any("freeze" in line for line in fired(place)) and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = []
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, look=stop, workers=3, watch=script(place, "freeze worker 1 at step 5 in data"))
    assert outcome.status == "terminated"
    assert outcome.saved_step == 5
    assert_nothing_left(outcome)
    assert_same(resume(outcome.paths), calm(run, job))


def test_a_stop_at_which_the_saver_dies_loses_nothing(run, resume, place):
    def stop(paths, event, picture):
        if fired(place) and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = []
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, look=stop, workers=3, watch=script(place, "freeze worker 0 at step 15 in data"))
    assert outcome.status == "terminated"
    assert outcome.saved_step == 15
    assert_same(resume(outcome.paths), calm(run, job))


def test_a_hanging_worker_is_named_with_step_phase_and_line(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watch=script(place, "hang worker 1 at step 5 in compute"))
    assert_same(outcome, calm(run, job))
    (row,) = rows(outcome, "put_out")
    assert row["worker"] == "worker-1"
    assert "hangs in compute at step 5" in row["reason"]
    assert "faults.py" in row["reason"]


def test_who_is_slow_at_first_is_not_put_out(run, place):
    """A first batch and a first evaluation that take longer than a hang may."""
    job = JOBS["mlp"] | {"lanes": 6, "evaluate": {"every_steps": 12, "batch_size": 16}}
    lines = ["delay worker 1 at step 0 in data by 4000 ms", "delay worker 2 at step 12 in evaluation by 4000 ms"]
    outcome = run(job, workers=3, watch=script(place, *lines))
    assert_same(outcome, calm(run, job))
    assert set(lines) == fired(place)
    assert not rows(outcome, "put_out")
    assert outcome.receipt.deaths_survived == 0


# ---- coming and going ----


def test_a_worker_that_is_terminated_leaves_without_loss(run, place):
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    outcome = run(job, workers=3, watch=script(place, "terminate worker 0 at step 5 in compute"))
    assert_same(outcome, calm(run, job))
    assert [row.who for row in rows(outcome, "left") if row["why"] == "asked to leave"] == ["worker-0"]
    assert not rows(outcome, "stopped"), "a step was discarded"
    assert outcome.receipt.deaths_survived == 0


def test_all_are_terminated_at_once(run, place):
    """They stay until others have what they hold."""
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    outcome = run(job, workers=3, watch=script(place, "terminate all at step 5 in compute"))
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.deaths_survived == 0
    assert not rows(outcome, "resumed")


def test_a_stop_before_the_workers_are_there(run):
    def stop(paths, event, picture):
        if event.kind == "run_started":
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run(JOBS["mlp"], look=stop, workers=3, lanes=6)
    assert outcome.status == "interrupted"
    assert_nothing_left(outcome)


def test_folds_side_by_side_with_two_workers_each(run):
    def folds(parallel):
        split = {"kind": "stratified", "folds": 3, "parallel": parallel}
        return JOBS["mlp"] | {"lanes": 4, "data": MLP["data"] | {"split": split}}

    alone = [one.receipt.weights_sha256 for one in run(folds(1)).folds]
    assert [one.receipt.weights_sha256 for one in run(folds(3), workers=2).folds] == alone


def test_two_runs_side_by_side(run, place):
    job = JOBS["mlp"] | {"lanes": 4, "steps": 200}
    other = make_job(job | {"workers": 2}, base_dir=str(place))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(drive.run, other, runs=place / "beside")
        outcome = run(job, workers=2)
        assert_same(outcome, calm(run, job))
        assert_same(beside.result(), calm(run, job))


# ---- without a driver ----


@pytest.fixture
def long_job(place):
    job = JOBS["mlp"] | {"steps": 500, "lanes": 6, "workers": 3, "checkpoint": {"every": "never", "keep_best": 0}}
    (place / "job.yaml").write_text(yaml.safe_dump(job))
    return job


def lose_driver(place):
    """A driver in a process of its own, killed while its three workers train. The run's paths and their processes."""
    command = Command(place, "run", str(place / "job.yaml"), "--json")
    started = {}
    joined = 0
    while joined < 3:
        row = json.loads(command.process.stdout.readline())
        joined += row["kind"] == "joined"
        if row["kind"] == "worker_started":
            started[row["who"]] = row["pid"]
    os.kill(command.process.pid, signal.SIGKILL)
    command.end()
    return RunPaths.at(place / "runs" / "mlp-1"), started


@pytest.mark.parametrize("killed", [[], ["worker-0"], ["worker-0", "worker-2"]])
def test_workers_outlive_their_driver(killed, long_job, place, run, resume):
    paths, started = lose_driver(place)
    for name in killed:
        os.kill(started[name], signal.SIGKILL)
    outcome = resume(paths)
    assert_same(outcome, calm(run, long_job))
    assert not rows(outcome, "resumed")
    again = [row for row in rows(outcome, "worker_started") if row["pid"] not in started.values()]
    assert len(again) <= len(killed), "who was alive was taken over"
    after = max(row.t for row in rows(outcome, "run_started"))
    carried = {row.who for row in rows(outcome, "joined") if row.t > after}
    assert set(started) - set(killed) <= carried
    assert_nothing_left(outcome)


def test_workers_without_a_driver_save_and_leave(long_job, place, run, resume):
    (place / "job.yaml").write_text(yaml.safe_dump(long_job | {"steps": 100_000, "engine": {"patience_s": 0.5}}))
    paths, started = lose_driver(place)
    deadline = time.monotonic() + 30
    while processes_of(paths.root) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(paths.root)
    left = [row for row in read(paths.events) if row.kind == "left"]
    assert {row.who for row in left} == set(started)
    assert all("no driver" in row["why"] for row in left)
    assert len({row.step for row in left}) == 1, "they agree where they stop"
    assert max(manifest.step for manifest in list_manifests(paths.checkpoints)) == left[0].step


# ---- exactly once ----


@pytest.mark.parametrize("seed", range(3))
def test_every_sample_is_seen_exactly_once_per_epoch(seed, run, place):
    """Weights that count: 512 samples, two epochs and a half, kills wherever the seed says."""
    rng = random.Random(seed)
    phases = ("in data", "in compute", "in exchange", "while applying", "in telling", "in exchange after 1 ms")
    lines = [f"kill worker {n} at step {rng.randint(0, 19)} {rng.choice(phases)}" for n in range(6)]
    (place / "samples.csv").write_text("number,y\n" + "".join(f"{n},0\n" for n in range(512)))
    job = {
        "name": "tally",
        "task": {"name": "models.py:Tally", "args": {"samples": 512}},
        "optimizer": {"name": "SGD", "args": {"lr": 64.0}},
        "data": {"source": {"kind": "csv", "path": "samples.csv", "target": "y"}, "split": "none"},
        "batch_size": 64,
        "steps": 20,
        "lanes": 5,
        "export": [],
        "checkpoint": {"every": "never"},
    }
    outcome = run(job, workers=4, watch=script(place, *lines), engine=RESTARTS)
    assert outcome.status == "finished", outcome.error
    weights = load_weights(outcome.paths.model)
    times = weights["times"].long()
    assert sorted(times.tolist()) == [2] * 256 + [3] * 256, f"{lines}"
    assert int(weights["total"]) == sum(number * int(count) for number, count in enumerate(times))


# ---- noise ----


def test_strangers_and_noise_change_nothing(run, place):
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    nuisance = Nuisance()
    outcome = run(job, look=nuisance.look, workers=3)
    nuisance.stop()
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.deaths_survived == 0
    assert not rows(outcome, "stopped")
    assert nuisance.done > 20
    assert nuisance.ports > 3, "the driver's, and a worker's"
    assert not nuisance.let_in


def test_a_step_that_does_not_count_leaves_running_statistics_as_they_were(run, place):
    """The others had moved theirs when it died; the step is done again from where it began."""
    lines = ["kill worker 1 at step 7 in compute", "kill worker 2 at step 15 in compute"]
    outcome = run(JOBS["cnn"], workers=3, lanes=6, watch=script(place, *lines))
    assert rows(outcome, "stopped")
    assert_same(outcome, calm(run, JOBS["cnn"], lanes=6))


NONSENSE = [("standing", {}), ("standing", {"view": "x", "position": 3}), ("standing", {"view": 99, "position": "far"}),
            ("beat", {"lane_s": [1]}), ("event", {"row": 7}), ("drain", {}), ("what", {})]  # fmt: skip


def test_one_that_knows_the_token_and_talks_nonsense_is_dropped(run, place):
    """As a worker and as a user. Nobody else notices."""

    def babble(paths, event, picture):
        if event.kind == "joined" and not links:
            contact = read_contact(paths.control)
            for kind, fields in NONSENSE:
                for role in ({"role": "user"}, worker):
                    link = call_host(contact.host, contact.port, contact.token, json.dumps(role).encode())
                    link.sendall(pack(kind, fields))
                    links.append(link)

    links = []
    address = {"host": "127.0.0.1", "port": 1, "host_id": "elsewhere", "unix": ""}
    worker = {"role": "worker", "seat": None, "local": False, "pid": 1, "host": "h", "address": address, "view": 0,
              "training": False}  # fmt: skip
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    outcome = run(job, look=babble, workers=2)
    assert len(links) == 2 * len(NONSENSE)
    for link in links:
        link.close()
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.weights_sha256 == calm(run, job).weights_sha256


def test_the_token_is_told_nowhere(run, place, capfd):
    outcome = run(JOBS["mlp"], workers=3, lanes=6, watch=script(place, "kill worker 1 at step 5 in exchange"))
    token = json.loads(outcome.paths.control.read_text())["token"]
    assert outcome.paths.control.stat().st_mode & 0o077 == 0
    files = [file for file in outcome.paths.root.rglob("*") if file.is_file() and file != outcome.paths.control]
    assert len(files) > 8
    assert not [file for file in files if token.encode() in file.read_bytes()]
    assert token not in "".join(capfd.readouterr())
