"""Damaged files of runs: everything else in them stays readable, and the state is that of the file without the damage.

`make test` tries some hundred damaged files, `make test-all` ten thousand streams. Hypothesis repeats a failure by the
blob that it prints.
"""

import contextlib
import copy
import hashlib
import io
import json
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.checkpoint.files import LocalFiles
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError, ShoalError
from shoal.events import RunState, RunStateReader, load_state, load_summary, read_events, summary_index
from shoal.events.checks import is_finite, is_number
from shoal.events.schema import KINDS, to_row
from shoal.events.snapshot import content_digest, encode_state
from shoal.events.stream import MAX_LINE_BYTES, parse_event
from shoal.fleet.driver_address import check_driver_address, read_driver_address
from shoal.jobs import run_dir, run_index
from shoal.jobs.receipt import make_receipt
from shoal.jobs.resume import job_to_resume
from shoal.jobs.run_driver import first_free_seat
from shoal.jobs.run_executor import load_run_state
from shoal.spec.load import load_run_job
from shoal.spec.receipt import read_receipt_file
from shoal.terminal import reports
from shoal.terminal.console import make_console
from shoal.terminal.live import _panel
from shoal.terminal.notes import event_line
from tests.checkpoint.states import bit_equal
from tests.events.random_events import ANYTHING, events
from tests.jobs.past_run import TOLD, told_events, write_run

FEW, MANY = 60, 10_000


def examples(count):
    """Always the same examples: a test that fails now and then tells nobody anything."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, derandomize=True, database=None, suppress_health_check=slow)


# ---- damage ----

CHOICE = {"workers": 2, "hosts": 1, "threads": 1, "how": "lanes"}
TIMES = dict.fromkeys(("step_s", "compute_s", "encode_s", "exchange_s", "apply_s"), 0.5)
LAYOUT = {"shard": "fsdp", "ways": 2, "replicas": 1, "cuts": ["a"], "parameters": 3, "trainable": 3}
MEASURED = {"prediction": TIMES, "expected": TIMES, "truth": {"step_s": 0.5, "lane_s": [[0.5]]}}
PLANNED = [
    ("layout", "worker-0", 0, LAYOUT),
    ("plan", "driver", None, {"choice": CHOICE, "prediction": TIMES, "reason": "fast"}),
    ("replan", "driver", 9, {"choice": CHOICE, **MEASURED, "moves": None, "best": None, "reason": "slow"}),
    ("failed", "worker-0", 9, {"code": "SH401", "message": "the model failed"}),
]
EVENTS = told_events([*TOLD[:-2], *PLANNED, *TOLD[-2:]])
"""A run in which almost everything happened."""
ONE_OF_EACH = list({event.kind: event for event in EVENTS}.values())

NASTY = [10**400, -(10**400), 10**30, 2**63, -1, 1e308, float("inf"), "../../etc", "/etc/passwd", "\x1b[2J", [], {}]
NESTED = [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 100_000 + b"]" * 100_000]


def wrong_value(kind, name):
    """A value that the field of the kind must not have; None if it may have any."""
    tried = [[], {}, "text", True, 10**30, -1, None, [{"a": []}], {"a": {"b": [None]}}, float("inf")]
    return next((value for value in tried if KINDS[kind].wrong_fields({name: value})), None)


@st.composite
def damaged_rows(draw):
    """One line that no reader may use."""
    event = draw(st.sampled_from(ONE_OF_EACH))
    row, how = (
        to_row(event),
        draw(st.sampled_from(["type", "frame", "missing", "cut", "nul", "utf-8", "nested", "noise"])),
    )
    line = json.dumps(row).encode()
    place = draw(st.integers(1, len(line) - 1))
    if how == "type":
        names = [name for name in KINDS[event.kind].hints if wrong_value(event.kind, name) is not None]
        if names:
            name = draw(st.sampled_from(names))
            return json.dumps(row | {name: wrong_value(event.kind, name)}).encode()
    if how in ("type", "frame"):
        wrong = {"t": [None, "1", -1, 1e12, float("nan")], "who": [None, 3, []], "kind": [None, "x", [], 10**400]}
        wrong["step"] = ["3", -1, 2**63, 1.5, [], True]
        name = draw(st.sampled_from(sorted(wrong)))
        return json.dumps(row | {name: draw(st.sampled_from(wrong[name]))}).encode()
    if how == "missing":
        del row[draw(st.sampled_from(["t", "who", "kind"]))]
        return json.dumps(row).encode()
    return {
        "cut": line[:place],
        "nul": line[:place].replace(b'"', b"\0") + b"\0" + line[place:],
        "utf-8": line[:place] + b"\xff\xc0" + line[place:],
        "nested": draw(st.sampled_from(NESTED)),
        "noise": b"\x80" + draw(st.binary(max_size=60)).replace(b"\n", b""),
    }[how]


@st.composite
def damaged_streams(draw):
    """Lines, each with whether it is sound. Sound ones may be swapped and doubled, and two may have been joined."""
    rows = [to_row(event) for event in draw(st.lists(st.sampled_from(ONE_OF_EACH), min_size=1, max_size=12))]
    rows += [to_row(event) for event in draw(st.lists(events(), max_size=2))]
    for row in rows:
        if draw(st.booleans()):  # a field of a newer version
            name = draw(st.sampled_from(["steps_per_s", "parameters", "again", "\x1b[2J"]))
            row |= {name: draw(ANYTHING)} if name not in KINDS[row["kind"]].hints else {}
    sound = [json.dumps(row).encode() for row in rows]
    for _ in range(draw(st.integers(0, 3))):
        a, b = draw(st.integers(0, len(sound) - 1)), draw(st.integers(0, len(sound) - 1))
        sound[a], sound[b] = sound[b], sound[a]
        sound.insert(a, sound[b])
    lines = [(line, True) for line in sound]
    for _ in range(draw(st.integers(1, 5))):
        place = draw(st.integers(0, len(lines)))
        lines[place:place] = [(draw(damaged_rows()), False)]
    if draw(st.booleans()):
        (one, _), (other, _) = lines[:2]
        lines[:2] = [(one + other, False)]
    if draw(st.integers(0, 39)) == 0:
        lines.insert(draw(st.integers(0, len(lines))), (b'{"x":"' + b"y" * (10 << 20) + b'"}', False))
    return lines


@st.composite
def flipped(draw, content, *, most=4):
    """The bytes with some bits flipped, and sometimes without their end."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        changed[draw(st.integers(0, len(changed) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(changed[: draw(st.sampled_from([len(changed), draw(st.integers(0, len(changed)))]))])


