from __future__ import annotations

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError

from .states import bit_equal, training_state
from .stores import blob_sizes, make_store, save_and_wait, saved_steps


def newest_of(tmp_path: Path, kind: str) -> Path:
    """A file that only the newest checkpoint has: its manifest, a large blob, or a packed one."""
    new, old = list_manifests(tmp_path)[:2]
    if kind == "manifest":
        return tmp_path / "manifests" / f"{new.step:012d}.json"
    own = {ref.blob for ref in new.tensors.values() if (ref.key == "tensor") == (kind == "large")} - old.blobs.keys()
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
def test_a_damaged_checkpoint_is_passed_over(tmp_path, recorder, kind, harm):
    store = make_store(tmp_path)
    save_and_wait(store, 1)
    save_and_wait(store, 2)
    harm(newest_of(tmp_path, kind))
    resumed = make_store(tmp_path, recorder, keep=1, keep_best=0)
    manifest, state = resumed.load_latest()
    assert manifest.step == 1
    assert bit_equal(state, training_state(1))
    if (kind, harm) != ("manifest", Path.unlink):
        (row,) = recorder.of_kind("checkpoint_invalid")
        assert row["step"] == 2
        assert row["reason"]
    # The damaged one does not count as kept, and saving the step again mends it.
    save_and_wait(resumed, 2)
    assert bit_equal(make_store(tmp_path).load_latest()[1], training_state(2))
    assert saved_steps(tmp_path) == [2]


def test_saving_does_not_count_on_a_damaged_blob(tmp_path):
    """A flipped bit in a frozen tensor would otherwise spoil every later checkpoint too."""
    save_and_wait(make_store(tmp_path), 1)
    frozen = max(blob_sizes(tmp_path), key=blob_sizes(tmp_path).get)
    flip(0.7)(tmp_path / frozen)
    save_and_wait(make_store(tmp_path), 2)
    assert bit_equal(make_store(tmp_path).load_latest()[1], training_state(2))


def test_a_damaged_newer_checkpoint_never_displaces_a_sound_one(tmp_path):
    store = make_store(tmp_path, keep=1, keep_best=0)
    save_and_wait(store, 1)
    saver = make_store(tmp_path, keep=9)
    save_and_wait(saver, 100)
    flip(0.5)(newest_of(tmp_path, "large"))
    resumed = make_store(tmp_path, keep=1, keep_best=0)
    assert resumed.load_latest()[0].step == 1
    save_and_wait(resumed, 2)
    assert saved_steps(tmp_path) == [2]


def test_a_checkpoint_of_another_job_is_refused(tmp_path):
    save_and_wait(make_store(tmp_path), 1)
    for act in (lambda s: s.load(1), CheckpointStore.load_latest, CheckpointStore.latest):
        with pytest.raises(CheckpointError, match="SH504"):
            act(make_store(tmp_path, job_sha256="other"))
    assert make_store(tmp_path, job_sha256=None).load_latest()[0].job_sha256 == "job"


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


def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path, recorder):
    store = make_store(tmp_path, recorder)
    save_and_wait(store, 1)
    before = {path: (tmp_path / path).read_bytes() for path in open_files(tmp_path).sizes()}
    with full_disk(100_000):
        assert store.maybe_save(2, lambda: training_state(2))
        store._wait_for_save()
        assert store.maybe_save(3, lambda: training_state(3), force=True)
        with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)) as caught:
            store.wait()
    assert caught.value.code == "SH510"
    assert [row["step"] for row in recorder.of_kind("save_failed")] == [2, 3]
    assert {path: (tmp_path / path).read_bytes() for path in open_files(tmp_path).sizes()} == before
    assert store.maybe_save(3, lambda: training_state(3), force=True)
    store.wait()
    assert bit_equal(store.load_latest()[1], training_state(3))


def test_a_directory_that_cannot_be_made_fails_the_save(tmp_path, recorder):
    (tmp_path / "file").write_text("in the way")
    store = make_store(tmp_path / "file" / "store", recorder)
    store.save(1, training_state(1))
    with pytest.raises(CheckpointError, match="SH503"):
        store.wait()
    assert recorder.of_kind("save_failed")
    store.close()
