"""Compaction: whoever reads a run sees the same before and after, and a kill at any moment loses nothing."""

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.events import EventWriter, packed_file, read_events
from shoal.events.packed_file import PackedReader, open_content, pack_blocks, packed_path, unpack_file
from shoal.jobs import run_dir
from shoal.spec.run_paths import RunPaths
from shoal.storage import cleanup, logs
from shoal.storage.compaction import compact_run, expand_run
from shoal.storage.history import RunHistory
from tests.jobs.past_run import TOLD, call_verb, write_run

KILLS = """
import os, signal, sys
from pathlib import Path
from shoal.events.packed_file import open_content, pack_file, packed_path, unpack_file

CHANGING = ("open", "write", "flush", "close", "fsync", "utime", "replace", "unlink", "__exit__")
path, content = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()

def attempt(act, kill_at):
    '''Act in a child that kills itself before its nth call that may change the disk. Returns whether it was killed.'''
    child = os.fork()
    if child == 0:
        calls = 0
        def count(frame, event, argument):
            nonlocal calls
            calls += event == "c_call" and argument.__name__ in CHANGING
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(count)
        act(path)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

kills = 0
for act in (pack_file, unpack_file):
    kill_at = 1
    while attempt(act, kill_at):
        with open_content(path) as file:
            assert file.read() == content, (act, kill_at)
        kills += 1
        kill_at += 1
        path.exists() or act is unpack_file or path.write_bytes(content)
        if act is unpack_file and path.exists():
            pack_file(path)
    assert path.exists() == (act is unpack_file), act
print(kills)
"""


@pytest.fixture
def runs(tmp_path):
    """Two runs whose events and logs are larger than a block of the disk."""
    steps = [("step", "worker-0", n, {"loss": 2.3 / n, "samples": 50, "wall_s": 0.01}) for n in range(1, 3001)]
    told = [*TOLD[:4], *steps, *TOLD[64:]]
    for name in ("mlp-1", "mlp-2"):
        paths = write_run(tmp_path / name, told)
        paths.logs.mkdir()
        paths.log(0).write_bytes(b"".join(b"line %d\n" % n for n in range(2000)))
        paths.error_log(0).write_bytes(b"short\n")
        for path in (paths.job, paths.events):
            os.utime(path, (1e9, 1e9))
    return tmp_path


def packed_bytes(content):
    return b"".join(pack_blocks(io.BytesIO(content)))


@given(st.binary(max_size=60), st.lists(st.tuples(st.integers(0, 70), st.integers(-1, 20)), max_size=6))
def test_any_content_is_read_from_any_position(content, reads):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_file, "BLOCK_BYTES", 7)
        packed = packed_bytes(content)
        assert gzip.decompress(packed) == content  # as zcat reads it
        reader, plain = io.BufferedReader(PackedReader(io.BytesIO(packed)), 4), io.BytesIO(content)
        assert packed_file.content_size(reader) == len(content)
        for position, length in reads:
            assert reader.seek(position) == plain.seek(position)
            assert reader.read(length) == plain.read(length)


def test_damage_is_an_error_and_never_other_content():
    """Every bit of a file is flipped once, and the file is cut at every byte."""
    content = random.Random(1).randbytes(32) + b"a" * 32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_file, "BLOCK_BYTES", 16)
        packed = packed_bytes(content)
        flipped = [
            packed[:place] + bytes([packed[place] ^ 1 << bit]) + packed[place + 1 :]
            for place in range(len(packed))
            for bit in range(8)
        ]
        for damaged in [*flipped, *(packed[:length] for length in range(len(packed)))]:
            with contextlib.suppress(OSError):
                reader = io.BufferedReader(PackedReader(io.BytesIO(damaged)))
                packed_file.content_size(reader)
                assert reader.read() == content


def test_a_kill_at_any_moment_loses_nothing(tmp_path):
    content = b"".join(b'{"step":%d}\n' % n for n in range(1000))
    (tmp_path / "whole").write_bytes(content)
    (tmp_path / "events.jsonl").write_bytes(content)
    words = [sys.executable, "-c", KILLS, str(tmp_path / "events.jsonl"), str(tmp_path / "whole")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
    assert (tmp_path / "events.jsonl").read_bytes() == content
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "whole"]


