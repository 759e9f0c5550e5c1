"""Notices of clouds: a file, a URL of a real server on loopback, and an agent that obeys."""

import http.server
import threading

import pytest

from shoal.fleet.agents.notice import notice_arrived
from shoal.fleet.engines.agents import AgentEngine
from shoal.fleet.engines.make import apart_hosts
from shoal.spec.run_paths import RunPaths
from tests.fleet.engine_contract import launch, wait_exits, wait_ready
from tests.fleet.test_agent_engine import fork_server  # noqa: F401


class MetadataService(http.server.BaseHTTPRequestHandler):
    answers = {"/google/no": b"FALSE", "/google/yes": b"TRUE", "/aws": b'{"action": "terminate"}'}

    def do_GET(self):
        wants_token = self.path.startswith("/aws") and self.headers.get("X-aws-ec2-metadata-token") != "t"
        wants_flavor = self.path.startswith("/google") and self.headers.get("Metadata-Flavor") != "Google"
        found = self.answers.get(self.path)
        self.send_response(401 if wants_token else 403 if wants_flavor else 404 if found is None else 200)
        self.end_headers()
        self.wfile.write(found or b"")

    def do_PUT(self):
        self.send_response(200 if self.path == "/latest/api/token" else 404)
        self.end_headers()
        self.wfile.write(b"t")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def service():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), MetadataService) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "expected"), [("/google/no", False), ("/google/yes", True), ("/aws", True), ("/nothing", False)]
)
def test_a_url_says_whether_the_machine_is_taken_away(service, path, expected):
    assert notice_arrived(service + path) is expected


def test_a_file_and_an_unreachable_url(tmp_path):
    assert not notice_arrived(str(tmp_path / "notice"))
    (tmp_path / "notice").touch()
    assert notice_arrived(str(tmp_path / "notice"))
    assert not notice_arrived("http://127.0.0.1:9/")


def test_an_agent_leaves_on_a_notice(fork_server, tmp_path):  # noqa: F811
    engine = AgentEngine(apart_hosts(1, fork_server, notice=str(tmp_path / "notice")), RunPaths(tmp_path))
    try:
        engine.start([launch(0, "wait")])
        wait_ready(tmp_path, 0, engine=engine)
        (tmp_path / "notice").touch()
        (one,) = wait_exits(engine, 1)
        assert one.code == -15  # it does not know the signal; a worker leaves
        assert engine.capacity() == []
    finally:
        engine.close()
