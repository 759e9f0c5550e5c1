"""A model that does not fit into the memory of one process."""

import pytest

from tests.jobs.fault_injection import events_of_kind
from tests.jobs.test_sharded_runs import JOB, finished

pytestmark = pytest.mark.long

MORE_MB = 200
WIDTH, DEPTH = 1024, 24
LARGE = JOB | {
    "name": "large",
    "model": {
        "name": "memory_limited.py:memory_limited",
        "args": {"width": WIDTH, "depth": DEPTH, "inputs": 64, "classes": 10, "more_mb": MORE_MB},
    },
    "steps": 3,
    "lanes": 4,
    "batch_size": 16,
    "evaluate": {"every_steps": 2},
    "schedule": None,
}
WEIGHTS_MB = 4 * DEPTH * WIDTH * WIDTH >> 20


def test_one_process_has_no_room_for_it(run):
    assert 3 * WEIGHTS_MB > MORE_MB, "with gradients and momentum"
    outcome = run(LARGE)
    assert outcome.error is not None
    assert outcome.error.code == "SH407"


@pytest.mark.parametrize(
    "shard", [{"kind": "fsdp"}, {"kind": "tensor", "patterns": "mlp"}, {"kind": "pipeline", "microbatches": 2}]
)
def test_four_processes_have(shard, run):
    outcome = run(LARGE, workers=4, shard=shard)
    receipt = finished(outcome)
    assert not events_of_kind(outcome, "save_failed") + events_of_kind(outcome, "cleanup_failed")
    assert receipt.parameters * 4 >> 20 >= WEIGHTS_MB
    assert receipt.steps == 3