def test_files_are_smaller_and_come_back_byte_for_byte(runs, capsys, monkeypatch):
    paths = RunPaths(runs / "mlp-1")
    before = {path: path.read_bytes() for path in (paths.events, paths.log(0), paths.error_log(0), paths.receipt)}
    changed_t = paths.events.stat().st_mtime_ns
    paths.history.write_bytes(b"x" * 9999)
    code, out, _ = call_verb(capsys, monkeypatch, "compact", "mlp-1", "--runs", runs, "--json")
    (done,) = json.loads(out)
    assert (code, done["files"]) == (0, 2)
    assert done["after_bytes"] < done["before_bytes"] / 3
    assert sorted(os.listdir(paths.logs)) == ["worker-0.err", "worker-0.log.gz"]
    assert not paths.events.exists()
    assert not paths.history.exists()
    assert gzip.decompress(packed_path(paths.events).read_bytes()) == before[paths.events]
    assert packed_path(paths.events).stat().st_mtime_ns == changed_t
    assert compact_run(paths).files == 0
    assert "nothing is lost" in call_verb(capsys, monkeypatch, "compact", "mlp-1", "--undo", "--runs", runs)[1]
    assert {path: path.read_bytes() for path in before} == before
    assert paths.events.stat().st_mtime_ns == changed_t


def read_everything(runs, capsys, monkeypatch):
    """What verbs show of a run, with nothing left of what they keep to be faster."""
    for path in runs.rglob(".*"):
        if path.is_file() and path.name in (".state.json", ".index.json", ".history.bin"):
            path.unlink()
    out = str(runs / "out.csv")
    verbs = [("show", "mlp-1", "--json"), ("runs", "--json"), ("logs", "mlp-1"), ("logs", "mlp-1", "--grep", "77"),
             ("export", "mlp-1", "--to", "csv", "--out", out)]  # fmt: skip
    told = [call_verb(capsys, monkeypatch, *verb, "--runs", runs) for verb in verbs]
    assert [code for code, _, _ in told] == [0] * len(verbs)
    return told, (runs / "out.csv").read_bytes()


def test_verbs_show_the_same_before_and_after(runs, capsys, monkeypatch):
    before = read_everything(runs, capsys, monkeypatch)
    (runs / "out.csv").unlink()
    paths = RunPaths(runs / "mlp-1")
    compact_run(paths)
    assert read_everything(runs, capsys, monkeypatch) == before
    assert sum(event.kind == "step" for event in read_events(paths.events)) == 3000
    assert logs.read_after(paths, "worker-0.log", offset=len(b"line 0\n")).lines[0] == "line 1"


def test_what_a_killed_call_left_is_cleared_and_the_plain_file_counts(runs):
    paths = RunPaths(runs / "mlp-1")
    content = paths.events.read_bytes()
    shutil.copy(paths.events, runs / "kept")
    compact_run(paths)
    newer = content + b'{"kind":"note"}\n'
    paths.events.write_bytes(newer)  # as after an expansion that was killed before its end, and a row since
    with open_content(paths.events) as file:
        assert file.read() == newer
    assert expand_run(paths).files == 2
    assert paths.events.read_bytes() == newer
    assert not packed_path(paths.events).exists()


def test_a_new_row_unpacks_the_stream(runs):
    """Also a finished run may go on: its receipt was damaged."""
    paths = RunPaths(runs / "mlp-1")
    before = list(read_events(paths.events))
    compact_run(paths)
    writer = EventWriter(paths.events, "driver")
    writer.emit("note", message="more")
    writer.close()
    assert list(read_events(paths.events))[:-1] == before
    assert not packed_path(paths.events).exists()


def test_a_damaged_packed_stream_is_told_and_kept(runs, capsys, monkeypatch):
    paths = RunPaths(runs / "mlp-1")
    compact_run(paths)
    packed = packed_path(paths.events)
    content = bytearray(packed.read_bytes())
    content[100] ^= 1
    packed.write_bytes(content)
    code, _, err = call_verb(capsys, monkeypatch, "show", "mlp-1", "--runs", runs)
    assert (code, "SH605" in err, "damaged" in err) == (6, True, True)
    assert "unreadable" in call_verb(capsys, monkeypatch, "runs", "--json", "--runs", runs)[1]
    with pytest.raises(ShoalError) as caught:
        expand_run(paths)
    assert caught.value.code == "SH682"
    assert packed.read_bytes() == content
    with pytest.raises(OSError, match="damaged"):
        unpack_file(paths.events)


def test_only_whole_finished_runs_are_compacted(runs):
    paths = RunPaths(runs / "mlp-1")
    with run_dir.driver_lock(paths):
        check_refused(paths, "SH602")
    shutil.copytree(paths.root, runs / "mlp-2" / "fold-0")
    check_refused(RunPaths(runs / "mlp-2" / "fold-0"), "SH609")
    assert compact_run(RunPaths(runs / "mlp-2")).files == 4
    paths.receipt.unlink()
    check_refused(paths, "SH682")
    assert paths.events.is_file()


def check_refused(paths, code):
    with pytest.raises(ShoalError) as caught:
        compact_run(paths)
    assert caught.value.code == code


