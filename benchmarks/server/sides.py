"""A side is a process that waits and makes rounds on request, so that sides can take turns."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import psutil

from benchmarks.overhead.side_by_side import Numbers
from benchmarks.report import environment
from benchmarks.server.setting import Setting


class Side:
    """A module that calls `protocol.serve`, with all the processes that it starts."""

    def __init__(self, module: str, setting: Setting, *, python: str = sys.executable) -> None:
        command = [python, "-m", f"benchmarks.server.{module}", setting.as_text()]
        quiet = environment() | {"PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._module = module

    def wait_until_ready(self) -> None:
        self._receive()

    def measure(self, rounds: int) -> Numbers:
        """Median and mean time of a round, and the processor time per round of all processes."""
        before = self._cpu_s()
        self._send(rounds)
        times = self._receive()
        cpu_s = (self._cpu_s() - before) / rounds
        return {"wall_s": statistics.median(times), "mean_s": statistics.mean(times), "cpu_s": cpu_s}

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._send(0)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _send(self, rounds: int) -> None:
        assert self._process.stdin
        print(rounds, file=self._process.stdin, flush=True)

    def _receive(self) -> list[float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._module} ended early")
        times: list[float] = json.loads(line)
        return times

    def _cpu_s(self) -> float:
        me = psutil.Process(self._process.pid)
        return sum(_cpu_s(one) for one in [me, *me.children(recursive=True)])


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextlib.contextmanager
def ready_sides(wanted: Mapping[str, Callable[[], Side]]) -> Iterator[dict[str, Side]]:
    """Start all sides one after the other, because starting takes processor time."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, start in wanted.items():
            sides[name] = start()
            stack.callback(sides[name].close)
            sides[name].wait_until_ready()
        yield sides
