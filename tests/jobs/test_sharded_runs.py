"""Jobs whose model is spread over several workers: real workers, the real loop.

The bound is that of tests/sharding/test_training.py: a layout adds the same products in another order, so after
n steps every tensor is within n * 64 units in the last place (2^-24) of its largest value. Jobs here train with SGD,
where an update is proportional to the gradient. What is said of bits is an equality of SHA-256.
"""

import json
import os
import random
import signal
import threading

import pytest
import torch
import yaml

from shoal import api
from shoal.checkpoint.export import load_weights
from shoal.checkpoint.manifest import blob_path, list_manifests
from shoal.checkpoint.sha256 import weights_sha256
from shoal.errors import ShoalError
from shoal.events import read_events, replay
from shoal.jobs.commands import scale
from shoal.spec.run_paths import RunPaths
from shoal.spec.sharding import INEXACT_LAYOUT, INEXACT_MICROBATCHES
from shoal.terminal.notes import describe_layout, note_lines
from tests.conftest import CNN, GPT, MLP, long_only
from tests.jobs.fault_injection import (
    assert_nothing_left,
    events_of_kind,
    fault_script,
    fired_faults,
    open_resources,
)
from tests.jobs.test_bit_exact_resume import ShoalCommand

ROUNDING = 2.0**-24 * 64
STEPS = 12
FSDP = {"kind": "fsdp"}
TENSOR = {"kind": "tensor", "patterns": "mlp"}
PIPELINE = {"kind": "pipeline", "microbatches": 1}  # else dropout draws for each microbatch
KINDS = {"fsdp": FSDP, "tensor": TENSOR, "pipeline": PIPELINE}

JOB = MLP | {
    "name": "sharded",
    "model": {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10, "depth": 2}},
    "steps": STEPS,
    "evaluate": {"every_steps": 5},
    "schedule": {"name": "CosineAnnealingLR", "args": {"T_max": "steps"}},
    "clip": {"norm": 1.0},
}


def with_size(shard, size):
    return KINDS[shard] | {"size": size}


