"""Export to MLflow: against a small server of its REST API, and against MLflow itself where it is installed."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal.storage import export
from tests.jobs.past_run import TOLD, call_verb, write_run

MLFLOW = os.environ.get("SHOAL_MLFLOW") or shutil.which("mlflow")
NAN = ("step", "worker-0", 60, {"loss": float("nan"), "samples": 50, "wall_s": 0.01})


class Tracking(BaseHTTPRequestHandler):
    """Keeps what is logged, within the limits that MLflow documents; `server.refuse` refuses a call."""

    def do_GET(self):
        name = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["experiment_name"][0]
        if name in self.server.experiments:
            self.answer(200, {"experiment": {"experiment_id": self.server.experiments[name]}})
        else:
            self.answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        call = self.path.removeprefix("/api/2.0/mlflow/")
        if call == self.server.refuse and self.server.runs:
            self.answer(400, {"error_code": "BAD_REQUEST"})
            return
        self.server.authorization = self.headers.get("authorization")
        self.answer(200, getattr(self, call.replace("/", "_").replace("-", "_"))(**body))

    def experiments_create(self, name):
        self.server.experiments[name] = str(len(self.server.experiments))
        return {"experiment_id": self.server.experiments[name]}

    def runs_create(self, **fields):
        self.server.runs["r1"] = {**fields, "metrics": [], "params": {}, "tags": {}, "deleted": False}
        return {"run": {"info": {"run_id": "r1"}}}

    def runs_log_batch(self, run_id, metrics=(), params=(), tags=()):
        assert len(metrics) + len(params) + len(tags) <= 1000
        assert len(params) <= 100
        run = self.server.runs[run_id]
        run["metrics"] += [(one["key"], one["step"], one["value"]) for one in metrics]
        run["params"] |= {one["key"]: one["value"] for one in params}
        run["tags"] |= {one["key"]: one["value"] for one in tags}
        return {}

    def runs_update(self, run_id, **fields):
        self.server.runs[run_id] |= fields
        return {}

    def runs_delete(self, run_id):
        self.server.runs[run_id]["deleted"] = True
        return {}

    def answer(self, status, fields):
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words):
        pass


@pytest.fixture
def tracking():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Tracking)
    server.experiments, server.runs, server.refuse, server.authorization = {}, {}, "", None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def paths(tmp_path):
    told = [NAN if kind == "step" and step == 60 else (kind, who, step, fields) for kind, who, step, fields in TOLD]
    return write_run(tmp_path / "runs" / "mlp-1", told)


def export_run(paths, address, capsys, monkeypatch):
    words = ("export", "mlp-1", "--to", "mlflow", "--out", address, "--runs", paths.root.parent)
    return call_verb(capsys, monkeypatch, *words)


def test_every_point_and_field_arrives(paths, tracking, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    rule = "alerts: [{when: finished, webhook: 'https://hooks.example/secret'}]"
    paths.job.write_text(re.sub("^alerts: .*$", rule, paths.job.read_text(), flags=re.MULTILINE))
    code, out, err = export_run(paths, tracking.address, capsys, monkeypatch)
    assert code == 0, err
    assert out.strip().endswith("/#/experiments/0/runs/r1")
    run = tracking.runs["r1"]
    wanted = [(name, step, repr(value)) for _, name, step, _, value in export.points(paths)]
    assert [(name, step, repr(float(value))) for name, step, value in run["metrics"]] == wanted
    assert ("loss", 60, "NaN") in run["metrics"]
    assert (run["run_name"], run["status"], run["deleted"]) == ("mlp-1", "FINISHED", False)
    assert run["params"]["optimizer.name"]
    assert "secret" not in json.dumps(run["params"])
    assert run["tags"]["shoal.weights_sha256"] == "ab" * 32
    assert tracking.authorization == "Bearer t0ken"


def test_a_run_that_is_refused_half_way_is_deleted_there(paths, tracking, capsys, monkeypatch):
    tracking.refuse = "runs/log-batch"
    code, _, err = export_run(paths, tracking.address, capsys, monkeypatch)
    assert code == 6
    assert "SH680" in err
    assert tracking.runs["r1"]["deleted"]


def test_no_server_and_no_address_are_told(paths, capsys, monkeypatch):
    with socket.socket() as taken:  # nobody listens here
        taken.bind(("127.0.0.1", 0))
        code, _, err = export_run(paths, f"http://127.0.0.1:{taken.getsockname()[1]}", capsys, monkeypatch)
    assert (code, "SH680" in err) == (6, True)
    code, _, err = export_run(paths, "", capsys, monkeypatch)
    assert (code, "SH609" in err) == (6, True)


@pytest.mark.browser
@pytest.mark.skipif(not MLFLOW, reason="MLflow is not installed")
def test_mlflow_itself_has_the_run(paths, tmp_path, capsys, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [MLFLOW, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path / "a")]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*words, *store], cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/health", server)
        code, out, err = export_run(paths, address, capsys, monkeypatch)
        assert code == 0, err
        run = out.strip().rpartition("/")[2]
        url = f"{address}/api/2.0/mlflow/metrics/get-history?run_id={run}&metric_key=loss"
        found = json.loads(urllib.request.urlopen(url).read())["metrics"]
        assert sorted((one["step"], repr(float(one["value"]))) for one in found) == [
            (step, repr(value)) for _, name, step, _, value in export.points(paths) if name == "loss"
        ]
    finally:
        os.killpg(server.pid, 15)
        server.wait()


def wait_for(url, server):
    while True:
        assert server.poll() is None, "MLflow ended"
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(url, timeout=5).read()
