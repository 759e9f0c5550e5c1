"""`shoal plan` for real: a job is measured in a process of its own, and the answer names one way and all reasons."""

import json
import math
import os
import subprocess
import sys

import pytest
import yaml

from shoal.collectives.transport.bandwidth import measure_loopback
from shoal.errors import JobError
from shoal.jobs import planner
from shoal.jobs.probes import run_probe
from shoal.jobs.queue import client
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.plan.costs.inputs import PlanRequest, job_choice, read_measured
from shoal.plan.costs.model import RunChoice
from shoal.plan.queueing.needs import speed_key
from shoal.spec.load import make_job, save_job
from tests.conftest import CNN, MLP

LAN = {"latency_s": 2e-4, "bytes_s": 125e6}


def job(job_dir, base=MLP, **changes):
    return make_job(base | changes, base_dir=str(job_dir))


@pytest.fixture
def facts(job_dir, fork_server):
    """What was measured of a job, with one codec."""

    def go(base, **changes):
        return run_probe(
            "measure", job(job_dir, base, **changes), fork_server=fork_server, codecs=[{"kind": "bf16"}], threads=[1]
        )

    return go


def test_what_is_measured(facts):
    found = facts(CNN)
    (time,) = found["times"]
    assert time["threads"] == 1
    assert all(value > 0 and math.isfinite(value) for value in time.values())
    measured = read_measured(found)
    assert measured.lanes == 3
    assert measured.parameter_count == 80 + 16 + 584 + 16 + 1290
    assert measured.stretch_bytes >= 4 * (measured.parameter_count + 32), "moving buffers too"
    assert measured.optimizer_bytes >= 8 * measured.parameter_count
    assert measured.worker_bytes > measured.stretch_bytes
    assert measured.base_bytes > 50e6
    assert measured.codecs["bf16"].encode_s > 0
    assert measured.fragments == (1.0,), "too small to be cut"
    assert found["crowding"] >= 1
    assert found["exchange_s"] > 0 or found["cores"] == 1, "two workers were tried"
    assert found["cores"] == len(os.sched_getaffinity(0))


def test_measuring_does_not_run_into_the_end_of_a_schedule(facts):
    assert facts(CNN, steps=1, evaluate={})["steps_per_epoch"] > 1


def test_what_cannot_be_is_found_out(facts):
    task = {"model": None, "loss": None, "metrics": [], "task": "models.py:SampleCounter"}
    tally = {"task": {"name": "models.py:SampleCounter", "args": {"samples": 1797}}}
    found = facts(MLP, **(task | tally), optimizer={"name": "Rprop"})
    assert found["codecs"] == []
    assert found["no_codecs"] == "codecs take float32 gradients, and some are float64"
    assert found["no_servers"] == "servers hold parts of tensors, and Rprop may need whole ones"


def test_however_lanes_agree_the_update_is_measured(facts):
    """A local job has the optimizer's state of a lane, and not that of an agreement."""
    found = facts(CNN, sync={"kind": "local", "every": 4}, optimizer={"name": "AdamW"})
    measured = read_measured(found)
    assert measured.optimizer_bytes >= 8 * measured.parameter_count


@pytest.mark.parametrize("samples", [33, 40])
def test_hardly_any_samples(facts, samples):
    """Lanes without samples, or with few, are no measure of how long one takes."""
    data = MLP["data"] | {"split": {"kind": "holdout", "validation": 1 - samples / 1797}}
    found = facts(MLP, data=data, batch_size=32)
    assert found["steps_per_epoch"] == 2
    assert found["crowding"] < 10


def test_a_model_that_is_larger_than_the_machine(facts):
    with pytest.raises(Exception, match=r"SH407 model: .* needs 80000\.8 GB at least, the machine has "):
        facts(MLP, model={"name": "torch.nn:Linear", "args": {"in_features": 100_000, "out_features": 100_000_000}})


@pytest.mark.long
def test_a_job_with_a_shard_is_planned_with_its_shard(job_dir):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(MLP))
    done = shoal("plan", "job.yaml", "--workers", 2, "--set", "shard=fsdp", cwd=job_dir)
    assert done.returncode == 0, done.stderr
    assert "Take 2 workers (fsdp over 2): " in done.stdout
    assert "  shoal run job.yaml --set shard=fsdp --workers 2\n" in done.stdout


