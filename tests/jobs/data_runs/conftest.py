"""The four ways in which a job must give the same bits."""

import pytest

from tests.jobs.fault_injection import fault_script


@pytest.fixture
def same_bits(run, resume, job_dir):
    """Run the job on 1 worker, on 2 of which one is killed, and on one that is killed for good, then resumed on 2.
    Asserts the same bits and returns the first outcome."""

    def go(job):
        half = job["steps"] // 2
        one = run(job)
        assert one.status == "finished", one.error
        kill = {"name": "faults.py:KillAt", "args": {"steps": [half], "marks": str(job_dir)}}
        saved = {"checkpoint": {"every": "1 steps"}}
        killed = run(job, workers=2, watchers=[kill], **saved)
        assert killed.status == "finished", killed.error
        assert killed.receipt.deaths_survived == 1
        last = fault_script(job_dir, f"kill all at step {half + 1}")
        stopped = run(job, watchers=last, elastic={"restarts": 0}, **saved)
        assert stopped.status == "failed", stopped.status
        resumed = resume(stopped.paths, sets=["workers=2"])
        assert resumed.status == "finished", resumed.error
        for other in (killed, resumed):
            assert other.receipt.weights_sha256 == one.receipt.weights_sha256
            assert other.receipt.state_sha256 == one.receipt.state_sha256
            assert other.receipt.metrics == one.receipt.metrics
            assert other.receipt.samples_seen == one.receipt.samples_seen
        return one

    return go
