"""The receipt says "exact" only where lanes were computed again with the same bits, and names what differs."""

import pytest

from shoal.jobs.run_executor import load_run_state
from tests.conftest import CNN, GPT, MLP, long_only

TASK = {name: value for name, value in MLP.items() if name not in ("model", "loss", "metrics")} | {"steps": 30}


def with_task(name):
    return TASK | {"task": f"hidden_state.py:{name}"}


def with_passes(name):
    return TASK | {"task": f"hidden_passes.py:{name}"}


def descent(name):
    return {"name": f"hidden_passes.py:{name}", "args": {"lr": 0.05}}


LBFGS = {"optimizer": {"name": "LBFGS", "args": {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}}}
WRONG = {
    "a counter": (with_task("Counter"), "task.seen"),
    "a counter that matters late": (with_task("LateCounter"), "task.seen"),
    "a counter that is saved": (with_task("SavedCounter"), ""),
    "a list": (with_task("History"), "task.losses"),
    "a generator of its own": (with_task("OwnGenerator"), "task.rng"),
    "a counter of the module": (with_task("ModuleCounter"), "hidden_state.CALLS"),
    "a generator of the module": (with_task("ModuleGenerator"), "hidden_state.GENERATOR"),
    "a counter of the class": (with_task("ClassCounter"), "hidden_state.ClassCounter.seen"),
    "a cache of a random number": (with_task("CachedNoise"), "hidden_state.noise"),
    "objects that cannot be compared": (with_task("Incomparable"), "has other bits"),
    "a rate that lanes change": (with_task("RateInLoss"), "made again with new objects"),
    "a second optimizer": (with_task("SecondOptimizer"), "task.teacher_optimizer"),
    "an optimizer that switches modes": (with_task("SwitchingTask"), "model.0.weight"),
    "a counter in the model": (MLP | {"model": "hidden_state.py:CountingModel"}, "model.calls"),
    "an optimizer's own number": (
        MLP | {"optimizer": {"name": "hidden_state.py:MomentumOutside", "args": {"lr": 0.05}}}, "optimizer.taken",
    ),
    "an update that draws": (
        MLP | {"optimizer": {"name": "hidden_state.py:NoisyUpdate", "args": {"lr": 0.05}}}, "in model.0.weight",
    ),
    "a counter in a step with phases": (with_passes("CountingGan"), "task.seen"),
    "phases that share an attribute": (with_passes("SharedFakes"), "has other bits"),
    "the own number of a second optimizer": (with_passes("CountingSecondOptimizer"), "optimizer.taken"),
    "a second update that draws": (with_passes("NoisySecondOptimizer"), "in model.generator"),
    "a rate that phases change": (with_passes("RateInStep"), "made again with new objects"),
    "a counter in a closure": (with_task("Counter") | LBFGS, "task.seen"),
    "passes that a counter decides": (MLP | {"optimizer": descent("ImpatientDescent")}, "the number of its passes"),
    "what a lane carries": (TASK | {"task": "hidden_passes.py:ForgottenCarry"}, "task.seen"),
}  # fmt: skip


FEW = ("a counter", "a second optimizer", "an update that draws", "a counter in a step with phases")
"""Those that the fast tests also try with two workers."""


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((n, 1) for n in WRONG), *((n, 2) for n in FEW), *long_only(*((n, 2) for n in WRONG if n not in FEW))],
)
def test_a_job_that_depends_on_more_than_a_checkpoint_holds_is_not_exact(name, workers, run):
    job, culprit = WRONG[name]
    receipt = run(job, workers=workers).receipt
    assert receipt.exact is False, receipt.why
    assert culprit in receipt.why


RIGHT = {
    "mlp": MLP,
    "cnn": CNN,
    "gpt": GPT,
    "harmless": with_task("Harmless"),
    "phases": with_passes("HarmlessGan") | {"steps": 150},
    "lbfgs": with_task("Harmless") | LBFGS,
    "closure": MLP | {"optimizer": descent("Descent")},
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *(("mlp", 1), ("cnn", 3), ("harmless", 2), ("phases", 2), ("lbfgs", 2)),
        *long_only(("gpt", 2), ("harmless", 1), ("phases", 1), ("closure", 1), ("closure", 2)),
    ],
)
def test_an_exact_job_says_how_often_it_was_checked(name, workers, run):
    receipt = run(RIGHT[name], workers=workers).receipt
    assert receipt.exact is True, receipt.why
    assert receipt.lanes_checked >= 2 * workers
    assert receipt.why == f"sync: lanes; lanes computed again: {receipt.lanes_checked}, all equal"


@pytest.mark.parametrize(
    ("name", "workers"), [("harmless", 2), ("phases", 2), *long_only(("cnn", 1), ("gpt", 2), ("lbfgs", 1))]
)
def test_many_checks_change_no_bit(name, workers, run):
    checked = run(RIGHT[name], workers=workers, self_check=1).receipt
    plain = run(RIGHT[name], workers=workers, self_check=0).receipt
    assert checked.lanes_checked >= 2 * workers  # at the start, at the end, and between as often as there is time
    assert (plain.exact, plain.lanes_checked) == (None, 0)
    assert (checked.weights_sha256, checked.state_sha256) == (plain.weights_sha256, plain.state_sha256)
    assert checked.metrics == plain.metrics


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("SharedModel", "the job's code returns the same model or task each time"),
        ("OnlyOnce", "the port is taken"),
        ("OnlyOnceUnprintable", "its message cannot be made"),
    ],
)
def test_a_job_whose_objects_cannot_be_built_again_is_not_checked(name, why, run):
    receipt = run(with_task(name)).receipt
    assert (receipt.exact, receipt.lanes_checked) == (None, 0)
    assert why in receipt.why
    assert receipt.weights_sha256 == run(with_task(name), self_check=0).receipt.weights_sha256


@pytest.mark.parametrize(
    "sync",
    [{"kind": "local", "every": 5, "rounds_per_sync": 1}, *long_only({"kind": "server", "servers": 1, "backups": 0})],
)
def test_lanes_of_other_syncs_are_checked_too(sync, run):
    receipt = run(with_task("Counter"), workers=2, sync=sync).receipt
    assert receipt.exact is False
    assert "task.seen" in receipt.why
    assert run(MLP, workers=2, sync=sync).receipt.exact is True


def test_the_times_of_real_workers_add_up(run):
    """No second is counted twice: what has a name is not more than the workers lived. Workers do not begin and end an
    evaluation at the very same time; a time that is counted twice would be far more than half as much again."""
    outcome = run(CNN, workers=2)
    receipt, state = outcome.receipt, load_run_state(outcome.paths)
    lived_s = sum(worker.lifetime_s for worker in state.workers.values())
    assert lived_s - 0.01 <= receipt.worker_s <= 1.5 * lived_s
    assert 0 < receipt.startup_s < lived_s <= 2 * receipt.total_s
    assert receipt.checking_s > 0
    assert receipt.training_after_s < receipt.total_s
