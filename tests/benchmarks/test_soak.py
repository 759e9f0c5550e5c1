"""What a soak counts, and that its jobs and faults are real ones."""

import os

import pytest
import yaml
from benchmarks.soak.disturbance import COUNTED, Soak, quarters
from benchmarks.soak.kinds import KINDS

from shoal.spec.load import load_job


def test_quarters_are_medians_of_moments_with_such_a_process():
    samples = [{"server_fds": value} for value in (1, 3, 5, 0, 0, 7, 9, 11)]
    assert quarters(samples, "server_fds") == [2, 5, 7, 10]
    assert quarters([], "server_fds") == []
    assert quarters(samples[:1], "server_fds") == [1]


@pytest.mark.parametrize("name", KINDS)
def test_the_job_of_each_kind_is_valid_and_promises_what_is_compared(name, tmp_path):
    kind = KINDS[name]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(kind.job | {"steps": 10}))
    job = load_job(tmp_path / "job.yaml", overrides=[f"workers={kind.workers}"])
    assert job.sync.inexact_reason == ""
    assert job.shard.kind == ("fsdp" if name == "fsdp" else "none")
    assert ("kill server" in kind.faults) == (job.sync.kind == "server")
    if job.shard.kind != "none":
        assert kind.workers == kind.reference_workers
        assert not {"join", "leave"} & set(kind.faults), "another layout has other bits"


def test_a_fault_that_finds_no_victim_is_told_and_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(Soak, "_drive", lambda self, *words: None)
    one = Soak(KINDS["fsdp"], tmp_path, seed=1)
    one._rng.choice = lambda found: found[0]
    assert one.disturb().startswith("kill worker failed")
    assert not one.faults


def test_what_is_counted_has_a_name(tmp_path, monkeypatch):
    class Driver:
        pid = os.getpid()

    monkeypatch.setattr(Soak, "_drive", lambda self, *words: Driver())
    assert set(Soak(KINDS["lanes"], tmp_path, seed=1).counts()) == set(COUNTED)
