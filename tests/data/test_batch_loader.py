"""The batch loader: whatever loads ahead, a batch depends on seed, step and lane alone."""

import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import closing

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.batch import Batch
from shoal.data.batch_loader import BatchLoader, evaluation_batches
from shoal.data.files import find_files
from shoal.data.prefetch import BatchBuilder, make_prefetcher
from shoal.data.samplers import make_sampler
from shoal.data.source import SourceOptions, open_source
from shoal.data.sources import array_files
from shoal.data.sources.arrays import ArraySource, InMemoryRows
from shoal.data.sources.dataset import PythonDatasetSource
from shoal.data.sources.parquet_groups import ParquetRowGroupSource
from shoal.data.sources.parquet_rows import ParquetReader
from shoal.data.sources.table import choose_columns
from shoal.errors import ShoalError
from shoal.fleet.orphans import find_orphans
from shoal.spec.data import LoaderConfig, RandomSamplerConfig
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths
from shoal.spec.sources.config import NpySourceConfig, ParquetSourceConfig
from tests.conftest import living

LANES = 3


class StubSampler:
    """Lane 2 has nothing in every fourth step."""

    def ids(self, step, lane):
        if lane == 2 and step % 4 == 3:
            return np.zeros(0, dtype=np.int64)
        return np.arange(3, dtype=np.int64) * 7 % 40 + (step * LANES + lane) % 20


