"""Reading, overriding and writing job files."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ShoalError, single_errors
from shoal.spec import Job, Ref, check_job, load_job, make_job, save_job, yaml_document
from shoal.spec.yaml_document import parse_document, parse_value, write_value

JOB = """\
model: net.py:Net
loss: MSELoss
optimizer: AdamW
data:
  source: {kind: csv, path: rows.csv}
  split: kfold
workers: 1..4
batch_size: 8
epochs: 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text("class Net: ...\ndef Any(params, **args): ...\n")
    (tmp_path / "rows.csv").write_text("x,y\n1,2\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def failure(call: Any, *args: Any, **kwargs: Any) -> ShoalError:
    with pytest.raises(ShoalError) as caught:
        call(*args, **kwargs)
    (problem,) = single_errors(caught.value)
    return problem


def test_paths_start_at_the_job_files_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    job = load_job(f"{folder.name}/job.yaml")
    assert job.base_dir == str(folder)
    assert job.data.source.path == "rows.csv"


def test_a_relative_base_dir_starts_there_too(folder: Path) -> None:
    (folder / "jobs").mkdir()
    (folder / "jobs" / "a.yaml").write_text(JOB + "base_dir: ..\n")
    assert load_job(folder / "jobs" / "a.yaml").base_dir == str(folder)


def test_what_this_machine_lacks_can_be_left_unchecked(folder: Path) -> None:
    (folder / "rows.csv").unlink()
    (folder / "net.py").unlink()
    assert load_job(folder / "job.yaml", check_names=False).epochs == 2


# ---- files that cannot be read ----


def test_the_nearest_file_name_is_told(folder: Path) -> None:
    problem = failure(load_job, folder / "jobb.yaml")
    assert problem.code == "SH101"
    assert "Did you mean 'job.yaml'?" in problem.fix


def test_a_directory_is_no_job_file(folder: Path) -> None:
    problem = failure(load_job, folder)
    assert problem.code == "SH101"
    assert "job.yaml" in problem.fix


def test_a_missing_directory_is_told(folder: Path) -> None:
    assert "no directory" in failure(load_job, folder / "there" / "job.yaml").fix


def test_bytes_that_are_no_text_are_told_with_their_line(folder: Path) -> None:
    (folder / "job.yaml").write_bytes(b"name: a\nmodel: \xff\n")
    problem = failure(load_job, folder / "job.yaml")
    assert (problem.code, problem.where) == ("SH102", f"{folder}/job.yaml:2")


def test_a_data_file_is_no_job_file(folder: Path) -> None:
    (folder / "job.yaml").write_bytes(b"1,2,3\n" * 1_000_000)
    assert failure(load_job, folder / "job.yaml").code == "SH101"


# ---- YAML as people mean it ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), ("1.5e+3", 1500.0), (".5", 0.5), (".inf", float("inf")), ("-2", -2),
        ("1_000", 1000), ("010", 10), ("0x10", 16), ("0o17", 15), ("12:30", "12:30"), ("1.2.3", "1.2.3"),
        ("2024-01-01", "2024-01-01"), ("e5", "e5"), ("yes", True), ("off", False), ("'yes'", "yes"),
        ("~", None), ("", None), ("-", [None]),
        ("[1, a, {b: 1e1}]", [1, "a", {"b": 10.0}]),
    ],
)  # fmt: skip
def test_scalars(text: str, value: object) -> None:
    found = parse_value(text, name="test")
    assert (found, type(found)) == (value, type(value))


def test_keys_are_text_as_written() -> None:
    assert parse_document("{on: 1, 1: 2, 1.0: 3, null: 4}", name="t").data == {
        "on": 1, "1": 2, "1.0": 3, "null": 4,
    }  # fmt: skip


def test_anchors_and_merges_work_and_an_own_key_is_no_double() -> None:
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\nc: *a\nd: {<<: *a}\n"
    document = parse_document(text, name="t")
    assert document.data["b"] == {"x": 3, "y": 2}
    assert document.data["c"] == document.data["d"] == document.data["a"]


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join([f'*{m}'] * 10)}]\n" for m, n in pairwise("abcdefg")),
        "[" * 1500,
    ],
    ids=["itself", "itself in a mapping", "a billion laughs", "deep"],
)
def test_files_that_never_end_are_refused(text: str) -> None:
    assert failure(parse_document, text, name="t").code == "SH102"


