"""Damaged files of a run: they cost a row, and the user is told; no verb ends in a traceback."""

import json
import os

import pytest

import shoal
from shoal.cli import app
from shoal.errors import ShoalError
from shoal.events import RunStateReader, load_state
from shoal.jobs import commands, run_dir, run_index
from shoal.jobs.folds import FoldSchedule
from shoal.jobs.plan_file import read_plan_file
from shoal.jobs.resume import job_to_resume
from shoal.spec.load import make_job
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat
from tests.conftest import MLP
from tests.jobs.past_run import TOLD, call_verb, write_run

DAMAGED_ROWS = (
    b'{"t": 1, "who": "worker-0", "kind": "step", "step": "three"}',
    b'{"t": 1, "who": "worker-0", "kind": "built", "steps": -1}',
    b"\x00\xff\xfe noise",
)
DAMAGED_RECEIPTS = {
    "empty": b"",
    "half": None,  # the first half of a sound one
    "binary": bytes(range(256)),
    "list": b"[]",
    "wrong type": b'{"run": []}',
    "huge number": None,
    "folds of nothing": b'{"folds": 3, "metrics": {}}',
}


@pytest.fixture
def paths(tmp_path):
    return write_run(tmp_path / "runs" / "mlp-1")


@pytest.fixture
def verb(capsys, monkeypatch, paths):
    """A verb on the run, with the arguments that it needs."""

    def go(name, *words):
        return call_verb(capsys, monkeypatch, name, *words, "--runs", paths.root.parent)

    return go


def damage_receipt(paths, how):
    sound = paths.receipt.read_bytes()
    content = DAMAGED_RECEIPTS[how]
    if how == "half":
        content = sound[: len(sound) // 2]
    if how == "huge number":
        content = json.dumps(json.loads(sound) | {"steps": 10**400}).encode()
    paths.receipt.write_bytes(content)


def damage_events(paths):
    with paths.events.open("ab") as file:
        file.writelines(row + b"\n" for row in DAMAGED_ROWS)


def test_damaged_rows_are_passed_over_and_counted_by_every_verb(paths, verb):
    sound = load_state(paths.events, paths.state_snapshot)
    write_run(paths.root.parent / "mlp-2")
    damage_events(paths)
    told = "3 damaged rows in events.jsonl were passed over"
    code, out, _ = verb("show", "mlp-1")
    assert (code, told in out, "ab" * 32 in out) == (0, True, True)
    code, out, _ = verb("runs")
    assert (code, f"mlp-1: {told}" in out, "mlp-2: " in out) == (0, True, False)
    code, out, _ = verb("compare", "mlp-1", "mlp-2", "--json")
    assert (code, json.loads(out)["mlp-1"]["events"], "events" in json.loads(out)["mlp-2"]) == (0, told, False)
    rows = json.loads(verb("runs", "--json")[1])
    assert [(row["run"], row["damage"], row["step"]) for row in rows] == [("mlp-1", told, 60), ("mlp-2", "", 60)]
    assert load_state(paths.events, paths.state_snapshot).step == sound.step


@pytest.mark.parametrize("how", DAMAGED_RECEIPTS)
def test_a_damaged_receipt_leaves_the_run_to_be_seen(paths, verb, how):
    write_run(paths.root.parent / "mlp-2")
    damage_receipt(paths, how)
    code, out, err = verb("show", "mlp-1")
    assert (code, err) == (0, "")
    assert "receipt damaged" in out
    assert "step 60/60" in out
    shown = json.loads(verb("show", "mlp-1", "--json")[1])
    assert (shown["receipt"], bool(shown["receipt_damage"]), shown["status"]) == (None, True, "finished")
    assert [row["run"] for row in json.loads(verb("runs", "--json")[1])] == ["mlp-1", "mlp-2"]
    compared = json.loads(verb("compare", "mlp-1", "mlp-2", "--json")[1])
    assert compared["mlp-1"]["receipt"].startswith("damaged: ")
    assert compared["mlp-2"]["weights"] == "ab" * 8
    with pytest.raises(ShoalError, match=r"SH606.*receipt.json.*damaged"):
        run_index.require_receipt("mlp-1", paths.root.parent)


def test_a_damaged_receipt_is_written_again_from_the_events(run, resume):
    outcome = run(MLP, steps=4, evaluate={"every_steps": 2})
    sound = outcome.paths.receipt.read_text()
    outcome.paths.receipt.write_bytes(b"")
    again = resume(outcome.paths)
    assert again.status == "finished"
    assert json.loads(sound) == json.loads(outcome.paths.receipt.read_text()) | {
        "total_s": json.loads(sound)["total_s"]
    }
    with pytest.raises(ShoalError, match="SH604"):
        job_to_resume(outcome.paths, [])


def test_a_fold_with_a_damaged_receipt_is_run_again(tmp_path, job_dir):
    split = {"kind": "stratified", "folds": 2}
    job = make_job(MLP | {"data": MLP["data"] | {"split": split}}, base_dir=str(job_dir))
    paths = RunPaths.at(tmp_path / "mlp-1")
    for number in range(2):
        write_run(paths.fold(number).root)
    paths.fold(1).receipt.write_text("{")
    fold, _ = FoldSchedule(job, paths).take_next(0)
    assert fold == paths.fold(1)


def test_a_receipt_with_a_field_of_a_newer_version_is_sound(paths):
    paths.receipt.write_text(json.dumps(json.loads(paths.receipt.read_text()) | {"colour": "red"}))
    assert read_receipt_file(paths.receipt).own.run == "mlp-1"


def test_one_unreadable_run_does_not_hide_the_others(paths, verb):
    other = write_run(paths.root.parent / "mlp-2")
    paths.state_snapshot.unlink(missing_ok=True)
    paths.events.unlink()
    paths.events.mkdir()
    code, out, _ = verb("runs", "--json")
    rows = {row["run"]: row for row in json.loads(out)}
    assert (code, rows[other.name]["status"]) == (0, "finished")
    assert "cannot be read" in rows["mlp-1"]["damage"]
    for words in (("show", "mlp-1"), ("show", "mlp-1", "--json"), ("compare", "mlp-1", "mlp-2")):
        code, _, err = verb(*words)
        assert (code, "SH605" in err, "Traceback" in err) == (6, True, False)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"wanted": {"speeds": 3}}', '{"wanted": {"speeds": []}, "facts": 1}']
)
def test_a_damaged_plan_is_no_plan(paths, content):
    paths.plan.write_text(content)
    assert read_plan_file(paths) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": []}', '{"step": "9"}'])