class Noisy:
    """A dataset that draws from all global generators."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(()), np.random.rand(), random.random()]), i


def noisy(batch):
    x = batch.inputs[0]
    return Batch((x + torch.rand_like(x) + float(np.random.rand()) + random.random(),), batch.target, batch.size)


def careful(batch, *, generator):
    x = batch.inputs[0]
    return Batch((x + torch.rand(x.shape, generator=generator),), batch.target, batch.size)


def doubled(batch):
    return Batch((batch.inputs[0] * 2,), batch.target, batch.size)


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(array_files, "HELD_BYTES", 0)
    np.save(tmp_path / "x.npy", np.arange(240, dtype=np.float32).reshape(60, 4))
    return open_source(NpySourceConfig(kind="npy", path="x.npy"), base_dir=str(tmp_path))


@pytest.fixture
def held():
    rows = np.arange(240, dtype=np.float32).reshape(60, 4)
    return ArraySource((InMemoryRows(rows),), InMemoryRows(np.arange(60)))


@pytest.fixture(params=["held", "mapped", "dataset"])
def source(request):
    return PythonDatasetSource(Noisy()) if request.param == "dataset" else request.getfixturevalue(request.param)


def load_batches(source, *, workers, augment=None, lanes=range(LANES), steps=range(6), transform=doubled, seed=3):
    batch_loader = BatchLoader(
        source,
        StubSampler(),
        seed=seed,
        lanes=LANES,
        augment=augment,
        transform=transform,
        loader=LoaderConfig(workers=workers),
    )
    try:
        batch_loader.set_lanes(list(lanes), steps[0])
        return {(s, lane): plain(batch_loader.get(s, lane)) for s in steps for lane in lanes}
    finally:
        batch_loader.close()


def plain(batch):
    return None if batch is None else (batch.inputs[0].numpy().tobytes(), str(batch.target), batch.size)


@pytest.mark.parametrize("augment", [None, noisy, careful])
def test_batches_do_not_depend_on_who_makes_them(source, augment):
    alone = load_batches(source, workers=0, augment=augment)
    assert alone[3, 2] is None
    assert len({made for made in alone.values() if made}) > 10
    for workers in ("auto", 1, 2):
        assert load_batches(source, workers=workers, augment=augment) == alone
    backwards = load_batches(source, workers="auto", augment=augment, steps=range(5, -1, -1), lanes=[2, 0, 1])
    assert backwards == alone
    some = load_batches(source, workers="auto", augment=augment, lanes=[1], steps=range(2, 5))
    assert some == {key: alone[key] for key in some}
    if augment is not None:
        assert load_batches(source, workers=0, augment=augment, seed=4) != alone


@pytest.mark.parametrize("by", ["steps", "lanes"])
def test_each_batch_is_loaded_once_and_ahead(mapped, by):
    """Step by step, and also lane by lane in legs of several steps."""
    loaded, asking = [], threading.get_ident()

    class Told(type(mapped)):
        def take(self, ids):
            loaded.append((tuple(ids), threading.get_ident() == asking))
            return super().take(ids)

    mapped.__class__ = Told
    batch_loader, sampler = (
        BatchLoader(mapped, StubSampler(), seed=3, lanes=LANES, loader=LoaderConfig(prefetch=2)),
        StubSampler(),
    )
    legs = [range(6), range(6, 12)]
    order = [(s, lane) for leg in legs for s in leg for lane in range(LANES)]
    if by == "lanes":
        order = [(s, lane) for leg in legs for lane in range(LANES) for s in leg]
    with closing(batch_loader):
        batch_loader.set_lanes(range(LANES), 0)
        for step, lane in order:
            batch_loader.get(step, lane)
    expected = [tuple(ids) for step, lane in order if len(ids := sampler.ids(step, lane))]
    needed = [ids for ids, _ in loaded]
    assert all(needed.count(ids) <= expected.count(ids) + LANES for ids in expected), "but for what is ahead of the end"
    assert len(needed) <= len(expected) + 2 * LANES
    assert not any(here for _, here in loaded), "none when it was needed"


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, LANES - 1)), max_size=20), st.integers(0, 8))
def test_any_order_of_requests_and_any_lanes_are_right(tmp_path_factory, asked, start):
    path = tmp_path_factory.mktemp("loader")
    np.save(path / "x.npy", np.arange(240, dtype=np.float32).reshape(60, 4))
    source = open_source(NpySourceConfig(kind="npy", path="x.npy"), base_dir=str(path))
    batch_loader = BatchLoader(source, StubSampler(), seed=1, lanes=LANES, augment=noisy)
    bare = BatchLoader(source, StubSampler(), seed=1, lanes=LANES, augment=noisy, loader=LoaderConfig(workers=0))
    batch_loader.set_lanes([0, 2], start)
    try:
        for step, lane in asked:
            assert plain(batch_loader.get(step, lane)) == plain(bare.get(step, lane))
    finally:
        batch_loader.close()


def test_the_training_process_keeps_its_own_randomness(source):
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    wanted = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    for workers in (0, "auto", 1):
        load_batches(source, workers=workers, augment=noisy)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == wanted


def test_more_threads_in_training_do_not_reach_the_user_functions(held):
    seen = []

    def look(batch):
        seen.append(torch.get_num_threads())
        return batch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load_batches(held, workers=0, transform=look)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_carry_moves_to_other_lanes_and_steps(mapped):
    batch_loader = BatchLoader(mapped, StubSampler(), seed=1, lanes=LANES)
    bare = BatchLoader(mapped, StubSampler(), seed=1, lanes=LANES, loader=LoaderConfig(workers=0))
    for lanes, step in (([0, 1], 0), ([2], 9), ([0, 1, 2], 4)):
        batch_loader.set_lanes(lanes, step)
        for s in range(step, step + 3):
            for lane in lanes:
                assert plain(batch_loader.get(s, lane)) == plain(bare.get(s, lane))
    batch_loader.close()


@pytest.mark.parametrize("workers", [0, 1, "auto"])
def test_evaluation_in_chunks(source, workers):
    ids = np.arange(1, 60, 2)
    loader = LoaderConfig(workers=workers)
    got = list(evaluation_batches(source, ids, chunk_size=8, chunks=[0, 3, 1, 9], transform=doubled, loader=loader))
    assert [c for c, _ in got] == [0, 3, 1]
    assert [batch.size for _, batch in got] == [8, 6, 8]
    assert got[1][1].inputs[0][:, 0].tolist() == [2 * source.take(ids[24:]).inputs[0][i, 0].item() for i in range(6)]
    alone = evaluation_batches(
        source, ids, chunk_size=8, chunks=[0, 3, 1], transform=doubled, loader=LoaderConfig(workers=0)
    )
    assert [plain(b) for _, b in alone] == [plain(b) for _, b in got]
    begun = evaluation_batches(source, ids, chunk_size=8, chunks=range(4), loader=loader)
    next(begun)
    begun.close()


# ---- what loads ahead ----


def test_auto_chooses_by_source(held, mapped, monkeypatch):
    def way(source, cores, workers="auto"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        ahead = make_prefetcher(BatchBuilder(source, 0, 0), lambda key: np.arange(4), LoaderConfig(workers=workers))
        if ahead is None:
            return "inline"
        found = f"{len(ahead._loader_pool.pids)} processes" if ahead._loader_pool else "thread"
        ahead.close()
        return found

    assert way(held, 8) == "inline"
    assert way(mapped, 8) == "thread"
    assert way(mapped, 8, workers=0) == "inline"
    assert way(PythonDatasetSource(Noisy()), 8) == "2 processes"
    assert way(PythonDatasetSource(Noisy()), 2) == "1 processes"
    assert way(PythonDatasetSource(Noisy()), 1) == "inline"
    assert way(held, 8, workers=1) == "1 processes"


class Failing(Noisy):
    def __init__(self, how):
        self.how = how

    def __getitem__(self, i):
        if i == 21:
            self.how()
        return super().__getitem__(i)


def divide():
    return 1 / 0


def fail(failure):
    raise failure


class Unprintable(Exception):
    def __str__(self):
        raise self


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_failing_dataset_tells_sample_and_line(workers):
    with pytest.raises(ShoalError, match="sample 21: ZeroDivisionError") as caught:
        load_batches(PythonDatasetSource(Failing(divide)), workers=workers)
    assert caught.value.code == "SH309"
    assert "test_batch_loader.py:" in caught.value.where


@pytest.mark.parametrize(
    ("how", "says"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (lambda: os._exit(7), "exit code 7")],
)
def test_a_loader_that_dies_is_reported_with_its_samples(how, says):
    with pytest.raises(ShoalError, match=r"sample 21: 3 loader processes died") as caught:
        load_batches(PythonDatasetSource(Failing(how)), workers=2)
    assert caught.value.code == "SH312"
    assert says in caught.value.message


class FailingInCompany(Noisy):
    def __getitems__(self, ids):
        if len(ids) > 1:
            os._exit(7)
        return [self[i] for i in ids]


def test_samples_that_kill_only_together_are_told_together():
    class Two:
        def ids(self, step, lane):
            return np.array([14, 21])

    loader = LoaderConfig(workers=1)
    batch_loader = BatchLoader(PythonDatasetSource(FailingInCompany()), Two(), seed=0, lanes=1, loader=loader)
    with closing(batch_loader), pytest.raises(ShoalError, match=r"samples \[14, 21\] together"):
        batch_loader.get(0, 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_loaders_are_started_again_and_their_batches_built_again(workers):
    source, events = PythonDatasetSource(Noisy()), []
    undisturbed = load_batches(source, workers=0)
    batch_loader = BatchLoader(
        source,
        StubSampler(),
        seed=3,
        lanes=LANES,
        transform=doubled,
        loader=LoaderConfig(workers=workers),
        report=lambda kind, **fields: events.append((kind, fields)),
    )
    with closing(batch_loader):
        batch_loader.set_lanes(range(LANES), 0)
        found = {}
        for step in range(6):
            for pid in batch_loader._prefetcher._loader_pool.pids:
                os.kill(pid, signal.SIGKILL)
            for lane in range(LANES):
                found[step, lane] = plain(batch_loader.get(step, lane))
    assert found == undisturbed
    assert events
    assert all(kind == "loader_restarted" and "SIGKILL" in fields["reason"] for kind, fields in events)


def test_loaders_killed_in_an_evaluation_are_started_again(held):
    chunks = {"chunk_size": 8, "chunks": range(7), "transform": doubled}
    ids, events = np.arange(56), []
    undisturbed = [
        (c, plain(batch)) for c, batch in evaluation_batches(held, ids, loader=LoaderConfig(workers=0), **chunks)
    ]
    mine, found = psutil.Process(), []
    others = mine.children()
    report = lambda kind, **fields: events.append(kind)  # noqa: E731
    for c, batch in evaluation_batches(held, ids, loader=LoaderConfig(workers=1), report=report, **chunks):
        found.append((c, plain(batch)))
        for child in mine.children():
            if child not in others:
                child.kill()
    assert found == undisturbed
    assert "loader_restarted" in events


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", [sys.exit, lambda: fail(KeyboardInterrupt()), lambda: fail(Unprintable())])
def test_a_dataset_that_wants_to_leave_is_an_error_of_its_line(workers, how):
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a worker
    try:
        with pytest.raises(ShoalError, match="sample 21: ") as caught:
            load_batches(PythonDatasetSource(Failing(how)), workers=workers)
    finally:
        signal.signal(signal.SIGINT, old)
    assert caught.value.code == "SH309"
    assert "test_batch_loader.py:" in caught.value.where


def test_a_sample_that_cannot_be_pickled_is_an_error_that_says_so():
    class Unpicklable(Noisy):
        def __getitem__(self, i):
            return {"lock": threading.Lock()}

    class One:
        def ids(self, step, lane):
            return np.array([4])

    class Raw(PythonDatasetSource):
        def take(self, ids):
            return Batch(tuple(self._samples([int(i) for i in ids])), None, len(ids))

    batch_loader = BatchLoader(Raw(Unpicklable()), One(), seed=0, lanes=1, loader=LoaderConfig(workers=1))
    with closing(batch_loader), pytest.raises(ShoalError, match=r"samples \[4\] cannot be sent .* pickle") as caught:
        batch_loader.get(0, 0)
    assert caught.value.code == "SH309"


def test_failing_functions_of_the_user(held):
    def broken(batch):
        raise ValueError("oh")

    for workers in (0, 1):
        with pytest.raises(ShoalError, match=r"SH311.*augment: ValueError: oh") as caught:
            load_batches(held, workers=workers, augment=broken)
        assert "test_batch_loader.py:" in caught.value.where
    with pytest.raises(ShoalError, match=r"SH311.*transform returned a int"):
        load_batches(held, workers=0, transform=lambda batch: 3)


def test_loaders_hold_no_sockets_and_leave_when_closed(held):
    ours, theirs = socket.socketpair()
    others = psutil.Process().children()  # another test's fork server may be there
    batch_loader = BatchLoader(
        PythonDatasetSource(Noisy()), StubSampler(), seed=0, lanes=LANES, loader=LoaderConfig(workers=2)
    )
    batch_loader.set_lanes(range(LANES), 0)
    assert batch_loader.get(0, 0) is not None
    children = [child for child in psutil.Process().children() if child not in others]
    assert len(children) == 2
    ours.close()
    theirs.settimeout(10)
    assert theirs.recv(1) == b""  # the end is seen although forks of this process live
    theirs.close()
    batch_loader.close()
    assert not any(child.is_running() for child in children)


def test_loaders_do_not_hold_the_lock_of_their_workers_seat(tmp_path):
    """A worker that is killed is gone at once, although its loaders may live for a moment longer."""
    lock = RunPaths(tmp_path).seat_lock(0)
    held = open_lock_file(lock)
    fcntl.flock(held, fcntl.LOCK_EX)
    batch_loader = BatchLoader(
        PythonDatasetSource(Noisy()), StubSampler(), seed=0, lanes=LANES, loader=LoaderConfig(workers=1)
    )
    batch_loader.set_lanes(range(LANES), 0)
    assert batch_loader.get(0, 0) is not None  # so its only loader has begun
    assert find_orphans(RunPaths(tmp_path)) == []  # locked, and without the number of a process
    assert lock.exists()
    held.close()
    find_orphans(RunPaths(tmp_path))
    assert not lock.exists()  # nobody holds it any more
    batch_loader.close()


ORPHANS = """
import os, signal, sys, time
import numpy as np
from shoal.data.batch_loader import BatchLoader
from shoal.data.sources.dataset import PythonDatasetSource
from shoal.spec.data import LoaderConfig

