"""python -m benchmarks.server [part ...] [--side WORDS ...] [--rivals-python PATH] [--quick]"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial

from rich.console import Console

from benchmarks.overhead.side_by_side import Numbers, Row, in_turns, median
from benchmarks.report import keep, table, take_names
from benchmarks.server.setting import Setting
from benchmarks.server.sides import Side, ready_sides

LIMIT, BOTH = "bare sockets", "bare sockets, both ways at once"
PROCESS_COUNTS = (1, 2, 4)
LINKS = (1000.0,)
ROUNDS = 20

Sides = dict[str, tuple[Setting, Callable[[], Side]]]


def shoal(way: str, optimizer: str, *, workers: int = 1, servers: int = 1, backups: int = 0) -> tuple[str, Setting]:
    name = f"shoal, {way}, {optimizer}" + (f", {backups} backup" if backups else "")
    return name, Setting(workers, servers, backups, way, optimizer)


def pair(rivals_python: str | None) -> dict[str, Sides]:
    """One worker and one server, on every side."""
    wanted = dict(shoal(way, optimizer) for way in ("tcp", "shm") for optimizer in ("SGD", "AdamW"))
    sides = {LIMIT: _side("bare_sockets", Setting()), BOTH: _side("bare_sockets", Setting(way="both"))}
    sides |= {name: _side("shoal_servers", setting) for name, setting in wanted.items()}
    sides |= {f"{kind} alone": _side("update", Setting(optimizer=kind)) for kind in ("SGD", "AdamW")}
    return {"1 worker, 1 server": sides | _rivals(1, 1, rivals_python)}


def replication(rivals_python: str | None) -> dict[str, Sides]:
    """Two servers, with and without backups on each other."""
    ways = [(way, optimizer) for way in ("tcp", "shm") for optimizer in ("SGD", "AdamW")]
    wanted = dict(shoal(*way, servers=2, backups=backups) for way in ways for backups in (0, 1))
    sides = {LIMIT: _side("bare_sockets", Setting())} | {
        name: _side("shoal_servers", it) for name, it in wanted.items()
    }
    return {"1 worker, 2 servers": sides}


def apart(rivals_python: str | None) -> dict[str, Sides]:
    """The same with every process on its own host: the cost of replication if the network is the limit. Needs root."""
    found: dict[str, Sides] = {}
    for mbit in LINKS:
        limit = {
            LIMIT: _side("bare_sockets", Setting(mbit=mbit)),
            BOTH: _side("bare_sockets", Setting(way="both", mbit=mbit)),
        }
        settings = [Setting(1, 2, backups, "tcp", "SGD", mbit=mbit) for backups in (0, 1)]
        sides = {f"shoal, {it.backups} backups": _side("shoal_servers", it) for it in settings}
        found[f"1 worker, 2 servers, {mbit:g} Mbit/s"] = limit | sides
    return found


def crowd(rivals_python: str | None) -> dict[str, Sides]:
    """More workers and servers. The limit has one pair of sockets per worker."""
    found: dict[str, Sides] = {}
    for workers in PROCESS_COUNTS:
        for servers in PROCESS_COUNTS:
            wanted = dict(shoal(way, "SGD", workers=workers, servers=servers) for way in ("tcp", "shm"))
            if servers > 1:
                wanted |= [shoal("tcp", "SGD", workers=workers, servers=servers, backups=1)]
            sides = {LIMIT: _side("bare_sockets", Setting(workers))}
            sides |= {name: _side("shoal_servers", setting) for name, setting in wanted.items()}
            found[f"{workers} workers, {servers} servers"] = sides | _rivals(workers, servers, rivals_python)
    return found


PARTS = {"pair": pair, "replication": replication, "apart": apart, "crowd": crowd}


def _rivals(workers: int, servers: int, python: str | None) -> Sides:
    found = {
        f"torch RPC, {way}": _side("rivals.torch_rpc", Setting(workers, servers, way=way)) for way in ("tcp", "shm")
    }
    if python is None:
        return found
    return found | {"ray actors, shm": _side("rivals.ray_actors", Setting(workers, servers, way="shm"), python)}


def _side(module: str, setting: Setting, python: str = sys.executable) -> tuple[Setting, Callable[[], Side]]:
    return setting, partial(Side, module, setting, python=python)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.server", description="Parameter servers, compared.")
    take_names(parser, "part", PARTS)
    parser.add_argument("--side", action="append", metavar="WORDS", help="sides that begin so; may be repeated")
    parser.add_argument("--rivals-python", help="an environment that has ray")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="three turns, nothing written: does it work?")
    asked = parser.parse_args()
    console = Console()
    for part in asked.parts or PARTS:
        for title, sides in PARTS[part](asked.rivals_python).items():
            chosen = {name: it for name, it in sides.items() if not asked.side or name.startswith(tuple(asked.side))}
            rows = compare(chosen, turns=3 if asked.quick else asked.turns)
            console.print(table(f"{part}: {title}", rows))
            if not (asked.quick or asked.side):
                keep("server", f"{part}: {title}", {"rows": rows})


def compare(sides: Sides, *, turns: int) -> list[Row]:
    """GB/s count what is pushed and pulled. `of limit` is the ratio of GB/s to that of bare sockets."""
    with ready_sides({name: start for name, (_, start) in sides.items()}) as there:
        found = in_turns({name: partial(side.measure, ROUNDS) for name, side in there.items()}, turns)
    base = found.get(LIMIT)
    return [_row(name, sides[name][0], numbers, base) for name, numbers in found.items()]


def _row(name: str, setting: Setting, numbers: list[Numbers], base: list[Numbers] | None) -> Row:
    moved_gb, alone = setting.round_bytes / 1e9, name.endswith("alone")
    return {
        "side": name,
        "ms": 1000 * median(numbers, "wall_s"),
        "mean ms": 1000 * statistics.mean(one["mean_s"] for one in numbers),
        "GB/s": "" if alone else moved_gb / median(numbers, "wall_s"),
        "CPU ms": 1000 * median(numbers, "cpu_s"),
        "CPU s/GB": "" if alone else median(numbers, "cpu_s") / moved_gb,
        "of limit": "" if alone or base is None else median(base, "wall_s") / median(numbers, "wall_s"),
        "CPU of limit": "" if alone or base is None else median(numbers, "cpu_s") / median(base, "cpu_s"),
        "turns, ms": [round(1000 * one["wall_s"]) for one in numbers],
    }


if __name__ == "__main__":
    main()
