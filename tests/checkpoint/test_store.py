from __future__ import annotations

import errno
import os
import resource
import threading
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from shoal.checkpoint.files import RemoteFiles, open_files
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.store import Store
from shoal.checkpoint.writer import sweep
from shoal.errors import CheckpointError

from .states import Told, same, states, training_state


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def told():
    return Told()


def make(path, told=None, **options) -> Store:
    return Store(path, **{"job_sha256": "job", "every": ("steps", 1), "tell": told or Told(), **options})


def save(store: Store, step: int, **options) -> None:
    store.save(step, training_state(step), **options)
    store.wait()


def blobs(path) -> dict[str, int]:
    return open_files(path).sizes("blobs")


def steps(path, name="") -> list[int]:
    return [m.step for m in list_manifests(path, name=name)]


# ---- round trips ----


@given(states)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_state_comes_back_exactly(tmp_path, state):
    store = make(tmp_path, keep=1)
    store.save(1, {"it": state, "again": [state]})
    store.wait()
    _, loaded = make(tmp_path).load(1)
    assert same(loaded, {"it": state, "again": [state]})
    store.close()


def test_save_and_load(place, told):
    store = make(place, told)
    assert store.latest() is None
    assert store.load_latest() is None
    store.save(3, training_state(3), metric=0.5, info={"epoch": 2})
    store.wait()
    manifest, state = make(place).load_latest()
    assert (manifest.step, manifest.metric, manifest.info) == (3, 0.5, {"epoch": 2})
    assert same(state, training_state(3))
    assert store.latest() == manifest
    (row,) = told.of("saved")
    assert row["size_bytes"] == manifest.size_bytes == sum(blobs(place).values())
    assert row["written_bytes"] > row["size_bytes"]
    with pytest.raises(CheckpointError, match="SH501"):
        store.load(4)


def test_one_section_is_loaded_alone(tmp_path):
    store = make(tmp_path)
    save(store, 3)
    for path in blobs(tmp_path):  # the optimizer's blob is not needed
        if (tmp_path / path).stat().st_size < 1000:
            (tmp_path / path).unlink()
    _, model = store.load(3, section="model")
    assert same(model, training_state(3)["model"])


def test_loaded_tensors_are_the_callers_own(place):
    shared = torch.ones(40_000)
    store = make(place)
    store.save(1, {"a": shared, "b": shared, "view": shared[:3], "equal": shared.clone()})
    store.wait()
    assert len(blobs(place)) == 2  # the three equal ones are stored once
    _, state = store.load(1)
    state["a"].zero_()
    assert state["b"].sum() == state["equal"].sum() == 40_000
    assert state["a"].data_ptr() % 64 == 0  # as a fresh tensor: alignment can change a kernel's rounding


def test_what_is_saved_is_the_state_at_the_call(tmp_path):
    weight = torch.zeros(100_000)
    store = make(tmp_path, keep=9)
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
    store = make(tmp_path)
    tied = torch.ones(3)
    for state in (
        {"a": tied, "b": tied},
        {"a": torch.tensor([1, 2]), "b": torch.zeros(2)},
        {"a": torch.ones(2), "b": torch.zeros(2)},
        {"b": torch.zeros(5, 0)},
    ):
        store.save(1, state)
        store.wait()
        assert same(store.load(1)[1], state)


def test_blobs_are_safetensors_files(tmp_path):
    save(make(tmp_path), 3)
    found = {}
    for path in blobs(tmp_path):
        found |= safetensors.torch.load_file(tmp_path / path)
    assert sorted(found) == ["/optimizer/state/0/exp", "/optimizer/state/0/step", "tensor"]
    assert found["/optimizer/state/0/step"] == 3


# ---- when ----


def test_the_store_saves_when_it_is_time(tmp_path, told):
    now = [0.0]
    store = make(tmp_path, told, every=("seconds", 10), keep=99, clock=lambda: now[0])
    for step in range(1, 40):
        now[0] = float(step)
        store.maybe_save(step, lambda step=step: training_state(step))
        store.wait()
    assert steps(tmp_path) == [31, 21, 11]


def test_auto_saves_first_after_two_seconds(tmp_path):
    now = [100.0]
    store = make(tmp_path, every=("auto", 0), clock=lambda: now[0])
    asked = []
    for step in range(1, 50):
        now[0] += 0.125
        asked += [step] if store.maybe_save(step, lambda: {"a": 1}) else []
        store.wait()
    assert asked[0] == 17


def test_the_state_is_asked_for_only_when_it_is_time(tmp_path):
    store = make(tmp_path, every=("never", 0))
    assert not store.maybe_save(1, lambda: pytest.fail("asked"))
    assert store.maybe_save(1, lambda: {"a": 1}, force=True)


def test_a_step_is_saved_once_until_its_metric_is_known(tmp_path, told):
    store = make(tmp_path, told)
    assert store.maybe_save(1, lambda: training_state(1))
    assert not store.maybe_save(1, lambda: training_state(1), force=True)
    store.wait()
    assert not store.maybe_save(1, lambda: training_state(1), force=True)
    assert store.maybe_save(1, lambda: training_state(1), metric=0.5, force=True)
    store.wait()
    assert store.latest().metric == 0.5
    assert told.of("saved")[1]["written_bytes"] < 5_000  # only the manifest is new


