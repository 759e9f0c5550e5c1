from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError

from .states import bit_equal, states, training_state
from .stores import blob_sizes, make_store, save_and_wait, saved_steps

# ---- round trips ----


@given(states)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back_exactly(tmp_path, state):
    store = make_store(tmp_path, keep=1)
    store.save(1, {"it": state, "again": [state]})
    store.wait()
    _, loaded = make_store(tmp_path).load(1)
    assert bit_equal(loaded, {"it": state, "again": [state]})
    store.close()


def test_save_and_load(store_path, recorder):
    store = make_store(store_path, recorder)
    assert store.latest() is None
    assert store.load_latest() is None
    store.save(3, training_state(3), metric=0.5, info={"epoch": 2})
    store.wait()
    manifest, state = make_store(store_path).load_latest()
    assert (manifest.step, manifest.metric, manifest.info) == (3, 0.5, {"epoch": 2})
    assert bit_equal(state, training_state(3))
    assert store.latest() == manifest
    (row,) = recorder.of_kind("saved")
    assert row["size_bytes"] == manifest.size_bytes == sum(blob_sizes(store_path).values())
    assert row["written_bytes"] > row["size_bytes"]
    with pytest.raises(CheckpointError, match="SH501"):
        store.load(4)


def test_one_section_is_loaded_alone(tmp_path):
    store = make_store(tmp_path)
    save_and_wait(store, 3)
    for path in blob_sizes(tmp_path):  # the optimizer's blob is not needed
        if (tmp_path / path).stat().st_size < 1000:
            (tmp_path / path).unlink()
    _, model = store.load(3, section="model")
    assert bit_equal(model, training_state(3)["model"])


def test_loaded_tensors_are_the_callers_own(store_path):
    shared = torch.ones(40_000)
    store = make_store(store_path)
    store.save(1, {"a": shared, "b": shared, "view": shared[:3], "equal": shared.clone()})
    store.wait()
    assert len(blob_sizes(store_path)) == 2  # the three equal ones are stored once
    _, state = store.load(1)
    state["a"].zero_()
    assert state["b"].sum() == state["equal"].sum() == 40_000
    assert state["a"].data_ptr() % 64 == 0  # as a fresh tensor: alignment can change a kernel's rounding


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    weight = torch.zeros(100_000)
    store = make_store(tmp_path, keep=9)
    for step in range(1, 6):
        weight.fill_(step)
        store.save(step, {"w": weight, "tied": weight})
        weight.fill_(-1)
    store.wait()
    for step in range(1, 6):
        _, state = store.load(step)
        assert (state["w"] == step).all()
        assert (state["tied"] == step).all()


def test_buffers_follow_a_state_that_changes(tmp_path):
    store = make_store(tmp_path)
    tied = torch.ones(3)
    for state in (
        {"a": tied, "b": tied},
        {"a": torch.tensor([1, 2]), "b": torch.zeros(2)},
        {"a": torch.ones(2), "b": torch.zeros(2)},
        {"b": torch.zeros(5, 0)},
    ):
        store.save(1, state)
        store.wait()
        assert bit_equal(store.load(1)[1], state)


def test_blobs_are_safetensors_files(tmp_path):
    save_and_wait(make_store(tmp_path), 3)
    found = {}
    for path in blob_sizes(tmp_path):
        found |= safetensors.torch.load_file(tmp_path / path)
    assert sorted(found) == ["/optimizer/state/0/exp", "/optimizer/state/0/step", "tensor"]
    assert found["/optimizer/state/0/step"] == 3


# ---- when ----


def test_the_store_saves_when_it_is_time(tmp_path, recorder):
    now = [0.0]
    store = make_store(tmp_path, recorder, every=("seconds", 10), keep=99, clock=lambda: now[0])
    for step in range(1, 40):
        now[0] = float(step)
        store.maybe_save(step, lambda step=step: training_state(step))
        store.wait()
    assert saved_steps(tmp_path) == [31, 21, 11]


def test_auto_saves_first_after_two_seconds(tmp_path):
    now = [100.0]
    store = make_store(tmp_path, every=("auto", 0), clock=lambda: now[0])
    asked = []
    for step in range(1, 50):
        now[0] += 0.125
        asked += [step] if store.maybe_save(step, lambda: {"a": 1}) else []
        store.wait()
    assert asked[0] == 17


def test_the_state_is_asked_for_only_when_it_is_time(tmp_path):
    store = make_store(tmp_path, every=("never", 0))
    assert not store.maybe_save(1, lambda: pytest.fail("asked"))
    assert store.maybe_save(1, lambda: {"a": 1}, force=True)


def test_a_step_is_saved_once_until_its_metric_is_known(tmp_path, recorder):
    store = make_store(tmp_path, recorder)
    assert store.maybe_save(1, lambda: training_state(1))
    assert not store.maybe_save(1, lambda: training_state(1), force=True)
    store.wait()
    assert not store.maybe_save(1, lambda: training_state(1), force=True)
    assert store.maybe_save(1, lambda: training_state(1), metric=0.5, force=True)
    store.wait()
    assert store.latest().metric == 0.5
    assert recorder.of_kind("saved")[1]["written_bytes"] < 5_000  # only the manifest is new


@contextmanager
def held_back(store: CheckpointStore):
    """The disk is slow: writing waits for the end of the block."""
    gate, write = threading.Event(), store._files.write
    store._files.write = lambda *args: (gate.wait(), write(*args))
    yield gate
    gate.set()
    store._files.write = write


def test_a_save_that_comes_too_soon_is_skipped_and_a_forced_one_waits(tmp_path, recorder):
    store = make_store(tmp_path, recorder, every=("steps", 2), keep=9)
    with held_back(store) as gate:
        assert store.maybe_save(2, lambda: training_state(2))
        assert not store.maybe_save(3, lambda: training_state(3))
        assert not store.maybe_save(4, lambda: training_state(4))
        assert recorder.events == [("save_skipped", {"step": 4})]
        threading.Timer(0.02, gate.set).start()
        assert store.maybe_save(5, lambda: training_state(5), force=True)
    store.wait()
    assert saved_steps(tmp_path) == [5, 2]
    assert [row["step"] for row in recorder.of_kind("saved")] == [2, 5]


def test_what_cannot_be_saved_is_raised_at_once(tmp_path):
    store = make_store(tmp_path)
    with pytest.raises(CheckpointError, match=r"SH506 state/model/w"):
        store.maybe_save(1, lambda: {"model": {"w": b"bytes"}})
    with pytest.raises(CheckpointError, match="SH506 info"):
        store.save(1, {}, info={"x": object()})
