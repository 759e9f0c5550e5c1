"""The benchmark of codecs measures them all."""

from benchmarks.codecs.__main__ import CODECS, COPY, RIVAL, SIDE, measure


def test_every_codec_has_a_row():
    rows = {row["codec"]: row for row in measure(SIDE * SIDE, repeats=1)}
    assert list(rows) == [COPY, RIVAL, *CODECS]
    assert rows[COPY]["ratio"] == rows["none"]["ratio"] == 1
    assert rows["lowrank 4"]["ratio"] == 125
    assert all(row["both"] > 0 for row in rows.values())
