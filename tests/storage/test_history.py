"""The history of a run and its file: incremental, checked, made again when it is damaged."""

import numpy as np
import pytest

from shoal.events import Event
from shoal.events.stream import format_event
from shoal.spec.run_paths import RunPaths
from shoal.storage import history
from shoal.storage.history import RunHistory


def row(kind, step=None, who="worker-0", t=0.0, **fields):
    return format_event(Event(kind, 1.7e9 + t, who, step, fields))


def steps(first, last, who="worker-0", loss=lambda step: 1.0 / step):
    return b"".join(
        row("step", n, who, n * 0.1, loss=loss(n), lr=0.1, samples=10, wall_s=0.1, compute_s=0.06, waiting_s=0.04)
        for n in range(first, last + 1)
    )


@pytest.fixture
def paths(tmp_path):
    found = RunPaths(tmp_path)
    found.events.write_bytes(
        row("run_started", run="a-1")
        + row("joined", 0, lanes=[0], saves=True)
        + row("joined", 0, "worker-1", lanes=[1], saves=False)
        + steps(1, 50)
        + steps(1, 50, "worker-1", loss=lambda step: 99.0)
    )
    return found


def read(paths):
    history = RunHistory(paths)
    history.catch_up()
    return history


def append(paths, content):
    with paths.events.open("ab") as file:
        file.write(content)


def snapshot(history):
    curves = {name: [list(column) for column in one.columns] for name, one in history.series.items()}
    return curves, history.marks, history.timeline.to_fields(), history.step


def test_only_the_saver_gives_points_and_every_worker_time(paths):
    history = read(paths)
    assert list(history.series["loss"].values) == [1.0 / n for n in range(1, 51)]
    width_s, columns = history.timeline.columns(bins=1)
    assert {who: round(sum(kinds["compute_s"]), 6) for who, kinds in columns.items()} == {"worker-0": 3, "worker-1": 3}
    assert width_s >= 4.9


def test_a_planned_run_has_prediction_and_truth(paths):
    said = dict.fromkeys(("compute_s", "encode_s", "exchange_s", "apply_s"), 0.0)
    choice = {"workers": 2, "hosts": 1, "threads": 1, "how": "lanes"}
    append(paths, row("plan", choice=choice, prediction={"step_s": 0.04, **said}, reason="measured"))
    append(paths, steps(51, 60))
    truth = {"step_s": 0.1, "lane_s": [[0.05]]}
    append(paths, row("replan", choice=choice, prediction={"step_s": 0.04, **said}, truth=truth,
                      expected={"step_s": 0.09, **said}, moves=None, best=None, reason="slower"))  # fmt: skip
    append(paths, steps(61, 62))
    history = read(paths)
    expected, measured = history.series["step s/expected"], history.series["step s/measured"]
    assert list(zip(expected.steps, expected.values, strict=True)) == [(0, 0.04), (60, 0.09)]
    assert list(measured.steps) == list(range(51, 63))
    assert list(measured.values) == [0.1] * 12


def test_a_file_saves_the_work_and_gives_the_same(paths):
    whole = read(paths)
    whole.save()
    again = RunHistory(paths)
    assert again.offset == paths.events.stat().st_size
    append(paths, steps(51, 60) + row("worker_died", worker="worker-1", reason="killed"))
    again.catch_up()
    paths.history.unlink()
    assert snapshot(again) == snapshot(read(paths))


def test_a_disk_that_is_nearly_full_is_left_to_the_run(paths, monkeypatch):
    monkeypatch.setattr(history, "MIN_FREE_BYTES", 1 << 62)
    whole = read(paths)
    whole.save()
    assert not paths.history.exists()
    assert snapshot(read(paths)) == snapshot(whole)
    monkeypatch.undo()
    whole.save()
    assert paths.history.exists()


def test_a_step_that_comes_again_counts_once(paths):
    append(paths, row("resumed", 40) + steps(41, 55, loss=lambda step: 7.0))
    series = read(paths).series["loss"]
    assert list(series.steps) == list(range(1, 56))
    assert list(series.values[40:]) == [7.0] * 15


def test_a_damaged_file_is_made_again(paths):
    whole = read(paths)
    whole.save()
    content = paths.history.read_bytes()
    random = np.random.default_rng(0)
    for n in random.integers(0, len(content), 60):
        paths.history.write_bytes(content[:n] + bytes([content[n] ^ 1]) + content[n + 1 :])
        assert snapshot(read(paths)) == snapshot(whole)
    for size in (0, 1, 50, len(content) - 1):
        paths.history.write_bytes(content[:size])
        assert snapshot(read(paths)) == snapshot(whole)
    paths.history.write_bytes(content + b"x")
    assert snapshot(read(paths)) == snapshot(whole)


def test_a_replaced_or_cut_stream_is_read_from_its_beginning(paths):
    history = read(paths)
    history.save()
    paths.events.write_bytes(row("run_started", run="a-1") + steps(1, 3))
    history.catch_up()
    assert len(history.series["loss"]) == 3
    assert len(read(paths).series["loss"]) == 3
    other = paths.root / "other"
    other.write_bytes(row("run_started", run="a-1") + steps(1, 400))
    other.replace(paths.events)
    history.catch_up()
    assert len(history.series["loss"]) == 400


def test_damaged_and_incomplete_rows_are_passed_over(paths):
    append(paths, b'{"kind":"step"\n\xff\xff\n' + steps(51, 51) + b'{"t":1.7e9,"who":"worker-0","kind":"st')
    history = read(paths)
    assert len(history.series["loss"]) == 51
    append(paths, b'ep","step":52,"loss":0.5}\n')
    history.catch_up()
    assert list(history.series["loss"].values)[-1] == 0.5


def test_a_clock_that_jumps_loses_no_time(paths):
    append(
        paths,
        row("step", 51, t=-5000.0, compute_s=1.0, wall_s=1.0, loss=1.0)
        + row("step", 52, t=1e6, compute_s=1.0, loss=1.0),
    )
    _, columns = read(paths).timeline.columns(bins=1000)
    assert round(sum(columns["worker-0"]["compute_s"]), 3) == 5.0


def test_a_directory_that_cannot_be_written_is_no_error(paths, monkeypatch):
    history = read(paths)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(PermissionError()))
    history.save()
    assert not paths.history.exists()
    assert not list(paths.root.glob("*.tmp"))


def test_evaluations_are_time_of_every_worker_that_trains(paths):
    append(paths, steps(51, 52))
    append(paths, row("evaluated", split="validation", metrics={"loss": 1.0}, evaluation_s=2.5))
    _, columns = read(paths).timeline.columns(bins=1)
    assert {who: sum(kinds.get("evaluation_s", [])) for who, kinds in columns.items()} == {
        "worker-0": 2.5,
        "worker-1": 2.5,
    }