@st.composite
def mutated(draw, value):
    """The JSON value with something else somewhere inside it."""
    found = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        inside, other = found, draw(ANYTHING if draw(st.booleans()) else st.sampled_from(NASTY))
        while isinstance(inside, dict | list) and inside:
            keys = sorted(inside) if isinstance(inside, dict) else list(range(len(inside)))
            key = draw(st.sampled_from(keys))
            if draw(st.booleans()) or not isinstance(inside[key], dict | list):
                how = draw(st.sampled_from(["replace", "remove", "add"]))
                if how == "remove":
                    del inside[key]
                elif how == "add" and isinstance(inside, dict):
                    inside[draw(st.text(max_size=5) | st.just("../x"))] = other
                else:
                    inside[key] = other
                break
            inside = inside[key]
    return found


# ---- streams ----


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "mlp-1")


@pytest.fixture(scope="module")
def job(paths):
    return load_run_job(paths.job)


def console():
    return make_console(file=io.StringIO(), width=100)


def read_in_all_ways(paths, job):
    """What verbs do with a run. Returns its state."""
    state = load_run_state(paths)
    reports.print_run(console(), state, width=100)
    console().print(_panel(state))
    summary = run_index.run_summary(paths)
    reports.print_runs(console(), [summary])
    assert summary["step"] == state.step
    shown = RunState()
    for event in read_events(paths.events):
        shown.apply(event)
        event_line(event, shown)
    first_free_seat([*state.workers, *state.servers])
    if state.result:
        reports.print_receipt(console(), make_receipt(job, state, run=paths.name))
    return state


def assert_reads_as_without_damage(paths, job, lines, middle):
    """`middle`: how many lines there were when the snapshot was written."""
    for file in (paths.state_snapshot, paths.root.parent / run_index.INDEX_FILE):
        file.unlink(missing_ok=True)
    whole = b"".join(line + b"\n" for line in lines)
    paths.events.write_bytes(b"".join(line + b"\n" for line in lines[:middle]))
    reader = RunStateReader(paths.events, paths.state_snapshot)
    reader.catch_up()
    reader.save()
    paths.events.write_bytes(whole)
    state = read_in_all_ways(paths, job)
    present = [line for line in whole.split(b"\n") if line]
    sound = [line for line in present if parse_event(line) is not None]
    assert state.skipped_rows == len(present) - len(sound)
    shown = load_state(paths.events, paths.state_snapshot)
    paths.events.write_bytes(b"".join(line + b"\n" for line in sound))
    without = RunStateReader(paths.events, paths.root / "none").catch_up()
    assert without.skipped_rows == 0
    without.skipped_rows = shown.skipped_rows
    assert encode_state(shown) == encode_state(without)


