"""The benchmark of the queue, small."""

import pytest
from benchmarks.queue.__main__ import measure


def test_every_act_on_a_queue_is_timed(tmp_path):
    found = measure("many", tmp_path, quick=True)
    assert {"submit one more", "read all", "shoal queue"} <= {row["act"] for row in found["rows"]}
    assert found["size_bytes"] > 0


@pytest.mark.long
def test_six_jobs_have_the_same_bits_in_every_way_and_a_picture(tmp_path):
    found = measure("six", tmp_path, quick=True)
    assert found["same bits"]
    assert [row["way"] for row in found["rows"]] == ["one after the other", "first come first served", "elastic"]
    assert all(row["busy"] > 0 for row in found["rows"])
    title, *lines = found["picture"]
    assert "workers over" in title
    assert [line.split()[0] for line in lines] == list("123456")
