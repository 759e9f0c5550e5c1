"""Files that are not here: URLs of any file system that fsspec knows."""

import io
import threading

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shoal.data import files
from shoal.data.cache import cached_directory
from shoal.errors import ShoalError
from tests.data.source_helpers import open_spec


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def code(tmp_path, **spec):
    with pytest.raises(ShoalError) as caught:
        open_spec(tmp_path, **spec)
    return caught.value.code


def test_csv_directory_and_glob(memory, tmp_path):
    memory.pipe("/d/1.csv", b"x,y\n1,0\n")
    memory.pipe("/d/2.csv", b"x,y\n2,1\n")
    for path in ("memory://d", "memory://d/*.csv"):
        source = open_spec(tmp_path, kind="csv", path=path, target="y")
        assert source.take(np.arange(2)).inputs[0].tolist() == [[1], [2]]


def test_a_remote_file_is_copied_once_and_again_when_it_changes(memory, tmp_path):
    def put(array):
        raw = io.BytesIO()
        np.save(raw, array)
        memory.pipe("/x.npy", raw.getvalue())

    messages = []
    put(np.ones((2, 3)))
    for _ in range(2):
        assert len(open_spec(tmp_path, notify=messages.append, kind="npy", path="memory://x.npy")) == 2
    assert len(messages) == 1
    put(np.ones((4, 3)))
    assert len(open_spec(tmp_path, notify=messages.append, kind="npy", path="memory://x.npy")) == 4
    assert len(messages) == 2


def test_parquet_is_read_in_place(memory, tmp_path):
    raw = io.BytesIO()
    pq.write_table(pa.table({"x": [1.0, 2.0], "y": [0, 1]}), raw)
    memory.pipe("/a.parquet", raw.getvalue())
    source = open_spec(tmp_path, kind="parquet", path="memory://a.parquet", target="y")
    assert source.take(np.array([1])).inputs[0].tolist() == [[2]]
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def hdfs(monkeypatch):
    """fsspec's own file system for hdfs://, with this machine's files in the place of a server. What it was asked for
    is kept."""
    from fsspec.implementations.arrow import HadoopFileSystem

    asked = []

    class Server:
        type_name = "hdfs"

        def __init__(self, **options):
            asked.append(options)
            self._files = pa.fs.LocalFileSystem()

        def __getattr__(self, name):
            return getattr(self._files, name)

    monkeypatch.setattr("pyarrow.fs.HadoopFileSystem", Server, raising=False)
    HadoopFileSystem.clear_instance_cache()
    yield asked
    HadoopFileSystem.clear_instance_cache()


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("pattern", ["trips", "trips/*/part-*"])
def test_partitions_on_hdfs(hdfs, tmp_path, kind, pattern):
    """The name of the server is no part of the names of its files."""
    for year in (2023, 2024):
        place = tmp_path / "trips" / f"year={year}"
        place.mkdir(parents=True)
        (place / "_SUCCESS").touch()
        if kind == "csv":
            (place / "part-0.csv").write_text(f"x,y\n{year / 2},1\n")
        else:
            pq.write_table(pa.table({"x": [year / 2], "y": [1]}), place / "part-0.parquet")
    source = open_spec(tmp_path, kind=kind, path=f"hdfs://namenode:8020{tmp_path}/{pattern}", target="y")
    assert source.take(np.arange(2)).inputs[0].tolist() == [[1011.5, 2023], [1012, 2024]]
    assert {(one["host"], one["port"]) for one in hdfs} == {("namenode", 8020)}


def test_images_and_text(memory, tmp_path):
    raw = io.BytesIO()
    Image.new("RGB", (2, 2)).save(raw, "png")
    memory.pipe("/p/cat/1.png", raw.getvalue())
    memory.pipe("/a.txt", b"hello")
    assert open_spec(tmp_path, kind="images", path="memory://p").take(np.array([0])).size == 1
    assert len(open_spec(tmp_path, kind="text", path="memory://a.txt", context=2)) == 2


def test_file_urls_are_local_files(tmp_path):
    (tmp_path / "a.csv").write_text("x\n1\n")
    assert len(open_spec(tmp_path, kind="csv", path=f"file://{tmp_path}/a.csv")) == 1
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ShoalError, match=r"Did you mean 'a\.csv'"):
        open_spec(tmp_path, kind="csv", path=f"file://{tmp_path}/b.csv")


def test_errors(memory, tmp_path, monkeypatch):
    assert code(tmp_path, kind="csv", path="memory://none.csv") == "SH301"
    assert code(tmp_path, kind="csv", path="memory://none/*.csv") == "SH301"
    assert code(tmp_path, kind="csv", path="strange://a.csv") == "SH207"
    memory.pipe("/empty.csv", b"")
    assert code(tmp_path, kind="csv", path="memory://empty.csv") == "SH302"

    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(memory), "info", unreachable)
    assert code(tmp_path, kind="csv", path="memory://empty.csv") == "SH308"


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    def no_package(_):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(files, "_file_system", no_package)
    with pytest.raises(ShoalError, match=r"SH207.*shoal\[s3\]"):
        open_spec(tmp_path, kind="csv", path="s3://bucket/a.csv")


def test_a_copy_that_breaks_off_leaves_nothing(memory, tmp_path, monkeypatch):
    memory.pipe("/a.csv", b"x\n1\n")

    def breaks(self, path, local, **_):
        with open(local, "wb") as file:
            file.write(b"x")
        raise ConnectionResetError("by peer")

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "get_file", breaks)
        assert code(tmp_path, kind="csv", path="memory://a.csv") == "SH308"
    assert len(open_spec(tmp_path, kind="csv", path="memory://a.csv")) == 1


def test_the_cache_is_made_by_one_of_many(tmp_path):
    made = []

    def make(directory):
        made.append(directory)
        (directory / "done").write_text("yes")

    got = []
    threads = [threading.Thread(target=lambda: got.append(cached_directory(tmp_path, ["k"], make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(got)) == 1
    assert (got[0] / "done").read_text() == "yes"


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ShoalError, match="SH313"):
        cached_directory(tmp_path / "cache", ["k"], lambda directory: None)
