"""The receipt says "exact" only where lanes were computed again with the same bits, and names what differs."""

import pytest

from tests.conftest import CNN, GPT, MLP, long_only

TASK = {name: value for name, value in MLP.items() if name not in ("model", "loss", "metrics")} | {"steps": 30}


def with_task(name):
    return TASK | {"task": f"hidden_state.py:{name}"}


WRONG = {
    "a counter": (with_task("Counter"), "task.seen"),
    "a counter that matters late": (with_task("LateCounter"), "task.seen"),
    "a counter that is saved": (with_task("SavedCounter"), ""),
    "a list": (with_task("History"), "task.losses"),
    "a generator of its own": (with_task("OwnGenerator"), "task.rng"),
    "a counter of the module": (with_task("ModuleCounter"), "hidden_state.CALLS"),
    "a generator of the module": (with_task("ModuleGenerator"), "hidden_state.GENERATOR"),
    "a counter of the class": (with_task("ClassCounter"), "hidden_state.ClassCounter.seen"),
    "a second optimizer": (with_task("SecondOptimizer"), "task.teacher_optimizer"),
    "an optimizer that switches modes": (with_task("SwitchingTask"), "model.0.weight"),
    "a counter in the model": (MLP | {"model": "hidden_state.py:CountingModel"}, "model.calls"),
    "an optimizer's own number": (
        MLP | {"optimizer": {"name": "hidden_state.py:MomentumOutside", "args": {"lr": 0.05}}}, "optimizer.taken",
    ),
    "an update that draws": (
        MLP | {"optimizer": {"name": "hidden_state.py:NoisyUpdate", "args": {"lr": 0.05}}}, "in model.0.weight",
    ),
}  # fmt: skip


FEW = ("a counter", "a second optimizer", "an update that draws")
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


RIGHT = {"mlp": MLP, "cnn": CNN, "gpt": GPT, "harmless": with_task("Harmless")}


@pytest.mark.parametrize(
    ("name", "workers"), [("mlp", 1), ("cnn", 3), ("harmless", 2), *long_only(("gpt", 2), ("harmless", 1))]
)
def test_an_exact_job_says_how_often_it_was_checked(name, workers, run):
    receipt = run(RIGHT[name], workers=workers).receipt
    assert receipt.exact is True, receipt.why
    assert receipt.lanes_checked >= 2 * workers
    assert receipt.why == f"sync: lanes; lanes computed again: {receipt.lanes_checked}, all equal"
