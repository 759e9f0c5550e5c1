"""`sync: ddp`: close to what one worker gets, the same on all workers, and deaths are survived."""

import os
import signal
import threading

import pytest
import torch

from shoal.collectives import torch_group
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.transport.shared_memory import SharedMemory
from shoal.collectives.view_process_group import pick_backend
from shoal.errors import ShoalError
from shoal.spec.load import make_job
from shoal.strategies import torch_ddp
from shoal.strategies.torch_ddp import TorchDdpSync
from tests.collectives.worker_processes import RecordingReplica, WorkerProcesses, lane_sum, single_worker_total
from tests.conftest import CNN, GPT, MLP

THREE = {0: [3, 4], 1: [0, 1], 2: [2]}
LANES = 5
CPU = torch.device("cpu")


def workers_of(carries):
    return WorkerProcesses(
        carries, LANES, make_sync=lambda group: TorchDdpSync(LANES, group, backend="gloo", device=CPU)
    )


def close(found, expected):
    (step, tensors, count), (step_alone, alone_tensors, count_alone) = found, expected
    assert step == step_alone
    for a, b in zip(tensors, alone_tensors, strict=True):
        loose = {"rtol": 0.05, "atol": 0.05} if a.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(a, b, **loose)
    assert (count is None) == (count_alone is None)
    assert count is None or count.item() == count_alone.item()


def equal(totals):
    first, *others = totals
    return all(torch.equal(a, b) for other in others for a, b in zip(first[1], other[1], strict=True))


def leaked_resources(me):
    """Without the one pipe that libuv, inside torch's store, makes for the whole process and keeps."""
    found = me.leaked_resources()
    pipes = [one for one in found if one.startswith("pipe:")]
    return found if len(pipes) > 1 else [one for one in found if one not in pipes]


def some_lanes(*lanes):
    return lambda step, lane: lane_sum(step, lane) if lane in lanes else None


MAKERS = {
    "all lanes": lane_sum,
    "with counts": lambda step, lane: lane_sum(step, lane, counted=True),
    "a worker without samples": some_lanes(2, 3, 4),
    "only the last worker has samples": some_lanes(2),
}


@pytest.mark.parametrize("bucket_bytes", [torch_ddp.BUCKET_BYTES, 256])
@pytest.mark.parametrize("what", MAKERS)
def test_all_members_get_the_same_sum_and_one_worker_nearly_the_same(what, bucket_bytes):
    make = MAKERS[what]

    def act(me):
        torch_ddp.BUCKET_BYTES = bucket_bytes
        assert me.join() == ""
        replica = RecordingReplica(lane_sum(0, 0))
        outcomes = [me.sync.commit(replica, step, me.sums(make, step), halt=step == me.seat) for step in range(4)]
        assert me.group.gather(7, bytes([me.seat])) == {0: b"\0", 1: b"\1", 2: b"\2"}
        return replica.totals, [outcome.halt for outcome in outcomes], outcomes[0].bytes_sent, leaked_resources(me)

    with workers_of(THREE) as workers:
        results = workers.run(act)
    for step in range(4):
        assert equal([totals[step] for totals, *_ in results.values()])
        close(results[0][0][step], single_worker_total(make, LANES, step))
    for _, halts, bytes_sent, left in results.values():
        assert halts == [True, True, True, False]
        assert bytes_sent > 0
        assert left == []


def test_a_step_without_samples_does_not_count():
    def act(me):
        assert me.join() == ""
        return me.sync.commit(RecordingReplica(lane_sum(0, 0)), 0, me.sums(some_lanes(), 0))

    with workers_of(THREE) as workers:
        assert set(map(type, workers.run(act).values())) == {Discarded}


