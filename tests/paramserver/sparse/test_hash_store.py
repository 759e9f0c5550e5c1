"""The hash that holds rows, the rows that nobody has changed yet, and sums of rows."""

import hashlib
import resource

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.sparse.keys import chunks_of, ids_of, initial_rows, keys_of
from shoal.lanes.sparse.optimizers import ROW_OPTIMIZERS, row_means
from shoal.lanes.sparse.rows import RowBundle, SparseRows, add_rows, pack_rows, sort_rows, unpack_rows
from shoal.lanes.sparse.table_spec import TableSpec
from shoal.net.errors import LinkError
from shoal.paramserver.sparse.hash_store import RowStore
from shoal.paramserver.sparse.row_tables import RowTables, digests

CHUNKS = 7
numbers = st.integers(min_value=0, max_value=(1 << 48) - 1)


def spec(optimizer="rowwise_adagrad", dim=4, number=0, rows=10**9):
    return TableSpec(number, rows, dim, optimizer, lr=0.1, eps=1e-8, init=0.5, seed=3)


def rows_of(ids, values=None, *, dim=4, seed=0):
    ids = np.unique(np.asarray(ids, dtype=np.int64))
    keys = keys_of(ids, table=0, chunks=CHUNKS)
    if values is None:
        values = np.random.default_rng(seed).standard_normal((len(ids), dim), dtype=np.float32)
    return sort_rows(keys, values)


# ---- the store ----


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "drop"]), st.sets(numbers, max_size=40)), max_size=12))
def test_it_is_a_dictionary(acts):
    store, model = RowStore(2), {}
    for act, ids in acts:
        keys = keys_of(np.array(sorted(ids), dtype=np.int64), table=0, chunks=CHUNKS)
        if act == "insert":
            new = np.array([key for key in keys.tolist() if key not in model], dtype=np.int64)
            values = np.random.default_rng(len(model)).random((len(new), 2), dtype=np.float32)
            store.insert(new, values)
            model |= dict(zip(new.tolist(), values.tolist(), strict=True))
        else:
            first = len(ids) % CHUNKS
            store.drop(first, first + 2)
            model = {key: value for key, value in model.items() if not first <= key >> 48 < first + 2}
        places = store.find(keys)
        for key, place in zip(keys.tolist(), places.tolist(), strict=True):
            assert (place >= 0) == (key in model)
            if place >= 0:
                assert store.read(np.array([place]))[0].tolist() == model[key]
    assert len(store) == len(model)
    taken = store.read_chunks(0, CHUNKS)
    assert taken.keys.tolist() == sorted(model)
    assert taken.values.tolist() == [model[key] for key in sorted(model)]


def test_it_grows_and_finds_everything():
    store = RowStore(1)
    keys = np.random.default_rng(0).permutation(300_000).astype(np.int64) * 64  # neighbours and multiples alike
    for part in np.array_split(keys, 7):
        store.insert(part, part[:, None].astype(np.float32))
    assert np.array_equal(store.read(store.find(keys))[:, 0], keys.astype(np.float32))
    assert (store.find(keys + 1) == -1).all()


def test_memory_for_each_row():
    """As the documentation says it."""
    store = RowStore(17)
    ids = np.arange(1 << 17, dtype=np.int64)
    store.insert(keys_of(ids, table=0, chunks=64), np.ones((len(ids), 17), dtype=np.float32))
    assert store.nbytes / len(ids) <= (8 + 4 * 17) * 9 / 8 + 16


@pytest.mark.long
def test_ten_million_rows():
    row_tables, count = RowTables([spec(dim=16)]), 10_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for begin in range(0, count, 500_000):
        ids = np.arange(begin, begin + 500_000, dtype=np.int64)
        grads = sort_rows(keys_of(ids, table=0, chunks=64), np.ones((len(ids), 16), dtype=np.float32))
        row_tables.apply(0, 64, {0: grads})
    assert len(row_tables) == count
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown / count < 150


# ---- rows that nobody has changed ----


def test_fresh_rows_are_always_the_same():
    """On any machine and in any version: checkpoints do not have them."""
    found = initial_rows(np.array([0, 1, 10**12], dtype=np.int64), table=1, dim=5, seed=7, scale=0.1)
    assert hashlib.sha256(found.tobytes()).hexdigest() == FRESH
    assert np.array_equal(initial_rows(np.array([1], dtype=np.int64), table=1, dim=5, seed=7, scale=0.1), found[1:2])


FRESH = "e8a50de3675102f136c244bf4e35646127ba42afa33782c6996ef01e219de35d"


