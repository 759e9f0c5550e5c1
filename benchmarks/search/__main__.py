"""`python -m benchmarks.search simulate`, `price` and `disk`: searches on tables of learning curves. `decisions`: how
long deciding takes. `overhead`, `race`, `kills` and `price_real`: real trainings."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import environment, keep, table
from benchmarks.search.disk import disk
from benchmarks.search.price import price
from benchmarks.search.simulate import POLICIES, Conditions, simulate
from benchmarks.search.tables import load_tables
from benchmarks.search.workers import LANES

REAL = {
    "decisions": "processor time of a decision at 50 to 1000 trials",
    "overhead": "seconds per trial beyond its training, beside Optuna and Ray Tune",
    "race": "the best value over time on MNIST, beside Optuna and Ray Tune, with kills",
    "kills": "how soon a search trains again after kill -9 of the search or of a trial's worker",
    "price_real": "wall time in reproducible order against the order of the clock",
}
"""Parts without tables, each a module with `add_arguments` and `run`."""


def main() -> None:
    options = _parser().parse_args()
    if options.part in REAL:
        _train(options)
        return
    rows = ON_TABLES[options.part](options)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(table(f"search: {options.part}", rows))
    if options.keep:
        keep("search", options.keep, {"command": _command(options.tables), "rows": rows})


def _command(tables: Path) -> str:
    """The command line, with the last part of the tables' path alone."""
    words = [tables.name if word == str(tables) else word for word in sys.argv[1:]]
    return shlex.join(["python", "-m", "benchmarks.search", *words])


def _train(options: argparse.Namespace) -> None:
    """Results are kept under the name of the part, or another one, unless `--no-keep` says otherwise."""
    os.environ.update(environment())
    rows = importlib.import_module(f"benchmarks.search.{options.part}").run(options)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        Console().print(table(f"search: {options.part}", [{k: v for k, v in r.items() if k != "curve"} for r in rows]))
    if not options.no_keep:
        keep("search", options.keep or options.part, {"rows": rows})


def _simulate(options: argparse.Namespace) -> list[dict[str, Any]]:
    tables = load_tables(options.tables)
    asked = Conditions(options.order, options.workers, options.time, options.slots, options.lanes, options.warm)
    return [simulate(tables, policy, asked, seeds=options.seeds) for policy in options.policy or POLICIES]


def _price(options: argparse.Namespace) -> list[dict[str, Any]]:
    tables = load_tables(options.tables)[: options.most]
    asked = {"seeds": options.seeds, "lanes": options.lanes}
    return [row for workers in options.workers for row in price(tables, workers=workers, **asked)]


def _disk(options: argparse.Namespace) -> list[dict[str, Any]]:
    tables = load_tables(options.tables)
    return disk(tables, shares=options.share, workers=options.workers, seeds=options.seeds, horizon=options.time)


ON_TABLES = {"simulate": _simulate, "price": _price, "disk": _disk}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    run = parts.add_parser("simulate", help="regret at 1, 2.5, 5 and 10 units of time")
    run.add_argument("--policy", action="append", choices=POLICIES, help="any number of times; all if none is named")
    run.add_argument("--order", choices=("virtual", "clock"), default="virtual", help="of Shoal's search")
    run.add_argument("--workers", type=int, default=4)
    run.add_argument("--time", type=float, default=10.0, help="units of time: 1 is an average full training")
    run.add_argument("--slots", type=int, help="of Shoal's search; as many as workers without it")
    run.add_argument("--lanes", type=int, default=LANES, help="workers that one of its trials can use; 1: nobody helps")
    run.add_argument("--warm", type=int, default=0, help="searches on so many other tables come before Shoal's")
    cost = parts.add_parser("price", help="work done in reproducible order against the order of the clock")
    cost.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    cost.add_argument("--lanes", type=int, default=LANES, help="workers that one trial can use")
    cost.add_argument("--most", type=int, help="number of tables; all without it")
    room = parts.add_parser("disk", help="work that is done twice if few checkpoints of paused trials are kept")
    room.add_argument("--share", type=float, nargs="+", default=[0.05, 0.1, 0.2], help="of the paused trials")
    room.add_argument("--workers", type=int, default=4)
    room.add_argument("--time", type=float, default=10.0)
    for part in (run, cost, room):
        part.add_argument("--tables", type=Path, required=True, help="a directory of *.npz")
        part.add_argument("--seeds", type=int, default=3)
        part.add_argument("--json", action="store_true")
        part.add_argument("--keep", metavar="NAME", help="store the rows in results/search.json under this name")
    for name, told in REAL.items():
        part = parts.add_parser(name, help=told)
        importlib.import_module(f"benchmarks.search.{name}").add_arguments(part)
        part.add_argument("--json", action="store_true")
        part.add_argument("--keep", metavar="NAME", help="store the rows under another name than that of the part")
        part.add_argument("--no-keep", action="store_true")
    return parser


if __name__ == "__main__":
    main()
