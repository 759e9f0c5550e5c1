"""Prints the results of `verify` and `chaos`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.jobs import chaos as chaos_jobs
from shoal.jobs import verify as verify_jobs
from shoal.spec.receipt import Receipt
from shoal.terminal import formatting

MAX_NAMES = 5


def print_verify(console: Console, result: verify_jobs.VerifyResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_verify_data(result)))
        return
    first = result.receipts[0][1]
    table = Table("workers", "run", "steps", "weights", "state", "time", "", box=None, pad_edge=False)
    for number, r in result.receipts:
        same = (r.weights_sha256, r.state_sha256) == (first.weights_sha256, first.state_sha256)
        mark = Text("same", "green") if same else Text("differs", "bold red")
        shas = r.weights_sha256[:12], r.state_sha256[:12]
        table.add_row(str(number), r.run, formatting.count(r.steps), *shas, formatting.seconds(r.total_s), mark)
    console.print(table)
    _print_conclusion(console, [receipt for _, receipt in result.receipts], same=result.same)
    if result.divergence is not None:
        console.print(Text(_describe_divergence(result.divergence)), soft_wrap=True)


def _describe_divergence(divergence: verify_jobs.Divergence) -> str:
    if not divergence.step:
        return (
            "Run again, the two gave the same at every step: the difference comes and goes. Look for something that "
            "changes from run to run (the time, a process's number, a file that somebody writes)."
        )
    shown = ", ".join(divergence.tensors[:MAX_NAMES]) + (", …" if len(divergence.tensors) > MAX_NAMES else "")
    one, other = divergence.runs
    different = f"{len(divergence.tensors)} of {divergence.tensor_count}"
    return (
        f"They part at step {divergence.step}, in {different} tensors: {shown} ({one} against {other}). "
        "Look at what the model, the loss or the data do there that "
        "depends on the process: time, files, state outside of buffers, generators of their own."
    )


def _verify_data(result: verify_jobs.VerifyResult) -> dict[str, Any]:
    rows = [{"workers": n, **_receipt_data(r)} for n, r in result.receipts]
    parting = result.divergence
    where = {"step": parting.step, "tensors": list(parting.tensors), "runs": list(parting.runs)} if parting else None
    return {"same": result.same, "runs": rows, "parting": where}


def print_chaos(console: Console, result: chaos_jobs.ChaosResult, *, as_json: bool) -> None:
    calm, found = result.undisturbed, result.outcome.receipt
    assert calm is not None
    assert found is not None
    if as_json:
        facts = {"same": result.same, "planned": result.planned, "happened": result.injected}
        print(json.dumps({**facts, "undisturbed": _receipt_data(calm), "disturbed": _receipt_data(found)}))
        return
    table = Table("", "run", "weights", "state", "deaths", "views", "time", box=None, pad_edge=False)
    for name, r in (("undisturbed", calm), ("disturbed", found)):
        shas = r.weights_sha256[:12], r.state_sha256[:12]
        table.add_row(name, r.run, *shas, str(r.deaths_survived), str(r.views), formatting.seconds(r.total_s))
    console.print(table)
    happened = f"{result.injected} of {result.planned} faults happened"
    late = "; the run ended before the others (more steps leave more time)"
    console.print(happened + (late if result.injected < result.planned else ""), highlight=False)
    _print_conclusion(console, [calm, found], same=result.same)
    if not result.injected:
        console.print("No fault happened, so this says nothing about faults.")


def _print_conclusion(console: Console, receipts: Sequence[Receipt], *, same: bool) -> None:
    if same:
        console.print(Text("The weights are the same, bit for bit.", "green"))
        return
    weights = {receipt.weights_sha256 for receipt in receipts}
    what = "The weights differ." if len(weights) > 1 else "The weights are the same, and the optimizer's state differs."
    inexact = next((receipt for receipt in receipts if receipt.exact is False), None)
    if inexact is None:
        console.print(Text(what, "bold red"))
    else:
        console.print(Text(f"{what} {inexact.run} is not exact ({inexact.why})."), soft_wrap=True)


def _receipt_data(receipt: Receipt) -> dict[str, Any]:
    names = ("run", "steps", "weights_sha256", "state_sha256", "deaths_survived", "views", "total_s")
    return {name: getattr(receipt, name) for name in names}
