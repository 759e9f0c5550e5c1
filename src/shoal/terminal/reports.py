"""Prints receipts, tables and curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.errors import ShoalError, plural, single_errors
from shoal.events import RunState, describe_damage
from shoal.spec.job import Job
from shoal.spec.names import iter_refs
from shoal.spec.receipt import Receipt, metrics_mean_and_std
from shoal.spec.run_paths import RunPaths
from shoal.terminal import formatting, notes, plan_lines, servers
from shoal.terminal.console import printable
from shoal.terminal.curve import draw
from shoal.terminal.fact_table import GAP, fitting, widest
from shoal.terminal.live import GONE

MAX_SHARES = 12
MAX_NOTE_LINES = 8
LEAST_METRICS = 16
"""Columns for the metrics of a run in a list, at least."""
MAX_TABLE_ROWS = 500
"""Rows above which a table is printed without rich's layout, which takes half a millisecond per row."""
_TIME_NAMES = {
    "startup_s": "start-up", "compute_s": "compute", "data_s": "data", "exchange_s": "exchange",
    "waiting_s": "waiting", "saving_s": "saving", "evaluation_s": "evaluation", "recovery_s": "recovery",
    "checking_s": "checking", "export_s": "export", "other_s": "other",
}  # fmt: skip
_EXACT = {True: "yes", False: "no", None: "not checked"}


def print_receipt(console: Console, r: Receipt) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("run", Text(r.run, style="bold") + (f" (stopped: {r.stopped})" if r.stopped else ""))
    verdict = r.exact if r.lanes_checked or not r.exact else None  # receipts of earlier versions had no checks
    table.add_row("exact", f"{_EXACT[verdict]} ({r.why})")
    table.add_row("sha256", r.weights_sha256)
    trained = {"step": r.steps, "sample": r.samples_seen, "parameter": r.parameters}
    epochs = f"{r.epochs:g} epoch{'' if r.epochs == 1 else 's'}"
    table.add_row("trained", ", ".join([epochs, *(plural(n, word) for word, n in trained.items())]))
    if r.init_from is not None:
        left_out = r.init_from.left_out(shown=notes.MAX_TENSOR_NAMES)
        table.add_row("initialised", "; ".join([f"from {r.init_from}", *left_out]))
    carried = [plural(r.workers, "worker"), plural(r.lanes, "lane"), plural(r.starts, "start")]
    table.add_row("carried by", f"{', '.join(carried)}, {plural(r.deaths_survived, 'death')} survived")
    if len(r.carried) > 1:
        table.add_row("", _worker_shares(r))
    if r.servers:
        table.add_row("served by", _server_summary(r))
    table.add_row(
        "time", f"{formatting.seconds(r.total_s)}, training began after {formatting.seconds(r.training_after_s)}"
    )
    spent = [
        f"{name} {formatting.seconds(seconds)}"
        for field, name in _TIME_NAMES.items()
        if (seconds := getattr(r, field)) >= 0.0005
    ]
    table.add_row("worker time", f"{formatting.seconds(r.worker_s)}: {', '.join(spent)}")
    table.add_row("speed", f"{formatting.count(r.samples_per_s)} samples/s while training")
    instead = f" (instead of {formatting.size(r.bytes_plain)})" if r.bytes_plain > r.bytes_sent else ""
    table.add_row("bytes", f"{formatting.size(r.bytes_sent)} sent{instead}, {formatting.size(r.bytes_saved)} saved")
    if r.metrics:
        table.add_row("metrics", formatting.metrics(r.metrics))
    for name, value in r.best.items():
        if name != "step":
            table.add_row("best", f"{name} {formatting.number(value)} at step {r.best.get('step', 0):.0f}")
    console.print(table)


def print_receipt_damage(console: Console, damage: str, paths: RunPaths) -> None:
    """Print that the receipt is damaged, and how to get it back; nothing if it is not."""
    if damage:
        fix = f"`shoal resume {paths.parent_run.name}` writes it again from the events"
        print_lines(console, f"{paths.name}: receipt damaged ({damage}); {fix}")