def relative_error(found, expected):
    """The largest difference, in parts of the tensor's largest value."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, value in expected.items():
        if not torch.equal(found[name], value):
            scale = value.abs().max().double()
            worst = max(worst, float((found[name].double() - value.double()).abs().max() / scale))
    return worst


def finished(outcome):
    assert outcome.status == "finished", outcome.error or outcome.status
    assert_nothing_left(outcome)
    return outcome.receipt


@pytest.mark.parametrize(
    ("shard", "size", "workers"),
    [
        *[("fsdp", 2, 2), ("tensor", 2, 2), ("pipeline", 2, 2)],
        *long_only(
            ("fsdp", 2, 4), ("pipeline", 4, 4), ("fsdp", 4, 4), ("tensor", 4, 4), ("tensor", 2, 4), ("pipeline", 2, 4)
        ),
    ],
)
def test_the_result_is_that_of_one_process_to_the_accuracy_of_float32(shard, size, workers, run):
    outcome = run(JOB, workers=workers, shard=with_size(shard, size))
    receipt = finished(outcome)
    one = run(JOB, runs="one")
    assert relative_error(load_weights(outcome.paths.model), load_weights(one.paths.model)) < ROUNDING * STEPS
    assert receipt.metrics == pytest.approx(one.receipt.metrics, rel=ROUNDING * STEPS)
    assert (receipt.steps, receipt.samples_seen) == (one.receipt.steps, one.receipt.samples_seen)
    assert receipt.parameters == one.receipt.parameters
    assert not receipt.exact
    assert f"{shard} over {size}" in receipt.why
    assert f"{shard} over {size}, {workers // size} replica" in describe_layout(
        replay(read_events(outcome.paths.events)).layout
    )


@pytest.mark.parametrize(
    ("shard", "size", "workers"), [("fsdp", 2, 4), *long_only(("tensor", 2, 4), ("pipeline", 2, 2))]
)
def test_the_same_layout_gives_the_same_bits(shard, size, workers, run):
    job = JOB | {"optimizer": {"name": "AdamW", "args": {"lr": 0.003}}}
    one, other = (finished(run(job, workers=workers, shard=with_size(shard, size))) for _ in range(2))
    assert one.weights_sha256 == other.weights_sha256
    assert one.state_sha256 == other.state_sha256
    assert one.metrics == other.metrics


# ---- other layouts ----

STILL = {"optimizer": {"name": "SGD", "args": {"lr": 0.0}}, "steps": 1, "schedule": None}


@pytest.mark.long
def test_weights_go_from_layout_to_layout_as_they_are(run):
    """From fsdp on four to one process, to tensor on two, to pipeline on two: each starts from the one before."""
    outcome = run(JOB, workers=4, shard=FSDP)
    sha256 = finished(outcome).weights_sha256
    for changes in (
        {},
        {"workers": 2, "shard": TENSOR},
        {"workers": 2, "shard": PIPELINE},
        {"shard": {"kind": "none"}},
    ):
        outcome = run(JOB | STILL, init_from={"path": str(outcome.paths.root)}, **changes)
        assert finished(outcome).weights_sha256 == sha256


def test_a_run_goes_on_in_any_other_layout(run, resume, job_dir):
    """All workers are killed again and again, and each time others go on from the checkpoint."""
    lines = [f"kill all at step {step}" for step in (4, 7, 10)]
    how = {
        "elastic": {"restarts": 0},
        "checkpoint": {"every": "1 step"},
        "watchers": fault_script(job_dir, *lines),
    }
    outcome = run(JOB, workers=4, shard=FSDP, **how)
    for sets in (["shard=none", "workers=1"], ["shard={kind: tensor, patterns: mlp}", "workers=2"]):
        assert outcome.error.code == "SH603"
        outcome = resume(outcome.paths, sets=sets)
    outcome = resume(outcome.paths, sets=["shard={kind: pipeline, microbatches: 1}", "workers=2"])
    finished(outcome)
    assert fired_faults(job_dir) == set(lines)
    assert [row.step > 0 for row in events_of_kind(outcome, "resumed")] == [True] * 3
    assert (
        relative_error(load_weights(outcome.paths.model), load_weights(run(JOB, runs="one").paths.model))
        < ROUNDING * STEPS
    )


def test_a_damaged_checkpoint_is_passed_over(run, resume, job_dir):
    """One worker finds the damage, and all go on from the one before."""
    how = {"elastic": {"restarts": 0}, "checkpoint": {"every": "2 steps", "keep": 3, "keep_best": 0}}
    outcome = run(JOB, workers=2, shard=FSDP, watchers=fault_script(job_dir, "kill all at step 9"), **how)
    newest, *older = list_manifests(outcome.paths.checkpoints)
    own = set(newest.blobs) - {blob for manifest in older for blob in manifest.blobs}
    blob = outcome.paths.checkpoints / blob_path(min(own))
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    outcome = resume(outcome.paths)
    receipt = finished(outcome)
    assert [row.step for row in events_of_kind(outcome, "checkpoint_invalid")] == [newest.step]
    assert [row.step for row in events_of_kind(outcome, "resumed")] == [older[0].step]
    assert receipt.weights_sha256 == sharded_reference(run, "fsdp", 2).weights_sha256


def test_a_run_that_goes_on_trains_what_it_trained(run, resume, job_dir):
    how = {"elastic": {"restarts": 0}, "watchers": fault_script(job_dir, "kill all at step 4")}
    outcome = run(JOB, workers=2, shard=FSDP, **how)
    with pytest.raises(ShoalError, match="something else"):
        resume(outcome.paths, sets=["workers=2", "batch_size=10"])


# ---- deaths ----

RESTARTS = {"restarts": 9}
SAVES = {"every": "4 steps", "keep_best": 0}
UNSAVED = {"every": "never", "keep_best": 0}
_calm = {}


def sharded_reference(run, shard, workers, size=2):
    """The receipt of the same layout without faults."""
    if (shard, workers, size) not in _calm:
        _calm[shard, workers, size] = finished(run(JOB, runs="calm", workers=workers, shard=with_size(shard, size)))
    return _calm[shard, workers, size]


SCRIPTS = {
    "in the model": ["kill worker 1 at step 6 in together"],
    "in the model of who saves": ["kill worker 0 at step 6 in together"],
    "in the first step": ["kill worker 1 at step 0 in together"],
    "in a vote": ["kill worker 1 at step 6 in exchange after 1 ms"],
    "after a step": ["kill worker 0 at step 6 in telling"],
    "in an evaluation": ["kill worker 1 at step 10 in exchange"],
    "in a save": ["kill worker 1 at step 8 in save"],
    "in the save of who leads": ["kill worker 0 at step 8 in save after 1 ms"],
    "in building": ["kill worker 0 at step 0 in building"],
    "in export": ["kill worker 0 in export"],
    "one after the other": [f"kill worker {n} at step {3 + 2 * n} in together" for n in range(4)],
    "who comes for another": ["kill worker 1 at step 6 in together", "kill worker 2 while mirroring"],
    "all": ["kill all at step 9"],
}
MANY = ["in the first step", "after a step", "in a save", "in building", "in export", "in an evaluation"]


@pytest.mark.parametrize("name", [*long_only(*MANY), *(name for name in SCRIPTS if name not in MANY)])
@pytest.mark.parametrize("shard", ["fsdp", *long_only("tensor", "pipeline")])
def test_a_replica_is_made_whole_again(name, shard, run, job_dir):
    """By a worker that comes for the one that died: the layout is the same, and so are the bits. A neighbour has a
    copy of what died with it, unless both are gone."""
    receipt = disturbed(run, job_dir, name, with_size(shard, 2))
    if name not in ("all", "in building", "in the first step"):
        assert receipt.redone == 0


@pytest.mark.parametrize("name", ["in the model", "in the save of who leads", *long_only(*SCRIPTS)])
@pytest.mark.parametrize("shard", ["pipeline", *long_only("fsdp", "tensor")])
def test_without_shard_backups_a_replica_is_restored_from_the_checkpoint(name, shard, run, job_dir):
    disturbed(run, job_dir, name, with_size(shard, 2) | {"mirror": False})


BY_THREE = ["kill worker 1 at step 4 in together", "kill worker 0 at step 7 in exchange after 1 ms"]


@pytest.mark.parametrize("shard", ["pipeline", *long_only("fsdp", "tensor")])
def test_three_keep_copies_of_each_other(shard, run, job_dir):
    receipt = disturbed(run, job_dir, BY_THREE, with_size(shard, 3))
    assert (receipt.redone, receipt.deaths_survived) == (0, 2)


def disturbed(run, job_dir, name, shard):
    lines, size = SCRIPTS[name] if isinstance(name, str) else name, shard["size"]
    outcome = run(
        JOB, workers=size, shard=shard, watchers=fault_script(job_dir, *lines), elastic=RESTARTS, checkpoint=SAVES
    )
    receipt = finished(outcome)
    assert fired_faults(job_dir) == set(lines), "else the test says nothing"
    expected = sharded_reference(run, shard["kind"], size, size)
    assert receipt.weights_sha256 == expected.weights_sha256
    assert receipt.state_sha256 == expected.state_sha256
    assert receipt.metrics == expected.metrics
    return receipt


@pytest.mark.parametrize("shard", ["fsdp", *long_only("tensor", "pipeline")])
def test_groups_of_earlier_views_leave_no_threads_and_descriptors(shard, run, job_dir):
    seen = []

    def look(paths, event, run_state):
        if event.kind == "evaluated":
            seen.append(open_resources(run_state.workers["worker-0"].pid))

    lines = [f"kill worker {n} at step {3 * n + 1} in together" for n in (1, 2, 3)]
    outcome = run(
        JOB | {"evaluate": {"every_steps": 3}},
        look=look,
        workers=2,
        shard=with_size(shard, 2),
        watchers=fault_script(job_dir, *lines),
        elastic=RESTARTS,
    )
    assert finished(outcome).deaths_survived == 3
    first, last = seen[0], seen[-1]  # a group has at least 4 descriptors and 3 threads
    assert last["descriptors"] <= first["descriptors"] + 4, seen
    assert last["threads"] <= first["threads"] + 2, seen


PHASES = ("in together", "in exchange", "in exchange after 1 ms", "in together after 2 ms", "in telling", "in data")


@pytest.mark.parametrize("seed", long_only(*range(9)))
def test_kills_at_random(seed, run, job_dir):
    """Wherever members are: parts of two steps are never mixed, else the bits would be others."""
    rng = random.Random(seed)
    lines = {f"kill worker {n} at step {rng.randint(0, 11)} {rng.choice(PHASES)}" for n in range(6)}
    shard = with_size(rng.choice(sorted(KINDS)), 2) | {"mirror": rng.choice([None, None, False])}
    outcome = run(
        JOB, workers=2, shard=shard, watchers=fault_script(job_dir, *lines), elastic=RESTARTS, checkpoint=SAVES
    )
    expected = sharded_reference(run, shard["kind"], 2)
    assert finished(outcome).weights_sha256 == expected.weights_sha256, lines
    assert outcome.receipt.state_sha256 == expected.state_sha256
    assert outcome.receipt.metrics == expected.metrics


@pytest.mark.parametrize("seed", long_only(*range(4)))
def test_kills_at_random_of_several_replicas(seed, run, job_dir):
    rng = random.Random(seed)
    lines = {f"kill worker {n} at step {rng.randint(0, 11)} {rng.choice(PHASES)}" for n in range(7)}
    shard = with_size(rng.choice(sorted(KINDS)), 2)
    outcome = run(
        JOB, workers=4, shard=shard, watchers=fault_script(job_dir, *lines), elastic=RESTARTS, checkpoint=SAVES
    )
    finished(outcome)
    assert (
        relative_error(load_weights(outcome.paths.model), load_weights(run(JOB, runs="one").paths.model))
        < ROUNDING * STEPS
    )


OTHERS = [
    ("fsdp", "kill worker 0 at step 5 in exchange after 1 ms"),
    ("tensor", "kill worker 2 at step 6 in together"),
    ("pipeline", "kill worker 3 at step 6 in together"),
]


@pytest.mark.parametrize(("shard", "line"), [("fsdp", "kill worker 1 at step 6 in together"), *long_only(*OTHERS)])
def test_another_replica_has_what_died(shard, line, run, job_dir):
    """The rest go on at once as one replica, from memory; when there are enough, they are two again."""
    delay = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.1}}
    outcome = run(JOB, workers=4, shard=with_size(shard, 2), watchers=[*fault_script(job_dir, line), delay])
    receipt = finished(outcome)
    assert fired_faults(job_dir) == {line}
    assert (receipt.redone, receipt.deaths_survived) == (0, 1)
    assert not events_of_kind(outcome, "resumed")
    assert [row["replicas"] for row in events_of_kind(outcome, "layout")] == [2, 1, 2]
    assert (
        relative_error(load_weights(outcome.paths.model), load_weights(run(JOB, runs="one").paths.model))
        < ROUNDING * STEPS
    )


def test_a_death_costs_the_steps_since_the_last_save_and_the_receipt_says_so(run, job_dir):
    line = "kill worker 1 at step 7 in together"
    outcome = run(
        JOB, workers=2, shard=FSDP | {"mirror": False}, watchers=fault_script(job_dir, line), checkpoint=SAVES
    )
    receipt = finished(outcome)
    assert (receipt.redone, receipt.deaths_survived) == (3, 1)
    assert [row.step for row in events_of_kind(outcome, "resumed")] == [4]


@pytest.mark.parametrize("mirror", [False, *long_only(None)])
def test_steps_that_died_with_everybody_are_counted(mirror, run, job_dir):
    """Nothing was saved yet: all are made again."""
    line = "kill all at step 9"
    shard, watchers = with_size("fsdp", 2) | {"mirror": mirror}, [*fault_script(job_dir, line), *slow_steps(0.06)]
    outcome = run(JOB, workers=2, shard=shard, watchers=watchers, elastic=RESTARTS, checkpoint=UNSAVED)
    receipt = finished(outcome)
    told = max(row.step for row in events_of_kind(outcome, "step") if row.who == "worker-0")
    assert receipt.redone == told > 0
    assert receipt.weights_sha256 == sharded_reference(run, "fsdp", 2).weights_sha256


@pytest.mark.parametrize("seat", [0, *long_only(1)])
def test_who_leaves_takes_nothing_along(seat, run, job_dir):
    """Not even the one who saves, whose last save takes its time."""
    lines = [f"terminate worker {seat} at step 6 in together", "delay worker 0 while writing by 1500 ms"]
    shard, watchers = with_size("fsdp", 2) | {"mirror": False}, [*fault_script(job_dir, *lines), *slow_steps(0.1)]
    outcome = run(JOB, workers=2, shard=shard, watchers=watchers, checkpoint=UNSAVED)
    receipt = finished(outcome)
    assert fired_faults(job_dir) == set(lines)
    assert (receipt.redone, receipt.deaths_survived) == (0, 0)
    assert [row.who for row in events_of_kind(outcome, "left")] == [f"worker-{seat}"]
    assert receipt.weights_sha256 == sharded_reference(run, "fsdp", 2).weights_sha256


@pytest.mark.long
def test_who_leaves_stays_until_a_save_succeeds(run, job_dir):
    job = JOB | {"model": {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10, "depth": 2, "hidden": 256}}}
    job |= {"steps": 16, "checkpoint": UNSAVED}
    full = {"name": "faults.py:FileSizeLimit", "args": {"most_bytes": 100_000, "until": 7}}
    line, shard = "terminate worker 0 at step 2 in together", with_size("fsdp", 2) | {"mirror": False}
    outcome = run(job, workers=2, shard=shard, watchers=[*fault_script(job_dir, line), full, *slow_steps(0.4)])
    receipt = finished(outcome)
    assert fired_faults(job_dir) == {line}
    assert events_of_kind(outcome, "save_failed"), "else the test says nothing"
    assert (receipt.redone, receipt.deaths_survived) == (0, 0)
    assert [row.who for row in events_of_kind(outcome, "left")] == ["worker-0"]
    assert receipt.weights_sha256 == finished(run(job, runs="calm", workers=2, shard=shard)).weights_sha256


@pytest.mark.parametrize("act", ["freeze", *long_only("terminate")])
def test_one_that_freezes_or_must_leave_is_replaced(act, run, job_dir):
    lines = [f"{act} worker 1 at step 6 in together"]
    delay = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.1}}
    outcome = run(JOB, workers=2, shard=with_size("fsdp", 2), watchers=[*fault_script(job_dir, *lines), delay])
    receipt = finished(outcome)
    assert fired_faults(job_dir) == set(lines)
    assert receipt.weights_sha256 == sharded_reference(run, "fsdp", 2).weights_sha256
    assert receipt.redone == 0
    assert receipt.deaths_survived == (1 if act == "freeze" else 0)


@pytest.mark.parametrize("shard", ["pipeline", *long_only("fsdp", "tensor")])
def test_a_run_that_is_stopped_goes_on_where_it_was(shard, run, resume):
    def look(paths, event, run_state):
        if event.kind == "evaluated" and event.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = run(JOB, look=look, workers=2, shard=with_size(shard, 2))
    assert outcome.status == "terminated"
    assert_nothing_left(outcome)
    (saved,) = events_of_kind(outcome, "saved")[-1:]
    assert saved.step >= 5
    outcome = resume(outcome.paths)
    receipt = finished(outcome)
    assert [row.step for row in events_of_kind(outcome, "resumed")] == [saved.step]
    assert receipt.redone == 0
    assert receipt.weights_sha256 == sharded_reference(run, shard, 2).weights_sha256
    cuts = [row["cuts"] for row in events_of_kind(outcome, "layout")]
    assert cuts[0] == cuts[-1], "chosen once"


# ---- what jobs have ----


@pytest.mark.long
def test_all_that_a_job_may_have(run, job_dir):
    """Attention, a loss of tokens, groups of parameters of which a stretch may have none, frozen layers, bits that
    repeat, a test part, early stopping."""
    job = GPT | {
        "steps": 8,
        "optimizer": {"name": "AdamW", "args": {"lr": 0.003}, "groups": [{"match": "head", "args": {"lr": 0.001}}]},
        "init_from": {"freeze": ["places"]},
        "evaluate": {"every_steps": 3},
        "data": GPT["data"] | {"split": {"kind": "holdout", "validation": 0.1, "test": 0.1}},
        "stop_early": {"patience": 5},
    }
    one = run(job, runs="one")
    for shard in (FSDP, {"kind": "tensor"}, {"kind": "pipeline", "microbatches": 1}):
        receipt = finished(run(job, workers=2, shard=shard))
        assert receipt.metrics == pytest.approx(one.receipt.metrics, rel=1e-3), shard


@pytest.mark.long
def test_moving_buffers_and_short_batches(run):
    """Of 1438 samples the third batch has 38: with 40 lanes some have none."""
    job = CNN | {"batch_size": 700, "steps": 4, "lanes": 40, "evaluate": {"every_steps": 3}}
    one = run(job, runs="one")
    for shard in (FSDP, PIPELINE):
        outcome = run(job, workers=2, shard=shard)
        assert finished(outcome).metrics == pytest.approx(one.receipt.metrics, rel=1e-2), shard
        tracked = load_weights(outcome.paths.model)["1.num_batches_tracked"]
        assert tracked == load_weights(one.paths.model)["1.num_batches_tracked"]


@pytest.mark.parametrize(("microbatches", "told"), [(2, True), *long_only((1, False))])
def test_what_sees_microbatches_is_told(microbatches, told, run):
    """Batch norm takes the mean over those: another result, and not only another order."""
    outcome = run(CNN | {"steps": 3}, workers=2, shard=PIPELINE | {"microbatches": microbatches})
    receipt = finished(outcome)
    assert (INEXACT_MICROBATCHES in receipt.why, INEXACT_LAYOUT in receipt.why) == (told, not told)
    assert any(INEXACT_MICROBATCHES in note for note in note_lines(replay(read_events(outcome.paths.events)))) == told


@pytest.mark.long
def test_a_loss_with_a_count_of_its_own(run):
    job = JOB | {"task": {"name": "models.py:TokenTask"}, "lanes": 3, "steps": 6}
    job = {name: value for name, value in job.items() if name not in ("model", "loss", "metrics")}
    one = run(job, runs="one")
    outcome = run(job, workers=2, shard=FSDP)
    finished(outcome)
    assert relative_error(load_weights(outcome.paths.model), load_weights(one.paths.model)) < ROUNDING * 6


def test_an_error_in_the_model_is_told_as_it_is(run):
    for shard, code in ((FSDP, "SH715"), (PIPELINE | {"cuts": ["2"]}, "SH401")):
        outcome = run(
            JOB, workers=2, shard=shard, model={"name": "models.py:mlp", "args": {"inputs": 63, "classes": 10}}
        )
        assert outcome.error.code == code
        assert_nothing_left(outcome)


# ---- a Task with an optimizer of its own ----


def task(name, **args):
    job = {key: value for key, value in JOB.items() if key not in ("model", "loss", "metrics", "optimizer")}
    return job | {"task": {"name": f"models.py:{name}", "args": args}}


@pytest.mark.parametrize("shard", ["fsdp", *long_only("pipeline", "tensor")])
def test_an_optimizer_with_groups_goes_on_with_what_it_had(shard, run, resume, job_dir):
    """From one process to several, which number the parameters as it did, and from the start."""
    job = task("ParamGroupsTask")
    one = load_weights(run(job, runs="one").paths.model)
    how = {
        "elastic": {"restarts": 0},
        "checkpoint": {"every": "1 step"},
        "watchers": fault_script(job_dir, "kill all at step 6"),
    }
    outcome = run(job, **how)
    assert outcome.error.code == "SH603"
    outcome = resume(outcome.paths, sets=[f"shard={json.dumps(with_size(shard, 2))}", "workers=2"])
    finished(outcome)
    assert [row.step > 0 for row in events_of_kind(outcome, "resumed")] == [True]
    assert relative_error(load_weights(outcome.paths.model), one) < ROUNDING * STEPS
    outcome = run(job, runs="all", workers=2, shard=with_size(shard, 2))
    finished(outcome)
    assert relative_error(load_weights(outcome.paths.model), one) < ROUNDING * STEPS


def test_a_neighbours_copy_has_the_same_groups(run, job_dir):
    """Of a Task's optimizer: what died goes on with the bits that it had."""
    job = task("ParamGroupsTask")
    one = finished(run(job, runs="one", workers=2, shard=with_size("pipeline", 2)))
    line = "kill worker 1 at step 6 in together"
    outcome = run(
        job, workers=2, shard=with_size("pipeline", 2), watchers=fault_script(job_dir, line), elastic=RESTARTS
    )
    receipt = finished(outcome)
    assert fired_faults(job_dir) == {line}
    assert receipt.redone == 0
    assert (receipt.weights_sha256, receipt.state_sha256) == (one.weights_sha256, one.state_sha256)


