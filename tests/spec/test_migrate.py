"""Fields that were renamed: the error that users get, the jobs of older runs, and identities that stay."""

import json
from pathlib import Path

import pytest

from shoal.errors import ErrorGroup
from shoal.spec.load import load_job, load_run_job, make_job
from shoal.spec.migrate import RENAMED_FIELDS, migrate_job
from shoal.spec.yaml_document import write_value

RECORDED = json.loads((Path(__file__).parent / "job_identities.json").read_text())
"""Written by commit ad59a6b: each job as it was written then (`before`), as it is now (`changes`), and its hashes."""
CASES = [pytest.param(case, id=case["name"]) for case in RECORDED["cases"]]


def written(tmp_path, changes):
    path = tmp_path / "job.yaml"
    path.write_text(write_value(RECORDED["job"] | changes))
    return path


@pytest.mark.parametrize("case", CASES)
def test_the_identity_of_a_job_is_what_it_was(case):
    job = make_job(RECORDED["job"] | case["changes"], check_names=False)
    assert job.sha256() == case["sha256"]
    assert job.resume_compatibility_sha256() == case["resume_sha256"]


@pytest.mark.parametrize("case", CASES)
def test_the_job_of_an_older_run_is_the_same_job(case, tmp_path):
    older = load_run_job(written(tmp_path, case["before"]))
    assert older == load_run_job(written(tmp_path, case["changes"]))
    assert older.sha256() == case["sha256"]


def test_a_job_that_is_up_to_date_is_not_migrated():
    for case in RECORDED["cases"]:
        data = RECORDED["job"] | case["changes"]
        assert migrate_job(data) == data


def test_migration_leaves_its_argument_alone():
    data = {"engine": {"kind": "local", "restarts": 9}, "watch": ["tensorboard"]}
    assert migrate_job(data) == {"engine": {"kind": "local"}, "elastic": {"restarts": 9}, "watchers": ["tensorboard"]}
    assert data == {"engine": {"kind": "local", "restarts": 9}, "watch": ["tensorboard"]}


OLD_FIELDS = {
    "engine.restarts": {"engine": {"kind": "local", "restarts": 9}},
    "engine.patience_s": {"engine": {"patience_s": 9}},
    "engine.balance": {"engine": {"balance": False}},
    "engine.listen": {"engine": {"listen": "127.0.0.2"}},
    "engine.tls": {"engine": {"tls": "certificates"}},
    "shard.ways": {"shard": {"kind": "fsdp", "ways": 2}, "workers": 2},
    "sync.settle": {"sync": {"kind": "local", "settle": 2}},
    "data.deal": {"data": RECORDED["job"]["data"] | {"deal": "hash"}},
    "watch": {"watch": ["tensorboard"]},
}


def test_every_renamed_field_is_tried_here():
    assert OLD_FIELDS.keys() == RENAMED_FIELDS.keys()


@pytest.mark.parametrize("old", OLD_FIELDS)
def test_an_old_name_in_a_job_file_is_an_error_that_names_the_new_one(old, tmp_path):
    with pytest.raises(ErrorGroup) as failure:
        load_job(written(tmp_path, OLD_FIELDS[old]), check_names=False)
    (one,) = failure.value.errors
    assert one.code == "SH111"
    assert one.where.endswith(f" {old}")
    assert ".yaml:" in one.where
    assert f"`{RENAMED_FIELDS[old]}`" in one.message
    assert one.fix == f"Write {RENAMED_FIELDS[old]}."


@pytest.mark.parametrize("old", ["engine.listen=127.0.0.2", "watch=[]", "data.deal.kind=hash", "data.deal=hash"])
def test_an_old_name_after_set_is_the_same_error(old, tmp_path):
    with pytest.raises(ErrorGroup, match="SH111 --set"):
        load_job(written(tmp_path, {}), overrides=[old], check_names=False)
    with pytest.raises(ErrorGroup, match="SH111 --set"):
        load_run_job(written(tmp_path, OLD_FIELDS["engine.listen"]), overrides=[old])