def test_errors_of_the_model_are_told(facts):
    with pytest.raises(Exception, match="SH715"):
        facts(MLP, model="models.py:WrongInputWidth")


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, RunChoice()),
        ({"sync": "ddp", "threads": 2}, RunChoice(threads=2)),
        ({"codec": "int8"}, RunChoice(codec="int8")),
        ({"shard": "fsdp", "workers": 2}, RunChoice(shard="fsdp")),
        (
            {"shard": {"kind": "tensor", "size": 2, "patterns": "mlp"}, "workers": 4},
            RunChoice(workers=2, shard="tensor"),
        ),
        ({"shard": {"kind": "pipeline", "cuts": ["2"]}, "workers": 2}, RunChoice(workers=2, shard="pipeline")),
        (
            {"sync": {"kind": "server", "servers": 2, "staleness": "inf"}},
            RunChoice(sync="server", servers=2, staleness=math.inf),
        ),
    ],
)
def test_what_the_job_says(job_dir, changes, own):
    assert job_choice(job(job_dir, **changes)) == own


@pytest.mark.long
def test_a_plan_names_one_way_and_all_reasons(job_dir, fork_server):
    wanted = PlanRequest(**LAN, hosts=2, most=6)
    own = {"codec": {"kind": "int8", "block": 64}, "sync": {"kind": "server", "staleness": "inf"}}
    planned = planner.plan(job(job_dir, **own), wanted, fork_server=fork_server)
    told = json.loads(json.dumps(planned.to_json_data(), allow_nan=False))
    assert told["pick"] in told["rows"]
    assert all(row["reason"] for row in told["rows"])
    assert {row["choice"]["codec"] for row in told["rows"]} == {
        "none", "bf16", "fp16", "int8", "int4", "int3", "sign", "topk", "lowrank",
    }  # fmt: skip
    assert told["measured"]["codecs"]["int8"]["settings"]["block"] == 64
    refused = [row for row in told["rows"] if row["choice"]["workers"] > 4]
    assert {row["refused"][:24] for row in refused} == {"the job has 4 lanes: of ", "shards of gradients are "}
    for row in told["rows"]:
        if row["choice"]["sync"] != "local" and not row["refused"]:
            changed = job_choice(job(job_dir, **(own | row["settings"])))
            wanted = [row["choice"][name] for name in ("sync", "codec", "threads", "servers")]
            assert [changed.sync, changed.codec, changed.threads, changed.servers] == wanted


def test_a_plan_is_kept_for_the_queue(job_dir):
    """Speeds of the job as it is: other codecs, threads and ways to agree are not its own."""
    made = job(job_dir, workers="1..2", lanes=2)
    save_job(made, job_dir / "job.yaml")
    done = shoal("plan", "job.yaml", "--json", cwd=job_dir)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    own = {r["choice"]["workers"]: 1 / r["step_s"] for r in rows if set(r["settings"]) == {"workers"}}
    with QueueStore(QueuePaths.of(job_dir / "runs"), create=False) as store:
        kept = store.planned_speeds(speed_key(made))
    assert kept == pytest.approx(own)
    assert set(kept) == {1, 2}


def test_a_plan_without_a_place_for_the_queue_is_no_error(job_dir):
    (job_dir / "runs").mkdir()
    (job_dir / "runs" / ".queue").write_text("")
    said = client.keep_planned_speeds(job_dir / "runs", job(job_dir), {1: 10.0})
    assert said.startswith("The queue does not learn these speeds: ")


def test_more_hosts_than_workers_are_refused(job_dir):
    with pytest.raises(JobError, match="SH107 --hosts: 5 hosts, and 4 workers at most"):
        planner.plan(job(job_dir), PlanRequest(**LAN, hosts=5))


def test_processes_of_one_host_talk():
    found = measure_loopback()
    assert 0 < found.latency_s < 1
    assert found.bytes_s > 1e6


def shoal(*words, cwd):
    command = [sys.executable, "-c", "from shoal.cli import main; main()", *map(str, words)]
    env = os.environ | {"COLUMNS": "250"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_the_command(job_dir):
    """With one lane, so that what is picked does not depend on how fast this machine is."""
    (job_dir / "job.yaml").write_text(yaml.safe_dump(MLP))
    done = shoal("plan", "job.yaml", "--workers", 2, "--set", "lanes=1", cwd=job_dir)
    assert done.returncode == 0, done.stderr
    (picked,) = [line for line in done.stdout.splitlines() if line.startswith("→")]
    assert picked.split()[1] == "1"
    assert "and nothing to exchange" in picked
    assert "the job has 1 lane: of 2 workers 1 would have no lane" in done.stdout
    assert "Take 1 worker: " in done.stdout
    assert "  shoal run job.yaml --set lanes=1 --workers 1\n" in done.stdout
    assert "The job has one lane" in done.stdout
    assert not (job_dir / "runs").exists()


@pytest.mark.parametrize(
    ("words", "code"), [(["--link", "fast"], "SH106"), (["--latency", "7"], "SH106"), (["--speeds", "0"], "SH106")]
)
def test_what_is_no_link(job_dir, words, code):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(MLP))
    done = shoal("plan", "job.yaml", *words, cwd=job_dir)
    assert (done.returncode, code in done.stderr) == (2, True)
