"""Logs, tags, trash, disk use, cleanup and exports, through the command line where there is one."""

import csv
import io
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.jobs import run_dir
from shoal.spec.load import load_run_job, save_job
from shoal.spec.run_paths import RunPaths
from shoal.storage import cleanup, disk_usage, export, log_printing, logs, tags, trash
from tests.jobs.past_run import call_verb, write_run


@pytest.fixture(scope="session")
def written_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("written") / "mlp-1").root


@pytest.fixture
def runs(tmp_path, written_run):
    for n in (1, 2, 3):
        shutil.copytree(written_run, tmp_path / "runs" / f"mlp-{n}")
        os.utime(tmp_path / "runs" / f"mlp-{n}" / "job.yaml", (1e9 + n, 1e9 + n))
        os.utime(tmp_path / "runs" / f"mlp-{n}" / "events.jsonl", (1e9 + n, 1e9 + n))
    return tmp_path / "runs"


def write_log(runs, content, name="worker-0.log"):
    paths = RunPaths(runs / "mlp-1")
    paths.logs.mkdir(exist_ok=True)
    (paths.logs / name).write_bytes(content)
    return paths


def test_the_tail_and_what_follows_it(runs):
    paths = write_log(runs, b"".join(b"line %d\n" % n for n in range(1000)))
    tail = logs.read_tail(paths, "worker-0.log", lines=3)
    assert tail.lines == ["line 997", "line 998", "line 999"]
    assert tail.end == tail.size_bytes
    with (paths.logs / "worker-0.log").open("ab") as file:
        file.write(b"line 1000\nincompl")
    more = logs.read_after(paths, "worker-0.log", offset=tail.end)
    assert more.lines == ["line 1000"]
    assert logs.read_after(paths, "worker-0.log", offset=more.end).lines == []


@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"\n", b"a\nb", b"\n\n", b"x" * 600_000 + b"\nend\n"])
def test_a_tail_of_any_log(runs, content):
    paths = write_log(runs, content)
    found = logs.read_tail(paths, "worker-0.log", lines=10)
    wanted = [line.decode()[: logs.MAX_LOG_LINE] for line in content.splitlines()]
    assert found.lines == (wanted if len(content) < 500_000 else ["end"])
    assert found.end == len(content)


def test_a_search_over_all_logs_with_pieces(runs, monkeypatch):
    monkeypatch.setattr(logs, "SEARCH_PIECE_BYTES", 64)
    lines = [b"line %d %s" % (n, b"needle" if n % 10 == 3 else b"hay") for n in range(200)]
    paths = write_log(runs, b"\n".join(lines))
    write_log(runs, b"needle here\n", "server-1.err")
    found = list(logs.search(paths, logs.names_of(paths, ""), text="needle", at_most=100))
    assert [one.line for one in found] == [line.decode() for line in lines if b"needle" in line] + ["needle here"]
    content = (paths.logs / "worker-0.log").read_bytes()
    assert all(content[one.offset :].startswith(one.line.encode()) for one in found[:-1])


def test_logs_of_a_verb(runs, capsys, monkeypatch):
    write_log(runs, b"one\ntwo\x1b[31m red\n")
    code, out, _ = call_verb(capsys, monkeypatch, "logs", "mlp-1", "worker-0", "--runs", runs)
    assert (code, out) == (0, "one\ntwo red\n")
    assert call_verb(capsys, monkeypatch, "logs", "mlp-1", "--grep", "two", "--runs", runs)[1] == "two red\n"
    code, _, err = call_verb(capsys, monkeypatch, "logs", "mlp-1", "worker-7", "--runs", runs)
    assert code == 6
    assert "SH673" in err


def test_following_a_log_until_the_driver_is_done(runs):
    paths = write_log(runs, b"first\n")
    seen, came = [], threading.Event()

    def write(line):
        seen.append(line)
        came.set()

    with run_dir.driver_lock(paths):
        reader = threading.Thread(
            target=log_printing.print_logs,
            args=(paths, ""),
            kwargs={"text": "", "lines": 10, "follow": True, "write": write},
        )
        reader.start()
        assert came.wait(60)
        came.clear()
        with (paths.logs / "worker-0.log").open("ab") as file:
            file.write(b"second\n")
        assert came.wait(60)
    reader.join(60)
    assert not reader.is_alive()
    assert seen == ["worker-0.log: first", "worker-0.log: second"]