# ---- overrides ----


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("epochs=5", "epochs", 5),
        ("optimizer.args.lr=1e-2", "optimizer.args", {"lr": 0.01}),
        ("model.args.width=3", "model.args", {"width": 3}),
        ("data.split.folds=3", "data.split.folds", 3),
        ("data.split={kind: holdout, test: 0.1}", "data.split.kind", "holdout"),
        ("checkpoint.every=10 steps", "checkpoint.every", "10 steps"),
        ("workers.most=8", "workers.most", 8),
        ("workers=2", "workers.least", 2),
        ("metrics=[accuracy, f1]", "metrics.1.name", "f1"),
    ],
)
def test_overrides(folder: Path, override: str, field: str, value: object) -> None:
    found: Any = load_job(folder / "job.yaml", overrides=[override]).model_dump()
    for key in field.split("."):
        found = found[int(key) if key.isdecimal() else key]
    assert found == value


def test_overrides_apply_in_order_and_reach_into_lists(folder: Path) -> None:
    overrides = ["metrics=[accuracy, f1]", "metrics.0.args.top_k=2", "metrics.1=recall"]
    metrics = load_job(folder / "job.yaml", overrides=overrides).metrics
    assert [(m.name, m.args) for m in metrics] == [("accuracy", {"top_k": 2}), ("recall", {})]


def test_one_of_two_lengths_is_removed_by_null(folder: Path) -> None:
    job = load_job(folder / "job.yaml", overrides=["steps=7", "epochs=null"])
    assert (job.steps, job.epochs) == (7, None)


@pytest.mark.parametrize(
    ("override", "code", "where", "fix"),
    [
        ("epochs", "SH109", "--set epochs", "path.to.field=value"),
        ("=5", "SH109", "--set =5", "path.to.field=value"),
        ("a..b=5", "SH109", "--set a..b=5", "path.to.field=value"),
        ("epochs.x=5", "SH109", "--set epochs.x", "path.to.field=value"),
        ("export.7=x", "SH105", "--set export", "a list"),
        ("epoch=5", "SH103", "--set epoch", "Did you mean 'epochs'?"),
        ("dta.split=kfold", "SH103", "--set dta", "Did you mean 'data'?"),
        ("optimizer.lr=1", "SH103", "--set optimizer.lr", "optimizer.args.lr"),
        ("epochs=two", "SH105", "--set epochs", "a whole number"),
        ("epochs=0", "SH106", "--set epochs", "above 0"),
        ("steps=5", "SH107", "--set steps", "epochs=null"),
        ("model=net.py:Nett", "SH202", "--set model", "Did you mean 'Net'?"),
        ("data.source.path=row.csv", "SH301", "--set data.source.path", "Did you mean 'rows.csv'?"),
        ("epochs=[1", "SH102", "--set epochs:1:1", "missing ']'"),
    ],
)
def test_bad_overrides(folder: Path, override: str, code: str, where: str, fix: str) -> None:
    problem = failure(load_job, folder / "job.yaml", overrides=[override])
    assert (problem.code, problem.where) == (code, where)
    assert fix in problem.fix


def test_a_list_index_that_is_not_there(folder: Path) -> None:
    problem = failure(load_job, folder / "job.yaml", overrides=["metrics=[f1]", "metrics.3=recall"])
    assert (problem.code, problem.where) == ("SH109", "--set metrics.3")


# ---- writing ----


def test_a_saved_job_is_read_back_equal_from_anywhere(folder: Path, tmp_path: Path) -> None:
    overrides = [
        "optimizer.name=net.py:Any",
        "optimizer.args={lr: 1e-5, x: null, big: .inf, text: '1e-3', on: 'no', l: [1, 2.0]}",
    ]
    job = load_job(folder / "job.yaml", overrides=[*overrides, "best.metric=loss", "name=a.b-c_d"])
    (tmp_path / "elsewhere").mkdir()
    save_job(job, tmp_path / "elsewhere" / "saved.yaml")
    again = load_job(tmp_path / "elsewhere" / "saved.yaml")
    assert again == job
    assert again.sha256() == job.sha256()


