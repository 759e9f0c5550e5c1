"""A process that holds a queue and does nothing: `python -m tests.jobs.queue.claimer_that_waits RUNS`."""

import signal
import sys
from pathlib import Path

from shoal.jobs.queue.daemon_lock import daemon_lock, take_lease
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore

if __name__ == "__main__":
    paths = QueuePaths.of(Path(sys.argv[1]))
    with daemon_lock(paths), QueueStore(paths) as store:
        take_lease(store)
        print("serves", flush=True)
        signal.pause()
