"""What `verify` and `chaos` found out, printed."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.jobs import chaos as chaos_jobs
from shoal.jobs import verify as verify_jobs
from shoal.spec.receipt import Receipt
from shoal.terminal import words

MOST_NAMES = 5


def verify(console: Console, verdict: verify_jobs.Verdict, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_verified(verdict)))
        return
    first = verdict.receipts[0][1]
    table = Table("workers", "run", "steps", "weights", "state", "time", "", box=None, pad_edge=False)
    for number, r in verdict.receipts:
        same = (r.weights_sha256, r.state_sha256) == (first.weights_sha256, first.state_sha256)
        mark = Text("same", "green") if same else Text("differs", "bold red")
        shas = r.weights_sha256[:12], r.state_sha256[:12]
        table.add_row(str(number), r.run, words.count(r.steps), *shas, words.seconds(r.total_s), mark)
    console.print(table)
    _conclude(console, first, same=verdict.same)
    if verdict.parting is not None:
        console.print(Text(_parting(verdict.parting)), soft_wrap=True)


def _parting(parting: verify_jobs.Parting) -> str:
    if not parting.step:
        return (
            "Run again, the two gave the same at every step: the job does not depend on the number of workers, but on "
            "something that changes from run to run (the time, a process's number, a file that somebody writes)."
        )
    shown = ", ".join(parting.tensors[:MOST_NAMES]) + (", …" if len(parting.tensors) > MOST_NAMES else "")
    return (
        f"They part at step {parting.step}, in {len(parting.tensors)} of {parting.of} tensors: {shown} "
        f"({parting.runs[0]} against {parting.runs[1]}). Look at what the model, the loss or the data do there that "
        "depends on the process: time, files, state outside of buffers, generators of their own."
    )


def _verified(verdict: verify_jobs.Verdict) -> dict[str, Any]:
    rows = [{"workers": n, **_ends(r)} for n, r in verdict.receipts]
    parting = verdict.parting
    where = {"step": parting.step, "tensors": list(parting.tensors), "runs": list(parting.runs)} if parting else None
    return {"same": verdict.same, "runs": rows, "parting": where}


def chaos(console: Console, verdict: chaos_jobs.Verdict, *, as_json: bool) -> None:
    calm, found = verdict.calm, verdict.outcome.receipt
    assert calm is not None
    assert found is not None
    if as_json:
        facts = {"same": verdict.same, "planned": verdict.planned, "happened": verdict.happened}
        print(json.dumps({**facts, "undisturbed": _ends(calm), "disturbed": _ends(found)}))
        return
    table = Table("", "run", "weights", "state", "deaths", "views", "time", box=None, pad_edge=False)
    for name, r in (("undisturbed", calm), ("disturbed", found)):
        shas = r.weights_sha256[:12], r.state_sha256[:12]
        table.add_row(name, r.run, *shas, str(r.deaths_survived), str(r.views), words.seconds(r.total_s))
    console.print(table)
    happened = f"{verdict.happened} of {verdict.planned} faults happened"
    late = "; the run ended before the others (more steps leave more time)"
    console.print(happened + (late if verdict.happened < verdict.planned else ""), highlight=False)
    _conclude(console, found, same=verdict.same)


def _conclude(console: Console, receipt: Receipt, *, same: bool) -> None:
    if same:
        console.print("[green]The weights are the same, bit for bit.[/green]")
    elif receipt.exact:
        console.print(Text("The weights differ.", "bold red"))
    else:
        console.print(Text(f"The weights differ. The job does not promise that they are the same ({receipt.why})."))


def _ends(receipt: Receipt) -> dict[str, Any]:
    names = ("run", "steps", "weights_sha256", "state_sha256", "deaths_survived", "views", "total_s")
    return {name: getattr(receipt, name) for name in names}
