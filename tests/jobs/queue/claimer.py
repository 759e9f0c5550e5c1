"""A process that serves a queue without running anything: `python -m tests.jobs.queue.claimer RUNS`.

It takes the lease, claims job after job, writes a file for each start, and finishes it. A test kills it at any time.
"""

import os
import sys
from pathlib import Path

from shoal.jobs.queue.daemon_lock import daemon_lock, take_lease
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.plan.queueing import order, transitions


def main():
    paths = QueuePaths.of(Path(sys.argv[1]))
    with daemon_lock(paths, wait_s=60), QueueStore(paths) as store:
        epoch = take_lease(store).epoch
        for entry in store.entries():
            if entry.state == "running":
                store.apply(entry.id, lambda e: transitions.lose_driver(e, new_epoch=epoch), epoch=epoch)
        print("serves", flush=True)
        while True:
            ready = order.runnable({entry.id: entry for entry in store.entries()})
            if not ready:
                return
            number = ready[0].id
            store.apply(number, lambda e: transitions.claim(e, epoch=epoch, run=f"run-{e.id}-{epoch}"), epoch=epoch)
            run = store.get(number).run
            (paths.runs / run).mkdir(exist_ok=True)
            (paths.runs / run / f"start-{epoch}-{os.getpid()}").touch()
            store.apply(number, lambda e: transitions.prove(e, epoch=epoch), epoch=epoch)
            store.apply(number, lambda e: transitions.finish(e, epoch=epoch), epoch=epoch)


if __name__ == "__main__":
    main()
