"""A plan, printed: what was measured, the ways to run the job from fast to slow with reasons, and which one to take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from shoal.jobs.planning import Planned
from shoal.plan.costs.choose import Row
from shoal.plan.costs.crew import numbers_on
from shoal.plan.costs.facts import Choice, Machine
from shoal.plan.costs.sentences import milliseconds, times
from shoal.terminal import reports, words

MOST_ROWS, MOST_ALIKE = 14, 6
WIDE = 140
"""Where reasons have room beside the numbers."""


def show(console: Console, planned: Planned, *, command: str, every: bool = False) -> None:
    """`command` is what runs the job as it is."""
    plan = planned.plan
    _facts(console, planned)
    rows = list(plan.rows) if every else chosen(planned)
    _rows(console, rows, planned)
    if left_out := len(plan.rows) - len(rows):
        reports.lines(console, f"{left_out} others were looked at: --all shows them")
    console.print()
    if plan.pick is None:
        reports.lines(console, "None of these can be.")
    else:
        it = plan.pick.prediction.choice
        reports.lines(console, f"Take {_named(it, planned)}: {plan.pick.reason}.", f"  {_run(it, planned, command)}")
    if plan.offer and plan.pick is None:
        it = plan.offer.prediction.choice
        reports.lines(console, f"It would fit, with another result: {_named(it, planned)}: {plan.offer.reason}.")
    elif plan.offer:
        allow, it = ", ".join(plan.offer.changes), plan.offer.prediction.choice
        reports.lines(console, f"If the job had `plan: {{allow: [{allow}]}}`: {_named(it, planned)}.")
    reports.lines(console, *planned.notes)


def chosen(planned: Planned) -> list[Row]:
    """The pick and the offer, other numbers of workers for the pick's kind, the best of every other kind; in order."""
    plan, best = planned.plan, dict[tuple[object, ...], Row]()
    for row in plan.rows:
        best.setdefault(_kind(row, planned), row)
    like_it = [row for row in plan.rows if plan.pick and _kind(row, planned) == _kind(plan.pick, planned)]
    wanted = [*(row for row in (plan.pick, plan.offer) if row), *like_it[:MOST_ALIKE], *best.values()]
    few = list(dict.fromkeys(map(id, wanted)))[:MOST_ROWS]
    return [row for row in plan.rows if id(row) in few]


def _kind(row: Row, planned: Planned) -> tuple[object, ...]:
    """Codecs are all alike where nothing is sent."""
    it = row.prediction.choice
    if it.threads != planned.own.threads:
        return "threads", it.threads
    return it.sync, it.codec if row.prediction.sent_bytes else it.codec == planned.own.codec, it.staleness > 0, it.shard


def _facts(console: Console, planned: Planned) -> None:
    found, machine, link = planned.measured, planned.machine, planned.link
    time, host = found.times[planned.own.threads], machine.hosts[0]
    parts = {"forward": time.forward_s, "backward": time.backward_s, "update": time.apply_s}
    many = f"{len(machine.hosts)} of " if len(machine.hosts) > 1 else ""
    rows = {
        "job": f"{reports.plural(found.lanes, 'lane')}, {words.size(found.stretch_bytes)} to exchange",
        "one lane": ", ".join(f"{name} {milliseconds(s)}" for name, s in parts.items()),
        "machine": f"{many}{reports.plural(host.cores, 'core')}, {words.size(host.memory_bytes)}{_speeds(machine)}",
        "two workers": f"a lane {times(machine.crowding)} as long, an exchange {milliseconds(machine.round_s)} or more",
    }
    if many:
        rows["link"] = f"{words.size(link.send_bytes_s)}/s each way, {milliseconds(link.latency_s)} one way"
    reports.facts(console, rows)
    console.print()


def _speeds(machine: Machine) -> str:
    found = [host.speed for host in machine.hosts]
    return "" if len(set(found)) == 1 else f", speeds {', '.join(f'{speed:g}' for speed in found)}"


def _rows(console: Console, rows: Sequence[Row], planned: Planned) -> None:
    """Reasons beside the numbers, or below each line where the terminal is narrow."""
    hosts, threads = len(planned.machine.hosts) > 1, len(planned.measured.times) > 1
    head = ["", "workers", "hosts" * hosts, "threads" * threads, "how", "step", "exchange", "memory", "sent", "epoch"]
    cells = [head]
    for row in rows:
        it = row.prediction.choice
        mark = "→" if row is planned.plan.pick else ""
        cells.append([mark, str(it.workers), str(it.hosts) * hosts, str(it.threads) * threads, it.name, *_numbers(row)])
    first, *lines = _aligned(cells)
    reports.lines(console, first.rstrip())
    for line, row in zip(lines, rows, strict=True):
        between = "  " if console.width >= WIDE else "\n      "
        style = "bold" if row is planned.plan.pick else "" if row.possible else "dim"
        console.print(Text(line + between + row.reason, style=style), soft_wrap=True)


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    shown = [i for i, width in enumerate(widths) if width]
    return ["  ".join(row[i].ljust(widths[i]) for i in shown) for row in cells]


def _numbers(row: Row) -> list[str]:
    it = row.prediction
    memory = words.size(it.memory_bytes) if it.memory_bytes else "–"
    if not row.possible:
        return ["–", "–", memory, "–", "–"]
    spent = it.exchange_s + it.encode_s
    sent = words.size(it.sent_bytes) if it.sent_bytes else "–"
    return [milliseconds(it.step_s), milliseconds(spent) if spent else "–", memory, sent, words.seconds(it.epoch_s)]


def _named(it: Choice, planned: Planned) -> str:
    facts = [reports.plural(it.workers, "worker")]
    facts += [f"on {it.hosts} hosts"] if it.hosts > 1 else []
    facts += [f"with {reports.plural(it.threads, 'thread')} each"] if it.threads != planned.own.threads else []
    return " ".join(facts) + ("" if it.name == "lanes" else f" ({it.name})")


def _run(it: Choice, planned: Planned, command: str) -> str:
    """The command line that takes it."""
    sets = [f'--set "{field}={_yaml(value)}"' for field, value in planned.settings(it).items()]
    here, *there = numbers_on(it, planned.machine)
    line = " ".join([command, f"--workers {here}", *sets])
    if it.hosts == 1:
        return line
    elsewhere = f"{there[0]}" if len(set(there)) == 1 else f"N ({', '.join(map(str, there))})"
    return f"{line} --listen ADDRESS    # and elsewhere: shoal join HOST:PORT --workers {elsewhere}"


def _yaml(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return "{" + ", ".join(f"{name}: {part}" for name, part in value.items()) + "}"
