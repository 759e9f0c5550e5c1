"""A run for a tracking server of MLflow, over its REST API: job fields as parameters, every point, times and tags.

MLflow itself is not needed. `MLFLOW_TRACKING_TOKEN`, or `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`,
are sent as MLflow's own client sends them.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.errors import ShoalError, error
from shoal.jobs import run_index
from shoal.spec.alerts.config import hide_webhooks
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from shoal.storage.export import batches, points

TIMEOUT_S = 60.0
METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100
"""What MLflow takes in one request."""
MAX_PARAM, MAX_ANSWER_BYTES = 6000, 1 << 24
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_NOT_IN_NAMES = re.compile(r"[^\w/. :-]")


def export_to_mlflow(paths: RunPaths, address: str) -> str:
    """Write the run to the server, and return where it is there. SH680 if the server cannot be reached or refuses; what
    was begun there is deleted then."""
    server = _Server(address)
    row = run_index.run_summary(paths)
    experiment = server.experiment(paths.name.rpartition("-")[0] or paths.name)
    started_ms = int(1000 * (row["started_t"] or 0))
    made = server.post("runs/create", experiment_id=experiment, run_name=paths.name, start_time=started_ms)
    name = _text(made, "run", "info", "run_id")
    try:
        end_ms = _write(server, name, paths, row, started_ms)
    except BaseException:
        server.delete_run(name)
        raise
    status = STATUSES.get(row["status"], "RUNNING")
    server.post("runs/update", run_id=name, status=status, **({"end_time": end_ms} if status != "RUNNING" else {}))
    return f"{server.address}/#/experiments/{experiment}/runs/{name}"


def _write(server: _Server, name: str, paths: RunPaths, row: Mapping[str, Any], end_ms: int) -> int:
    """Returns the time of the last point, in milliseconds."""
    fields = run_index.comparison_column(paths)
    params = [
        {"key": _key(key.removeprefix("job ")), "value": hide_webhooks(str(value))[:MAX_PARAM]}
        for key, value in fields.items()
        if key.startswith("job ")
    ]
    for batch in batches(iter(params), PARAMS_AT_ONCE):
        server.post("runs/log-batch", run_id=name, params=batch)
    for metrics in batches(_metrics(paths), METRICS_AT_ONCE):
        server.post("runs/log-batch", run_id=name, metrics=metrics)
        end_ms = max(end_ms, *(one["timestamp"] for one in metrics))
    server.post("runs/log-batch", run_id=name, tags=_tags(paths, row))
    return end_ms


def _metrics(paths: RunPaths) -> Iterator[dict[str, Any]]:
    for _, series, step, t, value in points(paths):
        number = value if math.isfinite(value) else {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
        yield {"key": _key(series), "value": number, "timestamp": int(1000 * t), "step": step}


def _tags(paths: RunPaths, row: Mapping[str, Any]) -> list[dict[str, str]]:
    receipt = read_receipt_file(paths.receipt).own
    tags = {"shoal.run": paths.name, "shoal.weights_sha256": row["weights_sha256"]}
    if receipt is not None:
        tags |= {"shoal.exact": str(receipt.exact), "shoal.why": receipt.why}
    return [{"key": key, "value": str(value)[:MAX_PARAM]} for key, value in tags.items() if value]


def _key(name: str) -> str:
    """A name that MLflow takes."""
    return _NOT_IN_NAMES.sub("_", name)[:250]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *words: Any, **more: Any) -> None:
        return None


class _Server:
    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        if urllib.parse.urlsplit(self.address).scheme not in ("http", "https"):
            fix = "Name the tracking server: --out http://127.0.0.1:5000"
            raise error("SH609", f"'{address}' is not an address", where="--out", fix=fix)
        self._open = urllib.request.build_opener(_NoRedirect).open

    def experiment(self, name: str) -> str:
        """Its number; it is made if there is none."""
        query = urllib.parse.urlencode({"experiment_name": name})
        try:
            found = self._ask(f"experiments/get-by-name?{query}", None)
        except _MissingError:
            return _text(self.post("experiments/create", name=name), "experiment_id")
        return _text(found, "experiment", "experiment_id")

    def post(self, path: str, **fields: Any) -> Any:
        return self._ask(path, fields)

    def delete_run(self, name: str) -> None:
        """The first failure is the one to tell."""
        try:
            self.post("runs/delete", run_id=name)
        except (ShoalError, OSError):
            return

    def _ask(self, path: str, fields: Mapping[str, Any] | None) -> Any:
        body = None if fields is None else json.dumps(fields).encode()
        headers = {"content-type": "application/json", **_authorization()}
        request = urllib.request.Request(f"{self.address}/api/2.0/mlflow/{path}", data=body, headers=headers)  # noqa: S310
        try:
            with self._open(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read(MAX_ANSWER_BYTES) or b"{}")
        except urllib.error.HTTPError as failure:
            if failure.code == 404 and path.startswith("experiments/get-by-name"):
                raise _MissingError from failure
            told = failure.read(2000).decode(errors="replace")
            raise error("SH680", f"MLflow answers {failure.code}: {told}", where=self.address) from failure
        except (OSError, ValueError, RecursionError) as failure:
            raise error("SH680", f"MLflow cannot be reached: {failure}", where=self.address) from failure


class _MissingError(Exception):
    """There is no experiment of this name."""


def _text(answer: Any, *names: str) -> str:
    for name in names:
        answer = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(answer, str):
        raise error("SH680", f"the answer has no {'.'.join(names)}: this is not an MLflow server")
    return answer


def _authorization() -> dict[str, str]:
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"authorization": f"Bearer {token}"}
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    if user and password:
        return {"authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}
    return {}
