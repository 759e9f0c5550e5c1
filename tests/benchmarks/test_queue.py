"""The benchmark of the queue, small."""

from benchmarks.queue.__main__ import measure


def test_every_act_on_a_queue_is_timed(tmp_path):
    found = measure("many", tmp_path, quick=True)
    assert {"submit one more", "read all", "shoal queue"} <= {row["act"] for row in found["rows"]}
    assert found["size_bytes"] > 0
