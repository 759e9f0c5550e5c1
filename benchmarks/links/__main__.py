"""python -m benchmarks.links [part ...] [--links 10,100,1000] [--models gpt,cnn] [--codecs ...] [--data DIR] [--quick]

Needs root and `tc`. Two unnamed network namespaces are the hosts; the kernel removes them at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.links import measure, quality, regret
from benchmarks.links.hosts import Hosts, two_hosts
from benchmarks.links.models import BATCH, MODELS, USUAL
from benchmarks.links.quality import Curve, Goal
from benchmarks.links.samples import prepare
from benchmarks.links.sides import (
    ALONE,
    BUSY,
    CODECS,
    LOCALS,
    MEETING,
    RIVAL,
    TIME_FIELDS,
    ForkServers,
    has_staleness,
    open_fork_server,
    period,
    sides,
)
from benchmarks.overhead.side_by_side import Numbers, Row, in_turns, median, ratio

COMPARED = ("quality", "speed")
PARTS = (*COMPARED, "regret", "regrets")
"""`regret`: the planner's choice compared with all candidates, cell by cell. `regrets`: the table of all stored cells,
without measuring. Both run only if named."""
ROUNDS, SLOWEST_MBIT = 5, 10.0
"""Rounds, except on the slowest link, where a step takes seconds and one round is the default."""


@dataclass(frozen=True)
class Bench:
    """`steps` are those of a quality run, `window_s` the time in which a side's steps are counted."""

    hosts: Hosts
    fork_servers: ForkServers
    data: Path
    scratch: Path
    codecs: Sequence[str]
    locals: Sequence[str]
    sides: Sequence[str]
    steps: int
    seeds: int
    rounds: int | None
    window_s: float
    most_s: float
    keep: bool

    def quality(self, model: str) -> dict[str, list[Curve]]:
        lanes = [codec for codec in self.codecs if self._wanted(f"lanes, {codec}")]
        return quality.train_missing_curves(
            model,
            self.data,
            [*lanes, *filter(self._wanted, self.locals)],
            seeds=self.seeds,
            steps=self.steps,
            keep=self.keep,
            fork_server=self.fork_servers[0],
            scratch=self.scratch,
        )

    def speed(self, model: str, mbit: float) -> dict[str, list[Numbers]]:
        asked: dict[str, Any] = {"mbit": mbit, "window_s": self.window_s, "batch": BATCH[model]}
        variants = {
            name: partial(measure.speed, start, self.hosts, self.scratch, period=period(name), **asked)
            for name, start in self._sides(model).items()
        }
        return in_turns(variants, self.rounds or (ROUNDS if mbit > SLOWEST_MBIT else 1))

    def race(self, model: str, mbit: float, loss: float) -> dict[str, float | None]:
        """Seconds to the loss, for sides whose number of steps depends on the link."""
        asked: dict[str, Any] = {"mbit": mbit, "most_s": self.most_s, "batch": BATCH[model]}
        return {
            name: measure.seconds_to(loss, start, self.hosts, self.scratch, **asked)
            for name, start in self._sides(model).items()
            if has_staleness(name)
        }

    def _sides(self, model: str) -> dict[str, Any]:
        found = sides(model, self.data, self.codecs, self.locals, self.fork_servers)
        return {name: start for name, start in found.items() if self._wanted(name)}

    def _wanted(self, side: str) -> bool:
        return not self.sides or side.startswith(tuple(self.sides))


def main() -> None:
    asked = _asked()
    console = Console(width=160)
    _interrupt_on_signals()
    if asked.parts == ["regrets"]:
        console.print(report.table("regret", regret.regrets(report.kept("links"))))
        return
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch, _two_hosts() as machines:
        if "regret" in asked.parts:
            _regret(asked, console, machines, Path(scratch))
            return
        bench = Bench(
            *machines,
            data=prepare(asked.data, Path(scratch, "data")),
            scratch=Path(scratch),
            codecs=asked.codecs,
            locals=[] if asked.no_locals else LOCALS,
            sides=asked.side or [],
            steps=30 if asked.quick else asked.steps,
            seeds=1 if asked.quick else asked.seeds,
            rounds=1 if asked.quick else asked.rounds,
            window_s=2.0 if asked.quick else asked.window,
            most_s=20.0 if asked.quick else asked.most,
            keep=not asked.quick,
        )
        for model in asked.models:
            for part, rows in compare(bench, model, asked.parts or COMPARED, asked.links):
                console.print(report.table(part, rows))
                if not asked.quick and (asked.title or not asked.side) and quality.TITLE not in part:
                    report.keep("links", ", ".join(filter(None, [part, asked.title])), {"rows": rows})


