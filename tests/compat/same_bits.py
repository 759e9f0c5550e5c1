"""What the compatibility of a training loop means: one SHA-256, however the run is disturbed."""

from tests.jobs.fault_injection import fault_script, fired_faults


def assert_same_bits(run, resume, job, job_dir, *, kill_at=4, fail_at=5, **changes):
    """The same weights and state from 1 and 2 workers, after `kill -9` of one of them in an exchange, and after a run
    that ended in the middle and is resumed with another number of workers. Returns the outcome with one worker."""
    job = job | changes
    one = run(job, workers=1)
    assert one.status == "finished", one.error
    assert one.receipt.exact is (None if job.get("compile") else True), one.receipt.why
    line = f"kill worker 1 at step {kill_at} in exchange"
    killed = run(job, workers=2, watchers=fault_script(job_dir, line))
    at_step = {"name": "faults.py:KillAt", "args": {"steps": [fail_at], "marks": str(job_dir)}}
    failed = run(job, workers=1, watchers=[at_step], elastic={"restarts": 0}, checkpoint={"every": "2 steps"})
    assert failed.status != "finished"
    outcomes = {
        "two workers": run(job, workers=2),
        "a kill": killed,
        "a resume": resume(failed.paths, sets=["workers=2"]),
    }
    for what, outcome in outcomes.items():
        assert outcome.status == "finished", (what, outcome.error)
        assert outcome.receipt.weights_sha256 == one.receipt.weights_sha256, what
        assert outcome.receipt.state_sha256 == one.receipt.state_sha256, what
        assert outcome.receipt.metrics == one.receipt.metrics, what
    assert line in fired_faults(job_dir)
    assert killed.receipt.deaths_survived == 1
    return one