def test_a_saved_job_forgets_the_current_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    save_job(load_job("job.yaml").model_copy(update={"base_dir": "."}), folder.parent / "saved.yaml")
    assert load_job(folder.parent / "saved.yaml").base_dir == str(folder)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), plain, min_size=1))
def test_plain_data_survives_being_written(data: dict[str, Any]) -> None:
    assert parse_document(write_value(data), name="t").data == data


@given(st.text(alphabet="0123456789eE+-._xonyaf:~ ", max_size=8))
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert parse_value(write_value([text]), name="t") == [text]


# ---- from Python ----


def test_plain_data_gives_the_same_errors_as_a_file() -> None:
    problem = failure(make_job, {"data": {"source": {"kind": "csv", "path": 3}}, "epochs": 1})
    assert (problem.code, problem.where) == ("SH105", "data.source.path")


def test_a_job_made_of_objects_is_checked(folder: Path) -> None:
    job = Job.model_validate({"data": {"source": {"kind": "sklearn", "name": "iris"}}, "epochs": 1})
    assert failure(check_job, job).where == "model"
    fine = job.model_copy(update={"task": Ref(name="net.py:Net"), "base_dir": os.path.relpath(folder)})
    assert check_job(fine).base_dir == str(folder)
    assert failure(check_job, job, where=lambda field: f"Job {field}").where == "Job model"


def test_the_driver_stays_light() -> None:
    code = """
import sys, shoal.spec
source = {"kind": "sklearn", "name": "iris"}
job = {"model": "torch.nn:Identity", "loss": "MSELoss", "metrics": ["f1"], "epochs": 1}
shoal.spec.make_job({**job, "data": {"source": source}})
print([m for m in ("torch", "numpy", "sklearn", "pyarrow", "torchmetrics") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_checkpoints_lie_where_the_job_file_says_wherever_the_run_is_resumed(folder: Path) -> None:
    overrides = ["checkpoint.path=saves"]
    assert load_job(folder / "job.yaml", overrides=overrides).checkpoint.path == str(folder / "saves")
    remote = load_job(folder / "job.yaml", overrides=["checkpoint.path=s3://bucket/saves"])
    assert remote.checkpoint.path == "s3://bucket/saves"


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"lanes": 8, "workers": "auto"}, 8),
        ({"lanes": 8, "sync": "auto"}, 8),
        ({"lanes": 8, "sync": "auto", "workers": 2}, 2),
        ({"lanes": 8}, 1),
        ({"sync": "auto"}, 1),
        ({"lanes": 4000, "batch_size": 4000, "workers": "auto"}, 1024),
    ],
)
def test_workers_that_are_left_open(changes: dict[str, Any], most: int) -> None:
    body = {"model": "net.py:Net", "loss": "MSELoss", "data": {"source": {"kind": "csv", "path": "rows.csv"}}}
    job = make_job(body | {"batch_size": 8, "epochs": 1} | changes, check_names=False)
    assert job.workers.most == most
    assert job.lane_count == changes.get("lanes", 1)


@pytest.mark.parametrize(
    "text", ["yes", "1e3", "0x1f", "~", "a: b", "x #y", "-", "multi\nline\n", "tab\t", "long " * 60, "é", "😀", ""]
)
def test_job_files_are_the_same_with_and_without_libyaml(text, monkeypatch):
    data = {"text": text, "list": [text, {"of": text}], "number": 1.5e-9, "none": None, "empty": [{}, []]}
    fast = write_value(data)
    assert parse_document(fast, name="job", own=True).data == data
    monkeypatch.setattr(yaml_document, "_FastDumper", None)
    monkeypatch.setattr(yaml_document, "_FastLoader", None)
    assert write_value(data) == fast
    assert parse_document(fast, name="job", own=True).data == data