def _regret(asked: argparse.Namespace, console: Console, machines: tuple[Hosts, ForkServers], scratch: Path) -> None:
    data = prepare(asked.data, scratch / "data")
    bench = regret.Bench(*machines, data, scratch, 1.0 if asked.quick else asked.window)
    cells = [regret.Cell(model, mbit, slow) for model in asked.models for mbit in asked.links for slow in asked.slow]
    keep = not asked.quick
    rounds = 1 if asked.quick else asked.rounds or ROUNDS
    show = lambda *table: console.print(report.table(*table))  # noqa: E731
    regret.run(bench, cells, asked.side or [], rounds, keep=keep, show=show)


def compare(bench: Bench, model: str, parts: Sequence[str], links: Sequence[float]) -> Iterator[tuple[str, list[Row]]]:
    """Tables with their titles, as they become known."""
    goal = quality.kept_goal(model)
    if "quality" in parts:
        curves = bench.quality(model)
        goal = quality.goal(curves, bench.steps)
        yield f"{model}: {quality.TITLE} {bench.steps} steps", quality.rows(curves, goal)
    for mbit in links if "speed" in parts else ():
        found = bench.speed(model, mbit)
        raced = bench.race(model, mbit, goal.loss) if goal else {}
        yield f"{model}: {mbit:g} Mbit/s", [_row(name, found, goal, raced) for name in found]


def _row(
    name: str,
    found: Mapping[str, list[Numbers]],
    goal: Goal | None,
    raced: Mapping[str, float | None],
) -> Row:
    numbers, alone, rival = found[name], found.get(ALONE), found.get(RIVAL)
    steps_per_s = median(numbers, "steps/s")
    row: Row = {
        "side": name,
        "steps/s": steps_per_s,
        "of alone": ratio(numbers, alone, "steps/s") if alone else "",
        "of ddp": ratio(numbers, rival, "steps/s") if rival else "",
        "MB/step": median(numbers, "MB"),
        "CPU of alone": ratio(numbers, alone, "cpu_s") if alone else "",
    }
    if goal:
        row[f"s to {goal.loss:.2f}"] = _seconds_to(name, goal, raced, steps_per_s) or ""
    spent = {f"{one.removesuffix('_s')} ms": median(numbers, one) if one in numbers[0] else "" for one in TIME_FIELDS}
    return row | spent | {"turns": [round(one["steps/s"], 3) for one in numbers]}


def _seconds_to(name: str, goal: Goal, raced: Mapping[str, float | None], steps_per_s: float) -> float | None:
    """Servers without staleness need as many steps as lanes with the same codec, DDP as many as lanes without a codec.
    The workers without communication never reach the loss."""
    if name in (ALONE, BUSY, MEETING):
        return None
    if name in raced:
        return raced[name]
    same = name if name in LOCALS else "none" if name == RIVAL else name.rpartition(", ")[2]
    steps = goal.steps.get(same)
    return steps / steps_per_s if steps else None


@contextlib.contextmanager
def _two_hosts() -> Iterator[tuple[Hosts, ForkServers]]:
    with two_hosts() as hosts, contextlib.ExitStack() as stack:
        with hosts.on_remote():
            far = stack.enter_context(open_fork_server())
        yield hosts, (stack.enter_context(open_fork_server()), far)


def _interrupt_on_signals() -> None:
    """Clean up after any signal, even if a background shell ignores Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description="Slow links, compared.")
    report.take_names(parser, "part", PARTS)
    parser.add_argument("--links", type=_numbers, default=[10.0, 100.0, 1000.0], help="Mbit/s; inf: unshaped")
    parser.add_argument("--models", type=partial(_names, MODELS), default=list(USUAL))
    parser.add_argument("--codecs", type=partial(_names, CODECS), default=list(CODECS))
    parser.add_argument("--side", action="append", metavar="WORDS", help="sides that begin so; may be repeated")
    parser.add_argument(
        "--slow", type=_whole, default=[1], help="of regret: 1,3 for equal hosts, and one 3 times slower"
    )
    parser.add_argument("--no-locals", action="store_true", help="without lanes that train by themselves")
    parser.add_argument("--seeds", type=int, default=3, help="of a quality run")
    parser.add_argument("--title", default="", help="keep the results of some sides too, under this name")
    parser.add_argument("--steps", type=int, default=300, help="of a quality run")
    parser.add_argument("--rounds", type=int, help=f"turns of each side; {ROUNDS}, but 1 at {SLOWEST_MBIT:g} Mbit/s")
    parser.add_argument("--window", type=float, default=10.0, help="seconds in which a side's steps are counted")
    parser.add_argument("--most", type=float, default=120.0, help="seconds after which a race to a loss is given up")
    parser.add_argument("--data", type=Path, help="a directory with MNIST's IDX files and a shakespeare text")
    parser.add_argument("--quick", action="store_true", help="few steps, one turn, nothing written: does it work?")
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _whole(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _names(known: Mapping[str, Any], text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"no such name: {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    main()
