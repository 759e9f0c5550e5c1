"""Jobs whose model is spread over several workers: real workers, the real loop.

The bound is that of tests/parallel/shard/test_training.py: a layout adds the same products in another order, so after
n steps every tensor is within n * 64 units in the last place (2^-24) of its largest value. Jobs here train with SGD,
where an update is proportional to the gradient. What is said of bits is an equality of SHA-256.
"""

import pytest
import torch

from shoal.checkpoint.export import load_weights
from shoal.events import fold, read
from tests.conftest import MLP, long
from tests.jobs.disturbed import assert_nothing_left

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


def over(shard, ways):
    return KINDS[shard] | {"ways": ways}


def off(found, expected):
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
    ("shard", "ways", "workers"),
    [("fsdp", 2, 2), ("tensor", 2, 2), ("pipeline", 2, 2), ("fsdp", 2, 4), ("pipeline", 4, 4)]
    + [*long(("fsdp", 4, 4), ("tensor", 4, 4), ("tensor", 2, 4), ("pipeline", 2, 4))],
)
def test_the_result_is_that_of_one_process_to_the_accuracy_of_float32(shard, ways, workers, run):
    outcome = run(JOB, workers=workers, shard=over(shard, ways))
    receipt = finished(outcome)
    one = run(JOB, runs="one")
    assert off(load_weights(outcome.paths.model), load_weights(one.paths.model)) < ROUNDING * STEPS
    assert receipt.metrics == pytest.approx(one.receipt.metrics, rel=ROUNDING * STEPS)
    assert (receipt.steps, receipt.samples_seen) == (one.receipt.steps, one.receipt.samples_seen)
    assert receipt.parameters == one.receipt.parameters
    assert not receipt.exact
    assert f"{shard} over {ways}" in receipt.why
    assert f"{shard} over {ways}, {workers // ways} replica" in fold(read(outcome.paths.events)).layout