def _worker_shares(r: Receipt) -> Table:
    """The share of work of each worker."""
    table = Table.grid(padding=(0, 2))
    whole = sum(one.samples for one in r.carried.values()) or 1
    shown = sorted(r.carried.items(), key=lambda pair: -pair[1].samples)
    for name, one in shown[:MAX_SHARES]:
        share = f"{one.samples / whole:.0%}"
        counts = plural(one.samples, "sample"), plural(one.steps, "step")
        table.add_row(name, share, *counts, f"{formatting.seconds(one.work_s)} of work", one.host, style="dim")
    if rest := shown[MAX_SHARES:]:
        samples = sum(one.samples for _, one in rest)
        table.add_row(plural(len(rest), "other"), f"{samples / whole:.0%}", plural(samples, "sample"), style="dim")
    return table


def _server_summary(r: Receipt) -> str:
    facts = [plural(r.servers, "server"), f"{plural(r.server_deaths_survived, 'death')} survived"]
    if r.staleness_max:
        facts.append(f"staleness {r.staleness_mean:.2f} on average, {r.staleness_max} at most")
    return ", ".join(facts)


def print_folds(console: Console, receipts: Sequence[Receipt]) -> None:
    """One column per metric, one row per fold, and the mean."""
    merged = metrics_mean_and_std(receipts)
    table = Table("fold", *merged, "steps", "weights", box=None, pad_edge=False)
    for r in receipts:
        values = (formatting.number(r.metrics.get(name)) for name in merged)
        table.add_row(r.run.removeprefix("fold-"), *values, formatting.count(r.steps), r.weights_sha256[:12])
    means = (f"{formatting.number(mean)} ± {formatting.number(std)}" for mean, std in merged.values())
    table.add_row("mean", *means, "", "", style="bold")
    console.print(table)


def print_error(console: Console, error: ShoalError) -> None:
    """Print an error for the user: what, where, and the fix."""
    for one in single_errors(error):
        place = f"{one.where}: " if one.where else ""
        console.print(Text.assemble((f"{one.code} ", "bold red"), (place, "bold"), one.message), soft_wrap=True)
        console.print(Text(f"      → {one.fix}", style="green"), soft_wrap=True)


def print_lines(console: Console, *texts: str) -> None:
    for text in texts:
        console.print(Text(text), soft_wrap=True)


def print_stopped(console: Console, name: str, state: RunState, *, folds: bool) -> None:
    """Print how a stopped run ended."""
    if state.status == "finished":
        print_lines(console, f"{name} finished before it could be stopped")
        return
    saved = "nothing was saved yet" if state.saved_step is None else f"saved at step {state.saved_step}"
    print_lines(console, f"{name}: {state.status}{'' if folds else f'; {saved}'}. Continue with: shoal resume {name}")


def print_run(console: Console, state: RunState, *, width: int) -> None:
    """Print a run, in progress or ended."""
    console.print(
        Text.assemble(
            (state.run, "bold"),
            f"  {state.status}  step {state.step}/{state.steps_total}  epoch {state.epoch:.2f}",
        )
    )
    if state.layout:
        console.print(f"  {notes.describe_layout(state.layout)}", soft_wrap=True)
    if state.metrics:
        console.print("  " + formatting.metrics(state.metrics), soft_wrap=True)
    here = [worker for worker in state.workers.values() if worker.state not in GONE]
    if state.status in ("starting", "training"):
        for worker in here:
            print_lines(
                console, f"  {worker.name}  {worker.state}  pid {worker.pid} on {worker.host}  step {worker.step}"
            )
    if state.servers:
        console.print(f"  {servers.summary(state)}", soft_wrap=True)
        if state.serving_servers:
            print_lines(console, *(f"  {line}" for line in servers.server_lines(state)))
    print_lines(console, *(f"  {line}" for line in plan_lines.plan_lines(state)))
    for line in notes.note_lines(state)[-MAX_NOTE_LINES:]:
        console.print(Text(f"  {line}", style="yellow"), soft_wrap=True)
    if state.skipped_rows:
        print_lines(console, f"  {describe_damage(state.skipped_rows)}")
    for name, curve in _shown_curves(state):
        console.print(Text(f"\n{name}", style="bold"))
        for line in draw(curve.steps, curve.values, width=min(width - 14, 72), height=8):
            console.print(line, no_wrap=True)