def test_an_optimizer_that_needs_whole_tensors_is_refused(run):
    outcome = run(task("WholeTensorOptimizerTask"), workers=2, shard=FSDP)
    assert outcome.error.code == "SH110"
    assert "TrustRatioSGD" in outcome.error.message
    assert "AdamW" in outcome.error.fix
    assert_nothing_left(outcome)


@pytest.mark.parametrize(("late", "lines"), [(False, []), (True, ["kill worker 1 at step 6 in together"])])
def test_a_task_that_keeps_its_model_is_told(late, lines, run, job_dir):
    """At once where it had it before, else when parts of another are needed."""
    outcome = run(
        task("ReusedModelTask", late=late),
        workers=2,
        shard=FSDP,
        watchers=fault_script(job_dir, *lines),
        elastic=RESTARTS,
    )
    assert outcome.error.code == "SH204"
    assert "same object" in outcome.error.message
    assert fired_faults(job_dir) == set(lines)
    assert_nothing_left(outcome)


# ---- with a user, and without a driver ----


def slow_steps(seconds):
    return [{"name": "delays.py:SlowSteps", "args": {"seconds": seconds}}]


@pytest.mark.long
def test_more_workers_make_another_replica_and_fewer_one_less(run):
    threads = []

    def look(paths, event, run_state):
        wanted = {3: 4, 9: 2}.get(event.step) if event.kind == "evaluated" else None
        if wanted:  # in a thread: the driver, which calls this, answers
            threads.append(threading.Thread(target=scale, args=(paths, wanted)))
            threads[-1].start()

    job = JOB | {"evaluate": {"every_steps": 3}, "lanes": 4}
    outcome = run(job, look=look, workers=2, shard=with_size("pipeline", 2), watchers=slow_steps(0.2))
    for thread in threads:
        thread.join()
    receipt = finished(outcome)
    assert [row["replicas"] for row in events_of_kind(outcome, "layout")] == [1, 2, 1]
    assert (receipt.workers, receipt.deaths_survived, receipt.redone) == (4, 0, 0)
    assert not events_of_kind(outcome, "resumed")
    assert (
        relative_error(load_weights(outcome.paths.model), load_weights(run(job, runs="one").paths.model))
        < ROUNDING * STEPS
    )


