"""The journal: typed rows, a tolerated tail, and no silence about damage."""

import json
import math
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ShoalError
from shoal.jobs.search.journal import DecidedRow, EndedRow, Journal, StartedRow, ToldRow, read_rows
from shoal.jobs.search.receipt import decisions_sha256
from shoal.plan.search.trial import Stretch

STRETCH = Stretch(0, 1, 7, {"optimizer.args.lr": 0.1}, 0, 3, 0.0, 2.5, copy_of=(3, 1), why="promoted")
ROWS = [
    StartedRow(job_sha256="ab", workers=2, t=1.5),
    DecidedRow.of(STRETCH),
    ToldRow(number=0, rows=[{"loss": math.nan, "accuracy": 0.5}, {"loss": math.inf, "accuracy": 0.25}]),
    EndedRow(best=7, why="done", weights_sha256="cd"),
]


def write(path, rows):
    journal = Journal(path)
    for row in rows:
        journal.append(row)
    journal.close()


def test_rows_survive_the_file(tmp_path):
    write(tmp_path / "j", ROWS)
    rows, size_bytes = read_rows(tmp_path / "j")
    assert [repr(row) for row in rows] == [repr(row) for row in ROWS]
    assert size_bytes == (tmp_path / "j").stat().st_size
    assert rows[1].stretch == STRETCH
    for line in (tmp_path / "j").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 600))
def test_an_incomplete_tail_is_cut_off_and_written_again(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "j"
    write(path, ROWS)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(len(whole) - cut, 0)])
    left = len(read_rows(path)[0])
    write(path, ROWS[left:])
    assert path.read_bytes() == whole


def test_damage_before_sound_rows_is_an_error(tmp_path):
    write(tmp_path / "j", ROWS)
    lines = (tmp_path / "j").read_text().splitlines(keepends=True)
    (tmp_path / "j").write_text("".join([lines[0], lines[1].replace('"trial":7', '"trial":-7'), *lines[2:]]))
    with pytest.raises(ShoalError) as caught:
        read_rows(tmp_path / "j")
    assert caught.value.code == "SH631"


def test_a_row_that_the_full_disk_takes_only_in_part_is_not_in_the_file(tmp_path):
    """The limit of a file's size is as a disk that is full in the middle of a row."""
    write(tmp_path / "j", ROWS[:2])
    before = (tmp_path / "j").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (20, 0):
        journal = Journal(tmp_path / "j")
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, hard))
        try:
            with pytest.raises(ShoalError) as caught:
                journal.append(ROWS[2])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            journal.close()
        assert caught.value.code == "SH510"
        assert (tmp_path / "j").read_bytes() == before
    write(tmp_path / "j", ROWS[2:])
    assert [repr(row) for row in read_rows(tmp_path / "j")[0]] == [repr(row) for row in ROWS]


def test_the_digest_ignores_when_results_came():
    other = Stretch(1, 0, 8, {"optimizer.args.lr": 0.2}, 0, 3, 0.0, 2.0)
    first, second = ToldRow(number=0, rows=[{"loss": 1.0}]), ToldRow(number=1, rows=[{"loss": 2.0}], seconds=3.0, t=9.0)
    decided = [DecidedRow.of(STRETCH), DecidedRow.of(other)]
    told = [*decided, first, second], [decided[0], first, decided[1], second.model_copy(update={"t": 1.0})]
    assert decisions_sha256(told[0]) == decisions_sha256(told[1])
    changed = second.model_copy(update={"rows": [{"loss": 2.5}]})
    assert decisions_sha256([*decided, first, changed]) != decisions_sha256(told[0])