@given(st.integers(0, 5), st.integers(0, 2**40), st.integers(1, 9))
def test_fresh_rows_depend_on_everything(table, seed, dim):
    ids = np.arange(50, dtype=np.int64)
    made = initial_rows(ids, table=table, dim=dim, seed=seed, scale=2.0)
    assert np.abs(made).max() <= 2.0
    assert len(np.unique(made)) > 0.99 * made.size
    assert not np.array_equal(made, initial_rows(ids, table=table + 1, dim=dim, seed=seed, scale=2.0))
    assert not np.array_equal(made, initial_rows(ids, table=table, dim=dim, seed=seed + 1, scale=2.0))


def test_fresh_rows_are_uniform():
    made = initial_rows(np.arange(100_000, dtype=np.int64), table=0, dim=3, seed=0, scale=1.0)
    assert abs(made.mean()) < 0.005
    assert abs(made.std() - 3**-0.5) < 0.005
    assert np.abs(np.corrcoef(made.T) - np.eye(3)).max() < 0.01


@given(st.sets(numbers, min_size=1, max_size=50), st.integers(0, 9), st.integers(1, 1000))
def test_keys_keep_the_number_and_spread(ids, table, chunks):
    ids = np.array(sorted(ids), dtype=np.int64)
    keys = keys_of(ids, table=table, chunks=chunks)
    assert np.array_equal(ids_of(keys), ids)
    assert 0 <= chunks_of(keys).min() <= chunks_of(keys).max() < chunks


def test_rows_are_spread_evenly():
    counts = np.bincount(chunks_of(keys_of(np.arange(64_000, dtype=np.int64) * 1000, table=0, chunks=64)))
    assert counts.min() > 850
    assert counts.max() < 1150


# ---- sums ----


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 30), max_size=12), min_size=1, max_size=9), st.randoms(use_true_random=False))
def test_the_same_sum_whoever_adds(lanes, chance):
    """Nodes of the tree that different workers finish, in any order: the same bits, row by row."""
    gradients = [rows_of(sorted(ids), seed=i) if ids else None for i, ids in enumerate(lanes)]
    whole = TreeSum(len(lanes), add_rows)
    for lane, rows in enumerate(gradients):
        whole.push_lane(lane, rows)
    workers = [[lane for lane in range(len(lanes)) if chance.randrange(3) == w or w == 3] for w in range(3)]
    rest = set(range(len(lanes))) - {lane for carried in workers for lane in carried}
    carried_once, seen = [], set()
    for carried in [*workers, sorted(rest)]:
        carried_once.append([lane for lane in carried if lane not in seen])
        seen |= set(carried)
    nodes = {}
    for carried in carried_once:
        mine = TreeSum(len(lanes), add_rows)
        for lane in carried:
            mine.push_lane(lane, gradients[lane])
        nodes |= mine.partials
    order = list(nodes)
    chance.shuffle(order)
    together = TreeSum(len(lanes), add_rows)
    for node in order:
        together.push(node, nodes[node])
    expected, found = whole.total(), together.total()
    assert (expected is None) == (found is None)
    if expected is not None:
        assert expected.keys.tobytes() == found.keys.tobytes()
        assert expected.values.tobytes() == found.values.tobytes()
        dense = {}
        for rows in filter(None, gradients):
            for key, value in zip(rows.keys.tolist(), rows.values, strict=True):
                dense[key] = dense.get(key, 0) + value
        assert sorted(dense) == found.keys.tolist()
        np.testing.assert_allclose(found.values, [dense[key] for key in sorted(dense)], rtol=1e-4, atol=1e-6)


def test_rows_travel_as_they_are():
    bundles = [RowBundle(2, 0, rows_of([1, 5, 9])), RowBundle(0, 1, rows_of([7], dim=3)), RowBundle(1, 0, rows_of([]))]
    raw = b"".join(pack_rows(bundles))
    found = unpack_rows(bytearray(raw), [4, 3], chunks=(0, CHUNKS))
    assert [(one.tag, one.table) for one in found] == [(2, 0), (0, 1)]
    assert all(a.rows.values.tobytes() == b.rows.values.tobytes() for a, b in zip(found, bundles, strict=False))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 200), st.binary(max_size=8))
def test_nonsense_costs_a_line_and_no_more(noise, place, some):
    raw = bytearray(b"".join(pack_rows([RowBundle(0, 0, rows_of([1, 5, 9]))])))
    raw[place : place + len(some)] = some
    for content in (bytearray(noise), raw):
        try:
            found = unpack_rows(content, [4], chunks=(0, CHUNKS))
        except LinkError:
            continue
        for one in found:
            assert (one.rows.keys[1:] > one.rows.keys[:-1]).all()


# ---- updates ----