class Slow:
    def __len__(self): return 10
    def __getitem__(self, i):
        if i == 9: time.sleep(600)
        return np.zeros(1), 0

class StubSampler:
    def ids(self, step, lane): return np.array([9 if step else 0])

batch_loader = BatchLoader(PythonDatasetSource(Slow()), StubSampler(), seed=0, lanes=1, loader=LoaderConfig(workers=2))
batch_loader.set_lanes([0], 0)
batch_loader.get(0, 0)
print(*batch_loader._prefetcher._loader_pool.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_orphans_when_the_parent_is_killed():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(ORPHANS)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    _, left = psutil.wait_procs(living(pids), timeout=10)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_batches_survive_the_pipe_whatever_is_in_them():
    class Odd(Noisy):
        def __getitem__(self, i):
            return {"a": torch.full((3,), i, dtype=torch.bfloat16), "b": [torch.zeros(0), "word"]}

    class One:
        def ids(self, step, lane):
            return np.array([4, 5])

    batch_loader = BatchLoader(PythonDatasetSource(Odd()), One(), seed=0, lanes=1, loader=LoaderConfig(workers=1))
    batch_loader.set_lanes([0], 0)
    batch = batch_loader.get(0, 0)
    batch_loader.close()
    assert batch.inputs[0]["a"].dtype == torch.bfloat16
    assert batch.inputs[0]["a"][:, 0].tolist() == [4, 5]
    assert batch.inputs[0]["b"][1] == ("word", "word")
    batch.inputs[0]["b"][0].add_(1)  # one's own memory, to be written


def test_to_reaches_into_dicts():
    batch = Batch(({"x": torch.zeros(2)}, [torch.ones(1)]), None, 2).to("meta")
    assert batch.inputs[0]["x"].device.type == "meta"
    assert batch.inputs[1][0].device.type == "meta"
    assert batch.target is None


@pytest.mark.parametrize(("batch_size", "window_steps", "together"), [(50, 8, 1), (10, 40, 5), (1, 400, 16)])
def test_a_scout_has_blocks_decoded_before_they_are_needed(tmp_path, batch_size, window_steps, together):
    """The batches of some steps are gathered together; in the last case one of the two lanes has no samples."""
    table = pa.table({"x": np.arange(4000, dtype=np.float32), "y": np.arange(4000) % 3})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    rows = ParquetReader(
        find_files("t.parquet", options=SourceOptions(str(tmp_path), "fail", tmp_path, print), suffixes=("",)),
        "t.parquet",
    )
    layout = choose_columns(
        ParquetSourceConfig(kind="parquet", path="t.parquet", target="y"),
        rows.kinds,
        token_columns=rows.token_columns,
        where="",
    )
    source = ParquetRowGroupSource(rows, layout.with_classes((0, 1, 2)), skip_bad_rows=False)
    sampler = make_sampler(
        RandomSamplerConfig(open_blocks=4), ids=np.arange(4000), lanes=2, batch_size=batch_size, seed=0, source=source
    )
    assert sampler.window_steps == window_steps
    batch_loader = BatchLoader(source, sampler, seed=0, lanes=2)
    plain = BatchLoader(source, sampler, seed=0, lanes=2, loader=LoaderConfig(workers=0))
    assert batch_loader._block_prefetcher
    assert batch_loader._together == together
    batch_loader.set_lanes([0, 1], 0)
    for step in range(2 * min(sampler.steps_per_epoch, 500)):
        if step == 33:  # another worker takes a lane and gives it back later
            batch_loader.set_lanes([1], step)
        elif step == 41:
            batch_loader.set_lanes([1, 0], step)
        for lane in range(2):
            a, b = batch_loader.get(step, lane), plain.get(step, lane)
            assert (a is None) == (b is None) == (not len(sampler.ids(step, lane)))
            if a is not None:
                assert torch.equal(a.inputs[0], b.inputs[0])
                assert torch.equal(a.target, b.target)
                assert a.inputs[0].reshape(-1).tolist() == sampler.ids(step, lane).tolist()
    batch_loader.close()
    plain.close()
    warmed = []
    source.warm = warmed.extend
    with closing(BatchLoader(source, sampler, seed=0, lanes=2)) as fresh:
        fresh.set_lanes([0, 1], 0)
        fresh.get(0, 0)
    assert warmed == [*sampler.ids(window_steps, 0), *sampler.ids(window_steps, 1)]
