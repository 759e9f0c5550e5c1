"""The worker process: `python -m shoal.train.worker --seat 0 --run DIR`. Started by an engine, never by hand."""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import TextIO

import torch

from shoal.checkpoint.digest import state_sha256, weights_sha256
from shoal.checkpoint.export import export_model
from shoal.errors import EXIT_BUG, ShoalError, each
from shoal.events import Stream
from shoal.fleet.membership import FileMembership
from shoal.spec.job import Job
from shoal.spec.load import load_job
from shoal.spec.paths import RunPaths, cache_directory
from shoal.train.build import Built, build, build_loop
from shoal.train.loop import Ending, Loop


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.train.worker")
    parser.add_argument("--seat", type=int, required=True)
    parser.add_argument("--run", required=True)
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    sys.exit(guarded(paths, f"worker-{arguments.seat}", lambda stream: work(paths, arguments.seat, stream)))


def guarded(paths: RunPaths, who: str, act: Callable[[Stream], None]) -> int:
    """Run it; what goes wrong is told in the stream, and the exit code says whose fault it was."""
    stream = Stream(paths.events, who)
    try:
        act(stream)
    except ShoalError as failure:
        for one in each(failure):
            stream.emit("failed", code=one.code, message=one.message, where=one.where, fix=one.fix)
        traceback.print_exc()
        return failure.exit_code
    except BaseException as failure:
        stream.emit(
            "failed",
            code="BUG",
            message=f"{type(failure).__name__}: {failure}",
            where=traceback.format_exc(),
            fix="",
        )
        traceback.print_exc()
        return EXIT_BUG
    finally:
        stream.close()
    return 0


def work(paths: RunPaths, seat: int, stream: Stream) -> None:
    asked_to_leave = listen_for_the_end()
    job = load_job(paths.job, check_names=False)
    prepare_torch(job)
    with paths.seat_lock(seat).open("w") as lock:
        take_seat(lock, seat, stream)
        stream.emit(
            "worker_started",
            pid=os.getpid(),
            host=socket.gethostname(),
            threads=job.threads,
            torch=torch.__version__,
        )
        built = build(job, cache_dir=cache_directory(), tell=stream.emit)
        loop = build_loop(
            built,
            paths,
            seat=seat,
            membership=FileMembership(paths.view),
            stream=stream,
            asked_to_leave=asked_to_leave,
        )
        try:
            recover(loop)
            ending = loop.run()
            if ending.finished:
                finish(loop, ending, built, paths)
        finally:
            loop.feed.close()
            loop.store.close()


def take_seat(lock: TextIO, seat: int, stream: Stream) -> None:
    """A worker that lost its driver may still be saving: wait until it has left."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.emit("note", message=f"seat {seat} is still taken by an earlier worker; waiting for it to leave")
        fcntl.flock(lock, fcntl.LOCK_EX)


def prepare_torch(job: Job) -> None:
    """The same arithmetic everywhere: a fixed number of threads, deterministic kernels."""
    torch.set_num_threads(job.threads)
    if job.threads > 1 or torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def listen_for_the_end() -> Callable[[], str]:
    """Why this worker should leave at the next step boundary: SIGTERM, or its driver is gone."""
    parent = os.getppid()
    asked: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append("terminated"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def why() -> str:
        if asked:
            return asked[0]
        return "the driver is gone" if os.getppid() != parent else ""

    return why


def recover(loop: Loop) -> None:
    """From the newest valid checkpoint, if there is one."""
    start = time.perf_counter()
    found = loop.store.load_latest()
    if found is not None:
        manifest, state = found
        loop.load_state(state)
        seconds = round(time.perf_counter() - start, 6)
        loop.teller.tell("resumed", step=manifest.step, source="a checkpoint", recovery_s=seconds)


def finish(loop: Loop, ending: Ending, built: Built, paths: RunPaths) -> None:
    """Measure, save, export, and say so. Every part may be repeated after a crash."""
    loop.progress.flush(loop.step, loss=loop.loss, lr=loop.replica.lr)
    if loop.measured_at != loop.step:  # once and no more: schedules and watchers learn from it
        loop.evaluate("validation")
    loop.evaluate("test")
    loop.save(force=True)
    model = loop.replica.model
    weights = weights_sha256(model.state_dict())
    export_model(
        paths.model,
        model,
        program="program" in built.job.export,
        tell=loop.teller.tell,
        example_inputs=built.example.inputs,
        info={
            "job": built.job.dump(),
            "step": loop.step,
            "weights_sha256": weights,
            "metrics": loop.metrics,
            "classes": built.data.train.source.classes,
        },
    )
    loop.store.wait()
    loop.teller.tell(
        "finished",
        step=loop.step,
        weights_sha256=weights,
        state_sha256=state_sha256(loop.replica.state()),
        samples_seen=built.dealer.samples_before(loop.step),
        metrics=loop.metrics,
        stopped=ending.why,
        platform={
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
    )


if __name__ == "__main__":
    main()