def test_tags_are_added_and_removed(runs, capsys, monkeypatch):
    assert call_verb(capsys, monkeypatch, "tag", "mlp-1", "best", "v2", "--runs", runs)[1] == "best v2\n"
    assert call_verb(capsys, monkeypatch, "tag", "mlp-1", "--remove", "v2", "--runs", runs)[1] == "best\n"
    assert tags.read_tags(runs) == {"mlp-1": ["best"]}
    code, _, err = call_verb(capsys, monkeypatch, "tag", "mlp-1", "../x", "--runs", runs)
    assert code == 6
    assert "SH672" in err
    (runs / tags.TAGS_FILE).write_text("[]")
    assert tags.read_tags(runs) == {}


def test_a_run_goes_to_the_trash_and_comes_back(runs, capsys, monkeypatch):
    before = sorted((path.name, path.read_bytes()) for path in (runs / "mlp-1").iterdir() if path.is_file())
    code, out, _ = call_verb(capsys, monkeypatch, "trash", "--delete", "mlp-1", "--runs", runs, "--json")
    assert code == 0
    assert json.loads(out)[0]["run"] == "mlp-1"
    assert not (runs / "mlp-1").exists()
    assert [paths.name for paths in run_dir.list_runs(runs)] == ["mlp-2", "mlp-3"]
    assert call_verb(capsys, monkeypatch, "trash", "--restore", "mlp-1", "--runs", runs)[0] == 0
    after = sorted((path.name, path.read_bytes()) for path in (runs / "mlp-1").iterdir() if path.is_file())
    assert [one for one in after if one[0] != ".lock"] == [one for one in before if one[0] != ".lock"]
    assert trash.list_trash(runs) == []


def test_a_driven_run_is_not_deleted(runs):
    paths = RunPaths(runs / "mlp-1")
    with run_dir.driver_lock(paths), pytest.raises(ShoalError) as refused:
        trash.move_to_trash(paths, runs)
    assert refused.value.code == "SH602"
    with run_dir.driver_lock(paths), pytest.raises(ShoalError) as refused:
        trash.delete_for_good(paths, runs)
    assert refused.value.code == "SH602"
    assert paths.job.is_file()
    assert trash.list_trash(runs) == []


def test_a_run_can_be_deleted_without_undo(runs, capsys, monkeypatch):
    (runs / "mlp-1" / "model").mkdir()
    (runs / "elsewhere").mkdir()
    (runs / "mlp-1" / "linked").symlink_to(runs / "elsewhere")
    (runs / "mlp-1" / "checkpoints").mkdir()
    words = ["trash", "--delete", "mlp-1", "--for-good", "--runs", runs]
    code, _, told = call_verb(capsys, monkeypatch, *words, "--part", "checkpoints")
    assert (code, told.partition(":")[0]) == (0, "the checkpoints of mlp-1 are deleted")
    assert not (runs / "mlp-1" / "checkpoints").exists()
    assert (runs / "mlp-1" / "job.yaml").is_file()
    code, _, told = call_verb(capsys, monkeypatch, *words)
    assert (code, told.partition(":")[0]) == (0, "mlp-1 is deleted")
    assert not (runs / "mlp-1").exists()
    assert (runs / "elsewhere").is_dir()
    assert trash.list_trash(runs) == []


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--delete", "mlp-1", "--empty"], "--delete, --restore, --empty"),
        (["--restore", "mlp-1", "--delete", "mlp-1"], "--delete, --restore, --empty"),
        (["--for-good"], "--part, --for-good"),
        (["--part", "checkpoints", "--empty"], "--part, --for-good"),
    ],
)
def test_options_of_the_trash_that_do_not_go_together_do_nothing(runs, capsys, monkeypatch, words, where):
    code, _, told = call_verb(capsys, monkeypatch, "trash", *words, "--runs", runs)
    assert code != 0
    assert "SH609" in told
    assert where in " ".join(told.split())
    assert (runs / "mlp-1" / "job.yaml").is_file()
    assert trash.list_trash(runs) == []


