"""From a job to everything the loop uses, in this process: no worker is started."""

import json

import pytest

from shoal.checkpoint.sha256 import state_sha256
from shoal.collectives.peer_services import PeerServices
from shoal.errors import ShoalError
from shoal.events import EventWriter
from shoal.fleet.membership import InMemoryMembership
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import View
from shoal.strategies.fault_injection import FaultInjection, pauses_at
from shoal.strategies.local_sgd.strategy import LocalSgdStrategy
from shoal.strategies.parameter_server import ParameterServerStrategy
from shoal.strategies.replicated import ReplicatedStrategy
from shoal.strategies.self_check.strategy import SelfCheck
from shoal.strategies.sharded import ShardedStrategy
from shoal.train.activity import Activity
from shoal.train.build import TrainingSession, build, build_loop
from shoal.train.elastic import ElasticLoop
from tests.conftest import MLP

ALONE = View(number=1, carries={0: [0, 1, 2, 3]}, saver=0)


class Reports(list):
    def __call__(self, kind, /, **fields):
        self.append((kind, fields))

    def of(self, kind):
        return [fields for found, fields in self if found == kind]


@pytest.fixture
def make(job_dir):
    """Builds a job, and gives what it becomes and what was reported."""

    def go(job=MLP, **changes):
        reports = Reports()
        made = make_job(job | changes, base_dir=str(job_dir))
        return build(made, cache_dir=job_dir, report=reports), reports

    return go


@pytest.fixture
def start(make, job_dir):
    """The loop of a job's worker, and its surroundings. Nobody else is there."""
    peers, loops = PeerServices("token", bind="127.0.0.1"), []

    def go(job=MLP, *, trace=False, **changes):
        built, _ = make(job, **changes)
        placed = []
        session = TrainingSession(
            InMemoryMembership(), peers, Activity(), lambda offsets, learn: placed.append(offsets), lambda: ""
        )
        paths = RunPaths.at(job_dir / "run")
        paths.root.mkdir(exist_ok=True)
        stream = EventWriter(paths.events, "worker-0")
        loop, context = build_loop(built, paths, session=session, stream=stream, has_state=True, trace=trace)
        loops.append(context)
        return loop, session, paths, placed

    yield go
    for context in loops:
        context.batches.close()
        context.store.close()
    peers.close()


def run_alone(loop, session, **view):
    session.membership.publish(ALONE.model_copy(update=view))
    return ElasticLoop(loop, peers=session.peers, seat=0, save_lock=None).run()


# ---- what a job becomes ----


def test_facts_are_reported(make):
    built, reports = make()
    (facts,) = reports.of("built")
    assert (facts["steps"], facts["lanes"], facts["device"]) == (60, 4, "cpu")
    assert facts["parameters"] == facts["trainable"] == 64 * 32 + 32 + 32 * 10 + 10
    assert facts["samples"] == {"train": 1438, "validation": 359}
    assert built.train_schedule.steps == 60
    assert built.example.size == built.sampler.ids(0, 0).size


def test_an_average_that_never_begins_is_refused(make):
    make(average={"kind": "swa", "start": 60})
    with pytest.raises(ShoalError, match=r"SH107.*step 61.*has 60 steps"):
        make(average={"kind": "swa", "start": 61})


def test_a_sharded_model_is_not_counted_before_it_is_cut(make):
    _, reports = make(shard={"kind": "fsdp", "size": 2}, workers=2)
    assert "parameters" not in reports.of("built")[0]


def test_epochs_become_steps(make):
    built, _ = make({key: value for key, value in MLP.items() if key != "steps"}, epochs=3)
    assert built.train_schedule.steps == 3 * built.sampler.steps_per_epoch == 87


def test_late_evaluations_are_noted(make):
    _, reports = make(sync={"kind": "local", "every": 16, "rounds_per_sync": 2})
    assert any("lanes agree every 32 steps" in note["message"] for note in reports.of("note"))
    _, reports = make(sync={"kind": "local", "every": 5, "rounds_per_sync": 2})
    assert reports.of("note") == []


def test_sparse_tables_need_servers(make):
    with pytest.raises(ShoalError, match="sparse tables") as caught:
        make(model={"name": "sparse.py:SparseDigits"})
    assert caught.value.code == "SH418"


# ---- which strategy ----


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, ReplicatedStrategy),
        ({"codec": {"kind": "int8"}}, ReplicatedStrategy),
        ({"sync": "ddp"}, ReplicatedStrategy),
        ({"sync": {"kind": "local", "every": 5}}, LocalSgdStrategy),
        ({"sync": {"kind": "server", "servers": 1, "backups": 0}}, ParameterServerStrategy),
        ({"shard": {"kind": "fsdp", "size": 2}, "workers": 2}, ShardedStrategy),
        ({"faults": {"pause_probability": 0.5, "pause_s": 0.01}}, FaultInjection),
    ],
    ids=str,
)
def test_a_job_gets_the_strategy_that_it_asks_for(start, changes, kind):
    loop, session, _, placed = start(**changes, self_check=0)
    assert type(loop.strategy) is kind
    assert session.activity.moved_bytes() == 0
    assert len(placed) == (kind is ParameterServerStrategy)
    assert loop.progress.has_state is (kind is not ShardedStrategy)


