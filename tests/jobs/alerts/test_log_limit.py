"""Logs stay below their limit while a process writes to them: no line at the end is lost, and positions stay."""

import os
import subprocess
import sys

import pytest

from shoal.events import EventWriter, RunState, read_events
from shoal.fleet import process_limits
from shoal.fleet.process_limits import LogLimit
from shoal.jobs.alerts import watch
from shoal.jobs.alerts.watch import RunWatch
from shoal.spec.engine import LimitsConfig
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.storage import logs
from shoal.storage.compaction import plain_files
from tests.conftest import MLP

LIMIT = 1_000_000
WRITER = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for n in range(200_000):
    os.write(file, b"line %d\\n" % n)
"""


@pytest.fixture
def paths(tmp_path):
    found = RunPaths.at(tmp_path / "mlp-1")
    found.logs.mkdir(parents=True)
    return found


def occupied(path):
    return path.stat().st_blocks * 512


def write_lines(paths):
    """As a worker does, in a process of its own, with the limit enforced all the time. Returns what was said."""
    limit, told = LogLimit(paths, LIMIT), []
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(paths.log(0))])
    while writer.poll() is None:
        told += limit.enforce()
    return told + limit.enforce()


def test_a_log_that_is_written_stays_below_its_limit(paths):
    told = write_lines(paths)
    assert told == ["worker-0.log exceeds limits.log: its beginning and its end are kept"]
    assert occupied(paths.log(0)) <= LIMIT
    assert paths.log(0).stat().st_size == sum(len(f"line {n}\n") for n in range(200_000))
    assert logs.read_tail(paths, "worker-0.log", lines=300).lines == [f"line {n}" for n in range(199_700, 200_000)]


def test_readers_pass_over_what_is_not_kept(paths):
    write_lines(paths)
    lines, end = [], 0
    while (piece := logs.read_after(paths, "worker-0.log", offset=end)).lines:
        lines, end = lines + piece.lines, piece.end
    assert end == paths.log(0).stat().st_size
    (gap,) = [n for n, line in enumerate(lines) if "bytes are not kept" in line]
    assert lines[: gap - 1] == [f"line {n}" for n in range(gap - 1)]  # the last line before the gap is cut
    after = lines[gap + 2 :]
    assert after == [f"line {n}" for n in range(200_000 - len(after), 200_000)]
    assert min(gap, len(after)) > 10_000
    found = [one.line for one in logs.search(paths, ["worker-0.log"], text="line 19999", at_most=-1)]
    assert found == ["line 19999", *(f"line 19999{n}" for n in range(10))]
    assert plain_files(paths) == []  # its gap would be packed as zeros


def test_a_line_without_an_end_is_read_in_pieces(paths):
    paths.log(0).write_bytes(b"x" * (logs.MAX_PIECE_BYTES + 10) + b"\nnext\n")
    first = logs.read_after(paths, "worker-0.log", offset=0)
    assert (len(first.lines), first.end) == (1, logs.MAX_PIECE_BYTES)
    assert logs.read_after(paths, "worker-0.log", offset=first.end).lines == ["x" * 10, "next"]


def test_the_driver_enforces_it_and_says_so(paths, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.0)
    job = make_job(MLP | {"limits": {"log": "1 MB"}}, base_dir=".", check_names=False)
    content = b"".join(b"line %d\n" % n for n in range(200_000))
    paths.log(0).write_bytes(content)
    paths.error_log(0).write_bytes(b"line\n" * 1000)
    os.symlink(paths.log(0), paths.logs / "worker-1.log")
    stream = EventWriter(paths.events, "driver")
    follows = RunWatch(job, paths, stream)
    for _ in range(3):
        follows.tick(RunState())
    follows.close()
    stream.close()
    notes = [event["message"] for event in read_events(paths.events) if event.kind == "note"]
    assert notes == ["worker-0.log exceeds limits.log: its beginning and its end are kept"]
    assert occupied(paths.log(0)) <= LIMIT
    kept = paths.log(0).read_bytes()
    assert len(kept) == len(content)
    assert kept[: LIMIT // 4] == content[: LIMIT // 4]
    assert kept[-LIMIT // 2 :] == content[-LIMIT // 2 :]


def test_a_file_system_that_cannot_is_told_once(paths, monkeypatch):
    monkeypatch.setattr(process_limits, "PUNCH_HOLE", 1 << 20)  # a request that no file system knows
    paths.log(0).write_bytes(b"line\n" * 400_000)
    limit = LogLimit(paths, LIMIT)
    (note,) = limit.enforce()
    assert note.startswith("logs are not bounded by limits.log:")
    assert limit.enforce() == []
    assert paths.log(0).read_bytes() == b"line\n" * 400_000


def test_a_limit_has_a_size():
    assert LimitsConfig().log_bytes == 256_000_000
    for wrong in ("many", "10 kB", "-1 GB"):
        with pytest.raises(ValueError, match=r"1 MB|size"):
            LimitsConfig(log=wrong)
