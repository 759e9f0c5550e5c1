"""Prints a plan: the measurements, the ways to run the job from fast to slow with reasons, and the recommended one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from shoal.errors import plural
from shoal.jobs.planner import PlanResult
from shoal.plan.costs.model import Cluster, RunChoice
from shoal.plan.costs.price import epoch_price
from shoal.plan.costs.select import PlanCandidate
from shoal.plan.costs.units import format_milliseconds, format_times
from shoal.plan.costs.worker_layout import workers_per_host
from shoal.terminal import formatting, reports

MAX_ROWS, MAX_ALIKE = 14, 6
WIDE_COLUMNS = 140
"""Terminal width from which reasons fit beside the numbers."""


def print_plan(console: Console, result: PlanResult, *, command: str, show_all: bool = False) -> None:
    """`command` is the command line that runs the job unchanged."""
    plan = result.plan
    _print_measurements(console, result)
    rows = list(plan.candidates) if show_all else rows_to_show(result)
    _print_rows(console, rows, result)
    if left_out := len(plan.candidates) - len(rows):
        reports.print_lines(
            console, f"{plural(left_out, 'other')} {'was' if left_out == 1 else 'were'} looked at: --all shows them"
        )
    console.print()
    if plan.pick is None:
        reports.print_lines(console, "None of these can be.")
    else:
        it = plan.pick.prediction.choice
        reports.print_lines(
            console, f"Take {_describe(it, result)}: {plan.pick.reason}.", f"  {_command_line(it, result, command)}"
        )
    if plan.offer and plan.pick is None:
        it = plan.offer.prediction.choice
        reports.print_lines(
            console, f"It would fit, with another result: {_describe(it, result)}: {plan.offer.reason}."
        )
    elif plan.offer:
        allow, it = ", ".join(plan.offer.changes), plan.offer.prediction.choice
        reports.print_lines(console, f"If the job had `plan: {{allow: [{allow}]}}`: {_describe(it, result)}.")
    reports.print_lines(console, *result.notes)


def rows_to_show(result: PlanResult) -> list[PlanCandidate]:
    """The pick, the offer, other numbers of workers for the pick's kind, and the best of every other kind, in order."""
    plan, best = result.plan, dict[tuple[object, ...], PlanCandidate]()
    for row in plan.candidates:
        best.setdefault(_kind(row, result), row)
    like_it = [row for row in plan.candidates if plan.pick and _kind(row, result) == _kind(plan.pick, result)]
    wanted = [*(row for row in (plan.pick, plan.offer) if row), *like_it[:MAX_ALIKE], *best.values()]
    few = list(dict.fromkeys(map(id, wanted)))[:MAX_ROWS]
    return [row for row in plan.candidates if id(row) in few]


def _kind(row: PlanCandidate, result: PlanResult) -> tuple[object, ...]:
    """The group of a candidate. All codecs are one group if nothing is sent."""
    it = row.prediction.choice
    if it.threads != result.job_choice.threads:
        return "threads", it.threads
    return (
        it.sync,
        it.codec if row.prediction.sent_bytes else it.codec == result.job_choice.codec,
        it.staleness > 0,
        it.shard,
    )


def _print_measurements(console: Console, result: PlanResult) -> None:
    found, machine, link = result.measured, result.machine, result.link
    time, host = found.times[result.job_choice.threads], machine.hosts[0]
    parts = {"forward": time.forward_s, "backward": time.backward_s, "update": time.apply_s}
    memory, speeds = formatting.size(host.memory_bytes), _host_speeds(machine)
    slowdown, exchange = format_times(machine.crowding), format_milliseconds(machine.round_s)
    many = f"{len(machine.hosts)} of " if len(machine.hosts) > 1 else ""
    rows = {
        "job": f"{plural(found.lanes, 'lane')}, {formatting.size(found.stretch_bytes)} to exchange",
        "one lane": ", ".join(f"{name} {format_milliseconds(s)}" for name, s in parts.items()),
        "machine": f"{many}{plural(host.cores, 'core')}, {memory}{speeds}",
        "two workers": f"a lane {slowdown} as long, an exchange {exchange} or more",
    }
    if many:
        rows["link"] = f"{formatting.size(link.send_bytes_s)}/s each way, {format_milliseconds(link.latency_s)} one way"
    reports.print_fields(console, rows)
    console.print()