def test_what_cannot_be_written_leaves_the_run_as_it_is(runs, monkeypatch):
    paths = RunPaths(runs / "mlp-1")
    before = paths.events.read_bytes()
    monkeypatch.setattr(packed_file, "pack_block", lambda block: b"wrong")
    check_refused(paths, "SH682")
    assert paths.events.read_bytes() == before
    assert [path.name for path in runs.rglob("*.gz*")] == []


def test_a_plan_compacts_exactly_what_it_lists(runs, capsys, monkeypatch):
    words = ["gc", "--compact", "--older", "1", "--keep", "newest=0", "--runs", runs]
    out = call_verb(capsys, monkeypatch, *words)[1]
    assert "2 would be compacted, which frees about" in out
    planned = json.loads(call_verb(capsys, monkeypatch, *words, "--json")[1])
    assert [item["part"] for item in planned["items"]] == ["compact", "compact"]
    said = sum(item["freed_bytes"] for item in planned["items"])
    with RunPaths(runs / "mlp-2").events.open("ab") as file:
        file.write(b"\n")
    code, out, err = call_verb(capsys, monkeypatch, "gc", "--apply", planned["plan"], "--json", "--runs", runs)
    (done,) = json.loads(out)
    assert (code, done["run"]) == (0, "mlp-1")
    assert 0.5 < (done["before_bytes"] - done["after_bytes"]) / (said / 2) < 2  # it was an estimate
    assert "mlp-2 stays" in err
    rules = cleanup.read_rules(days=0, keep="0", total="", status="", checkpoints=False, compact=True)
    assert [item["run"] for item in cleanup.make_plan(runs, rules)] == ["mlp-2"]  # the other has nothing left to give
    with pytest.raises(ShoalError):
        cleanup.read_rules(days=0, keep="0", total="", status="", checkpoints=True, compact=True)


def test_a_search_is_compacted_with_its_trials(runs):
    search = runs / "mlp-2"
    (search / "search.jsonl").write_text("")
    search.joinpath("receipt.json").unlink()
    shutil.copytree(runs / "mlp-1", search / "trial-0")
    (search / "trial-0" / "receipt.json").unlink()  # a trial that was stopped early
    check_refused(RunPaths(search), "SH682")
    (search / "search.json").write_text("{}")
    assert compact_run(RunPaths(search)).files == 4
    assert packed_path(RunPaths(search / "trial-0").events).is_file()


def test_what_a_killed_call_had_begun_goes(runs):
    paths = RunPaths(runs / "mlp-1")
    left = [paths.root / ".events.jsonl.gz.tmp", paths.root / ".events.jsonl.tmp", paths.logs / ".worker-0.log.gz.tmp"]
    for path in left:
        path.write_bytes(b"x" * 5000)
    compact_run(paths)
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("act", [compact_run, expand_run])
def test_two_files_that_differ_both_stay(runs, act):
    """Whatever brought them: nothing is deleted that is not elsewhere too."""
    paths = RunPaths(runs / "mlp-1")
    compact_run(paths)
    packed = packed_path(paths.log(0)).read_bytes()
    paths.log(0).write_bytes(b"another log\n" * 1000)
    with pytest.raises(ShoalError) as caught:
        act(paths)
    assert caught.value.code == "SH682"
    assert packed_path(paths.log(0)).read_bytes() == packed
    assert paths.log(0).read_bytes() == b"another log\n" * 1000


AGAIN = """
import sys
from pathlib import Path
from shoal.errors import ShoalError
from shoal.spec.run_paths import RunPaths
from shoal.storage.compaction import compact_run, expand_run

paths, refused = RunPaths(Path(sys.argv[1])), 0
for _ in range(40):
    for act in (compact_run, expand_run):
        try:
            act(paths)
        except ShoalError as failure:
            assert failure.code == "SH602", failure
            refused += 1
print(refused)
"""


@pytest.mark.long
def test_two_processes_compact_one_run_while_others_read_it(runs):
    """Each reader sees the whole content each time, and only one of the two acts at a time."""
    paths = RunPaths(runs / "mlp-1")
    content, steps = paths.events.read_bytes(), sum(event.kind == "step" for event in read_events(paths.events))
    words = [sys.executable, "-c", AGAIN, str(paths.root)]
    acting = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    reads = 0
    while any(one.poll() is None for one in acting):
        with open_content(paths.events) as file:
            assert file.read() == content
        history = RunHistory(paths)
        history.catch_up()
        assert len(history.series["loss"]) == steps
        assert logs.read_tail(paths, "worker-0.log", lines=1).lines == ["line 1999"]
        reads += 1
    refused = [int(one.communicate()[0]) for one in acting]
    assert [one.returncode for one in acting] == [0, 0]
    assert reads > 5
    assert 0 < sum(refused) < 160
    expand_run(paths)
    assert paths.events.read_bytes() == content
    assert not list(paths.root.rglob("*.gz")) + list(paths.root.rglob("*.tmp"))
