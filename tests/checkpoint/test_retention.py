from __future__ import annotations

import uuid

import torch

from shoal.checkpoint.files import RemoteFiles, open_files
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.writer import sweep_blobs

from .states import bit_equal, training_state
from .stores import blob_sizes, make_store, save_and_wait, saved_steps


def test_retention_keeps_the_newest_and_the_best(store_path, recorder):
    store = make_store(store_path, recorder, keep=2, keep_best=1, metric_sign=-1)
    for step, metric in [(1, 0.9), (2, 0.1), (3, None), (4, 0.5), (5, 0.6)]:
        save_and_wait(store, step, metric=metric)
    assert saved_steps(store_path) == [5, 4, 2]
    assert not recorder.of_kind("cleanup_failed")


def test_what_was_just_saved_stays_even_below_an_older_run_of_the_store(store_path):
    save_and_wait(make_store(store_path), 100)
    save_and_wait(make_store(store_path, keep=1, keep_best=0), 2)
    assert saved_steps(store_path) == [100, 2]


def test_blobs_of_dropped_checkpoints_are_removed(tmp_path):
    store = make_store(tmp_path, keep=1, keep_best=0)
    for step in (1, 2, 3):
        save_and_wait(store, step)
    needed = {f"blobs/{d[:2]}/{d}" for m in list_manifests(tmp_path) for d in m.blobs}
    assert blob_sizes(tmp_path).keys() == needed


def test_remote_blobs_are_removed_when_they_are_old():
    store_path = f"memory://{uuid.uuid4().hex}"
    store = make_store(store_path, keep=1, keep_best=0)
    save_and_wait(store, 1)
    save_and_wait(store, 2)
    assert len(blob_sizes(store_path)) == 5
    assert not sweep_blobs(RemoteFiles(store_path))
    assert len(blob_sizes(store_path)) == 5
    assert sweep_blobs(RemoteFiles(store_path, grace_s=0))
    assert len(blob_sizes(store_path)) == 3
    assert bit_equal(store.load(2)[1], training_state(2))


def test_frozen_tensors_are_stored_once(store_path, recorder):
    store = make_store(store_path, recorder, keep=9)
    for step in (1, 2, 3):
        save_and_wait(store, step)
    first, *later = recorder.of_kind("saved")
    frozen, head = 65536 * 4, 300 * 300 * 4
    assert first["written_bytes"] > frozen + head
    for row in later:
        assert row["size_bytes"] == first["size_bytes"]
        assert head < row["written_bytes"] < head + 5_000
    assert sum(blob_sizes(store_path).values()) < frozen + 3 * (head + 5_000)


def test_a_frozen_section_of_small_tensors_is_stored_once(store_path, recorder):
    store = make_store(store_path, recorder)
    for step in (1, 2):
        store.save(
            step,
            {
                "frozen": {str(i): torch.full((2000,), float(i)) for i in range(20)},
                "head": {"w": torch.tensor(step)},
            },
        )
        store.wait()
    first, second = recorder.of_kind("saved")
    assert first["written_bytes"] > 160_000 > 10_000 > second["written_bytes"]


def test_folds_share_blobs_and_keep_apart(store_path, recorder):
    one, two = make_store(store_path, name="fold-0", keep=1), make_store(store_path, recorder, name="fold-1", keep=1)
    save_and_wait(one, 1)
    save_and_wait(two, 1)
    if "memory" not in store_path:  # where nothing keeps others from sweeping, it is written again, over itself
        assert recorder.of_kind("saved")[0]["written_bytes"] < 5_000
    assert len(blob_sizes(store_path)) == 3
    save_and_wait(one, 2)
    assert (saved_steps(store_path, "fold-0"), saved_steps(store_path, "fold-1"), saved_steps(store_path)) == (
        [2],
        [1],
        [],
    )
    assert bit_equal(two.load_latest()[1], training_state(1))


def test_a_sweep_waits_for_a_save_of_another(tmp_path):
    store = make_store(tmp_path, keep=1, keep_best=0)
    save_and_wait(store, 1)
    with open_files(tmp_path).save_lock():
        save_and_wait(store, 2)
        assert len(blob_sizes(tmp_path)) == 5  # left for next time
    save_and_wait(store, 3)
    assert len(blob_sizes(tmp_path)) == 3


def test_what_crashed_saves_left_is_swept(tmp_path):
    for litter in ("blobs/ab/.tmp-123-x", "manifests/.tmp-456-y", "blobs/cd/" + "cd" * 32):
        (tmp_path / litter).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / litter).write_bytes(b"half")
    save_and_wait(make_store(tmp_path), 1)
    assert sorted(path for path in open_files(tmp_path).sizes() if "tmp" in path) == []
    assert len(blob_sizes(tmp_path)) == 3


def test_nothing_is_swept_beside_a_manifest_of_a_newer_version(tmp_path, recorder):
    store = make_store(tmp_path, recorder, keep=1, keep_best=0)
    save_and_wait(store, 1)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / f"{9:012d}.json").write_text('{"format": 2}')
    save_and_wait(store, 2)
    assert len(blob_sizes(tmp_path)) == 5
    assert "format 2" in recorder.of_kind("cleanup_failed")[0]["reason"]