def test_a_damaged_description_of_the_model_names_no_checkpoint(paths, content):
    paths.model.mkdir()
    (paths.model / "model.safetensors").touch()
    (paths.model / "model.json").write_text(content)
    job = run_index.load_run_job(paths.job)
    assert run_index.find_checkpoint(paths, job, best=False) == ""


def test_names_with_other_digits_are_no_numbers(paths):
    """`isdigit` says yes to ², and `int` no."""
    for name in ("mlp-²", "mlp-٣", "fold-²"):
        (paths.root.parent / name).mkdir()
        (paths.root / name).mkdir()
    job = make_job(MLP, base_dir=str(paths.root), check_names=False)
    assert run_dir.create(job, paths.root.parent).name == "mlp-4"
    assert paths.folds == []


# ---- where runs are kept ----

VERBS = {
    "run": ("run", "job.yaml"),
    "resume": ("resume", "last"),
    "check": ("check", "job.yaml"),
    "plan": ("plan", "job.yaml"),
    "evaluate": ("evaluate", "last"),
    "runs": ("runs",),
    "show": ("show", "last"),
    "compare": ("compare", "a", "b"),
    "scale": ("scale", "last", "2"),
    "drain": ("drain", "last", "0"),
    "stop": ("stop", "last"),
    "token": ("token", "last"),
    "verify": ("verify", "job.yaml"),
    "chaos": ("chaos", "job.yaml"),
    "submit": ("submit", "job.yaml"),
    "queue": ("queue",),
    "cancel": ("cancel", "1"),
    "priority": ("priority", "1", "5"),
    "release": ("release", "1"),
    "top": ("top",),
    "up": ("up",),
    "down": ("down",),
    "web": ("web",),
    "tokens": ("tokens",),
    "stacks": ("stacks", "last"),
    "profile": ("profile", "last"),
    "logs": ("logs", "last"),
    "du": ("du",),
    "tag": ("tag", "last"),
    "trash": ("trash",),
    "gc": ("gc",),
    "compact": ("compact", "last"),
    "archive": ("archive", "last", "--to", "there"),
    "fetch": ("fetch", "there"),
    "predict": ("predict", "last", "--data", "new.csv"),
    "export": ("export", "last", "--to", "csv"),
    "compress": ("compress", "last"),
}


