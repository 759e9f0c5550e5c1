"""Rules between fields: what is fine, beside the table of what is not (test_broken_jobs.py)."""

import math
from pathlib import Path
from typing import Any

import pytest

from shoal.spec.files import check_files
from shoal.spec.job import ELEMENTWISE_OPTIMIZERS, Job
from shoal.spec.rules import check_rules, has_validation

SOURCE = {"kind": "csv", "path": "rows.csv"}


def job(data: dict[str, Any] | None = None, **fields: Any) -> Job:
    base = {"model": "net.py:Net", "loss": "MSELoss", "epochs": 1}
    return Job.model_validate({**base, **fields, "data": {"source": SOURCE, **(data or {})}})


def found(checked: Job) -> list[tuple[str, str]]:
    return [(problem.code, problem.where) for problem in check_rules(checked)]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"epochs": None, "steps": 5},
        {"task": "net.py:Task", "model": None, "loss": None, "metrics": ["accuracy"]},
        {"clip": {"norm": 1}},
        {"clip": {"value": 0.5}},
        {"lanes": 32, "batch_size": 32},
        {"lanes": 2, "workers": "1..8"},
        {"lanes": 3, "workers": "3..8"},
        {"device": "cuda:1"},
        {"device": "mps"},
        {"init_from": {"freeze": ["a.*"]}},
        {"init_from": {"path": "w.safetensors", "rename": {"a": "b"}}},
        {"optimizer": {"name": "SGD", "args": {"lr": 0}, "groups": [{"match": "*", "args": {"lr": 1}}]}},
        {"evaluate": {"batch_size": 4}},
    ],
)
def test_good_jobs(fields: dict[str, Any]) -> None:
    assert found(job(**fields)) == []


@pytest.mark.parametrize(
    ("data", "validates"),
    [
        ({}, False),
        ({"split": "none"}, False),
        ({"split": {"kind": "holdout", "validation": 0, "test": 0.5}}, False),
        ({"split": {"kind": "column", "by": "part", "validation": []}}, False),
        ({"split": "holdout"}, True),
        ({"split": "kfold"}, True),
        ({"split": {"kind": "column", "by": "part"}}, True),
        ({"validation": SOURCE}, True),
    ],
)
def test_what_needs_validation_samples(data: dict[str, Any], validates: bool) -> None:
    asks = {"stop_early": {}, "best": {"mode": "max"}, "evaluate": {"every_steps": 5}}
    checked = job(data, **asks)
    assert has_validation(checked) is validates
    assert found(checked) == ([] if validates else [("SH107", field) for field in asks])


def test_a_monitored_metric_is_one_that_the_job_computes() -> None:
    split = {"split": "holdout"}
    metrics = ["accuracy", "torchmetrics:F1Score", "mine.py:top5", "accuracy"]
    for name in ("loss", "accuracy", "F1Score", "top5", "accuracy_3"):
        assert found(job(split, metrics=metrics, best={"metric": name})) == []
    asked = {"best": {"metric": "f2"}, "stop_early": {"metric": "val_loss"}}
    expected = [("SH106", "best.metric"), ("SH106", "stop_early.metric")]
    assert found(job(split, metrics=metrics, **asked)) == expected


def test_a_task_may_bring_metrics_that_nobody_knows_yet() -> None:
    checked = job({"split": "holdout"}, task="t.py:T", model=None, loss=None, best={"metric": "bleu"})
    assert found(checked) == []


def test_no_model_and_no_task() -> None:
    assert found(job(model=None, loss=None)) == [("SH104", "model")]


def test_a_task_with_model_and_loss_tells_both() -> None:
    assert found(job(task="t.py:T")) == [("SH107", "model"), ("SH107", "loss")]


