"""Same weights on any number of workers: a verdict, and where it is no, the step and the tensor."""

import json
import sys

import pytest
import yaml

from shoal import cli
from shoal.errors import ShoalError
from shoal.jobs import verify
from shoal.jobs.fork_servers import ForkServerPool
from shoal.spec.load import make_job
from tests.conftest import MLP

UNEVEN = MLP | {
    "name": "uneven",
    "model": {"name": "worker_dependent.py:WorkerDependent", "args": {"after": 5}},
    "steps": 12,
}


@pytest.fixture
def command(job_dir, fork_server, monkeypatch, capsys):
    """`shoal` in this process: its exit code and what it printed."""
    monkeypatch.setattr(ForkServerPool, "get", lambda *_, **__: fork_server)
    monkeypatch.chdir(job_dir)

    def go(*words):
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, capsys.readouterr()

    return go


def test_an_exact_job_is_the_same_everywhere(job_dir, command):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(MLP))
    code, said = command("verify", "job.yaml", "--workers", "1,2,4", "--steps", "15", "--json")
    assert code == 0, said.err
    verdict = json.loads(said.out)
    assert verdict["same"]
    assert verdict["parting"] is None
    assert [row["workers"] for row in verdict["runs"]] == [1, 2, 4]
    assert {row["steps"] for row in verdict["runs"]} == {15}
    assert len({row["state_sha256"] for row in verdict["runs"]}) == 1


@pytest.mark.long
def test_a_job_that_depends_on_the_worker_is_found_out(job_dir, command):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(UNEVEN))
    code, said = command("verify", "job.yaml", "--workers", "1,2")
    assert code == 1
    assert "The weights differ." in said.out
    assert "They part at step 6, in 2 of 8 tensors: model/extra, optimizer/state/0/momentum_buffer" in said.out


def test_who_is_the_same_and_where_the_others_part(job_dir, fork_server):
    job = make_job(UNEVEN, base_dir=str(job_dir))
    verdict = verify.verify(job, [1, 1, 3], runs=job_dir / "runs", fork_server=fork_server)
    first, again, other = [receipt.weights_sha256 for _, receipt in verdict.receipts]
    assert first == again != other
    assert not verdict.same
    assert verdict.divergence.runs == ("uneven-verify-4", "uneven-verify-5")
    assert (verdict.divergence.step, verdict.divergence.tensors[0]) == (6, "model/extra")


def test_lanes_are_resolved_once_for_all_worker_counts(job_dir):
    job = make_job({k: v for k, v in MLP.items() if k != "lanes"}, base_dir=str(job_dir))
    fixed = verify.pin_job(job, max_workers=5, purpose="verify")
    assert fixed.lane_count == 5
    assert {verify.with_workers(fixed, n).sha256() for n in (1, 2, 5)} == {fixed.sha256()}
    with pytest.raises(ShoalError, match=r"SH107.*6 workers but 4 lanes"):
        verify.pin_job(make_job(MLP, base_dir=str(job_dir)), max_workers=6, purpose="verify")


def test_a_long_name_stays_a_name(job_dir):
    job = make_job(MLP | {"name": "x" * 64}, base_dir=str(job_dir))
    assert len(verify.pin_job(job, max_workers=1, purpose="verify").name) == 64


def test_folds_are_verified_one_at_a_time(job_dir):
    job = make_job(MLP | {"data": MLP["data"] | {"split": {"kind": "kfold", "folds": 3}}}, base_dir=str(job_dir))
    with pytest.raises(ShoalError, match=r"SH614.*data\.split\.fold=0"):
        verify.pin_job(job, max_workers=2, purpose="verify")


@pytest.mark.parametrize("text", ["", "2", "1,x", "1,0", "1,,2", "1,99999"])
def test_bad_numbers_are_told(text):
    with pytest.raises(ShoalError, match=r"SH609"):
        verify.parse_worker_counts(text)


def test_the_first_difference():
    left = {1: {"a": "0", "b": "0"}, 2: {"a": "1", "b": "1"}, 3: {"a": "2", "b": "2"}}
    assert verify.first_difference(left, left) == (0, [])
    assert verify.first_difference(left, left | {3: {"a": "2", "b": "x"}, 2: {"a": "y", "b": "1"}}) == (2, ["a"])
    assert verify.first_difference(left, {1: left[1]}) == (2, ["a", "b"])
    assert verify.first_difference({}, {1: {"a": "0"}}) == (1, ["a"])
    assert verify.first_difference({1: left[1], 3: {"a": "x", "b": "2"}}, left) == (3, ["a"]), "step 2 is damaged"


DAMAGE = [
    b"{",
    b"[]",
    b'{"step":1}',
    b'{"step":"a","tensors":{}}',
    b'{"step":2,"tensors":{"a":[]}}',
    b"\xff",
    b"[" * 10**5,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_row_of_a_trace_is_passed_over(tmp_path, damage):
    rows = [json.dumps({"step": step, "tensors": {"a": str(step)}}).encode() for step in (1, 2, 3)]
    (tmp_path / "trace").write_bytes(b"\n".join([rows[0], damage, rows[2]]))
    assert verify.read_trace(tmp_path / "trace") == {1: {"a": "1"}, 3: {"a": "3"}}
