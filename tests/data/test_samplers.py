"""Every sample exactly once per epoch, whatever the kind, the lanes and the batch size, asked at any time."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.sample_hash import hash_values
from shoal.data.samplers import assign_longest_first, jump_hash, make_sampler
from shoal.errors import DataError
from shoal.spec.data import BalancedSamplerConfig, HashSamplerConfig, RandomSamplerConfig, WeightedSamplerConfig

from .memory_source import MemorySource

KINDS = [
    RandomSamplerConfig(),
    RandomSamplerConfig(shuffle=False),
    RandomSamplerConfig(open_blocks=2),
    HashSamplerConfig(kind="hash"),
    HashSamplerConfig(kind="hash", by="word", open_blocks=1),
    BalancedSamplerConfig(kind="balanced"),
    BalancedSamplerConfig(kind="balanced", by="cost", shuffle=False),
]


def table(n: int, blocks: bool) -> MemorySource:
    numbers = np.arange(n)
    return MemorySource(
        n,
        blocks=np.arange(0, n, 7) if blocks else None,
        size=numbers % 13,
        cost=(numbers % 5) * 0.5,
        word=np.array([f"w{i % 17}" for i in range(n)], dtype=object),
    )


sampler_cases = st.fixed_dictionaries(
    {
        "spec": st.sampled_from(KINDS),
        "n": st.integers(1, 120),
        "lanes": st.integers(1, 9),
        "batch_size": st.integers(1, 50),
        "seed": st.integers(0, 2**63),
        "blocks": st.booleans(),
    }
)


def make_sampler_of(*, spec, n, lanes, batch_size, seed=0, blocks=False, drop_last=False, ids=None):
    ids = np.arange(n)[n // 3 :] if ids is None else ids
    source = table(n, blocks)
    return make_sampler(
        spec, ids=ids, lanes=lanes, batch_size=batch_size, seed=seed, drop_last=drop_last, source=source
    )


def step_ids(sampler, step):
    return [sampler.ids(step, lane) for lane in range(sampler.lanes)]


@given(sampler_cases, st.integers(0, 3))
def test_every_sample_once_per_epoch(how, epoch):
    sampler = make_sampler_of(**how)
    steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
    sampled = np.concatenate([ids for step in steps for ids in step_ids(sampler, step)])
    assert sampled.dtype == np.int64
    assert np.array_equal(np.sort(sampled), np.arange(how["n"])[how["n"] // 3 :])


@given(sampler_cases, st.booleans())
def test_totals_count_the_sampled_ids(how, drop_last):
    if drop_last and how["n"] - how["n"] // 3 < how["batch_size"]:
        return
    sampler = make_sampler_of(**how, drop_last=drop_last)
    before = 0
    for step in range(2 * sampler.steps_per_epoch):
        assert sampler.samples_before(step) == before
        assert sampler.batch_samples(step) == sum(map(len, step_ids(sampler, step))) > 0
        assert not drop_last or sampler.batch_samples(step) == how["batch_size"]
        before += sampler.batch_samples(step)


@given(sampler_cases, st.data())
def test_any_step_at_any_time(how, data):
    sampler = make_sampler_of(**how)
    most = 3 * sampler.steps_per_epoch - 1
    asked = data.draw(st.lists(st.integers(0, most), min_size=1, max_size=8))
    for step in asked:
        fresh = make_sampler_of(**how)
        for lane in range(sampler.lanes):
            assert np.array_equal(sampler.ids(step, lane), fresh.ids(step, lane))


def test_pages_are_seamless():
    """More steps than a page holds, backwards, equal to a sampler that goes forwards."""
    how = {"spec": RandomSamplerConfig(), "n": 6000, "lanes": 2, "batch_size": 3}
    forwards, backwards = make_sampler_of(**how), pickle.loads(pickle.dumps(make_sampler_of(**how)))
    assert forwards.steps_per_epoch > 1024
    expected = [forwards.ids(step, 1) for step in range(1400)]
    assert all(np.array_equal(backwards.ids(step, 1), expected[step]) for step in reversed(range(1400)))


def test_sampled_ids_are_the_callers_own():
    for spec in KINDS:
        sampler = make_sampler_of(spec=spec, n=60, lanes=2, batch_size=10)
        before = sampler.ids(0, 0).copy()
        sampler.ids(0, 0)[:] = -1
        assert np.array_equal(sampler.ids(0, 0), before)


@given(sampler_cases)
def test_random_parts_differ_by_at_most_one(how):
    sampler = make_sampler_of(**how | {"spec": RandomSamplerConfig()})
    for step in range(sampler.steps_per_epoch):
        batch = step_ids(sampler, step)
        expected = np.array_split(np.concatenate(batch), sampler.lanes)
        assert [len(part) for part in batch] == [len(part) for part in expected]


def test_lanes_do_not_change_the_global_batch():
    samplers = [make_sampler_of(spec=RandomSamplerConfig(), n=100, lanes=lanes, batch_size=16) for lanes in (1, 3, 8)]
    for step in range(10):
        batches = [np.concatenate(step_ids(sampler, step)) for sampler in samplers]
        assert all(np.array_equal(batch, batches[0]) for batch in batches)


def test_without_shuffle_the_order_is_kept():
    sampler = make_sampler_of(
        spec=RandomSamplerConfig(shuffle=False), n=10, lanes=2, batch_size=4, ids=np.array([5, 3, 9, 1, 0])
    )
    assert [part.tolist() for part in step_ids(sampler, 0) + step_ids(sampler, 1)] == [[5, 3], [9, 1], [0], []]


def test_epochs_and_seeds_differ():
    sampler = make_sampler_of(spec=RandomSamplerConfig(), n=300, lanes=1, batch_size=200)
    other = make_sampler_of(spec=RandomSamplerConfig(), n=300, lanes=1, batch_size=200, seed=1)
    assert not np.array_equal(sampler.ids(0, 0), sampler.ids(1, 0))
    assert not np.array_equal(sampler.ids(0, 0), other.ids(0, 0))


def test_a_block_is_read_once_per_epoch():
    sampler = make_sampler_of(
        spec=RandomSamplerConfig(open_blocks=1), n=70, lanes=1, batch_size=7, blocks=True, ids=np.arange(70)
    )
    blocks = [set((sampler.ids(step, 0) // 7).tolist()) for step in range(10)]
    assert all(len(block) == 1 for block in blocks)
    assert len(set.union(*blocks)) == 10


# ---- hash ----


@given(sampler_cases)
def test_a_key_stays_with_its_lane(how):
    sampler = make_sampler_of(**how | {"spec": HashSamplerConfig(kind="hash", by="word")})
    lane_of = {}
    for step in range(2 * sampler.steps_per_epoch):
        for lane, ids in enumerate(step_ids(sampler, step)):
            for sample in ids.tolist():
                assert lane_of.setdefault(sample % 17, lane) == lane


def test_lanes_get_their_share_in_every_batch():
    sampler = make_sampler_of(spec=HashSamplerConfig(kind="hash"), n=3000, lanes=4, batch_size=100)
    sizes = np.array([[len(ids) for ids in step_ids(sampler, step)] for step in range(sampler.steps_per_epoch)])
    assert (np.abs(sizes - sizes.sum(axis=0) / len(sizes)) <= 2).all()


@pytest.mark.parametrize("lanes", [1, 2, 5, 16, 63])
def test_one_lane_more_moves_one_in_n(lanes):
    keys = hash_values(np.arange(20_000))
    before, after = jump_hash(keys, lanes), jump_hash(keys, lanes + 1)
    moved = before != after
    share = 1 / (lanes + 1)
    assert (after[moved] == lanes).all()
    assert abs(moved.mean() - share) < 5 * (share * (1 - share) / 20_000) ** 0.5
    counts = np.bincount(after, minlength=lanes + 1)
    assert (np.abs(counts - 20_000 * share) < 5 * (20_000 * share) ** 0.5).all()


# ---- balanced ----


@given(
    costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=40),
    lanes=st.integers(1, 8),
)
def test_a_sample_goes_to_the_lane_that_has_least(costs, lanes):
    """Without its last (cheapest) sample no lane has more than any other lane has at the end."""
    lane = assign_longest_first(np.array([costs]), lanes)[0]
    for full in range(lanes):
        mine = [cost for cost, to in zip(costs, lane, strict=True) if to == full]
        for other in range(lanes):
            theirs = [cost for cost, to in zip(costs, lane, strict=True) if to == other]
            assert not mine or sum(mine) - min(mine) <= sum(theirs) + 1e-9


@given(sampler_cases)
def test_every_lane_works_when_there_is_enough(how):
    for by in ("size", "cost"):
        sampler = make_sampler_of(**how | {"spec": BalancedSamplerConfig(kind="balanced", by=by)})
        for step in range(sampler.steps_per_epoch):
            batch = step_ids(sampler, step)
            assert sampler.batch_samples(step) < sampler.lanes or min(map(len, batch)) >= 1


def test_costs_are_balanced():
    sampler = make_sampler_of(spec=BalancedSamplerConfig(kind="balanced", by="size"), n=1200, lanes=4, batch_size=64)
    full = [step_ids(sampler, step) for step in range(sampler.steps_per_epoch - 1)]
    loads = np.array([[(ids % 13).sum() for ids in batch] for batch in full])
    assert (loads.max(axis=1) - loads.min(axis=1)).max() <= 2


def test_samples_without_cost_are_spread():
    source = MemorySource(40, cost=np.zeros(40))
    spec = BalancedSamplerConfig(kind="balanced", by="cost")
    sampler = make_sampler(spec, ids=np.arange(40), lanes=4, batch_size=40, seed=0, source=source)
    assert [len(ids) for ids in step_ids(sampler, 0)] == [10, 10, 10, 10]


def test_costs_from_a_file(tmp_path):
    path = tmp_path / "costs.npy"
    np.save(path, np.array([8.0, 1, 1, 1, 1, 1, 1, 1, 1]))
    spec = BalancedSamplerConfig(kind="balanced", by=str(path), shuffle=False)
    sampler = make_sampler_of(spec=spec, n=9, lanes=2, batch_size=9, ids=np.arange(9))
    assert [ids.tolist() for ids in step_ids(sampler, 0)] == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


# ---- what is not possible ----


@pytest.mark.parametrize(
    ("cost", "said"),
    [([1.0, -1.0], "-1.0"), ([1.0, np.nan], "nan"), ([1.0, np.inf], "inf"), (["a", "b"], "not numbers")],
)
def test_bad_costs(cost, said):
    with pytest.raises(DataError, match=said) as caught:
        make_sampler(BalancedSamplerConfig(kind="balanced", by="cost"), ids=np.arange(2), lanes=1, batch_size=1, seed=0,
                    source=MemorySource(2, cost=cost))  # fmt: skip
    assert caught.value.code == "SH355"


def test_costs_of_another_length(tmp_path):
    np.save(tmp_path / "c.npy", np.ones(3))
    with pytest.raises(DataError, match="3 costs for 9 samples"):
        make_sampler_of(
            spec=BalancedSamplerConfig(kind="balanced", by=str(tmp_path / "c.npy")), n=9, lanes=1, batch_size=1
        )


def test_missing_things():
    with pytest.raises(DataError, match="Did you mean 'word'") as caught:
        make_sampler_of(spec=HashSamplerConfig(kind="hash", by="wrod"), n=9, lanes=1, batch_size=1)
    assert caught.value.code == "SH356"
    with pytest.raises(DataError, match="no such file"):
        make_sampler_of(spec=BalancedSamplerConfig(kind="balanced", by="nowhere.npy"), n=9, lanes=1, batch_size=1)
    with pytest.raises(DataError, match="drop_last"):
        make_sampler_of(spec=RandomSamplerConfig(), n=9, lanes=1, batch_size=10, drop_last=True)
    with pytest.raises(DataError, match="no training samples"):
        make_sampler_of(spec=RandomSamplerConfig(), n=9, lanes=1, batch_size=1, ids=np.arange(0))


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_repeated_ids_are_sampled_as_often_as_they_occur(seed):
    ids = np.array([1, 1, 1, 4, 7, 7])
    for spec in KINDS:
        sampler = make_sampler_of(spec=spec, n=8, lanes=2, batch_size=4, seed=seed, ids=ids, blocks=True)
        sampled = np.concatenate([part for s in range(sampler.steps_per_epoch) for part in step_ids(sampler, s)])
        assert np.array_equal(np.sort(sampled), ids)


# ---- weighted ----


def draw(spec: WeightedSamplerConfig, source: MemorySource, ids: np.ndarray, *, lanes: int, steps: int) -> list[int]:
    sampler = make_sampler(spec, ids=ids, lanes=lanes, batch_size=50, seed=3, source=source)
    return [int(i) for step in range(steps) for lane in range(lanes) for i in sampler.ids(step, lane)]


def test_classes_are_drawn_equally_often_and_lanes_do_not_change_the_batch():
    source = MemorySource(1000, target=(np.arange(1000) % 10 == 0).astype(np.int64))  # one in ten
    ids = np.arange(0, 1000)[np.arange(1000) % 7 != 0]
    one, four = (draw(WeightedSamplerConfig(kind="weighted"), source, ids, lanes=n, steps=200) for n in (1, 4))
    assert one == four
    assert set(one) <= set(ids.tolist())
    rare = np.mean([i % 10 == 0 for i in one])
    assert 0.47 < rare < 0.53  # 10,000 draws: six standard deviations


def test_weights_decide_how_often_a_sample_is_drawn():
    source = MemorySource(4, importance=[0.0, 1.0, 3.0, 0.0])
    spec = WeightedSamplerConfig(kind="weighted", by="importance")
    drawn = draw(spec, source, np.arange(4), lanes=2, steps=9000)
    counts = np.bincount(drawn, minlength=4)
    assert counts[[0, 3]].tolist() == [0, 0]
    assert 0.73 < counts[2] / counts.sum() < 0.77
    again = make_sampler(spec, ids=np.arange(4), lanes=2, batch_size=3, seed=3, source=source)
    later = [again.ids(step, 0).tolist() for step in (5, 0, 5)]
    assert later[0] == later[2]  # any step at any time


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"by": "nothing"}, "no column 'nothing'"),
        ({"by": "zero"}, "all weights are 0"),
        ({"by": "negative"}, "the weight of sample 0"),
        ({"balance": "number"}, "no classes to balance"),
    ],
)
def test_weights_that_cannot_be_used_are_told(spec, words):
    source = MemorySource(3, zero=np.zeros(3), negative=-np.ones(3), number=np.array([0.5, 0.25, 1.0]))
    with pytest.raises(DataError, match=words):
        draw(WeightedSamplerConfig(kind="weighted", **spec), source, np.arange(3), lanes=1, steps=1)
