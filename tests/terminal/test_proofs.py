"""What `verify` and `chaos` conclude is what they have compared."""

import io

import pytest
from rich.console import Console

from shoal.jobs.chaos import ChaosResult
from shoal.jobs.run_result import RunResult
from shoal.jobs.verify import VerifyResult
from shoal.spec.receipt import Receipt
from shoal.spec.run_paths import RunPaths
from shoal.terminal import proofs, reports


def receipt(weights="w", state="s", *, exact=None, why="sync: lanes", **changes):
    return Receipt(
        run="a-1", job_sha256="", exact=exact, why=why, weights_sha256=weights, state_sha256=state, steps=10,
        epochs=1.0, samples_seen=1, parameters=5, workers=1, lanes=1, **changes,
    )  # fmt: skip


def said(act):
    console = Console(file=io.StringIO(), width=120)
    act(console)
    return " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("other", "conclusion"),
    [
        (receipt(), "The weights are the same, bit for bit."),
        (receipt(weights="v"), "The weights differ."),
        (receipt(state="t"), "The weights are the same, and the optimizer's state differs."),
        (
            receipt(weights="v", exact=False, why="sync: ddp: the order"),
            "The weights differ. a-1 is not exact (sync: ddp: the order).",
        ),
    ],
)
def test_what_verify_concludes(other, conclusion):
    result = VerifyResult([(1, receipt()), (2, other)])
    assert said(lambda console: proofs.print_verify(console, result, as_json=False)).endswith(conclusion)


@pytest.mark.parametrize(("injected", "tried"), [(0, False), (1, True)])
def test_chaos_without_a_fault_says_so(injected, tried, tmp_path):
    outcome = RunResult(RunPaths.at(tmp_path), "finished", receipt=receipt())
    result = ChaosResult(receipt(), outcome, planned=3, injected=injected)
    text = said(lambda console: proofs.print_chaos(console, result, as_json=False))
    assert "The weights are the same, bit for bit." in text
    assert ("No fault happened, so this says nothing about faults." not in text) is tried


@pytest.mark.parametrize(
    ("made", "row"),
    [
        (receipt(exact=True, lanes_checked=4), "exact yes (sync: lanes)"),
        (receipt(exact=None), "exact not checked (sync: lanes)"),
        (receipt(exact=False, lanes_checked=4), "exact no (sync: lanes)"),
        (receipt(exact=True), "exact not checked (sync: lanes)"),  # of an earlier version, which had no checks
    ],
)
def test_a_receipt_says_exact_only_after_a_check(made, row):
    assert row in said(lambda console: reports.print_receipt(console, made))


def test_a_receipt_separates_the_clock_from_the_workers():
    made = receipt(total_s=10.0, training_after_s=4.0, worker_s=18.0, startup_s=8.0, compute_s=9.0, other_s=1.0)
    text = said(lambda console: reports.print_receipt(console, made))
    assert "time 10.0 s, training began after 4.0 s" in text
    assert "worker time 18.0 s: start-up 8.0 s, compute 9.0 s, other 1.0 s" in text
