"""What a server says to its driver, without serving anything: quick to start, and as mortal as one."""

import argparse
import contextlib
import fcntl
import os
import socket
import sys
from functools import partial

from shoal.fleet.contact import read_contact
from shoal.fleet.tie import Tie
from shoal.spec.paths import RunPaths
from shoal.spec.table import pieces

SERVED = {
    "pushes": 10,
    "bytes_in": 500,
    "bytes_plain": 2000,
    "bytes_out": 800,
    "staleness_mean": 1.5,
    "staleness_max": 4,
}
PATIENCE_S = 20


def main():
    with stand_in("server") as (seat, paths, tie):
        if (paths.root.parent / "broken").exists():
            sys.exit(3)
        tie.connect(PATIENCE_S)
        number = 0
        while tie.alone_s < PATIENCE_S and paths.root.exists():
            table = tie.wait_table(number, 0.2)
            if table is not None:
                number = table.number
                for filled in sorted(
                    {s for piece in pieces(table) for s in piece.filling if piece.predecessor(s) == seat}
                ):
                    tie.say("filled", table=number, seat=filled)


@contextlib.contextmanager
def stand_in(role):
    parser = argparse.ArgumentParser()
    parser.add_argument("--seat", type=int)
    parser.add_argument("--run")
    arguments = parser.parse_args()
    seat, paths = arguments.seat, RunPaths.at(arguments.run)

    def hello():
        return {
            "role": role,
            "seat": seat,
            "local": True,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": {"host": "127.0.0.1", "port": 1 + seat},
            "table": tie.table.model_dump() if tie.table else None,
            "view": tie.view.number if tie.view else 0,
            "training": tie.view is not None,
        }

    def beat():
        return {"phase": "serving" if role == "server" else "waiting", "served": SERVED}

    tie = Tie(partial(read_contact, paths.control), hello, beat=beat)
    lock = paths.seat_lock(seat, role)
    with lock.open("w") as held, contextlib.closing(tie):
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(str(os.getpid()))
        held.flush()
        yield seat, paths, tie
        lock.unlink(missing_ok=True)