@pytest.mark.parametrize(
    ("changes", "checked"),
    [
        ({}, True),
        ({"self_check": 0}, False),
        ({"sync": {"kind": "local", "every": 5}}, True),
        ({"sync": {"kind": "server", "servers": 1, "backups": 0}}, True),
        ({"sync": {"kind": "server", "servers": 1, "backups": 0, "staleness": 2}}, False),
        ({"sync": "ddp"}, False),
    ],
    ids=str,
)
def test_a_job_that_promises_the_same_bits_is_checked(start, changes, checked):
    loop, *_ = start(**changes)
    assert isinstance(loop.strategy, SelfCheck) is checked


@pytest.mark.parametrize(
    ("sync", "exact", "lockstep"),
    [
        ("lanes", True, True),
        ("ddp", False, True),
        ({"kind": "server", "servers": 1, "backups": 0}, True, True),
        ({"kind": "server", "servers": 1, "backups": 0, "staleness": 2}, False, False),
    ],
    ids=str,
)
def test_what_the_loops_must_know_of_a_strategy(start, sync, exact, lockstep):
    assert start(sync=sync)[0].strategy.traits == (exact, lockstep)


def test_pauses_are_a_function_of_seat_and_step():
    drawn = [pauses_at(seat, step, probability=0.25) for seat in range(4) for step in range(250)]
    assert drawn == [pauses_at(seat, step, probability=0.25) for seat in range(4) for step in range(250)]
    assert 180 < sum(drawn) < 320
    assert not any(pauses_at(0, step, probability=0.0) for step in range(100))


# ---- a run of one worker, in this process ----


def events(paths):
    return [json.loads(row) for row in paths.events.read_text().splitlines()]


def test_a_worker_alone_goes_to_the_end(start):
    loop, session, paths, _ = start(steps=12, evaluate={"every_steps": 6})
    result = run_alone(loop, session)
    assert (result.step, result.finished) == (12, True)
    loop.progress.reporter.stream.close()
    found = {event["kind"]: event for event in events(paths)}
    finished = found["finished"]
    assert finished["metrics"] == found["evaluated"]["metrics"]
    assert finished["samples_seen"] == 12 * 50
    assert finished["stopped"] == ""
    model = json.loads((paths.model / "model.json").read_text())
    assert (model["step"], model["weights_sha256"]) == (12, finished["weights_sha256"])


def test_the_bits_are_those_of_any_other_run(start):
    digests = set()
    for changes in ({}, {}, {"faults": {"pause_probability": 0.5, "pause_s": 0.001}}):
        loop, session, paths, _ = start(steps=8, **changes)
        run_alone(loop, session)
        loop.progress.reporter.stream.close()
        digests.add(events(paths)[-1]["state_sha256"])
    assert len(digests) == 1


def test_a_trace_has_a_row_for_each_step(start):
    loop, session, paths, _ = start(steps=5, trace=True)
    run_alone(loop, session)
    rows = [json.loads(row) for row in paths.trace.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    first, last = rows[0]["tensors"], rows[-1]["tensors"]
    assert first.keys() == last.keys()
    assert any(name.startswith("model/") for name in first)
    assert all(first[name] != last[name] for name in first if name.startswith("model/"))


def test_a_run_that_is_stopped_goes_on_from_its_checkpoint(start):
    loop, _, _, _ = start(steps=12)
    loop.membership.newer = lambda number: loop.progress.step >= 4
    assert loop.strategy.enter(ALONE, 0) is None
    assert loop.train(ALONE, 0) is None
    loop.leave("asked to leave")
    again, session, _, _ = start(steps=12)
    assert again.strategy.restore() == 4
    assert again.progress.position == 8
    assert run_alone(again, session, position=8).finished
    once, session, _, _ = start(steps=12)
    run_alone(once, session)
    assert state_sha256(again.strategy.state()) == state_sha256(once.strategy.state())


# ---- watchers of the user ----


def test_watchers_of_a_job_are_built_with_their_arguments(start, job_dir):
    watcher = {"name": "models.py:StepRecorder", "args": {"path": str(job_dir / "seen.txt")}}
    loop, session, _, _ = start(steps=3, watchers=[watcher], stop_early={"metric": "loss"})
    kinds = [type(one).__name__ for one in loop.progress.reporter.watchers]
    assert kinds == ["BestMetric", "EarlyStopping", "StepRecorder"]
    run_alone(loop, session)
    assert [row.split()[0] for row in (job_dir / "seen.txt").read_text().splitlines()] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("class Mine:\n    pass\n", "SH206", "has no method watch"),
        ("def Mine():\n    raise OSError('no disk')\n", "SH208", "watchers mine.py:Mine: OSError: no disk"),
    ],
)
def test_a_watcher_that_cannot_be_built_is_refused(start, job_dir, source, code, words):
    (job_dir / "mine.py").write_text(source)
    with pytest.raises(ShoalError, match=words) as caught:
        start(watchers=["mine.py:Mine"])
    assert caught.value.code == code


@pytest.mark.parametrize(("evaluate", "every"), [({"every_steps": 7}, 7), ({"every_epochs": 2}, 58), ({}, 29)], ids=str)
def test_when_a_job_evaluates(make, evaluate, every):
    assert make(evaluate=evaluate)[0].train_schedule.evaluate_every == every
