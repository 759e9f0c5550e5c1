from __future__ import annotations

import os
import uuid

import pytest

from shoal.checkpoint.files import LocalFiles, RemoteFiles, atomic_replace, open_files


@pytest.fixture(params=["local", "memory"])
def files(request, tmp_path):
    return open_files(tmp_path / "at" if request.param == "local" else f"memory://{uuid.uuid4().hex}/at")


def test_what_was_written_is_there(files):
    assert files.sizes() == {}
    files.write("a/b/c", [b"one", memoryview(b"two")])
    files.write("a/b/c", [b"three"])
    files.write("d", [])
    assert files.sizes() == {"a/b/c": 5, "d": 0}
    assert files.sizes("a") == {"a/b/c": 5}
    with files.open("a/b/c") as file:
        assert file.read() == b"three"
    files.remove("a/b/c")
    files.remove("a/b/c")
    assert files.sizes() == {"d": 0}
    with pytest.raises(FileNotFoundError):
        files.open("a/b/c")


def test_a_url_of_a_local_file_is_local(tmp_path):
    assert isinstance(open_files(f"file://{tmp_path}"), LocalFiles)
    assert isinstance(open_files("memory://x"), RemoteFiles)


def test_what_fails_half_way_leaves_nothing_and_the_old_in_place(tmp_path):
    (tmp_path / "x").write_text("old")

    def fail() -> None:
        with atomic_replace(tmp_path / "x") as temp:
            temp.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_a_sweep_and_a_save_exclude_each_other_and_saves_do_not(tmp_path):
    one, two = LocalFiles(str(tmp_path)), LocalFiles(str(tmp_path))
    with one.save_lock(), two.save_lock(), two.sweep_lock() as alone:
        assert not alone
    with one.sweep_lock() as alone, two.sweep_lock() as too:
        assert (alone, too) == (True, False)


def test_a_process_forked_during_a_save_does_not_keep_its_lock(tmp_path):
    """Loader processes are forked at any time and live on."""
    files = LocalFiles(str(tmp_path))
    ready, go = os.pipe()
    with files.save_lock():
        pid = os.fork()
        if pid == 0:
            os.read(ready, 1)
            os._exit(0)
    try:
        with files.sweep_lock() as alone:
            assert alone
    finally:
        os.write(go, b"!")
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(go)
