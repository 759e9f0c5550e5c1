"""`shoal.connect`: the functions of the API, over a real socket."""

import http.server
import threading

import pytest

import shoal
from shoal.errors import ShoalError
from shoal.jobs.queue.access_tokens import TokenFile
from shoal.spec.run_paths import RunPaths
from tests.jobs.past_run import write_run
from tests.web.live_run import serving
from tests.web.test_api import append, step
from tests.web.test_attacks import table


@pytest.fixture
def server(tmp_path):
    for name in ("mlp-1", "mlp-2"):
        write_run(tmp_path / name)
    with serving(tmp_path) as one:
        yield one


def client_of(server, role="operate"):
    token = TokenFile(server.site.runs).create(role, role=role, runs=[], expires_t=None)
    return shoal.connect(server.url, token)


def test_every_route_is_a_function(server):
    names = [route.handler.__name__ for route in table()]
    assert dir(client_of(server)) == sorted(names)
    assert len(set(names)) == len(names)


def test_runs_are_read_and_steered(server):
    page = client_of(server)
    assert [row["run"] for row in page.list_runs(where="step>10", sort="run")["rows"]] == ["mlp-1", "mlp-2"]
    (curve,) = page.show_series("mlp-1", names="loss", from_=50)["series"]
    assert curve["step"][0] >= 50
    assert page.tag_run("mlp-1", add=["best"]) == {"tags": ["best"]}
    entry = page.delete_run("mlp-2", confirm="mlp-2")["entry"]
    assert page.list_runs()["total"] == 1
    page.restore_run(entry)
    assert page.list_runs()["total"] == 2
    assert page.show_metrics().endswith(b"# EOF\n")


def test_refusals_have_the_codes_of_the_server(server):
    page = client_of(server, "read")
    with pytest.raises(shoal.ShoalError, match="there is no run 'mlp-9'") as refused:
        page.show_run("mlp-9")
    assert (refused.value.code, refused.value.fix) == ("SH601", "`shoal runs` lists the runs.")
    with pytest.raises(shoal.ShoalError, match="403 this needs the role operate"):
        page.tag_run("mlp-1", add=["best"])
    with pytest.raises(shoal.ShoalError, match="limit: Input should be"):
        page.list_runs(limit=0)
    with pytest.raises(AttributeError, match="list_runs"):
        page.drop_everything()
    with pytest.raises(TypeError, match="takes 1 names"):
        page.show_run()
    for url, token in ((server.url, "wrong"), ("file:///etc/passwd", ""), ("http://127.0.0.1:1", "")):
        with pytest.raises(shoal.ShoalError) as refused:
            shoal.connect(url, token)
        assert refused.value.code == "SH683"


def test_a_stream_goes_on_after_a_break_and_ends_with_its_token(server, monkeypatch):
    page, paths = client_of(server, "read"), RunPaths(server.site.runs / "mlp-1")
    monkeypatch.setattr("shoal.web.client.TIMEOUT_S", 2.0)  # it breaks when nothing comes for so long
    messages = page.open_stream(runs="mlp-1", after=0)
    assert next(messages)["rows"][-1]["kind"] == "run_ended"
    for n in (61, 62):
        later = threading.Timer(3.5, append, [paths, step(n, 1.0)])
        later.start()
        rows = next(one["rows"] for one in messages if one["rows"])  # others tell only that nobody drives it
        assert [row["step"] for row in rows] == [n]
        later.join()
    TokenFile(server.site.runs).revoke("read")
    with pytest.raises(shoal.ShoalError, match="401"):
        for _ in messages:
            pass


PAGES = [
    b"<html>another server</html>",
    b"\xff\xfe",
    b"[" * 100_000,
    b"[]",
    b"{}",
    b'{"paths": {"/x": []}}',
    b'{"paths": {"/x": {"get": {"operationId": "runs", "summary": "", "responses": {"200": {"content": {}}}}}}}',
]


@pytest.mark.parametrize("page", PAGES)
def test_another_server_at_the_address_is_an_error_with_a_code(page):
    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        with pytest.raises(ShoalError) as caught:
            shoal.connect(f"http://127.0.0.1:{other.server_port}", "token")
        thread.join()
    assert caught.value.code == "SH683"
    assert "not that of a web page of Shoal" in str(caught.value)
