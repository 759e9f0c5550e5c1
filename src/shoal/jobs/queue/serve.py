"""Serving a queue: in the foreground (`shoal up`), or in the background, started by the first `shoal submit`."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from shoal.errors import EXIT_OK, ShoalError, did_you_mean, error
from shoal.jobs.queue.clusters import Listening, open_cluster
from shoal.jobs.queue.daemon import QueueDaemon
from shoal.jobs.queue.daemon_lock import daemon_lock, is_served, take_lease
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.run_executor import RunExecutor, catch_stop_signals, open_executor
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.shares import FirstComeFirstServed, SharePolicy
from shoal.plan.queueing.transitions import MAX_EARLY_DEATHS, StaleEpochError
from shoal.spec.engine import EngineConfig

IDLE_S = 60.0
"""Seconds after which a background daemon with nothing to do ends."""
START_TIMEOUT_S = 30.0
POLL_S = 0.02
LONG_LIFE_S = 60.0
"""A daemon that was killed after so many seconds is started again, however often it was killed before."""
POLICIES: Mapping[str, Callable[[], SharePolicy]] = {"elastic": ElasticShares, "first-come": FirstComeFirstServed}


def serve(
    runs: Path,
    *,
    policy: str = "elastic",
    idle_s: float | None = None,
    engine: EngineConfig | None = None,
    listening: Listening | None = None,
    wait_s: float = 0.0,
    show: Callable[[str], None] = print,
) -> None:
    """Run the jobs of the queue until a signal or `shoal down` ends this, or until it has been idle for `idle_s`."""
    if policy not in POLICIES:
        raise error("SH609", f"there is no policy '{policy}'", where="--policy", fix=did_you_mean(policy, POLICIES))
    paths = QueuePaths.of(runs)
    with (
        daemon_lock(paths, wait_s=wait_s),
        QueueStore(paths) as store,
        open_cluster(paths, engine, listening, show=show) as (cluster, prepare),
        open_executor() as executor,
    ):
        daemon = QueueDaemon(
            store,
            executor,
            take_lease(store),
            policy=POLICIES[policy](),
            cluster=cluster,
            idle_s=idle_s,
            prepare=prepare,
        )
        daemon.start()
        show(f"serves {paths.file}")
        with catch_stop_signals() as asked:
            try:
                while not daemon.tick():
                    if asked:
                        daemon.stop(asked[0])
            except StaleEpochError as failure:
                save_and_stop(executor)
                raise error("SH641", f"another daemon took over: {failure}", where=str(paths.file)) from failure
            except ShoalError:  # the queue file cannot be used any more
                save_and_stop(executor)
                raise


def save_and_stop(executor: RunExecutor) -> None:
    """Let all runs save and stop. Each can be resumed, with the queue or without."""
    for handle in executor.active:
        handle.stop("terminated")
    executor.run_until_done()


def parse_quotas(texts: Sequence[str]) -> dict[str, int | None]:
    """Parse `ann=4`; `ann=none` takes the limit away."""
    found: dict[str, int | None] = {}
    for text in texts:
        user, _, number = text.partition("=")
        if not user or not (number == "none" or (number.isdecimal() and int(number) >= 1)):
            raise error("SH609", f"'{text}' is not a quota", where="--quota", fix="Write a user and a number: ann=4.")
        found[user] = None if number == "none" else int(number)
    return found


def parse_engine(text: str) -> EngineConfig | None:
    """An engine by its kind; None for '': each job has its own."""
    if not text:
        return None
    try:
        return TypeAdapter(EngineConfig).validate_python({"kind": text})
    except ValidationError as failure:
        raise error("SH609", f"there is no engine '{text}'", where="--engine") from failure


# ---- in the background ----


def ensure_served(paths: QueuePaths) -> bool:
    """Start a daemon in the background unless one serves the queue. Returns whether it was started. SH648 if it does
    not start.

    It must be called after the change that the daemon is to see: a daemon that ends gives the lease back in a
    transaction of its own, and this one then finds no holder.
    """
    with QueueStore(paths) as store:
        if store.lease().holder and is_served(paths):
            return False
        process = _spawn(paths)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (store.lease().holder and is_served(paths)):
            if process.poll() is not None and process.returncode != EXIT_OK:
                last = paths.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                raise error("SH648", "; ".join(last) or f"exit code {process.returncode}", where=str(paths.log))
            if time.monotonic() > deadline_s:
                raise error("SH648", f"no sign of it in {START_TIMEOUT_S:g} s", where=str(paths.log))
            time.sleep(POLL_S)
    return True


def _spawn(paths: QueuePaths) -> subprocess.Popen[bytes]:
    """A guard in a session of its own, with no terminal: it outlives this process, and listens nowhere."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(paths.log, flags, 0o600), "ab") as log:
        return subprocess.Popen(
            _command(paths, "--guard"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=paths.runs.parent,
            start_new_session=True,
        )


def _command(paths: QueuePaths, *words: str) -> list[str]:
    idle_s = os.environ.get("SHOAL_QUEUE_IDLE_S", f"{IDLE_S:g}")
    return [sys.executable, "-P", "-m", "shoal.jobs.queue.serve", str(paths.runs), "--idle-s", idle_s, *words]


def guard(paths: QueuePaths) -> int:
    """Start the daemon, and start it again when it was killed: its jobs are resumed. Returns its exit code."""
    early_deaths = 0
    while True:
        began_s = time.monotonic()
        code = subprocess.call(_command(paths))
        lived_long = time.monotonic() - began_s >= LONG_LIFE_S
        early_deaths = 0 if lived_long else early_deaths + 1
        if not restart_after(code, early_deaths):
            return code
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(f"the daemon ended by {how} and is started again", flush=True)


def restart_after(code: int, early_deaths: int) -> bool:
    """Whether a daemon is started again. Jobs that kill it are held after MAX_EARLY_DEATHS; then it must still live."""
    killed_or_bug = code < 0 or code == 1
    return killed_or_bug and early_deaths <= 2 * MAX_EARLY_DEATHS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shoal.jobs.queue.serve")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument("--policy", choices=list(POLICIES), default="elastic")
    parser.add_argument("--guard", action="store_true")
    given = parser.parse_args(arguments)
    if given.guard:
        return guard(QueuePaths.of(given.runs))
    try:
        serve(given.runs, policy=given.policy, idle_s=given.idle_s, wait_s=START_TIMEOUT_S / 2)
    except ShoalError as failure:
        print(f"{failure.code}: {failure}", file=sys.stderr)
        return failure.exit_code
    return EXIT_OK


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