@pytest.mark.long
@pytest.mark.parametrize("killed", [[], *long_only(["worker-1"])])
def test_workers_outlive_their_driver(killed, run, resume, job_dir):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(JOB | {"workers": 2, "shard": FSDP, "watchers": slow_steps(0.3)}))
    command = ShoalCommand(job_dir, "run", str(job_dir / "job.yaml"), "--json")
    started, joined = {}, 0
    while joined < 2:
        row = json.loads(command.process.stdout.readline())
        joined += row["kind"] == "joined"
        if row["kind"] == "worker_started":
            started[row["who"]] = row["pid"]
    os.kill(command.process.pid, signal.SIGKILL)
    command.wait()
    for name in killed:
        os.kill(started[name], signal.SIGKILL)
    outcome = resume(RunPaths.at(job_dir / "runs" / "sharded-1"))
    receipt = finished(outcome)
    assert not events_of_kind(outcome, "resumed")
    assert receipt.weights_sha256 == sharded_reference(run, "fsdp", 2).weights_sha256
    again = [row for row in events_of_kind(outcome, "worker_started") if row["pid"] not in started.values()]
    assert len(again) == len(killed)


def test_the_model_and_the_best_one_are_loaded_as_any_other(run):
    outcome = run(JOB, workers=2, shard=TENSOR)
    finished(outcome)
    weights = load_weights(outcome.paths.model)
    for best in (False, True):
        model = api.load(outcome.paths.root, best=best)
        found = model.state_dict()
        assert found.keys() == weights.keys()
        assert best or all(torch.equal(found[name], weights[name]) for name in weights)
    told = json.loads((outcome.paths.model / "model.json").read_text())
    assert told["weights_sha256"] == outcome.receipt.weights_sha256 == weights_sha256(weights)
