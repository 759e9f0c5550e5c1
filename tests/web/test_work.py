"""Searches, the queue and compressions over the API: what they show, and what can be done."""

import pytest

from shoal.jobs.queue import client as queue
from shoal.spec.load import load_run_job, save_job
from tests.conftest import FIXTURES
from tests.jobs.past_run import call_verb
from tests.web import past_work
from tests.web.test_api import get


@pytest.fixture
def no_daemon(served, monkeypatch):
    """The starts of a daemon that were asked for. The job of mlp-1 can be submitted."""
    job = load_run_job(served.runs / "mlp-1" / "job.yaml")
    save_job(job.model_copy(update={"base_dir": str(FIXTURES)}), served.runs / "mlp-1" / "job.yaml")
    asked = []
    monkeypatch.setattr(queue, "ensure_served", asked.append)
    return asked


def test_a_search_has_trials_best_front_and_importance(served):
    rows = past_work.write_search(served.runs / "small-1")
    client = served.client("read")
    (listed,) = get(client, "searches")["rows"]
    assert (listed["run"], listed["status"], listed["told"]) == ("small-1", "finished", past_work.told(rows))
    newest = get(client, "runs")["rows"][0]  # a search has a beginning too
    assert (newest["run"], newest["started_t"] > 1.7e9) == ("small-1", True)
    page = get(client, "searches/small-1")
    assert page["total"] == len(page["trials"]) == past_work.trials(rows)
    assert [goal["sign"] for goal in page["goals"]] == [1, -1]
    assert [one["rank"] for one in page["trials"] if one["rank"]] == list(range(1, 1 + sum(page["counts"].values())))
    assert page["note"] == ""
    values = [one["value"] for one in page["history"]]
    assert values == sorted(values)
    by_number = {one["trial"]: one for one in page["trials"]}
    front = [by_number[n]["values"] for n in page["front"]]
    for one in front:  # nothing beats a trial of the front in both metrics
        assert not any(
            other["values"]["accuracy"] > one["accuracy"] and other["values"]["parameters"] < one["parameters"]
            for other in page["trials"]
        )
    assert {one["trial"] for one in page["trials"] if one["on_front"]} == set(page["front"])
    assert sum(page["importance"].values()) == pytest.approx(1.0)
    assert len(get(client, "searches/small-1", limit=2)["trials"]) == 2


def test_a_trial_is_a_run_that_its_search_steers(served):
    past_work.write_search(served.runs / "small-1")
    client = served.client("submit")
    assert get(client, "searches/small-1")["trials"]
    assert get(client, "runs/small-1~trial-0")["step"] == 60
    assert client.post("/api/v1/runs/small-1~trial-0/delete", json={"confirm": "trial-0"}).json()["code"] == "SH677"
    for name in ("small-1~trial-99", "small-1~trial-0~trial-0", "small-1~fold-0"):
        assert client.get(f"/api/v1/runs/{name}").status_code == 404
    scoped = served.client("read", runs=["small-1"])
    assert get(scoped, "runs/small-1~trial-0")["step"] == 60
    assert served.client("read", runs=["mlp-1"]).get("/api/v1/searches/small-1").status_code == 404
    assert get(served.client("read", runs=["mlp-1"]), "searches")["rows"] == []


def test_a_search_that_goes_on_is_read_again(served):
    rows = past_work.write_search(served.runs / "small-1")
    journal = served.runs / "small-1" / "search.jsonl"
    whole = journal.read_bytes()
    lines = whole.splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    client = served.client("read")
    before = get(client, "searches/small-1")
    assert before["status"] == "stopped"
    assert before["decisions"] < sum(row.kind == "decided" for row in rows)
    with served.site.searches.use(served.site.find("small-1")) as followed:
        followed._not_before_s = 0.0  # as if enough time had passed
    journal.write_bytes(whole)
    after = get(client, "searches/small-1")
    assert (after["status"], after["total"]) == ("finished", past_work.trials(rows))


def test_a_run_is_not_a_search(served):
    assert served.client("read").get("/api/v1/searches/mlp-1").json()["code"] == "SH632"


