"""The receipt as a table: a job and the state of a run in, the numbers out."""

import copy
import io

import pytest
from rich.console import Console

from shoal.events import Event, RunState, replay
from shoal.events.run_state import LostResidual
from shoal.jobs.receipt import exactness_reason, make_receipt
from shoal.spec.load import make_job
from shoal.spec.receipt import Receipt, describe_lost_residual
from shoal.terminal.reports import print_receipt
from tests.conftest import MLP

FINISHED = {
    "weights_sha256": "w" * 64,
    "state_sha256": "s" * 64,
    "samples_seen": 500,
    "stopped": "",
    "platform": {"machine": "x86_64"},
    "metrics": {"accuracy": 0.9},
}


BUILT = {
    "steps": 10, "steps_per_epoch": 4, "lanes": 4, "samples": {"train": 200}, "skipped": 0, "device": "cpu",
    "parameters": 650,
}  # fmt: skip


def job(job_dir, **changes):
    return make_job(copy.deepcopy(MLP) | changes, base_dir=str(job_dir))


def run_of_two_workers():
    """Two workers, ten steps each; one of them dies."""
    yield Event("run_started", 100.0, "driver", None, {"run": "mlp-1"})
    for worker in (0, 1):
        yield Event("worker_started", 101.0, f"worker-{worker}", None, {"host": "here", "pid": worker + 1})
        yield Event("built", 102.0, f"worker-{worker}", None, BUILT)
        fields = {"lanes": [2 * worker, 2 * worker + 1], "saves": worker == 0}
        yield Event("joined", 103.0, f"worker-{worker}", 0, fields)
    yield Event(
        "view", 103.0, "driver", None, {"number": 1, "why": "", "carries": {"worker-0": [0, 1], "worker-1": [2, 3]}}
    )
    for worker in (0, 1):
        fields = {
            "steps": 10, "samples": 250, "wall_s": 2.0, "compute_s": 1.0, "data_s": 0.5, "exchange_s": 0.25,
            "waiting_s": 0.25, "bytes_sent": 1000, "bytes_plain": 4000, "loss": 0.5,
        }  # fmt: skip
        yield Event("step", 105.0, f"worker-{worker}", 10, fields)
    yield Event("saved", 105.5, "worker-0", 10, {"written_bytes": 77, "stall_s": 0.125})
    yield Event("worker_died", 106.0, "driver", None, {"worker": "worker-1", "reason": "SIGKILL"})
    yield Event("finished", 110.5, "worker-0", 10, FINISHED)


EXPECTED = {
    "run": "mlp-1", "exact": True, "why": "sync: lanes", "steps": 10, "epochs": 2.5, "samples_seen": 500,
    "parameters": 650, "workers": 2, "lanes": 4, "starts": 1, "deaths_survived": 1, "redone": 0, "servers": 0,
    "views": 1, "stopped": "", "compute_s": 2.0, "data_s": 1.0, "exchange_s": 0.5, "waiting_s": 0.5, "saving_s": 0.125,
    "total_s": 10.5, "samples_per_s": 250.0, "bytes_sent": 2000, "bytes_plain": 8000, "bytes_saved": 77,
    "metrics": {"accuracy": 0.9}, "platform": {"machine": "x86_64"}, "weights_sha256": "w" * 64,
}  # fmt: skip


def test_the_numbers_of_a_run(job_dir):
    made = job(job_dir)
    receipt = make_receipt(made, replay(run_of_two_workers()), run="mlp-1")
    found = receipt.model_dump()
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert receipt.job_sha256 == made.sha256()
    assert {
        name: (one.host, one.lanes, one.steps, one.samples, one.work_s) for name, one in receipt.carried.items()
    } == {
        "worker-0": ("here", [0, 1], 10, 250, 1.5),
        "worker-1": ("here", [2, 3], 10, 250, 1.5),
    }


def test_the_same_state_gives_the_same_receipt_and_is_not_changed(job_dir):
    state = replay(run_of_two_workers())
    before = copy.deepcopy(state)
    first, second = (make_receipt(job(job_dir), state, run="mlp-1") for _ in range(2))
    assert first == second
    assert state == before


def test_a_run_that_computed_nothing(job_dir):
    """Resumed after its last step: only the last event is there."""
    receipt = make_receipt(job(job_dir), RunState(result=FINISHED), run="again")
    assert (receipt.workers, receipt.samples_per_s, receipt.total_s, receipt.carried) == (1, 0.0, 0.0, {})


LOST = [LostResidual(1, "worker-1", 4), LostResidual(2, "worker-1", 4)]
LOST_REASON = describe_lost_residual(1, "worker-1", 4)


@pytest.mark.parametrize(
    ("changes", "lost", "reported", "exact", "why"),
    [
        ({}, [], "", True, "sync: lanes"),
        ({"codec": "int8"}, [], "", True, "sync: lanes, codec: int8"),
        ({"codec": "int8"}, LOST[:1], "", False, f"sync: lanes, codec: int8: {LOST_REASON}"),
        ({"codec": "int8"}, LOST, "", False, f"sync: lanes, codec: int8: {LOST_REASON}, and 1 more times"),
        ({"sync": {"kind": "server", "staleness": 2}}, [], "", False, None),
        ({"sync": "ddp"}, [], "", False, None),
        ({"shard": {"kind": "fsdp"}, "workers": 2}, [], "another order of sums", False, None),
    ],
)
def test_whether_a_run_is_exact_and_why_not(job_dir, changes, lost, reported, exact, why):
    made = job(job_dir, **changes)
    receipt = make_receipt(made, RunState(result=FINISHED, lost_residuals=lost, inexact=reported), run="one")
    assert receipt.exact == exact
    assert receipt.why == exactness_reason(made, lost, reported)
    assert receipt.why.startswith(f"sync: {made.sync.kind}")
    if why is not None:
        assert receipt.why == why
    else:
        assert (reported or made.inexact_reason) in receipt.why


def test_the_receipt_says_what_init_from_gave(job_dir):
    """Of the first worker: later ones get the state of the others, whatever their own file has."""
    first = {"path": "first-1", "loaded": 3, "tensors": 4, "missing": ["head"], "missing_count": 1, "unknown": 7}
    other = first | {"loaded": 4, "missing": [], "missing_count": 0}
    loaded = [Event("weights_loaded", 102.0, f"worker-{n}", None, dict(one)) for n, one in enumerate((first, other))]
    receipt = make_receipt(job(job_dir), replay([*loaded, *run_of_two_workers()]), run="mlp-1")
    assert receipt.init_from is not None
    assert str(receipt.init_from) == "first-1: 3 of 4 tensors"
    assert receipt.init_from.missing == ["head"]
    assert Receipt.model_validate_json(receipt.model_dump_json()) == receipt
    console = Console(file=io.StringIO(), width=120)
    print_receipt(console, receipt)
    assert "initialised  from first-1: 3 of 4 tensors; 1 not in the file: head" in console.file.getvalue()
    assert make_receipt(job(job_dir), replay(run_of_two_workers()), run="mlp-1").init_from is None