def test_all_verbs_with_runs_are_tried():
    taking = {
        command.name or command.callback.__name__
        for command in app.registered_commands
        if "runs" in command.callback.__annotations__
    }
    assert taking == set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_runs_at_a_url_are_refused_with_the_fix(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = call_verb(capsys, monkeypatch, *VERBS[name], "--runs", "s3://bucket/runs")
    assert code == 6, err
    assert "SH625" in err
    assert "checkpoint.path" in err
    assert os.listdir(tmp_path) == []


def test_runs_at_a_file_url_get_the_path_to_write(tmp_path):
    with pytest.raises(ShoalError, match=r"SH625.*Write --runs /tmp/x\."):
        run_dir.list_runs(run_dir.Path("file:///tmp/x"))


def test_the_api_refuses_runs_at_a_url(tmp_path, job_dir, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    job = make_job(MLP, base_dir=str(job_dir))
    for act in (
        lambda: shoal.run(job, runs="s3://bucket/runs"),
        lambda: shoal.resume("last", runs="s3://bucket/runs"),
        lambda: shoal.load("last", runs="s3://bucket/runs"),
    ):
        with pytest.raises(ShoalError, match="SH625"):
            act()
    assert os.listdir(".") == []


# ---- the file with the driver's address ----


def test_a_damaged_address_is_an_error_with_a_fix(paths):
    for content in ("", "{", '{"host": "a", "port": 99999, "token": "t"}', '{"host": "\\u001b[2J", "port": 1}'):
        paths.driver_address.write_text(content)
        paths.driver_address.chmod(0o600)
        with pytest.raises(ShoalError, match=r"SH626.*\.control\.json.*damaged.*shoal resume"):
            commands.read_token(paths)


def test_an_address_that_others_can_read_is_refused(paths):
    paths.driver_address.write_text('{"host": "localhost", "port": 1, "token": "t"}')
    paths.driver_address.chmod(0o644)
    with pytest.raises(ShoalError, match=r"SH626.*other users can read"):
        commands.read_token(paths)
    paths.driver_address.chmod(0o600)
    assert commands.read_token(paths) == "t"


# ---- from the snapshot, not from the beginning ----


@pytest.mark.parametrize("saved", [False, True])
def test_a_departure_is_told_before_and_after_the_snapshot(tmp_path, saved):
    told = [
        *TOLD[:4],
        ("left", "worker-0", 9, {"why": "drained"}),
        ("worker_died", "driver", None, {"worker": "worker-1", "reason": "SIGKILL"}),
        ("server_left", "driver", None, {"server": "server-2"}),
        ("server_died", "driver", None, {"server": "server-3", "reason": "SIGBUS"}),
    ]
    paths = write_run(tmp_path / "mlp-1", told)
    if saved:
        reader = RunStateReader(paths.events, paths.state_snapshot)
        reader.catch_up()
        reader.save()
        paths.events.write_bytes(paths.events.read_bytes())
        assert RunStateReader(paths.events, paths.state_snapshot).state.starts == 1, "it is used"
    seats = (("worker", 0), ("worker", 1), ("server", 2), ("server", 3), ("worker", 4))
    found = [commands.wait_for_departure(paths, Seat(number=number, role=role)) for role, number in seats]
    assert found == ["left at step 9", "died: SIGKILL", "left", "died: SIGBUS", ""]