def test_groups_have_learning_rates_too() -> None:
    groups = [{"match": "*", "args": {"lr": "0.1"}}, {"match": "*", "args": {"lr": -1}}]
    assert found(job(optimizer={"name": "SGD", "groups": groups})) == [
        ("SH105", "optimizer.groups.0.args.lr"),
        ("SH106", "optimizer.groups.1.args.lr"),
    ]


@pytest.mark.parametrize("value", [object(), {1: 2}, [print], {"a": {"b": (1,)}}])
def test_arguments_from_python_must_be_plain_data(value: Any) -> None:
    assert found(job(model={"name": "a:b", "args": {"x": value}})) == [("SH105", "model.args")]


# ---- servers ----


def served(**fields: Any) -> Job:
    return job(sync={"kind": "server", **fields})


def test_two_servers_back_each_other_unless_one_says_otherwise() -> None:
    assert [served(servers=n).sync.backups for n in (1, 2, 5)] == [0, 1, 1]
    assert served(servers=3, backups=0).sync.backups == 0
    assert found(served(servers=3, backups=2)) == []
    assert found(served(backups=1)) == [("SH107", "sync.backups")]


@pytest.mark.parametrize(
    ("said", "kept", "bound"), [(0, 0, 0), (4, 4, 4), ("inf", "inf", math.inf), (math.inf, "inf", math.inf)]
)
def test_staleness_is_a_number_or_infinite(said: Any, kept: Any, bound: float) -> None:
    sync = served(staleness=said).sync
    assert (sync.staleness, sync.staleness_bound, bool(sync.inexact_reason)) == (kept, bound, said != 0)
    assert Job.model_validate(served(staleness=said).dump()).sync == sync


@pytest.mark.parametrize("name", [*ELEMENTWISE_OPTIMIZERS, "torch.optim:SGD", "torch.optim.adamw:AdamW"])
def test_optimizers_that_servers_can_use(name: str) -> None:
    assert found(job(sync="server", optimizer=name)) == []


@pytest.mark.parametrize(
    "name", ["Adafactor", "Muon", "mine.py:SGD", "mine.py:LBFGS", "torch.py:SGD", "torch.optimal:SGD"]
)
def test_optimizers_that_servers_cannot_use(name: str) -> None:
    (problem,) = check_rules(job(sync="server", optimizer=name))
    assert (problem.code, problem.where) == ("SH110", "optimizer.name")
    assert "AdamW" in problem.fix
    assert found(job(optimizer=name)) == []


@pytest.mark.parametrize("sync", ["lanes", "server", "local"])
def test_optimizers_of_sparse_gradients(sync: str) -> None:
    (problem,) = check_rules(job(sync=sync, optimizer="torch.optim:SparseAdam"))
    assert (problem.code, problem.where) == ("SH420", "optimizer.name")
    assert problem.fix


@pytest.mark.parametrize(
    "changes", [{"sync": "server"}, {"sync": "local"}, {"sync": "ddp"}, {"sync": "auto"}, {"codec": "bf16"}]
)
def test_closures_need_exact_lanes(changes: dict[str, str]) -> None:
    (problem,) = check_rules(job(optimizer="LBFGS", **changes))
    assert (problem.code, problem.where) == ("SH860", "optimizer.name")
    assert next(iter(changes.values())) in problem.message
    assert found(job(optimizer="LBFGS")) == []


@pytest.mark.parametrize(
    ("setting", "where"),
    [({"average": "ema"}, "average"), ({"precision": "fp16"}, "precision")],
)
@pytest.mark.parametrize("sync", ["server", "local", "auto"])
def test_settings_of_the_loop_that_a_sync_does_not_support(setting: dict[str, str], where: str, sync: str) -> None:
    (problem,) = check_rules(job(sync=sync, **setting))
    assert (problem.code, problem.where) == ("SH863", where)
    assert f"sync: {sync}" in problem.message
    assert found(job(**setting)) == found(job(sync="ddp", **setting)) == []


