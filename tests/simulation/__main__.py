"""`python -m tests.simulation SEED --trace` repeats a history; `python -m tests.simulation 0 --count 1000` runs many."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.history import describe_failure, fails, format_trace, make_history, run_history
from tests.simulation.standins import installed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="how many histories, from this seed on")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    arguments = parser.parse_args()
    done, failed, began = 0, 0, time.perf_counter()
    with installed():
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            history = make_history(seed)
            done += 1
            if fails(history) is not None:
                failed += 1
                print(describe_failure(history))
                if not arguments.keep_going:
                    break
            elif arguments.trace:
                print("\n".join(format_trace(run_history(history))))
    seconds = time.perf_counter() - began
    print(f"{failed} of {done} histories failed; {done / seconds:.0f} a second", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