def test_a_deletion_without_undo_that_is_cut_short_leaves_a_run(runs, monkeypatch):
    """Wherever it is cut short, the run can be deleted again."""
    paths = RunPaths(runs / "mlp-1")
    for number in range(30):
        (paths.root / f"other-{number}").write_text("x")
    paths.job.rename(runs / "job")  # whichever end a file system lists first, a file stands before the job
    (runs / "job").rename(paths.job)
    (paths.root / "last").write_text("x")
    gone, unlink = [], os.unlink

    def unlink_and_note(path, **more):
        unlink(path, **more)
        gone.append(Path(path).name)

    monkeypatch.setattr(os, "unlink", unlink_and_note)
    trash.delete_for_good(paths, runs)
    assert len(gone) > 32
    assert gone[-1] == "job.yaml"
    assert not paths.root.exists()


def test_restoring_replaces_nothing(runs):
    trash.move_to_trash(RunPaths(runs / "mlp-1"), runs)
    shutil.copytree(runs / "mlp-2", runs / "mlp-1")
    with pytest.raises(ShoalError) as refused:
        trash.restore(runs, "mlp-1")
    assert refused.value.code == "SH671"
    assert len(trash.list_trash(runs)) == 1


def test_emptying_deletes_only_what_is_old_enough(runs):
    trash.move_to_trash(RunPaths(runs / "mlp-1"), runs)
    assert trash.empty_trash(runs, older_than_s=3600) == []
    assert len(trash.empty_trash(runs)) == 1
    assert trash.list_trash(runs) == []


def test_disk_use_counts_shared_bytes_once(runs):
    root = runs / "mlp-1"
    (root / "checkpoints").mkdir()
    blob = root / "checkpoints" / "a"
    blob.write_bytes(b"x" * 100_000)
    os.link(blob, root / "checkpoints" / "b")
    os.link(blob, runs / "elsewhere")
    used = disk_usage.run_usage(root).parts["checkpoints"]
    assert (used.size_bytes, used.freed_bytes, used.files) == (200_000, 0, 2)
    assert used.shared_bytes == blob.stat().st_blocks * 512
    (runs / "elsewhere").unlink()
    assert disk_usage.run_usage(root).parts["checkpoints"].freed_bytes >= 100_000
    (root / "logs").symlink_to("/usr")
    assert disk_usage.run_usage(root).total.files < 100


def test_du_of_a_verb(runs, capsys, monkeypatch):
    code, out, _ = call_verb(capsys, monkeypatch, "du", "--runs", runs, "--json")
    assert code == 0
    assert {row["run"] for row in json.loads(out)} == {"mlp-1", "mlp-2", "mlp-3"}


def test_a_plan_is_applied_by_its_hash(runs, capsys, monkeypatch):
    tags.change_tags(runs, "mlp-1", add=["keep"])
    code, out, _ = call_verb(capsys, monkeypatch, "gc", "--plan", "--keep", "1", "--runs", runs, "--json")
    plan = json.loads(out)
    assert code == 0
    assert [item["run"] for item in plan["items"]] == ["mlp-2"]  # mlp-1 has a tag, mlp-3 is the newest
    assert (runs / "mlp-2").is_dir()
    code, out, err = call_verb(capsys, monkeypatch, "gc", "--apply", plan["plan"], "--runs", runs, "--json")
    assert code == 0, err
    assert [entry["run"] for entry in json.loads(out)] == ["mlp-2"]
    assert sorted(path.name for path in runs.iterdir() if path.name[0] != ".") == ["mlp-1", "mlp-3"]


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"mlp-1": [7]}', "[" * 100_000])
def test_a_damaged_file_of_tags_protects_everything(runs, capsys, monkeypatch, damage):
    name = cleanup.save_plan(runs, cleanup.make_plan(runs, cleanup.CleanupRules(keep_newest=1)))
    (runs / tags.TAGS_FILE).write_text(damage)
    for words in (["gc", "--keep", "1"], ["tag", "mlp-2", "new"]):
        code, _, err = call_verb(capsys, monkeypatch, *words, "--runs", runs)
        assert (code, "SH672" in err, "damaged" in err) == (6, True, True)
    done = cleanup.apply_plan(runs, name)
    assert (done.entries, len(done.stays)) == ([], 2)
    assert (runs / tags.TAGS_FILE).read_text() == damage
    assert call_verb(capsys, monkeypatch, "runs", "--runs", runs)[0] == 0


