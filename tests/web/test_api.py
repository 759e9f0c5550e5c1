"""The API over runs of the past: lists, curves, events, comparisons, changes with undo."""

import contextlib
import json
import re
import shutil
import time
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from shoal.events import Event
from shoal.events.stream import format_event
from shoal.jobs import run_dir
from shoal.spec.run_paths import RunPaths
from shoal.storage.tags import change_tags
from shoal.web.open_metrics import HELP
from shoal.web.openapi import make_document
from shoal.web.run_filter import select_rows
from shoal.web.stream import FollowedRun, parse_positions
from tests.web.conftest import Served
from tests.web.test_attacks import table


def get(client, path, **params):
    answer = client.get(f"/api/v1/{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def append(paths, *events):
    with paths.events.open("ab") as file:
        file.write(b"".join(map(format_event, events)))


def step(n, loss, who="worker-0"):
    return Event("step", 1.7e9 + n, who, n, {"loss": loss, "samples": 50, "wall_s": 0.01})


def test_runs_are_filtered_sorted_and_paged(served):
    change_tags(served.runs, "mlp-2", add=["best"])
    client = served.client("read")
    every = get(client, "runs", sort="run")
    assert [row["run"] for row in every["rows"]] == ["cnn-1", "mlp-1", "mlp-2"]
    assert [row["run"] for row in get(client, "runs", where="mlp", sort="-run")["rows"]] == ["mlp-2", "mlp-1"]
    assert [row["run"] for row in get(client, "runs", where="tags=best accuracy>=0.5")["rows"]] == ["mlp-2"]
    assert get(client, "runs", where="status=failed")["total"] == 0
    first = get(client, "runs", sort="run", limit=2)
    rest = get(client, "runs", sort="run", limit=2, cursor=first["cursor"])
    assert [row["run"] for row in first["rows"] + rest["rows"]] == ["cnn-1", "mlp-1", "mlp-2"]
    assert rest["cursor"] is None
    assert {group["job"]: group["runs"] for group in every["groups"]} == {"mlp": 2, "cnn": 1}


def test_rows_without_a_value_come_last():
    rows = [
        {"run": "a", "metrics": {"x": 1.0}},
        {"run": "b", "metrics": {}},
        {"run": "c", "metrics": {"x": float("nan")}},
    ]
    rows += [{"run": "d", "metrics": {"x": 3.0}}]
    assert [row["run"] for row in select_rows(rows, where="", sort="-x")] == ["d", "a", "b", "c"]


@pytest.mark.parametrize("sort", ["x", "-x"])
def test_rows_with_the_same_value_have_one_order(sort):
    """However they were read: else a row may be on two pages of the list, or on none."""
    rows = [{"run": name, "metrics": {"x": 1.0} if name < "e" else {}} for name in "abcdefgh"]
    for given in (rows, rows[::-1], rows[3:] + rows[:3]):
        assert "".join(row["run"] for row in select_rows(given, where="", sort=sort)) == "abcdefgh"


def test_the_state_of_a_run(served):
    page = get(served.client("read"), "runs/mlp-1")
    assert (page["status"], page["step"], page["steps"]) == ("finished", 60, 60)
    assert page["metrics"] == {"accuracy": 0.5, "loss": 0.7}
    assert page["workers"][0]["name"] == "worker-0"
    assert page["peak_workers"] == 1


def test_an_answer_that_has_not_changed_is_not_sent_again(served):
    client = served.client("read")
    first = client.get("/api/v1/runs/mlp-1")
    again = client.get("/api/v1/runs/mlp-1", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_series_of_a_zoom_and_of_nan(served):
    append(served.site.find("mlp-1"), step(61, float("nan")), step(62, float("inf")), step(63, -4.0))
    client = served.client("read")
    (loss,) = get(client, "runs/mlp-1/series", names="loss")["series"]
    assert loss["points"] == 63
    assert loss["not_finite"] == [61, 62]
    assert loss["last"][-3:] == [None, None, -4.0]
    (loss,) = get(client, "runs/mlp-1/series", names="loss", points=4)["series"]
    assert (min(loss["least"]), max(loss["most"])) == (-4.0, 2.3)
    (loss,) = get(client, "runs/mlp-1/series", names="loss", **{"from": 10, "to": 12})["series"]
    assert loss["step"] == [10, 11, 12]


def test_a_metric_that_is_nan_is_json(served):
    append(
        served.site.find("mlp-1"),
        Event("evaluated", 1.8e9, "worker-0", 70, {"split": "validation", "metrics": {"loss": float("nan")}}),
    )
    assert get(served.client("read"), "runs/mlp-1")["metrics"]["loss"] == "nan"
    assert get(served.client("read"), "runs", where="mlp-1")["rows"][0]["metrics"]["loss"] == "nan"


def test_events_have_positions_to_go_on_from(served):
    client = served.client("read")
    first = get(client, "runs/mlp-1/events", limit=10)
    rest = get(client, "runs/mlp-1/events", after=first["end"], limit=5000)
    content = RunPaths(served.runs / "mlp-1").events.read_bytes()
    assert [json.loads(line) for line in content.splitlines()] == first["rows"] + rest["rows"]
    assert [row["kind"] for row in get(client, "runs/mlp-1/events", kind="saved")["rows"]] == ["saved"]
    beyond = get(client, "runs/mlp-1/events", after=(1 << 62) - 1)
    assert (beyond["rows"], beyond["end"]) == ([], len(content))


def test_a_stream_goes_on_where_it_was(served):
    paths = served.site.find("mlp-1")
    followed = FollowedRun("mlp-1", paths, None)
    assert followed.read()["rows"] == []
    assert followed.read() is None
    append(paths, step(61, 1.0), step(62, 2.0))
    assert [row["step"] for row in followed.read()["rows"]] == [61, 62]
    position = f"mlp-1:{followed.offset}"
    append(paths, step(63, 3.0))
    again = FollowedRun("mlp-1", paths, parse_positions(position, ["mlp-1"])["mlp-1"])
    assert [row["step"] for row in again.read()["rows"]] == [63]


def test_positions_that_make_no_sense_are_left_out():
    assert parse_positions("7", ["a"]) == {"a": 7}
    assert parse_positions("7", ["a", "b"]) == {}
    assert parse_positions("a:1,b:x,c:3,:4,b:99999999999999999999", ["a", "b"]) == {"a": 1}


def test_two_runs_part_where_their_losses_differ(served):
    client = served.client("read")
    assert get(client, "compare", runs="mlp-1,mlp-2")["same_bits"] is True
    paths = served.site.find("cnn-1")
    content = paths.events.read_text().replace('"step":30,"loss":', '"step":30,"loss":9').replace("abab", "cdcd")
    paths.events.write_text(content)
    found = get(client, "runs/mlp-1/diff", **{"with": "cnn-1"})
    assert found["same_bits"] is False
    assert found["part_at"] == 30
    assert "job name" not in found["differs"]


def test_receipt_job_timeline_and_logs(served):
    client = served.client("read")
    assert get(client, "runs/mlp-1/receipt")["receipt"]["weights_sha256"] == "ab" * 32
    assert "models.py:mlp" in get(client, "runs/mlp-1/job")["yaml"]
    assert get(client, "runs/mlp-1/timeline")["marks"][0]["kind"] == "run_started"
    logs = served.runs / "mlp-1" / "logs"
    logs.mkdir()
    (logs / "worker-0.log").write_text("one\ntwo\n")
    assert get(client, "runs/mlp-1/logs") == [{"name": "worker-0.log", "size_bytes": 8}]
    assert get(client, "runs/mlp-1/logs/worker-0.log")["lines"] == ["one", "two"]
    assert get(client, "runs/mlp-1/search", find="tw")["matches"][0]["line"] == "two"


def test_a_deleted_run_comes_back(served):
    client = served.client("operate")
    answer = client.post("/api/v1/runs/mlp-1/delete", json={"confirm": "mlp-1"})
    assert answer.json()["state"] == "done"
    assert client.get("/api/v1/runs/mlp-1").status_code == 404
    (entry,) = get(client, "storage")["trash"]
    assert client.post(f"/api/v1/trash/{entry['entry']}/restore", json={}).json()["state"] == "done"
    assert get(client, "runs/mlp-1")["step"] == 60
    assert any("delete mlp-1" in line for line in served.said)


def test_a_cleanup_is_applied_as_it_was_shown(served):
    client = served.client("operate")
    shown = client.post("/api/v1/storage/plan", json={"days": 0, "keep": "newest=1"}).json()
    assert [(one["run"], one["part"]) for one in shown["items"]] == [("mlp-1", "")]
    assert shown["freed_bytes"] > 0
    assert client.post("/api/v1/storage/apply", json={"plan": "0" * 16}).status_code == 409
    done = client.post("/api/v1/storage/apply", json={"plan": shown["plan"]}).json()["result"]
    assert (done["moved"], done["stays"]) == (["mlp-1"], [])
    assert not (served.runs / "mlp-1").exists()
    assert client.get("/api/v1/storage").json()["trash"][0]["run"] == "mlp-1"
    assert client.post("/api/v1/storage/apply", json={"plan": shown["plan"]}).status_code == 409  # only once
    assert client.post("/api/v1/storage/plan", json={"keep": "all"}).status_code == 422


SHOWN = ("runs/mlp-1", "runs/mlp-1/series?names=loss,lr&points=50", "runs/mlp-1/timeline", "runs/mlp-1/receipt",
         "runs/mlp-1/events?after=300&limit=20", "runs/mlp-1/logs", "runs/mlp-1/logs/worker-0.log?tail=3",
         "runs/mlp-1/search?find=77", "compare?runs=mlp-1,mlp-2", "runs?where=mlp-1")  # fmt: skip


def read_all(client):
    found = {path: get(client, path.partition("?")[0], **dict(parse_qsl(path.partition("?")[2]))) for path in SHOWN}
    return found["runs/mlp-1"].pop("packed"), found


def test_a_compacted_run_is_shown_as_before(served):
    paths, client = RunPaths(served.runs / "mlp-1"), served.client("operate")
    paths.logs.mkdir()
    paths.log(0).write_bytes(b"".join(b"line %d\n" % n for n in range(2000)))
    before = read_all(client)
    assert served.client("read").post("/api/v1/runs/mlp-1/compact", json={}).status_code == 403
    done = client.post("/api/v1/runs/mlp-1/compact", json={}).json()["result"]
    assert done["files"] == 2
    assert done["after_bytes"] < done["before_bytes"]
    assert not paths.events.exists()
    assert read_all(client) == (True, before[1])  # a server that had it open
    other = Served(served.runs)
    assert read_all(other.client("read")) == (True, before[1])
    other.site.close()
    stream = FollowedRun("mlp-1", paths, None)
    assert stream.offset == before[1]["runs/mlp-1"]["offset"]
    assert client.post("/api/v1/runs/mlp-1/compact", json={"undo": True}).json()["result"]["files"] == 2
    assert read_all(client) == before
    plan = client.post("/api/v1/storage/plan", json={"days": 0, "keep": "0", "compact": True}).json()
    assert {item["part"] for item in plan["items"]} == {"compact"}
    told = client.post("/api/v1/storage/apply", json={"plan": plan["plan"]}).json()["result"]
    assert sorted(told["compacted"]) == ["cnn-1", "mlp-1", "mlp-2"]


def test_a_finished_run_cannot_be_stopped_or_resumed(served):
    client = served.client("submit")
    for verb in ("stop", "resume"):
        answer = client.post(f"/api/v1/runs/mlp-1/{verb}", json={})
        assert answer.status_code == 409
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "SH604"
        assert answer.json()["fix"]
        assert str(served.runs) not in answer.text


def test_a_run_that_another_driver_drives_is_not_resumed(served):
    (served.runs / "mlp-1" / "receipt.json").unlink()
    with run_dir.driver_lock(served.site.find("mlp-1")):
        assert served.client("submit").post("/api/v1/runs/mlp-1/resume", json={}).json()["code"] == "SH602"


@pytest.mark.parametrize("damage", ["events", "receipt", "job", "directory"])
def test_a_damaged_run_hides_no_other(served, damage):
    root = served.runs / "mlp-1"
    if damage == "directory":
        (root / "events.jsonl").unlink()
        (root / "events.jsonl").mkdir()
    else:
        name = {"events": "events.jsonl", "receipt": "receipt.json", "job": "job.yaml"}[damage]
        (root / name).write_bytes(b"\xff{[" * 100)
    client = served.client("read")
    assert get(client, "runs")["total"] == 3
    for path in ("", "/series", "/timeline", "/receipt", "/job", "/events", "/logs", "/diff?with=mlp-2"):
        answer = client.get(f"/api/v1/runs/mlp-1{path}")
        assert answer.status_code < 500 or answer.json()["code"] == "SH605", (path, answer.text)
    assert get(client, "runs/mlp-2")["step"] == 60


def test_metrics_are_of_live_runs_only(served):
    client = served.client("read")
    assert client.get("/metrics").text == "# EOF\n"
    paths = served.site.find("mlp-1")
    rows = paths.events.read_bytes().splitlines(keepends=True)
    paths.events.write_bytes(b"".join(rows[:20]))
    served.site.forget_rows()
    with run_dir.driver_lock(paths):
        text = client.get("/metrics").text
    assert 'shoal_run_step{run="mlp-1"} 16.0' in text
    assert "mlp-2" not in text
    assert text.endswith("# EOF\n")


def test_metrics_are_what_prometheus_reads(served):
    """By the strict parser of its own library, with names that end a label, a line or a set of labels."""
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    names = ['a"b', "a\\nb", "a\nb", "\\", '"', "}", '", x="', "\r", "\u2028", "é", "# EOF", "", "a" * 500]
    client, paths = served.client("read"), served.site.find("mlp-1").root.rename(served.runs / 'a "b"\\')
    paths = RunPaths(paths)
    paths.events.write_bytes(b"".join(paths.events.read_bytes().splitlines(keepends=True)[:20]))
    values = dict(zip(names, [0.5, float("nan"), float("inf"), float("-inf"), 1e300, *range(20)], strict=False))
    usage = {"worker": "worker-0", "cpu": 0.5, "rss_bytes": 10, "room_bytes": 90, "net_bytes_s": 0}
    append(
        paths,
        Event("evaluated", 1.8e9, "worker-0", 17, {"split": "validation", "metrics": values}),
        Event("usage", 1.8e9, "driver", None, usage),
    )
    served.site.forget_rows()
    with run_dir.driver_lock(paths):
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {one.name: one for one in parser.text_string_to_metric_families(answer.content.decode())}
    found = {one.labels["metric"]: one.value for one in families["shoal_run_metric"].samples}
    assert str(found) == str({name: float(value) for name, value in values.items()})  # NaN is not equal to itself
    assert {one.labels["run"] for family in families.values() for one in family.samples} == {paths.name}
    assert {name: (family.type, family.documentation) for name, family in families.items()} == {
        name: HELP[name] for name in families
    }
    assert families.keys() >= {"shoal_run_deaths", "shoal_worker_memory_bytes", "shoal_run_worker_seconds"}


def test_metrics_of_a_run_that_goes_hide_no_other(served):
    client = served.client("read")
    with contextlib.ExitStack() as driven:
        for name in ("mlp-1", "mlp-2"):
            paths = served.site.find(name)
            rows = paths.events.read_bytes().splitlines(keepends=True)
            paths.events.write_bytes(b"".join(rows[:20]))
            driven.enter_context(run_dir.driver_lock(paths))
        served.site.forget_rows()
        assert client.get("/metrics").text.count("shoal_run_step{") == 2  # the list is kept for a second
        shutil.rmtree(served.runs / "mlp-1")
        served.site._listed = (time.monotonic(), served.site._listed[1])
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert 'shoal_run_step{run="mlp-2"}' in answer.text
    assert "mlp-1" not in answer.text


def test_every_route_is_described_with_its_role():
    document = make_document(table())
    described = {(method.upper(), path) for path, verbs in document["paths"].items() for method in verbs}
    assert described == {(route.method, route.path) for route in table()}
    for verbs in document["paths"].values():
        for one in verbs.values():
            assert one["x-role"] in ("public", "read", "operate", "submit")
            assert one["responses"]["200"]["content"]
    text = json.dumps(document)
    for name in set(text.split('"#/components/schemas/')[1:]):
        assert name.split('"')[0] in document["components"]["schemas"]


def test_the_list_follows_runs_that_come_grow_and_go(served, written_run):
    client = served.client("read")

    def listed():
        served.site.forget_rows()
        return {row["run"]: row["step"] for row in get(client, "runs")["rows"]}

    assert listed() == {"mlp-1": 60, "mlp-2": 60, "cnn-1": 60}
    append(served.site.find("mlp-1"), step(61, 0.1))
    shutil.copytree(written_run, served.runs / "mlp-3")
    shutil.rmtree(served.runs / "mlp-2")
    (served.runs / "no-run").mkdir()
    (served.runs / "link").symlink_to(served.runs / "mlp-1")
    assert listed() == {"mlp-1": 61, "mlp-3": 60, "cnn-1": 60}
    assert listed() == {"mlp-1": 61, "mlp-3": 60, "cnn-1": 60}


def test_the_dashboard_asks_for_numbers_that_there_are():
    panels = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())["panels"]
    asked = {name for one in panels for name in re.findall(r"shoal_\w+", one["targets"][0]["expr"])}
    given = {f"{name}_total" if kind == "counter" else name for name, (kind, _) in HELP.items()}
    assert asked <= given
    assert len(asked) >= 12


def test_the_model_is_sent_to_those_who_may_have_it(served):
    model = served.runs / "mlp-1" / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights" * 100_000)
    answer = served.client("operate").get("/api/v1/runs/mlp-1/model", stays=True)
    assert answer.content == b"weights" * 100_000
    assert answer.headers["content-disposition"].startswith("attachment")
    assert served.client("read").get("/api/v1/runs/mlp-1/model").status_code == 403
    assert served.client("operate").get("/api/v1/runs/mlp-2/model").json()["code"] == "SH606"
    (served.runs / "mlp-2" / "model").mkdir()
    (served.runs / "mlp-2" / "model" / "model.safetensors").symlink_to(model / "model.safetensors")
    assert served.client("operate").get("/api/v1/runs/mlp-2/model").status_code == 409