def _host_speeds(machine: Cluster) -> str:
    found = [host.speed for host in machine.hosts]
    return "" if len(set(found)) == 1 else f", speeds {', '.join(f'{speed:g}' for speed in found)}"


def _print_rows(console: Console, rows: Sequence[PlanCandidate], result: PlanResult) -> None:
    """Reasons beside the numbers, or below each row in a narrow terminal."""
    hosts, threads = len(result.machine.hosts) > 1, len(result.measured.times) > 1
    head = ["", "workers", "hosts" * hosts, "threads" * threads, "how", "step", "exchange", "memory", "sent", "epoch"]
    head += ["price"] if result.seat_price else []
    cells = [head]
    for row in rows:
        it = row.prediction.choice
        mark = "→" if row is result.plan.pick else ""
        where = [mark, str(it.workers), str(it.hosts) * hosts, str(it.threads) * threads, it.name]
        cells.append([*where, *_prediction_cells(row), *_price_cell(row, result)])
    first, *lines = _aligned(cells)
    reports.print_lines(console, first.rstrip())
    for line, row in zip(lines, rows, strict=True):
        between = "  " if console.width >= WIDE_COLUMNS else "\n      "
        style = "bold" if row is result.plan.pick else "" if row.feasible else "dim"
        console.print(Text(line + between + row.reason, style=style), soft_wrap=True)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    shown = [i for i, width in enumerate(widths) if width]
    return ["  ".join(row[i].ljust(widths[i]) for i in shown) for row in cells]


def _prediction_cells(row: PlanCandidate) -> list[str]:
    it = row.prediction
    memory = formatting.size(it.memory_bytes) if it.memory_bytes else "–"
    if not row.feasible:
        return ["–", "–", memory, "–", "–"]
    spent = it.exchange_s + it.encode_s
    sent = formatting.size(it.sent_bytes) if it.sent_bytes else "–"
    return [
        format_milliseconds(it.step_s),
        format_milliseconds(spent) if spent else "–",
        memory,
        sent,
        formatting.seconds(it.epoch_s),
    ]


def _price_cell(row: PlanCandidate, result: PlanResult) -> list[str]:
    """Of an epoch."""
    if not result.seat_price:
        return []
    return [f"{epoch_price(row.prediction, result.seat_price):.3g}" if row.feasible else "–"]


def _describe(it: RunChoice, result: PlanResult) -> str:
    facts = [plural(it.workers, "worker")]
    facts += [f"on {it.hosts} hosts"] if it.hosts > 1 else []
    facts += [f"with {plural(it.threads, 'thread')} each"] if it.threads != result.job_choice.threads else []
    return " ".join(facts) + ("" if it.name == "lanes" else f" ({it.name})")


def _command_line(it: RunChoice, result: PlanResult, command: str) -> str:
    """The command line that runs the job with this choice."""
    sets = [f'--set "{field}={_yaml(value)}"' for field, value in result.job_overrides(it).items()]
    here, *there = workers_per_host(it, result.machine)
    line = " ".join([command, f"--workers {here}", *sets])
    if it.hosts == 1:
        return line
    elsewhere = f"{there[0]}" if len(set(there)) == 1 else f"N ({', '.join(map(str, there))})"
    return f"{line} --listen ADDRESS    # and elsewhere: shoal join HOST:PORT --workers {elsewhere} --trust-code"


def _yaml(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "{" + ", ".join(f"{name}: {part}" for name, part in value.items()) + "}"
