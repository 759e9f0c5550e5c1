"""Serving a queue: `shoal up`, and the daemon that `background` starts."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.errors import EXIT_OK, ShoalError, did_you_mean, error
from shoal.fleet.engines.host_use import HostUse
from shoal.jobs.queue.background import IDLE_S, START_TIMEOUT_S, guard
from shoal.jobs.queue.clusters import Listening, open_cluster
from shoal.jobs.queue.daemon import QueueDaemon
from shoal.jobs.queue.daemon_lock import daemon_lock, take_lease
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.queue.served_with import note_options
from shoal.jobs.run_executor import RunExecutor, catch_stop_signals, open_executor
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.shares import FirstComeFirstServed, SharePolicy
from shoal.plan.queueing.transitions import StaleEpochError
from shoal.spec.engine import EngineConfig

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
    paths, hosts = QueuePaths.of(runs), HostUse()
    with (
        daemon_lock(paths, wait_s=wait_s),
        QueueStore(paths) as store,
        open_cluster(paths, engine, listening, hosts=hosts, show=show) as (cluster, prepare),
        open_executor(host_use=hosts) as executor,
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
        note_options(paths, options_of(engine, listening))
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


def options_of(engine: EngineConfig | None, listening: Listening | None) -> str:
    """The options of `shoal up` that decide where jobs run."""
    if listening is not None:
        return shlex.join(["--listen", listening.address, *(["--tls", str(listening.tls)] if listening.tls else [])])
    if engine is None:
        return ""
    fields = {"kind": engine.kind} | engine.model_dump(mode="json", exclude_defaults=True)
    return shlex.join(["--engine", engine.kind if len(fields) == 1 else json.dumps(fields)])


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
