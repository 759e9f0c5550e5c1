"""Data from a real HTTP server on loopback."""

import functools
import http.server
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.errors import ShoalError
from tests.data.source_helpers import open_spec

pytest.importorskip("aiohttp")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    """A directory and the address under which it is served."""
    folder = tmp_path / "site"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_kind_of_file_comes_over_http(site, tmp_path):
    folder, address = site
    x, y = np.arange(20.0, dtype=np.float32).reshape(10, 2), np.arange(10) % 2
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    rows = "\n".join(f"{a},{b},{c}" for (a, b), c in zip(x, y, strict=True))
    (folder / "t.csv").write_text("a,b,y\n" + rows + "\n")
    pq.write_table(pa.table({"a": x[:, 0], "b": x[:, 1], "y": y}), folder / "t.parquet")
    sources = [
        open_spec(tmp_path, kind="npy", path=f"{address}/x.npy", target=f"{address}/y.npy"),
        open_spec(tmp_path, kind="csv", path=f"{address}/t.csv", target="y"),
        open_spec(tmp_path, kind="parquet", path=f"{address}/t.parquet", target="y"),
    ]
    ids = np.array([7, 0, 3])
    for source in sources:
        batch = source.take(ids)
        assert batch.inputs[0].tolist() == x[ids].tolist()
        assert batch.target.tolist() == y[ids].tolist()


def test_a_missing_page_and_a_dead_server_are_told(site, tmp_path):
    _, address = site
    with pytest.raises(ShoalError) as caught:
        open_spec(tmp_path, kind="csv", path=f"{address}/no.csv", target="y")
    assert caught.value.code == "SH301"
    with pytest.raises(ShoalError) as caught:
        open_spec(tmp_path, kind="csv", path="http://127.0.0.1:9/no.csv", target="y")
    assert caught.value.code == "SH308"