@contextmanager
def held_back(store: Store):
    """The disk is slow: writing waits for the end of the block."""
    gate, write = threading.Event(), store._files.write
    store._files.write = lambda *args: (gate.wait(), write(*args))
    yield gate
    gate.set()
    store._files.write = write


def test_a_save_that_comes_too_soon_is_skipped_and_a_forced_one_waits(tmp_path, told):
    store = make(tmp_path, told, every=("steps", 2), keep=9)
    with held_back(store) as gate:
        assert store.maybe_save(2, lambda: training_state(2))
        assert not store.maybe_save(3, lambda: training_state(3))
        assert not store.maybe_save(4, lambda: training_state(4))
        assert told.rows == [("save_skipped", {"step": 4})]
        threading.Timer(0.02, gate.set).start()
        assert store.maybe_save(5, lambda: training_state(5), force=True)
    store.wait()
    assert steps(tmp_path) == [5, 2]
    assert [row["step"] for row in told.of("saved")] == [2, 5]


def test_what_cannot_be_saved_is_raised_at_once(tmp_path):
    store = make(tmp_path)
    with pytest.raises(CheckpointError, match=r"SH506 state/model/w"):
        store.maybe_save(1, lambda: {"model": {"w": b"bytes"}})
    with pytest.raises(CheckpointError, match="SH506 info"):
        store.save(1, {}, info={"x": object()})


# ---- what is kept, and what is stored once ----


def test_retention_keeps_the_newest_and_the_best(place, told):
    store = make(place, told, keep=2, keep_best=1, sign=-1)
    for step, metric in [(1, 0.9), (2, 0.1), (3, None), (4, 0.5), (5, 0.6)]:
        save(store, step, metric=metric)
    assert steps(place) == [5, 4, 2]
    assert not told.of("cleanup_failed")


def test_blobs_of_dropped_checkpoints_are_removed(tmp_path):
    store = make(tmp_path, keep=1, keep_best=0)
    for step in (1, 2, 3):
        save(store, step)
    needed = {f"blobs/{d[:2]}/{d}" for m in list_manifests(tmp_path) for d in m.blobs}
    assert blobs(tmp_path).keys() == needed


def test_remote_blobs_are_removed_when_they_are_old():
    place = f"memory://{uuid.uuid4().hex}"
    store = make(place, keep=1, keep_best=0)
    save(store, 1)
    save(store, 2)
    assert len(blobs(place)) == 5
    assert not sweep(RemoteFiles(place))
    assert len(blobs(place)) == 5
    assert sweep(RemoteFiles(place, grace_s=0))
    assert len(blobs(place)) == 3
    assert same(store.load(2)[1], training_state(2))


def test_frozen_tensors_are_stored_once(place, told):
    store = make(place, told, keep=9)
    for step in (1, 2, 3):
        save(store, step)
    first, *later = told.of("saved")
    frozen, head = 65536 * 4, 300 * 300 * 4
    assert first["written_bytes"] > frozen + head
    for row in later:
        assert row["size_bytes"] == first["size_bytes"]
        assert head < row["written_bytes"] < head + 5_000
    assert sum(blobs(place).values()) < frozen + 3 * (head + 5_000)


def test_a_frozen_section_of_small_tensors_is_stored_once(place, told):
    store = make(place, told)
    for step in (1, 2):
        store.save(
            step,
            {
                "frozen": {str(i): torch.full((2000,), float(i)) for i in range(20)},
                "head": {"w": torch.tensor(step)},
            },
        )
        store.wait()
    first, second = told.of("saved")
    assert first["written_bytes"] > 160_000 > 10_000 > second["written_bytes"]


def test_folds_share_blobs_and_keep_apart(place, told):
    one, two = make(place, name="fold-0", keep=1), make(place, told, name="fold-1", keep=1)
    save(one, 1)
    save(two, 1)
    if "memory" not in place:  # where nothing keeps others from sweeping, it is written again, over itself
        assert told.of("saved")[0]["written_bytes"] < 5_000
    assert len(blobs(place)) == 3
    save(one, 2)
    assert (steps(place, "fold-0"), steps(place, "fold-1"), steps(place)) == ([2], [1], [])
    assert same(two.load_latest()[1], training_state(1))


def test_a_sweep_waits_for_a_save_of_another(tmp_path):
    store = make(tmp_path, keep=1, keep_best=0)
    save(store, 1)
    with open_files(tmp_path).saving():
        save(store, 2)
        assert len(blobs(tmp_path)) == 5  # left for next time
    save(store, 3)
    assert len(blobs(tmp_path)) == 3


def test_what_crashed_saves_left_is_swept(tmp_path):
    for litter in ("blobs/ab/.tmp-123-x", "manifests/.tmp-456-y", "blobs/cd/" + "cd" * 32):
        (tmp_path / litter).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / litter).write_bytes(b"half")
    save(make(tmp_path), 1)
    assert sorted(path for path in open_files(tmp_path).sizes() if "tmp" in path) == []
    assert len(blobs(tmp_path)) == 3


