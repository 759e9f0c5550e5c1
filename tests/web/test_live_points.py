"""The page extends its curves by events as the server makes them: the same steps, values and marks."""

import json
import shutil
import subprocess

import pytest

from shoal.events import Event
from shoal.web.app import STATIC
from shoal.web.table import encode_json
from tests.jobs.past_run import TOLD, write_run
from tests.web.test_api import append, get

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(not NODE, reason="there is no node")
PROGRAM = """
import { readFileSync } from "node:fs";
import { append, liveWorkers } from "./live.mjs";
const { pages, rows, workers } = JSON.parse(readFileSync(0, "utf8"));
const live = liveWorkers(workers);
const told = rows.map((row) => append(pages, [row], live));
console.log(JSON.stringify({ pages, told }));
"""


def step(n, loss, who="worker-0", **more):
    return Event("step", 1.7e9 + n, who, n, {"loss": loss, "samples": 50, "wall_s": 0.02, **more})


def joined(t, who, lanes, *, saves):
    return Event("joined", 1.7e9 + t, who, t, {"lanes": lanes, "view": 2, "saves": saves})


NEWS = [
    step(61, float("nan")), step(62, float("inf")), step(63, 0.5, samples=80),
    joined(63, "worker-1", [2, 3], saves=False), step(64, 0.4, samples=20), step(64, 7.0, "worker-1", samples=30),
    step(68, 0.3, steps=4, wall_s=0.08), step(69, None), step(70, 0.2, wall_s=0.0),
    Event("evaluated", 1.7e9 + 70, "worker-0", 70, {"split": "validation", "metrics": {"loss": float("nan")}}),
    Event("worker_died", 1.7e9 + 71, "driver", 71, {"worker": "worker-1", "reason": "exit code -9"}),
    step(72, 0.1),
    Event("view", 1.7e9 + 72, "driver", 72, {"number": 3, "carries": {"worker-2": [0, 1, 2, 3]}}),
    joined(72, "worker-0", [0], saves=False), joined(72, "worker-2", [0, 1, 2, 3], saves=True),
    step(73, 0.09, "worker-2"), step(73, 8.8), step(74, 0.08, "worker-2", lr=0.1),
]  # fmt: skip


@pytest.fixture
def extended(served, tmp_path):
    """The series that the page has after the news, those of the server, and how many points came."""
    told = [row for row in TOLD if row[0] not in ("finished", "run_ended")]
    plan = ("plan", "driver", 0, {"choice": {"workers": 1, "hosts": 1, "threads": 1, "how": "lanes"}, "prediction": {
        "step_s": 0.02, "compute_s": 0.0, "encode_s": 0.0, "exchange_s": 0.0, "apply_s": 0.0}, "reason": "measured",
    })  # fmt: skip
    paths = write_run(served.runs / "live-1", [*told[:4], plan, *told[4:]])
    client = served.client("read")
    before = get(client, "runs/live-1/series")["series"]
    workers = get(client, "runs/live-1")["workers"]
    end = get(client, "runs/live-1/events", limit=5000)["end"]
    append(paths, *NEWS)
    rows = get(client, "runs/live-1/events", after=end)["rows"]
    shutil.copy(STATIC / "live.js", tmp_path / "live.mjs")
    (tmp_path / "main.mjs").write_text(PROGRAM)
    sent = encode_json({"pages": before, "rows": rows, "workers": workers})
    done = subprocess.run([NODE, "main.mjs"], cwd=tmp_path, input=sent, capture_output=True, check=True)
    found = json.loads(done.stdout)
    return found["pages"], get(client, "runs/live-1/series")["series"], found["told"]


def test_the_page_extends_curves_as_the_server_does(extended):
    pages, series, told = extended
    assert sum(one["added"] for one in told) > 10
    assert not any(one["unknown"] for one in told[:-1])
    assert told[-1]["unknown"]  # the first row with a learning rate
    mine, its = ({one["name"]: one for one in every} for every in (pages, series))
    assert set(its) - set(mine) == {"lr"}
    assert {"loss", "samples/s", "step s/measured", "validation/loss"} < set(mine)
    for name in mine:
        one = its[name]
        for column in ("step", "last", "not_finite"):
            assert mine[name][column] == pytest.approx(one[column]), (name, column)
    assert mine["loss"]["not_finite"] == [61, 62]