def _shown_curves(state: RunState) -> list[tuple[str, Any]]:
    names: list[str] = [n for n in ("loss", "validation/loss") if n in state.curves]
    names += [n for n in state.curves if n.startswith("validation/") and n != "validation/loss"][:2]
    return [(n if n != "loss" else "training loss", state.curves[n]) for n in names if len(state.curves[n].steps) > 1]


def print_runs(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    header = ("run", "status", "step", "metrics", "started", "weights")
    cells = [_run_cells(row) for row in rows]
    if len(cells) > MAX_TABLE_ROWS:
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in (header, *cells))
        print(printable("\n".join(lines)), file=console.file)
    else:
        console.print(_runs_table(header, cells, width=console.width if console.is_terminal else None))
    print_lines(console, *(f"{row['run']}: {row['damage']}" for row in rows if row["damage"]))


def _runs_table(header: Sequence[str], cells: Sequence[Sequence[str]], *, width: int | None) -> Table:
    """The columns that fit into `width`, or all. Only the metrics wrap, between words."""
    rows = [dict(zip(header, line, strict=True)) for line in cells]
    names: Sequence[str] = header
    if width is not None:
        needed = widest([*rows, {name: name for name in header}]) | {"metrics": " " * LEAST_METRICS}
        names = list(fitting(needed, width + GAP, drop=("weights", "started", "metrics")))
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=width is not None and name != "metrics", overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _run_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["run"],
        row["status"],
        f"{row['step']}/{row['steps']}" if row["steps"] else "–",
        formatting.metrics(row["metrics"]),
        row["started"],
        row["weights_sha256"][:12],
    )


def print_comparison(console: Console, columns: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Runs side by side: the fields in which the jobs differ, then the results."""
    table = Table("", *(name for name, _ in columns), box=None, pad_edge=False)
    for key in dict.fromkeys(k for _, values in columns for k in values):
        cells = [values.get(key) for _, values in columns]
        same = all(cell == cells[0] for cell in cells)
        if key.startswith("job ") and same:
            continue
        style = "" if same else "bold"
        table.add_row(key.removeprefix("job "), *(_cell(cell) for cell in cells), style=style)
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return formatting.number(value) if isinstance(value, float) else str(value)


def print_fields(console: Console, fields: Mapping[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        table.add_row(name, value)
    console.print(table)


def print_check(console: Console, c: Mapping[str, Any]) -> None:
    """Print the result of `shoal check`."""
    memory = ", ".join(f"{name} {formatting.size(c[f'{name}_bytes'])}" for name in ("weights", "gradient", "optimizer"))
    parameters, trainable = formatting.count(c["parameters"]), formatting.count(c["trainable"])
    skipped = f" ({plural(c['skipped'], 'bad row')} skipped)" if c["skipped"] else ""
    rows = {
        "samples": ", ".join(f"{formatting.count(n)} {name}" for name, n in c["samples"].items()) + skipped,
        "batch": f"inputs {', '.join(map(str, c['batch']['inputs']))}; target {c['batch']['target']}",
        "model": f"{parameters} parameters ({trainable} train), {c['device']}",
        "memory": f"{memory}; the process {formatting.size(c['peak_bytes'])} at its peak",
        "steps": f"{formatting.count(c['steps'])}, {formatting.count(c['steps_per_epoch'])} in an epoch",
        "first step": f"{formatting.seconds(c['step_s'])}, loss {formatting.number(c['loss'])}",
    }
    if c["metrics"]:
        rows["metrics"] = formatting.metrics(c["metrics"])
    print_fields(console, rows)
    for note in c["notes"]:
        console.print(f"note: {note}", markup=False)


def print_static_check(console: Console, job: Job, *, as_json: bool) -> None:
    """Print the result of `shoal check --static`: the names of the job, which were found and not executed."""
    names = {place: ref.name for place, _, ref in iter_refs(job)}
    if as_json:
        print(json.dumps({"static": True, "names": names}))
        return
    print_fields(console, names)
    print_lines(console, "Fields, rules, files and names are right. Nothing was executed: whether the code runs, and")
    print_lines(console, "what is in the data, is not known. `shoal check` without --static tries it.")
