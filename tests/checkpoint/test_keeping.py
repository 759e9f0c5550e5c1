from __future__ import annotations

import uuid

import torch

from shoal.checkpoint.files import RemoteFiles, open_files
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.writer import sweep

from .states import same, training_state
from .stores import blobs, make, save, steps


def test_retention_keeps_the_newest_and_the_best(place, told):
    store = make(place, told, keep=2, keep_best=1, sign=-1)
    for step, metric in [(1, 0.9), (2, 0.1), (3, None), (4, 0.5), (5, 0.6)]:
        save(store, step, metric=metric)
    assert steps(place) == [5, 4, 2]
    assert not told.of("cleanup_failed")


def test_what_was_just_saved_stays_even_below_an_older_run_of_the_store(place):
    save(make(place), 100)
    save(make(place, keep=1, keep_best=0), 2)
    assert steps(place) == [100, 2]


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