def test_other_settings_of_the_loop() -> None:
    assert found(job(precision="fp16", codec="int8")) == [("SH863", "codec")]
    assert found(job(average={"kind": "swa", "decay": 0.5})) == [("SH107", "average.decay")]
    assert found(job(optimizer="LBFGS", precision="fp16")) == [("SH863", "precision")]
    sharded = {"shard": "fsdp", "workers": 2, "lanes": 2}
    for setting in ({"compile": True}, {"gradient_checkpointing": ["0"]}, {"average": "ema"}, {"precision": "fp16"}):
        assert ("SH863", next(iter(setting))) in found(job(**sharded, **setting))


@pytest.mark.parametrize(
    ("fields", "lanes"),
    [({"lanes": 2}, 6), ({"workers": 2}, 6), ({"workers": "1..4"}, 12), ({}, 3), ({"workers": {"most": 2}}, 6)],
)
def test_accumulation_is_more_lanes(fields: dict[str, Any], lanes: int) -> None:
    made = job(**fields, accumulate=3)
    assert (made.lane_count, made.accumulate) == (lanes, 1)
    assert made.sha256() == job(**{**fields, "lanes": lanes}).sha256()
    assert Job.model_validate(made.dump()).lane_count == lanes


def test_what_changes_no_bit_is_no_part_of_the_identity() -> None:
    one = job()
    for setting in ({"gradient_checkpointing": ["0"]}, {"sync": {"kind": "lanes", "exchange": "device"}}):
        assert job(**setting).sha256() == one.sha256()
    for setting in ({"average": "ema"}, {"precision": "fp16"}, {"compile": True}):
        assert job(**setting).sha256() != one.sha256()


@pytest.mark.parametrize(
    ("args", "lanes", "code"),
    [
        ({"reduction": "sum"}, 2, "SH421"),
        ({"size_average": False}, 2, "SH421"),
        ({"reduction": "none"}, 1, "SH421"),
        ({"reduce": False}, 1, "SH421"),
        ({"reduction": "sum"}, 1, ""),
        ({"reduction": "mean"}, 2, ""),
        ({"size_average": True}, 2, ""),
    ],
)
@pytest.mark.parametrize("name", ["CrossEntropyLoss", "torch.nn.functional:cross_entropy"])
def test_a_loss_of_torch_must_be_a_mean_if_lanes_share_a_batch(
    name: str, args: dict[str, Any], lanes: int, code: str
) -> None:
    problems = check_rules(job(loss={"name": name, "args": args}, lanes=lanes))
    assert [one.code for one in problems] == ([code] if code else [])
    assert all(one.where.startswith("loss.args.") for one in problems)
    assert check_rules(job(loss={"name": "mine.py:loss", "args": args}, lanes=lanes)) == []


def test_how_servers_are_run_is_no_part_of_the_result() -> None:
    lanes = job().sha256()
    assert served().sha256() == served(servers=4, backups=2, placement="ring").sha256() == lanes
    assert job(faults={"pause_probability": 0.5}).sha256() == lanes
    stale = served(staleness=4).sha256()
    assert stale == served(staleness=4, servers=3).sha256()
    assert (
        len({lanes, stale, served(staleness="inf").sha256(), served(staleness=4, staleness_aware=True).sha256()}) == 4
    )


# ---- files ----


def missing(checked: Job, folder: Path) -> list[tuple[str, str]]:
    return [(p.code, p.where) for p in check_files(checked.model_copy(update={"base_dir": str(folder)}))]