def test_the_queue_is_shown_and_changed(served, no_daemon):
    client = served.client("submit")
    body = {"run": "mlp-1", "set": ["seed=3"], "priority": 2}
    assert client.post("/api/v1/queue", json=body).json()["result"] == {"id": 1, "state": "waiting"}
    assert client.post("/api/v1/queue", json={"run": "mlp-1", "after": [1]}).json()["result"]["id"] == 2
    assert len(no_daemon) == 2
    found = get(client, "queue")
    assert [row["id"] for row in found["rows"]] == [1, 2]
    assert not found["served"]
    assert found["rows"][1]["why"] == "it comes after 1 (waiting)"
    assert found["rows"][0]["user"].startswith("submit")
    changed = client.post("/api/v1/queue/1/priority", json={"priority": -7})
    assert changed.json()["result"] == {"id": 1, "priority": -7}
    assert client.post("/api/v1/queue/1/cancel", json={}).json()["result"]["state"] == "cancelled"
    page = get(client, "queue/2")
    assert page["entry"]["state"] == "cancelled"
    assert [row["state"] for row in page["history"]] == ["waiting", "cancelled"]
    assert client.post("/api/v1/queue/1/priority", json={"priority": 1}).json()["code"] == "SH647"
    assert client.post("/api/v1/queue/1/release", json={}).json()["code"] == "SH647"


def test_a_search_is_submitted_as_a_search(served, no_daemon):
    past_work.write_search(served.runs / "small-1")
    job = load_run_job(served.runs / "small-1" / "job.yaml")
    save_job(job.model_copy(update={"base_dir": str(FIXTURES)}), served.runs / "small-1" / "job.yaml")
    served.client("submit").post("/api/v1/queue", json={"run": "small-1"})
    assert [entry.kind for entry in queue.look(served.runs).entries.values()] == ["search"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"run": "none"}, 404),
        ({"run": "../mlp-1"}, 404),
        ({"run": "mlp-1", "set": ["nothing=1"]}, 422),
        ({"run": "mlp-1", "priority": 101}, 422),
        ({"run": "mlp-1", "user": "root"}, 422),
        ({"run": "mlp-1", "set": ["seed=1"] * 51}, 422),
    ],
)
def test_a_wrong_submission_changes_nothing(served, no_daemon, body, status):
    assert served.client("submit").post("/api/v1/queue", json=body).status_code == status
    assert no_daemon == []
    assert queue.look(served.runs).entries == {}


@pytest.mark.parametrize("number", ["7", "0", "-1", "x", "9" * 30])
def test_a_job_that_is_not_in_the_queue(served, number):
    assert served.client("read").get(f"/api/v1/queue/{number}").json()["code"] == "SH646"


def test_the_ladder_of_a_compression(served):
    past_work.write_compression(served.runs / "mlp-compressed-1")
    client = served.client("read")
    (row,) = get(client, "compressions")["rows"]
    assert (row["parent"], row["chosen"], row["size_ratio"], row["targets_met"]) == ("mlp-1", "int8", 0.25, True)
    page = get(client, "runs/mlp-compressed-1/compression")
    assert [one["name"] for one in page["rungs"] if one["kept"]] == ["int8"]
    assert page["rungs"][1]["latency"] == {"1": [0.45, 0.5, 0.55]}
    assert get(client, "runs/mlp-1/compression")["parent"] == ""
    report = served.runs / "mlp-compressed-1" / "compression.json"
    report.write_text("{")
    assert get(client, "compressions")["rows"][0]["targets_met"] is None


def test_priority_is_a_verb(served, no_daemon, capsys, monkeypatch):
    job = served.runs / "mlp-1" / "job.yaml"
    assert call_verb(capsys, monkeypatch, "submit", job, "--runs", served.runs)[0] in (0, None)
    assert "job 1 has priority 9" in call_verb(capsys, monkeypatch, "priority", "1", "9", "--runs", served.runs)[1]
    assert queue.look(served.runs).entries[1].priority == 9
    assert "SH609" in call_verb(capsys, monkeypatch, "priority", "1", "101", "--runs", served.runs)[2]


def test_a_search_is_stopped_and_resumed_by_the_command_line(served):
    """Its journal is steered by one process, which no route reaches. What a route cannot do is said, and nothing is
    started."""
    past_work.write_search(served.runs / "small-1")
    client = served.client("submit")
    for verb, body in (("stop", {}), ("scale", {"workers": 2}), ("drain", {"who": "worker-0"}), ("resume", {})):
        answer = client.post(f"/api/v1/runs/small-1/{verb}", json=body)
        assert (answer.status_code, answer.json()["code"]) == (404, "SH632"), (verb, answer.text)
        assert "shoal search stop small-1, shoal search resume small-1" in answer.json()["fix"]
