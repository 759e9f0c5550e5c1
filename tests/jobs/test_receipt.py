"""The receipt as a table: a job and the state of a run in, the numbers out."""

import copy
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.events import Event, RunState, replay
from shoal.events.run_state import WORKER_TIMES
from shoal.events.state_parts import LostResidual
from shoal.jobs.receipt import make_receipt
from shoal.spec.load import make_job
from shoal.spec.receipt import Receipt, describe_lost_residual
from shoal.terminal.reports import print_receipt
from tests.conftest import FIXTURES, MLP

FINISHED = {
    "weights_sha256": "w" * 64,
    "state_sha256": "s" * 64,
    "samples_seen": 500,
    "stopped": "",
    "platform": {"machine": "x86_64"},
    "metrics": {"accuracy": 0.9},
    "export_s": 0.25,
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
    "run": "mlp-1", "exact": None, "why": "sync: lanes: no lane was computed again",
    "steps": 10, "epochs": 2.5, "samples_seen": 500,
    "parameters": 650, "workers": 2, "lanes": 4, "starts": 1, "deaths_survived": 1, "redone": 0, "servers": 0,
    "views": 1, "stopped": "", "compute_s": 2.0, "data_s": 1.0, "exchange_s": 0.5, "waiting_s": 0.5, "saving_s": 0.125,
    "startup_s": 4.0, "recovery_s": 0.0, "checking_s": 0.0, "export_s": 0.25, "other_s": 5.125, "worker_s": 13.5,
    "total_s": 10.5, "training_after_s": 3.0,
    "samples_per_s": 250.0, "bytes_sent": 2000, "bytes_plain": 8000, "bytes_saved": 77,
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
        ({}, [], "", None, "sync: lanes: no lane was computed again"),
        ({"codec": "int8"}, [], "", None, "sync: lanes, codec: int8: no lane was computed again"),
        ({"self_check": 0}, [], "", None, "sync: lanes: self_check is 0"),
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
    assert receipt.exact is exact
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


def checked(*rows):
    """The state after these rows of `self_checked`."""
    return replay([Event("self_checked", 1.0, "worker-0", step, fields) for step, fields in enumerate(rows)])


def test_a_run_is_exact_once_lanes_were_computed_again(job_dir):
    state = checked({"lanes": 2}, {"lanes": 2}, {"lanes": 0, "failure": "too little memory"})
    state.result = FINISHED
    receipt = make_receipt(job(job_dir), state, run="one")
    assert (receipt.exact, receipt.lanes_checked) == (True, 4)
    assert receipt.why == "sync: lanes; lanes computed again: 4, all equal"


def test_a_difference_counts_whatever_else_was_equal(job_dir):
    found = {"lanes": 1, "why": "lane 0 of step 3 has other bits", "objects": ["task.seen"]}
    state = checked({"lanes": 2}, found, {"lanes": 2})
    state.result = FINISHED
    receipt = make_receipt(job(job_dir), state, run="one")
    assert receipt.exact is False
    assert receipt.why == "sync: lanes: lane 0 of step 3 has other bits (not in a checkpoint, and different: task.seen)"


def test_a_run_that_could_not_be_checked_says_why(job_dir):
    state = checked({"lanes": 0, "failure": "it takes 9 MiB of memory, and 8 are free"})
    state.result = FINISHED
    receipt = make_receipt(job(job_dir), state, run="one")
    assert (receipt.exact, receipt.why) == (None, "sync: lanes: it takes 9 MiB of memory, and 8 are free")


SECONDS = st.floats(0, 100, allow_nan=False)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["worker_started", "joined", "step", "evaluated", "saved", "resumed", "self_checked", "died"]),
        st.integers(0, 3),
        SECONDS,
        SECONDS,
    ),
    max_size=40,
)
FIELDS = {
    "worker_started": lambda s: {},
    "joined": lambda s: {"lanes": [0]},
    "step": lambda s: {"wall_s": s, "compute_s": s / 2, "waiting_s": s / 4, "recovery_s": s / 8},
    "evaluated": lambda s: {"split": "validation", "metrics": {}, "evaluation_s": s},
    "saved": lambda s: {"stall_s": s},
    "resumed": lambda s: {"recovery_s": s},
    "self_checked": lambda s: {"lanes": 1, "checking_s": s},
}


@given(ROWS)
def test_the_times_of_any_run_add_up(rows):
    """The events of workers that may die, come back under another name, or report in any order."""
    made, t, state = make_job(copy.deepcopy(MLP), base_dir=str(FIXTURES)), 100.0, RunState()
    for kind, worker, later, seconds in rows:
        t += later
        who = f"worker-{worker}"
        if kind == "died":
            event = Event("worker_died", t, "driver", None, {"worker": who, "reason": "SIGKILL"})
        else:
            event = Event(kind, t, who, 1, FIELDS[kind](seconds))
        state.apply(event)
    state.result = FINISHED
    receipt = make_receipt(made, state, run="any")
    parts = [getattr(receipt, name) for name in (*WORKER_TIMES, "other_s")]
    assert min(parts) >= 0
    assert receipt.worker_s == pytest.approx(sum(parts), abs=1e-6)
    lived_s = sum(worker.lifetime_s for worker in state.workers.values())
    assert receipt.worker_s >= lived_s - 0.01
    assert 0 <= receipt.training_after_s <= receipt.total_s