def test_one_worker_needs_nobody():
    def act(me):
        assert me.join() == ""
        replica = RecordingReplica(lane_sum(0, 0))
        assert isinstance(me.sync.commit(replica, 0, me.sums(lane_sum, 0)), Committed)
        return replica.totals[0], leaked_resources(me)

    of_another_test = SharedMemory(4096)
    with workers_of({4: [0, 1, 2, 3, 4]}) as workers:
        total, left = workers.run(act)[4]
    of_another_test.close()
    assert equal([total, single_worker_total(lane_sum, LANES, 0)])
    assert left == []


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(moment):
    """In the third call of what happens at this moment."""
    owner, name = {
        "meeting before the all-reduce": (torch_ddp.StepHeader, "pack"),
        "all-reduce": (torch_ddp.AllReduceBuffer, "allreduce"),
        "apply": (RecordingReplica, "apply"),
        "making the group": (torch_group, "_make_group"),
    }[moment]
    original, calls = getattr(owner, name), []

    def fatal(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3 or name == "_make_group":
            die()
        return original(*args, **kwargs)

    setattr(owner, name, fatal)


@pytest.mark.parametrize("moment", ["meeting before the all-reduce", "all-reduce", "apply", "making the group"])
def test_a_member_dies_and_the_others_go_on(moment):
    """Who waits inside gloo for a living member is woken by the driver, here by a thread that hears of the death."""

    def act(me):
        if me.seat == 1:
            die_in(moment)
        me.send("here")
        heard = threading.Thread(target=lambda: (me.receive(), me.group.abort(1)))
        heard.start()
        replica = RecordingReplica(lane_sum(0, 0))
        why = me.join()
        step = 0
        while not why:
            outcome = me.sync.commit(replica, step, me.sums(lane_sum, step))
            why = outcome.why if isinstance(outcome, Discarded) else ""
            step += not why
        heard.join()
        carries = {0: [0, 1, 2], 2: [3, 4]}
        assert me.join(2, carries) == ""
        outcomes = [me.sync.commit(replica, 10 + i, me.sums(lane_sum, 10 + i, carries)) for i in range(2)]
        assert set(map(type, outcomes)) == {Committed}
        return why, step, replica.totals[-1], leaked_resources(me)

    with workers_of(THREE) as workers:
        workers.start(act)
        for seat in (0, 1, 2):
            assert workers.result(seat) == "here"
        os.waitid(os.P_PID, workers.pids[1], os.WEXITED | os.WNOWAIT)
        for seat in (0, 2):
            workers.send(seat, "worker 1 died")
        results = [workers.result(seat) for seat in (0, 2)]
    assert equal([total for _, _, total, _ in results])
    steps = [step for _, step, _, _ in results]
    if moment == "apply":
        assert all(step in (2, 3) for step in steps)
    else:
        assert steps == [0 if moment == "making the group" else 2] * 2
    for why, _, total, left in results:
        assert why
        close(total, single_worker_total(lane_sum, LANES, 11))
        assert left == [] or moment == "making the group"  # gloo waits for the dead one until its time is over


@pytest.mark.parametrize("waits_in", ["making the group", "meeting before the all-reduce", "all-reduce"])
def test_abort_wakes_whoever_waits_for_a_member_that_lives_but_does_nothing(waits_in):
    def act(me):
        replica = RecordingReplica(lane_sum(0, 0))
        if me.seat == 2:
            sleep_in(waits_in, me)
            if me.join() == "":
                me.sync.commit(replica, 0, me.sums(lane_sum, 0))
            raise AssertionError("it should sleep for ever")
        asked = threading.Thread(target=lambda: (me.receive(), me.group.abort(1)))
        asked.start()
        why = me.join() or me.sync.commit(replica, 0, me.sums(lane_sum, 0)).why
        asked.join()  # the other one, who was asked first, may have left meanwhile
        assert me.group.aborted()
        assert isinstance(me.sync.commit(replica, 0, me.sums(lane_sum, 0)), Discarded)
        carries = {0: [0, 1, 2], 1: [3, 4]}
        assert me.join(2, carries) == ""
        me.group.abort(1)
        assert isinstance(me.sync.commit(replica, 0, me.sums(lane_sum, 0, carries)), Committed)
        return why

    def sleep_in(moment, me):
        owner, name = {
            "making the group": (torch_group, "_make_group"),
            "meeting before the all-reduce": (torch_ddp.StepHeader, "pack"),
            "all-reduce": (torch_ddp.AllReduceBuffer, "allreduce"),
        }[moment]
        setattr(owner, name, lambda *args, **kwargs: (me.send("sleeps"), threading.Event().wait()))

    with workers_of(THREE) as workers:
        workers.start(act)
        assert workers.result(2) == "sleeps"
        for seat in (0, 1):
            workers.send(seat, "do not wait for it")
        told = [workers.result(seat) for seat in (0, 1)]
        assert all(told)
        assert any("aborted" in why for why in told)


# ---- whole runs ----


@pytest.mark.parametrize(
    ("job", "numbers"),
    [(MLP, [1, 2, 3]), (CNN, [3]), (GPT, [2])],
    ids=lambda x: x["name"] if isinstance(x, dict) else "",
)
def test_any_number_of_workers_trains_to_a_similar_loss(job, numbers, run):
    """Momentum, AdamW, clipping, schedules, batch norm, dropout."""
    job = job | {"steps": 30}
    exact = run(job, lanes=6).receipt
    for workers in numbers:
        receipt = run(job, lanes=6, workers=workers, sync="ddp").receipt
        assert receipt.workers == workers
        assert receipt.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=0.02)
        assert receipt.samples_seen == exact.samples_seen
        assert (receipt.exact, "order of additions" in receipt.why) == (False, True)
        assert receipt.job_sha256 != exact.job_sha256


def test_kills_are_survived(run):
    kills = [30, 10]

    def look(paths, event, state):
        if kills and event.kind == "step" and event.step >= kills[-1] and len(state.training_workers) == 3:
            kills.pop()
            os.kill(list(state.training_workers)[len(kills)].pid, signal.SIGKILL)

    undisturbed = run(CNN, lanes=6, steps=100).receipt
    outcome = run(CNN, look, lanes=6, steps=100, workers=3, sync="ddp", elastic={"restarts": 9})
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.deaths_survived == 2
    assert outcome.receipt.samples_seen == undisturbed.samples_seen
    assert outcome.receipt.metrics["loss"] == pytest.approx(undisturbed.metrics["loss"], rel=0.5)


def test_nccl_without_cuda_is_an_error(run):
    outcome = run(MLP, sync={"kind": "ddp", "backend": "nccl"})
    assert outcome.error.code == "SH411"
    assert "sync.backend" in outcome.error.where
    assert pick_backend("auto", CPU) == "gloo"


def test_what_the_job_file_may_say():
    with pytest.raises(ShoalError, match="ring") as caught:
        make_job(MLP | {"sync": {"kind": "ddp", "backend": "ring"}}, check_names=False)
    assert "nccl" in caught.value.fix
    with pytest.raises(ShoalError, match="ddpp"):
        make_job(MLP | {"sync": "ddpp"}, check_names=False)
    with pytest.raises(ShoalError, match="backend") as caught:
        make_job(MLP | {"sync": {"kind": "lanes", "backend": "gloo"}}, check_names=False)
    assert "ddp" in caught.value.fix