@pytest.mark.parametrize("change", ["forge", "grow", "tag", "drive"])
def test_a_plan_takes_nothing_that_has_changed(runs, change):
    name = cleanup.save_plan(runs, cleanup.make_plan(runs, cleanup.CleanupRules(keep_newest=2)))
    file = runs / cleanup.PLANS / f"{name}.json"
    if change == "forge":
        file.write_text(file.read_text().replace("mlp-1", "mlp-3"))
        with pytest.raises(ShoalError) as refused:
            cleanup.apply_plan(runs, name)
        assert refused.value.code == "SH674"
    elif change == "drive":
        with run_dir.driver_lock(RunPaths(runs / "mlp-1")):
            assert cleanup.apply_plan(runs, name).entries == []
    else:
        if change == "grow":
            with (runs / "mlp-1" / "events.jsonl").open("ab") as events:
                events.write(b"\n")
        else:
            tags.change_tags(runs, "mlp-1", add=["keep"])
        done = cleanup.apply_plan(runs, name)
        entries, stays = done.entries, done.stays
        assert entries == []
        assert "mlp-1 stays" in stays[0]
    assert (runs / "mlp-1").is_dir()
    assert (runs / "mlp-3").is_dir()


def test_checkpoints_go_only_where_the_model_is(runs):
    for n in (1, 2):
        (runs / f"mlp-{n}" / "checkpoints").mkdir()
        (runs / f"mlp-{n}" / "checkpoints" / "blob").write_bytes(b"x" * 10_000)
    (runs / "mlp-1" / "model").mkdir()
    (runs / "mlp-1" / "model" / "model.safetensors").write_bytes(b"x")
    (runs / "mlp-2" / "receipt.json").unlink()
    items = cleanup.make_plan(runs, cleanup.CleanupRules(part="checkpoints"))
    assert [(item["run"], item["part"]) for item in items] == [("mlp-1", "checkpoints")]


def measured(runs, number, accuracy):
    """A run whose last accuracy, by which its job ranks models, is this."""
    paths = RunPaths(runs / f"mlp-{number}")
    told = paths.events.read_text().replace('"accuracy":0.5', f'"accuracy":{accuracy}')
    paths.events.write_text(told)
    job = load_run_job(paths.job)
    save_job(job.model_copy(update={"best": job.best.model_copy(update={"metric": "accuracy"})}), paths.job)


def test_the_best_of_each_job_stay(runs):
    for number, accuracy in ((1, 0.7), (2, 0.9), (3, 0.8)):
        measured(runs, number, accuracy)
    rules = cleanup.read_rules(days=0, keep="best=1", total="", status="", checkpoints=False)
    assert [item["run"] for item in cleanup.make_plan(runs, rules)] == ["mlp-1", "mlp-3"]
    rules = cleanup.read_rules(days=0, keep="newest=1,best=1", total="", status="", checkpoints=False)
    assert [item["run"] for item in cleanup.make_plan(runs, rules)] == ["mlp-1"]


def test_only_as_many_go_as_the_total_needs(runs):
    for n in (1, 2, 3):
        (runs / f"mlp-{n}" / "blob").write_bytes(b"x" * 4_000_000)
    every = sum(one.total.freed_bytes for one in disk_usage.all_usage(runs))
    one = disk_usage.run_usage(runs / "mlp-1").total.freed_bytes
    for total, gone in ((every, []), (every - one, ["mlp-1"]), (every - one - 1, ["mlp-1", "mlp-2"])):
        items = cleanup.make_plan(runs, cleanup.CleanupRules(total_bytes=total))
        assert [item["run"] for item in items] == gone


@pytest.mark.parametrize("words", [("--keep", "oldest=1"), ("--keep", "best"), ("--total", "much")])
def test_wrong_rules_are_told(runs, words, capsys, monkeypatch):
    code, _, err = call_verb(capsys, monkeypatch, "gc", *words, "--runs", runs)
    assert (code, "SH609" in err) == (6, True)