def check_streams(paths, job, lines, middle):
    for line, is_sound in lines:
        assert (parse_event(line) is not None) == is_sound, line[:300]
    assert_reads_as_without_damage(paths, job, [line for line, _ in lines], middle)


def check_flipped(paths, job, data):
    sound = b"\n".join(json.dumps(to_row(event)).encode() for event in ONE_OF_EACH)
    content = data.draw(flipped(sound))
    assert_reads_as_without_damage(paths, job, content.split(b"\n"), data.draw(st.integers(0, 20)))
    return content


@examples(140)
@given(damaged_streams(), st.integers(0, 12))
def test_damaged_streams(paths, job, lines, middle):
    check_streams(paths, job, lines, middle)


@examples(FEW)
@given(st.data())
def test_streams_with_flipped_bits(paths, job, data):
    check_flipped(paths, job, data)


@pytest.mark.long
def test_damaged_streams_long(paths, job):
    read = []

    @examples(MANY * 3 // 4)
    @given(damaged_streams(), st.integers(0, 12))
    def check(lines, middle):
        check_streams(paths, job, lines, middle)
        read.append(hash(tuple(line for line, _ in lines)))

    check()
    assert len(read) >= MANY * 3 // 4
    assert len(set(read)) > 0.8 * len(read)


@pytest.mark.long
def test_streams_with_flipped_bits_long(paths, job):
    read = []

    @examples(MANY // 4)
    @given(st.data())
    def check(data):
        read.append(check_flipped(paths, job, data))

    check()
    assert len(read) >= MANY // 4
    assert len(set(read)) > len(read) // 2  # many are cut to the same few bytes


def test_the_damage_is_of_every_kind():
    """Else the tests above say nothing of the schema: each kind has a field that may be of a wrong type."""
    checked = {kind for kind in KINDS if any(wrong_value(kind, name) is not None for name in KINDS[kind].hints)}
    assert checked == {kind for kind in KINDS if KINDS[kind].hints}
    assert len(b"y" * (10 << 20)) > MAX_LINE_BYTES
    assert is_finite(5e-324)
    assert is_number(float("nan"))


# ---- receipts, snapshots, indexes, addresses ----


@examples(FEW)
@given(st.data())
def test_damaged_receipts(tmp_path_factory, data):
    directory = tmp_path_factory.getbasetemp() / "receipts" / "mlp-1"
    paths = run_dir.RunPaths.at(directory) if directory.exists() else write_run(directory)
    sound_file = directory / "sound"
    if not sound_file.exists():
        sound_file.write_bytes(paths.receipt.read_bytes())
    sound = sound_file.read_bytes()
    raw = data.draw(
        flipped(sound) | mutated(json.loads(sound)).map(lambda value: json.dumps(value).encode()) | st.binary()
    )
    paths.receipt.write_bytes(raw)
    stored = read_receipt_file(paths.receipt)
    assert (stored.found is None) == bool(stored.damage)
    if stored.own:
        reports.print_receipt(console(), stored.own)
        reports.print_folds(console(), [stored.own, stored.own])
    row = run_index.list_summaries(paths.root.parent)[0]
    assert (row["status"], row["step"]) == ("finished", 60)
    column = run_index.comparison_column(paths)
    assert ("receipt" in column) == bool(stored.damage)
    if stored.damage:
        job_to_resume(paths, [])  # a damaged receipt keeps nobody from resuming


@examples(FEW)
@given(st.data())
def test_damaged_snapshots(paths, job, data):
    """Also those whose digest is right: the digest is no secret."""
    paths.events.write_bytes(b"".join(json.dumps(to_row(event)).encode() + b"\n" for event in EVENTS))
    paths.state_snapshot.unlink(missing_ok=True)
    reader = RunStateReader(paths.events, paths.state_snapshot)
    whole = encode_state(reader.catch_up())
    reader.save()
    written = paths.state_snapshot.read_bytes()
    first, content = written.rstrip(b"\n").split(b"\n")
    how = data.draw(st.sampled_from(["flip", "state", "header"]))
    header, state = json.loads(first.partition(b" ")[2]), json.loads(content)
    if how == "state":
        part = data.draw(st.sampled_from(["layout", "plan", "replans", "result", "error", "facts", "curves", ""]))
        changed = state | {part: data.draw(mutated(state[part]))} if part else data.draw(mutated(state))
        content = json.dumps(changed).encode()
        header["state"] = content_digest(content)
    if how == "header":
        header = data.draw(mutated(header))
    first = json.dumps(header).encode()
    forged = content_digest(first).encode() + b" " + first + b"\n" + content + b"\n"
    paths.state_snapshot.write_bytes(data.draw(flipped(written)) if how == "flip" else forged)
    load_summary(paths.events, paths.state_snapshot)
    if how == "flip":
        assert encode_state(load_state(paths.events, paths.state_snapshot)) == whole
    read_in_all_ways(paths, job)


@examples(FEW)
@given(st.data())
def test_damaged_indexes(paths, data):
    runs = paths.root.parent
    paths.events.write_bytes(b"".join(json.dumps(to_row(event)).encode() + b"\n" for event in told_events()))
    paths.state_snapshot.unlink(missing_ok=True)
    file = runs / run_index.INDEX_FILE
    file.unlink(missing_ok=True)
    before, summary_index.MIN_NEW_ENTRIES = summary_index.MIN_NEW_ENTRIES, 1
    try:
        rows = run_index.list_summaries(runs)
        sound = file.read_bytes()
        file.write_bytes(
            data.draw(flipped(sound) | mutated(json.loads(sound)).map(lambda one: json.dumps(one).encode()))
        )
        found = run_index.list_summaries(runs)
    finally:
        summary_index.MIN_NEW_ENTRIES = before
    assert [row["run"] for row in found] == [row["run"] for row in rows]
    reports.print_runs(console(), found)
    json.dumps(found)


ADDRESS = {"host": "127.0.0.1", "port": 4000, "token": "ab" * 16}


@examples(FEW)
@given(flipped(json.dumps(ADDRESS).encode()) | mutated(ADDRESS).map(lambda one: json.dumps(one).encode()) | st.binary())
def test_damaged_addresses(tmp_path_factory, raw):
    path = tmp_path_factory.getbasetemp() / "address.json"
    path.touch()
    path.chmod(0o600)
    path.write_bytes(raw)
    found = read_driver_address(path)
    if found is None:
        with pytest.raises(ShoalError, match=r"SH626.*address\.json.*shoal resume"):
            check_driver_address(path)
    else:
        assert check_driver_address(path) == found
        assert 0 < found.port < 65536
        assert (found.host + found.token).isprintable()


# ---- manifests ----

STATE = {"model": {"w": [1.0, 2.0], "b": (3, None)}, "loop": {"step": 1}}
BLOB_OR_MANIFEST = re.compile(r"blobs/[0-9a-f]{2}/[0-9a-f]{64}|manifests/[0-9]{12}\.json")


@contextlib.contextmanager
def tolerated(*codes):
    """Errors with these codes are right, too."""
    try:
        yield
    except CheckpointError as failure:
        if failure.code not in codes:
            raise


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("store")
    store = CheckpointStore(directory, job_sha256="job")
    for step in (1, 2):
        store.save(step, STATE | {"tensor": torch.arange(9.0) * step, "large": torch.ones(20_000) * step})
        store.wait()
    return directory


@examples(FEW)
@given(st.data())
def test_damaged_manifests(store_dir, data):
    """An older checkpoint is used, and nothing outside the store is opened; also if the checksum is right."""
    newest = store_dir / "manifests" / f"{2:012d}.json"
    sound = newest.read_bytes()
    document = json.loads(sound)
    if data.draw(st.booleans()):
        raw = data.draw(flipped(sound))
    else:
        body = data.draw(mutated(document["body"]))
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        raw = json.dumps(document | {"body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()
    opened = []
    original = LocalFiles.open
    LocalFiles.open = lambda self, path: opened.append(path) or original(self, path)
    try:
        newest.write_bytes(raw)
        store = CheckpointStore(store_dir, job_sha256="job")
        with tolerated("SH504", "SH507"):  # of another job, of a newer version
            manifest, state = store.load_latest()
            assert manifest.step in (1, 2)
            if manifest.step == 1:
                assert bit_equal(state["loop"], STATE["loop"])
        for found in run_index.manifest.list_manifests(store_dir):
            assert found.step in (1, 2)
    finally:
        LocalFiles.open = original
        newest.write_bytes(sound)
    assert all(map(BLOB_OR_MANIFEST.fullmatch, opened)), opened
