"""The index of a directory of runs: it saves work, and is never believed where it may be wrong."""

import json
import os

import pytest

from shoal.events import Event, RunSummary, SummaryIndex, summary_index
from shoal.events.stream import format_event
from shoal.jobs import run_index
from tests.jobs.past_run import write_run

SUMMARY = RunSummary("finished", 60, 60, {"loss": 0.5}, 1.7e9, "ab", 0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(summary_index, "MIN_NEW_ENTRIES", 1)


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"one\n")
    return path


def look(tmp_path, stream, answer=SUMMARY):
    """The summary, and whether the stream was read for it."""
    read = []
    index = SummaryIndex(tmp_path / "index")
    found = index.summary("a", str(stream), lambda: read.append(1) or answer)
    index.save_if_useful()
    return found, bool(read)


def test_a_stream_is_read_once(tmp_path, stream):
    assert look(tmp_path, stream) == (SUMMARY, True)
    assert look(tmp_path, stream) == (SUMMARY, False)


def test_a_stream_that_has_changed_is_read_again(tmp_path, stream):
    look(tmp_path, stream)
    with stream.open("ab") as file:
        file.write(b"two\n")
    assert look(tmp_path, stream)[1]
    assert not look(tmp_path, stream)[1]
    stream.unlink()
    stream.write_bytes(b"one\ntwo\n")
    assert look(tmp_path, stream)[1], "another file"


def test_a_stream_that_grows_while_it_is_read_is_read_again(tmp_path, stream):
    def grow():
        with stream.open("ab") as file:
            file.write(b"two\n")
        return SUMMARY

    index = SummaryIndex(tmp_path / "index")
    index.summary("a", str(stream), grow)
    index.save_if_useful()
    assert look(tmp_path, stream)[1]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"version":[', '"version":[9,'),
        lambda text: text.replace('"step":60', '"step":"60"'),
        lambda text: text.replace('"step":60', '"more":60'),
        lambda text: text.replace('"loss":0.5', '"loss":"0.5"'),
        lambda text: text.replace('"stream":[', '"stream":[-1,'),
        lambda text: text.replace('"runs":{', '"runs":[{') + "]",
        lambda text: json.dumps(json.loads(text) | {"runs": {"a": None}}),
    ],
)
def test_a_damaged_index_is_ignored_and_replaced(tmp_path, stream, damage):
    look(tmp_path, stream)
    file = tmp_path / "index"
    file.write_text(damage(file.read_text()))
    assert look(tmp_path, stream) == (SUMMARY, True)
    assert look(tmp_path, stream) == (SUMMARY, False)


def test_bytes_that_are_no_text_are_ignored(tmp_path, stream):
    (tmp_path / "index").write_bytes(bytes(range(256)))
    assert look(tmp_path, stream) == (SUMMARY, True)


def test_an_index_of_another_user_is_ignored(tmp_path, stream, monkeypatch):
    look(tmp_path, stream)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert look(tmp_path, stream)[1]


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path, stream):
    index = SummaryIndex(tmp_path / "none" / "index")
    assert index.summary("a", str(stream), lambda: SUMMARY) == SUMMARY
    index.save_if_useful()


def test_the_list_is_the_same_with_and_without_the_index(tmp_path):
    paths = [write_run(tmp_path / f"mlp-{number}") for number in (1, 2, 3)]
    first = run_index.list_summaries(tmp_path)
    assert (tmp_path / run_index.INDEX_FILE).is_file()
    assert run_index.list_summaries(tmp_path) == first
    with paths[1].events.open("ab") as file:
        file.write(format_event(Event("run_started", 1.8e9, "driver", None, {"run": "mlp-2"})))
    assert [row["status"] for row in run_index.list_summaries(tmp_path)] == ["finished", "broken off", "finished"]


def test_few_runs_need_no_index(tmp_path, monkeypatch):
    monkeypatch.undo()
    write_run(tmp_path / "mlp-1")
    run_index.list_summaries(tmp_path)
    assert not (tmp_path / run_index.INDEX_FILE).exists()
