"""What may happen to the files that the page shows: a full disk, a directory that cannot be written, runs that vanish,
another server beside it, a clock that jumps. The page tells it, answers everything else, and loses nothing."""

import json
import math
import shutil
import subprocess
import sys
import time

import pytest

from shoal.spec.run_paths import RunPaths
from shoal.storage.history import RunHistory
from shoal.web.stream import FollowedRun
from tests.web.conftest import Served
from tests.web.test_api import append, get, step


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """What the page says over a disk of a megabyte. See full_disk.py."""
    words = [sys.executable, "-m", "tests.web.full_disk", str(tmp_path_factory.mktemp("disk"))]
    try:
        subprocess.run(["unshare", "-rm", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as failure:
        pytest.skip(f"no disk can be mounted here: {failure}")
    done = subprocess.run(["unshare", "-rm", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_full_disk_is_told_and_everything_else_goes_on(disk):
    full = disk["full"]
    assert set(full["read"].values()) == {200}
    assert full["free_bytes"] == 0
    assert "the checkpoint of step 3000 could not be saved: No space left on device; training goes on" in " ".join(
        full["notes"]
    )
    assert set(map(tuple, full["changes"].values())) == {(507, "SH510")}


def test_runs_on_a_full_disk_can_be_deleted(disk):
    """The entry of the trash needs a file, and there is no room for one. It leaves nothing behind, and tells a way."""
    freed = disk["freed"]
    (refused, code, fix), *done = freed["answers"]
    assert (refused, code, done) == (507, "SH510", [[200, "", ""], [200, "", ""]])
    assert "shoal trash --delete gone-1 --for-good" in fix
    assert freed["entries"] == [[], [], ["content", "entry.json"]]
    assert (freed["runs"], freed["left"]) == (["mlp-1"], [])
    assert freed["free_bytes"] >= 2 * (100 << 10)


def test_when_there_is_room_again_everything_works_and_nothing_is_left_over(disk):
    assert set(map(tuple, disk["room"]["changes"].values())) == {(200, "")}
    assert disk["files"] == []
    assert disk["whole"] == 3000


def test_a_directory_that_cannot_be_written_is_shown_and_changes_are_refused(disk):
    assert set(disk["read-only"]["read"].values()) == {200}
    assert set(map(tuple, disk["read-only"]["changes"].values())) == {(503, "SH605")}


PARTS = ("", "/series", "/timeline", "/receipt", "/job", "/logs", "/events", "/profiles")


def statuses(client, name):
    return {client.get(f"/api/v1/runs/{name}{part}").status_code for part in PARTS}


def test_a_run_that_is_deleted_while_it_is_shown(served, written_run):
    client, paths = served.client("operate"), RunPaths(served.runs / "mlp-1")
    assert statuses(client, "mlp-1") == {200}
    stream = FollowedRun("mlp-1", paths, None)
    assert stream.read() is not None  # its status
    shutil.rmtree(paths.root)
    served.site.forget_rows()
    assert statuses(client, "mlp-1") == {404}
    assert stream.read() is None
    assert [row["run"] for row in get(client, "runs", sort="run")["rows"]] == ["cnn-1", "mlp-2"]
    assert get(client, "compare", runs="mlp-2,cnn-1")["runs"]
    assert client.get("/api/v1/compare", params={"runs": "mlp-1,mlp-2"}).status_code == 404
    for verb in ("stop", "compact", "tags", "stacks"):
        assert client.post(f"/api/v1/runs/mlp-1/{verb}", json={}).status_code == 404
    shutil.copytree(written_run, paths.root)
    append(paths, step(61, 9.0))
    served.site.forget_rows()
    assert get(client, "runs/mlp-1")["step"] == 61  # another run of this name, read from its beginning
    assert get(client, "runs/mlp-1/series", names="loss")["series"][0]["last"][-1] == 9.0
    assert [row["step"] for row in stream.read()["rows"]][-1] == 61


def test_a_damaged_job_among_compared_runs_is_named(served):
    (served.runs / "mlp-2" / "job.yaml").write_text(": : [")
    refused = served.client("read").get("/api/v1/compare?runs=mlp-1,mlp-2")
    assert (refused.status_code, refused.json()["title"].partition(":")[0]) == (422, "'mlp-2'")


def test_a_directory_of_runs_that_vanishes_comes_back(served):
    client, away = served.client("read"), served.runs.with_name("away")
    token = client.headers["authorization"]
    served.runs.rename(away)
    assert client.get("/api/v1/runs").status_code in (401, 503)  # the tokens are gone with it
    away.rename(served.runs)
    served.site.forget_rows()
    assert client.headers["authorization"] == token
    assert get(client, "runs")["total"] == 3


def test_two_servers_write_what_they_know_of_the_same_runs(served, monkeypatch):
    """Caches are written by both, under names of their own, and read by both."""
    monkeypatch.setattr("shoal.storage.history.MIN_NEW_BYTES", 1)
    other = Served(served.runs)
    try:
        first, second = served.client("operate"), other.client("operate")
        for n in range(61, 65):
            append(RunPaths(served.runs / "mlp-1"), step(n, float(n)))
            for client in (first, second):
                assert get(client, "runs/mlp-1")["step"] == n
                assert get(client, "runs/mlp-1/series", names="loss")["series"][0]["last"][-1] == n
        first.post("/api/v1/runs/mlp-1/tags", json={"add": ["one"]})
        second.post("/api/v1/runs/mlp-1/tags", json={"add": ["two"]})
        assert get(first, "runs/mlp-1")["tags"] == ["one", "two"]
        second.post("/api/v1/runs/mlp-2/delete", json={"confirm": "mlp-2"})
        assert first.get("/api/v1/runs/mlp-2").status_code == 404
        plan = first.post("/api/v1/storage/plan", json={"days": 0, "keep": "0"}).json()["plan"]
        applied = [client.post("/api/v1/storage/apply", json={"plan": plan}) for client in (second, first)]
        assert [one.status_code for one in applied] == [200, 409]  # one of them, once
        assert not list(served.runs.rglob("*.tmp"))
    finally:
        other.site.close()


def test_a_clock_that_jumps(served, monkeypatch):
    """Back by an hour, then ahead by ten years: every answer is finite and bounded, and no session ends by it."""
    paths, now = RunPaths(served.runs / "mlp-1"), time.time
    for n, t in ((61, -3600.0), (62, 3.2e8), (63, 30.0)):
        row = step(n, 1.0)
        append(paths, type(row)(row.kind, 1.7e9 + t, row.who, row.step, dict(row.fields)))
    browser = served.browser()
    code = served.access.make_code(browser_identity(served))
    monkeypatch.setattr(time, "time", lambda: now() + 10 * 365 * 86400)
    assert browser.get("/api/v1/me").status_code == 200
    assert served.client().post("/api/v1/session", json={"secret": code}).status_code == 200
    page, shown = get(browser, "runs/mlp-1"), get(browser, "runs/mlp-1/timeline")
    assert page["step"] == 63
    series = get(browser, "runs/mlp-1/series", names="loss,samples/s")["series"]
    assert [one["step"][-1] for one in series] == [63, 63]
    assert all(math.isfinite(t) for one in series for t in one["t"])
    assert all(len(spent) <= 2000 for kinds in shown["workers"].values() for spent in kinds.values())
    assert statuses(browser, "mlp-1") == {200}
    history = RunHistory(paths)
    history.catch_up()
    assert len(history.series["loss"]) == 63


def browser_identity(served):
    return next(iter(served.access._sessions.values())).identity
