"""The list of runs is asked for every few seconds by every open page: an answer is made again only after a change."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest

from shoal.jobs.queue.access_tokens import Identity
from shoal.storage.tags import change_tags
from shoal.web.app import STATIC
from shoal.web.run_lists import ListQuery, RunLists
from tests.jobs.past_run import TOLD, write_run
from tests.web import past_work
from tests.web.test_api import append, get, step

OWNER = Identity("owner", "submit", None)


def asked(served, *, who=OWNER, **query):
    return SimpleNamespace(site=served.site, identity=who, query=ListQuery(**query))


def test_an_unchanged_list_is_made_once(served):
    lists = RunLists()
    first = lists.content(asked(served))
    rows = served.site.rows(fresh=True)
    assert served.site.rows(fresh=True) is rows
    assert lists.content(asked(served)) is first
    assert lists.content(asked(served, where="mlp")) is not first
    assert lists.content(asked(served, where="mlp")) is lists.content(asked(served, where="mlp"))
    guest = Identity("guest", "read", frozenset(["mlp-1"]))
    assert b"mlp-2" not in lists.content(asked(served, who=guest))


def test_whatever_changes_is_in_the_next_list(served):
    lists = RunLists()

    def changed(before, fresh=True):
        served.site.rows(fresh=fresh)
        now = lists.content(asked(served))
        assert now != before
        return now

    content = lists.content(asked(served))
    change_tags(served.runs, "mlp-2", add=["best"])
    content = changed(content)
    shutil.rmtree(served.runs / "cnn-1")
    content = changed(content)
    write_run(served.runs / "rnn-1", TOLD[:20])  # broken off: it has not ended
    content = changed(content)
    append(served.site.find("rnn-1"), step(99, 0.5))
    assert b'"step":99' in changed(content)


def test_streams_of_ended_runs_wait_for_their_turn_and_those_of_the_others_do_not(served):
    """Looking at 10,000 streams takes a while: live runs and new ones need not wait for it."""
    served.site.rows(fresh=True)
    summaries = served.site._summaries
    summaries._look_at_s = float("inf")
    write_run(served.runs / "rnn-1", TOLD[:20])
    with (served.runs / "rnn-1" / ".lock").open("w") as lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)  # it trains
        assert {row["run"]: row["step"] for row in summaries.read()}["rnn-1"] == 16
        append(served.site.find("rnn-1"), step(99, 0.5))
        append(served.site.find("mlp-1"), step(99, 0.5))
        steps = {row["run"]: row["step"] for row in summaries.read()}
        assert (steps["rnn-1"], steps["mlp-1"]) == (99, 60)
    shutil.rmtree(served.runs / "cnn-1")
    assert "cnn-1" not in [row["run"] for row in summaries.read()]
    assert {row["run"]: row["step"] for row in summaries.read(every=True)}["mlp-1"] == 99
    assert summaries._look_at_s < float("inf")


def test_a_live_search_moves_in_the_list(served):
    rows = past_work.write_search(served.runs / "small-1", ended=False)
    journal = served.runs / "small-1" / "search.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    half = next(n for n, row in enumerate(rows) if type(row).__name__ == "ToldRow") + 1
    journal.write_bytes(b"".join(lines[:half]))
    summaries = served.site._summaries
    assert {row["run"]: row["step"] for row in summaries.read()}["small-1"] == 1
    journal.write_bytes(b"".join(lines))
    summaries._look_at_s = float("inf")
    assert {row["run"]: row["step"] for row in summaries.read()}["small-1"] == past_work.told(rows)


def test_runs_are_grouped_by_job_and_by_search(served):
    rows = past_work.write_search(served.runs / "small-1")
    groups = get(served.client("read"), "runs")["groups"]
    assert {(one["kind"], one["job"]): one["runs"] for one in groups} == {
        ("job", "mlp"): 2, ("job", "cnn"): 1, ("search", "small-1"): past_work.trials(rows),
    }  # fmt: skip


def test_groups_that_are_left_out_are_counted(served, monkeypatch):
    monkeypatch.setattr("shoal.web.run_lists.MAX_GROUPS", 1)
    found = get(served.client("read"), "runs")
    assert ([one["job"] for one in found["groups"]], found["all_groups"]) == (["mlp"], 2)


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
def test_a_page_waits_fifty_times_what_an_answer_took(tmp_path):
    lines = (STATIC / "show.js").read_text().splitlines()
    told = [line for line in lines if line.startswith(("const SHARE", "export const pause"))]
    assert node("\n".join([*told, "console.log(pause(2000, 3), pause(2000, 120));"]), tmp_path=tmp_path) == [
        "2000",
        "6000",
    ]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("tags~be", ["mlp-2"]), ("tags~BEST", ["mlp-2"]), ("tags=be", []), ("tags!=best", ["cnn-1", "mlp-1"]),
        ("tags~st", ["mlp-2"]), ("tags~x", []), ("step>=60", ["cnn-1", "mlp-1", "mlp-2"]),
        ("step~6 mlp", ["mlp-1", "mlp-2"]),
    ],
)  # fmt: skip
def test_a_sign_means_the_same_for_every_field(served, where, found):
    change_tags(served.runs, "mlp-2", add=["best"])
    rows = get(served.client("read"), "runs", where=where, sort="run")["rows"]
    assert [row["run"] for row in rows] == found


@pytest.mark.parametrize(
    "where", ["step>abc", "step=abc", "accuracy>=best", "status>training", "tags<b", "started_t<x"]
)
def test_a_comparison_that_nothing_fulfils_is_refused_with_its_fix(served, where):
    answer = served.client("read").get("/api/v1/runs", params={"where": where})
    assert (answer.status_code, answer.json()["code"]) == (422, "SH609")
    assert answer.json()["fix"].startswith("Write ")


def test_a_hundred_runs_with_long_names_are_followed_as_they_are_compared(served):
    names = [f"{'long' * 17}-{n}" for n in range(100)]
    for name in names:
        shutil.copytree(served.runs / "mlp-1", served.runs / name)
    runs = ",".join(names)
    assert 4000 < len(runs) < 8000
    client = served.client("read")
    assert len(get(client, "compare", runs=runs)["runs"]) == 100
    served.site.stopping.set()  # the stream ends at once
    assert client.get("/api/v1/stream", params={"runs": runs}).status_code == 200


def node(program, *files, tmp_path):
    """What a program prints that imports modules of the page."""
    for name in files:
        shutil.copy(STATIC / name, tmp_path / name.replace(".js", ".mjs"))
    (tmp_path / "main.mjs").write_text(program)
    done = subprocess.run(["node", "main.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
def test_an_address_that_is_written_by_hand_is_read(tmp_path):
    program = """
        globalThis.location = { hash: "#/run/50%?tab=logs" };
        const { current, link } = await import("./route.mjs");
        console.log(current().name, current().query.tab);
        location.hash = link("run", "50%");
        console.log(current().name);
    """
    assert node(program, "route.js", tmp_path=tmp_path) == ["50%", "logs", "50%"]