def test_nothing_is_swept_beside_a_manifest_of_a_newer_version(tmp_path, told):
    store = make(tmp_path, told, keep=1, keep_best=0)
    save(store, 1)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / f"{9:012d}.json").write_text('{"format": 2}')
    save(store, 2)
    assert len(blobs(tmp_path)) == 5
    assert "format 2" in told.of("cleanup_failed")[0]["reason"]


# ---- damage ----


def newest_of(tmp_path: Path, kind: str) -> Path:
    """A file that only the newest checkpoint has: its manifest, a large blob, or a packed one."""
    new, old = list_manifests(tmp_path)[:2]
    if kind == "manifest":
        return tmp_path / "manifests" / f"{new.step:012d}.json"
    own = {
        ref.blob for ref in new.tensors.values() if (ref.key == "tensor") == (kind == "large")
    } - old.blobs.keys()
    digest = min(own)
    return tmp_path / "blobs" / digest[:2] / digest


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(where: float):
    def act(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[int(where * (len(raw) - 1))] ^= 4
        file.write_bytes(raw)

    return act


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"more")


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff" * file.stat().st_size)


@pytest.mark.parametrize("kind", ["manifest", "large", "packed"])
@pytest.mark.parametrize(
    "harm",
    [
        truncate,
        flip(0),
        flip(0.02),
        flip(0.5),
        flip(1),
        grow,
        garbage,
        Path.unlink,
        lambda f: f.write_bytes(b""),
    ],
    ids=[
        "truncate",
        "flip-start",
        "flip-header",
        "flip-middle",
        "flip-end",
        "grow",
        "garbage",
        "unlink",
        "empty",
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, told, kind, harm):
    store = make(tmp_path)
    save(store, 1)
    save(store, 2)
    harm(newest_of(tmp_path, kind))
    resumed = make(tmp_path, told, keep=1, keep_best=0)
    manifest, state = resumed.load_latest()
    assert manifest.step == 1
    assert same(state, training_state(1))
    if (kind, harm) != ("manifest", Path.unlink):
        (row,) = told.of("checkpoint_invalid")
        assert row["step"] == 2
        assert row["reason"]
    # The damaged one does not count as kept, and saving the step again mends it.
    save(resumed, 2)
    assert same(make(tmp_path).load_latest()[1], training_state(2))
    assert steps(tmp_path) == [2]


def test_saving_does_not_count_on_a_damaged_blob(tmp_path):
    """A flipped bit in a frozen tensor would otherwise spoil every later checkpoint too."""
    save(make(tmp_path), 1)
    frozen = max(blobs(tmp_path), key=blobs(tmp_path).get)
    flip(0.7)(tmp_path / frozen)
    save(make(tmp_path), 2)
    assert same(make(tmp_path).load_latest()[1], training_state(2))


def test_a_damaged_newer_checkpoint_never_displaces_a_sound_one(tmp_path):
    store = make(tmp_path, keep=1, keep_best=0)
    save(store, 1)
    saver = make(tmp_path, keep=9)
    save(saver, 100)
    flip(0.5)(newest_of(tmp_path, "large"))
    resumed = make(tmp_path, keep=1, keep_best=0)
    assert resumed.load_latest()[0].step == 1
    save(resumed, 2)
    assert steps(tmp_path) == [2]


def test_a_checkpoint_of_another_job_is_refused(tmp_path):
    save(make(tmp_path), 1)
    for act in (lambda s: s.load(1), Store.load_latest, Store.latest):
        with pytest.raises(CheckpointError, match="SH504"):
            act(make(tmp_path, job_sha256="other"))
    assert make(tmp_path, job_sha256=None).load_latest()[0].job_sha256 == "job"


# ---- failures while saving ----


@contextmanager
def full_disk(at_bytes: int):
    """Writing a file beyond this size fails, as on a full disk, by the kernel's own hand."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path, told):
    store = make(tmp_path, told)
    save(store, 1)
    before = {path: (tmp_path / path).read_bytes() for path in open_files(tmp_path).sizes()}
    with full_disk(100_000):
        assert store.maybe_save(2, lambda: training_state(2))
        store._join()
        assert store.maybe_save(3, lambda: training_state(3), force=True)
        with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)) as caught:
            store.wait()
    assert caught.value.code == "SH503"
    assert [row["step"] for row in told.of("save_failed")] == [2, 3]
    assert {path: (tmp_path / path).read_bytes() for path in open_files(tmp_path).sizes()} == before
    assert store.maybe_save(3, lambda: training_state(3), force=True)
    store.wait()
    assert same(store.load_latest()[1], training_state(3))


def test_a_directory_that_cannot_be_made_fails_the_save(tmp_path, told):
    (tmp_path / "file").write_text("in the way")
    store = make(tmp_path / "file" / "store", told)
    store.save(1, training_state(1))
    with pytest.raises(CheckpointError, match="SH503"):
        store.wait()
    assert told.of("save_failed")
    store.close()