def test_young_runs_stay(runs):
    os.utime(runs / "mlp-1" / "events.jsonl")
    items = cleanup.make_plan(runs, cleanup.CleanupRules(older_than_s=3600))
    assert [item["run"] for item in items] == ["mlp-2", "mlp-3"]
    assert time.time() > 1e9


def test_exports_have_every_point(runs, tmp_path, capsys, monkeypatch):
    wanted = [(name, step, value) for _, name, step, _, value in export.points(RunPaths(runs / "mlp-1"))]
    assert len([one for one in wanted if one[0] == "loss"]) == 60
    for kind in ("csv", "parquet"):
        out = tmp_path / f"x.{kind}"
        assert call_verb(capsys, monkeypatch, "export", "mlp-1", "--to", kind, "--out", out, "--runs", runs)[0] == 0
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert [(row["series"], int(row["step"]), float(row["value"])) for row in rows] == wanted
    import pyarrow.parquet as parquet

    table = parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert list(zip(table["series"], table["step"], table["value"], strict=True)) == wanted
    assert call_verb(capsys, monkeypatch, "export", "mlp-1", "--out", tmp_path / "x.csv", "--runs", runs)[0] == 6
    code, _, told = call_verb(capsys, monkeypatch, "export", "mlp-1", "--to", "xls", "--runs", runs)
    assert (code, told.splitlines()[0]) == (6, "SH609 --to: 'xls' is not a format")


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "safetensors", "html"])
def test_an_export_needs_a_directory_to_go_to(runs, tmp_path, capsys, monkeypatch, kind):
    words = ["export", "mlp-1", "--to", kind, "--out", tmp_path / "none" / "x", "--runs", runs]
    code, _, told = call_verb(capsys, monkeypatch, *words)
    assert (code, told.splitlines()[0]) == (6, f"SH609 --out: there is no directory {tmp_path / 'none'}")


def test_tensorboard_reads_the_export(runs, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export.export(RunPaths(runs / "mlp-1"), "tensorboard", tmp_path / "tb")
    found = EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert [(one.step, round(one.value, 5)) for one in found.Scalars("loss")] == [
        (n, round(2.3 / n, 5)) for n in range(1, 61)
    ]


def test_a_cell_is_never_a_formula():  # attack 28
    rows = iter([("=cmd|' /C calc'!A0", "@loss", 1, 0.0, -1.5), ("+a", "-b", 2, 0.0, 2.0)])
    file = io.StringIO()
    export.write_rows(rows, file)
    cells = [row.split(",") for row in file.getvalue().splitlines()[1:]]
    assert [row[:2] for row in cells] == [["'=cmd|' /C calc'!A0", "'@loss"], ["'+a", "'-b"]]
    assert cells[0][4] == "-1.5"


def test_the_parts_of_folds_and_trials_are_added_up(tmp_path):
    for name, size in (("trial-0/checkpoints", 5000), ("trial-1/checkpoints", 9000), ("trial-1/logs", 5000)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"x" * size)
    parts = disk_usage.run_usage(tmp_path).parts
    assert {name: one.size_bytes for name, one in parts.items()} == {"checkpoints": 14000, "logs": 5000}


def test_what_trials_share_goes_with_their_search(tmp_path):
    """Links between trials: none of them frees the file alone, all of them do."""
    first, second = (tmp_path / "small-1" / name / "checkpoints" for name in ("trial-0", "trial-1"))
    for directory in (first, second):
        directory.mkdir(parents=True)
    (first / "blob").write_bytes(b"x" * 100_000)
    os.link(first / "blob", second / "blob")
    whole, part = disk_usage.run_usage(tmp_path / "small-1"), disk_usage.run_usage(first.parent)
    assert (whole.total.freed_bytes, whole.total.shared_bytes) == ((first / "blob").stat().st_blocks * 512, 0)
    assert (part.total.freed_bytes, part.total.shared_bytes) == (0, whole.total.freed_bytes)
    os.link(first / "blob", first / "again")
    os.link(first / "blob", first.parent / "model")  # a part of its own
    whole = disk_usage.run_usage(tmp_path / "small-1")
    assert whole.parts["model"].freed_bytes == 0
    assert whole.total.freed_bytes > 0