def test_files_globs_directories_and_urls(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    (tmp_path / "a[1].npy").touch()
    absolute = str(tmp_path / "rows.csv")
    for path in ("rows.csv", "*.csv", "**/*.csv", ".", absolute, "s3://bucket/x.csv", "a[1].npy"):
        assert missing(job({"source": {"kind": "csv", "path": path}}), tmp_path) == [], path


def test_every_file_that_is_missing_is_told(tmp_path: Path) -> None:
    data = {
        "source": {"kind": "npy", "path": "x.npy", "target": "y.npy"},
        "validation": {"kind": "parquet", "path": "v/*.parquet"},
        "test": {"kind": "idx", "path": "i.gz", "target": "l.gz"},
        "sampler": {"kind": "balanced", "by": "cost.npy"},
    }
    assert missing(job(data, init_from={"path": "runs/a"}), tmp_path) == [
        ("SH301", "data.source.path"),
        ("SH301", "data.source.target"),
        ("SH301", "data.validation.path"),
        ("SH301", "data.test.path"),
        ("SH301", "data.test.target"),
        ("SH301", "data.sampler.by"),
        ("SH301", "init_from.path"),
    ]


def test_columns_and_names_of_runs_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    data = {"source": {**SOURCE, "target": "y"}, "sampler": {"kind": "balanced", "by": "cost"}}
    assert missing(job(data, init_from={"path": "digits-1"}), tmp_path) == []


def test_a_base_dir_that_is_not_there(tmp_path: Path) -> None:
    assert missing(job(), tmp_path / "there") == [("SH301", "base_dir")]


# ---- shards ----


def shards(**fields: Any) -> list[tuple[str, str]]:
    return found(job(batch_size=64, **fields))


@pytest.mark.parametrize(
    ("shard", "workers"),
    [
        ("fsdp", 2),
        ({"kind": "fsdp", "size": 2}, 4),
        ({"kind": "fsdp", "size": 2}, "2..8"),
        ("tensor", 4),
        ({"kind": "tensor", "patterns": {"feed.0": "columns", "feed.2": "rows", "out": "sliced"}}, 2),
        ("pipeline", 3),
        ({"kind": "pipeline", "size": 3, "cuts": ["blocks.2", "blocks.4"], "schedule": "gpipe"}, 6),
    ],
)
def test_shards_that_could_work(shard: Any, workers: Any) -> None:
    assert shards(shard=shard, workers=workers) == []
    checked = job(shard=shard, workers=workers)
    assert Job.model_validate(checked.dump()).shard == checked.shard
    assert checked.sha256() != job(workers=workers).sha256()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"shard": "fsdp"}, [("SH107", "workers")]),
        ({"shard": {"kind": "tensor", "size": 2}, "workers": 3}, [("SH107", "shard.size")]),
        ({"shard": {"kind": "fsdp", "size": 4}, "workers": "2..8"}, [("SH107", "shard.size")]),
        ({"shard": "fsdp", "workers": "2..4", "lanes": 4}, [("SH107", "shard.size")]),
        ({"shard": {"kind": "pipeline", "cuts": ["a"]}, "workers": 3}, [("SH107", "shard.cuts")]),
        ({"shard": "fsdp", "workers": 2, "sync": "server"}, [("SH110", "shard")]),
        ({"shard": "fsdp", "workers": 2, "sync": "auto"}, [("SH110", "sync")]),
        ({"shard": "fsdp", "workers": 2, "codec": "int8"}, [("SH110", "codec")]),
        ({"shard": "fsdp", "workers": 2, "sync": "local"}, [("SH110", "shard")]),
        ({"shard": "fsdp", "workers": 2, "device": "cuda"}, [("SH110", "device")]),
        ({"shard": "pipeline", "workers": 2, "precision": "bf16"}, [("SH110", "precision")]),
        ({"shard": {"kind": "fsdp", "size": 2}, "workers": 4, "lanes": 1}, [("SH107", "lanes")]),
    ],
)
def test_shards_that_cannot_work(fields: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert shards(**fields) == expected


def test_shards_of_tensors_need_an_optimizer_that_does_not_mind() -> None:
    assert ("SH110", "optimizer.name") in found(job(shard="fsdp", workers=2, optimizer="Adafactor"))


def test_no_shard_is_no_part_of_what_a_job_is() -> None:
    assert job().sha256() == job(shard="none").sha256()