@pytest.mark.parametrize(("optimizer", "theirs"), [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad)])
def test_like_torch_on_the_touched_rows(optimizer, theirs):
    """Lazily: what a dense optimizer does to rows with a gradient; of others it leaves zero gradients alone as well."""
    table = spec(optimizer)
    row_tables, ids = RowTables([table]), np.arange(20, dtype=np.int64)
    keys = keys_of(ids, table=0, chunks=CHUNKS)
    order = np.argsort(keys)
    dense = torch.nn.Parameter(torch.from_numpy(table.initial_rows(keys[order])))
    other = theirs([dense], lr=0.1, **({"eps": 1e-8} if optimizer == "adagrad" else {}))
    chance = np.random.default_rng(0)
    for _ in range(6):
        touched = np.sort(chance.choice(20, 7, replace=False))
        grads = chance.standard_normal((7, 4), dtype=np.float32)
        row_tables.apply(0, CHUNKS, {0: SparseRows(keys[order][touched], grads)})
        dense.grad = torch.zeros(20, 4)
        dense.grad[touched] = torch.from_numpy(grads)
        other.step()
    np.testing.assert_allclose(row_tables.read(0, keys[order]), dense.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_rowwise_adagrad():
    table = spec("rowwise_adagrad")
    row_tables, rows = RowTables([table]), rows_of([3, 4])
    start = row_tables.read(0, rows.keys)
    row_tables.apply(0, CHUNKS, {0: rows})
    row_tables.apply(0, CHUNKS, {0: rows})
    square = (rows.values**2).mean(1, keepdims=True)
    expected = start - 0.1 * rows.values / np.sqrt(square) - 0.1 * rows.values / np.sqrt(2 * square)
    np.testing.assert_allclose(row_tables.read(0, rows.keys), expected, rtol=1e-4)


@given(st.integers(1, 40))
def test_means_of_columns(dim):
    values = np.random.default_rng(dim).random((5, dim), dtype=np.float32)
    np.testing.assert_allclose(row_means(values)[:, 0], values.mean(1), rtol=1e-5)
    alone = np.concatenate([row_means(values[i : i + 1]) for i in range(5)])
    assert alone.tobytes() == row_means(values).tobytes()  # whoever else is there


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
@settings(max_examples=20, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_the_same_bits_however_chunks_are_held(optimizer, chance):
    """One row_tables with everything, and two between which ranges of chunks move; all see the same steps."""
    table = spec(optimizer)
    whole, parts = RowTables([table]), [RowTables([table]), RowTables([table])]
    holder = [chance.randrange(2) for _ in range(CHUNKS)]
    for step in range(8):
        rows = rows_of(sorted({chance.randrange(40) for _ in range(12)}), seed=step)
        whole.apply(0, CHUNKS, {0: rows})
        for chunk, at in enumerate(holder):
            parts[at].apply(chunk, chunk + 1, {0: rows})
        first = chance.randrange(CHUNKS)
        last = chance.randint(first + 1, CHUNKS)
        if len(set(holder[first:last])) == 1:
            old, new = parts[holder[first]], parts[1 - holder[first]]
            new.write_bundles(first, last, old.read_bundles(first, last))
            old.drop(first, last)
            holder[first:last] = [1 - holder[first]] * (last - first)
    for chunk, at in enumerate(holder):
        mine, theirs = whole.read_rows(chunk, chunk + 1), parts[at].read_rows(chunk, chunk + 1)
        assert digests(mine, chunk, chunk + 1) == digests(theirs, chunk, chunk + 1)
        keys = keys_of(np.arange(40, dtype=np.int64), table=0, chunks=CHUNKS)
        keys = np.sort(keys[chunks_of(keys) == chunk])
        applied = np.full(CHUNKS, 8)
        before = [row_tables.read(0, keys, step=7, applied=applied) for row_tables in (whole, parts[at])]
        assert before[0].tobytes() == before[1].tobytes()


@given(st.integers(0, 3))
def test_what_was_before_the_last_step(steps):
    row_tables, rows = RowTables([spec()]), rows_of([3, 4, 8])
    seen = [row_tables.read(0, rows.keys)]
    for _ in range(steps + 1):
        row_tables.apply(0, CHUNKS, {0: rows})
        seen.append(row_tables.read(0, rows.keys))
    applied = np.full(CHUNKS, steps + 1)
    assert row_tables.read(0, rows.keys, step=steps, applied=applied).tobytes() == seen[-2].tobytes()
    assert row_tables.read(0, rows.keys, step=steps + 1, applied=applied).tobytes() == seen[-1].tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"rows": 1 << 60},
        {"dim": 0},
        {"dim": 1.5},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"init": "x"},
        {"optimizer": "adam"},
        {"seed": -1},
        {"number": True},
        {"more": 1},
    ],
)
def test_no_table_of_this_kind(wrong):
    with pytest.raises(ValueError, match="table"):
        TableSpec.from_description(spec().describe() | wrong)
