"""The exchange that stays on the device, shown with gloo on the CPU: the bits of the exchange through host memory."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch

from shoal.collectives import device_allreduce
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.view_process_group import pick_backend
from shoal.spec.load import make_job
from shoal.strategies.device_sync import DeviceAllReduceSync
from shoal.strategies.make import WholeJobModel
from shoal.strategies.ordered_sync import OrderedAllReduceSync
from tests.collectives.worker_processes import RecordingReplica, WorkerProcesses, lane_sum, single_worker_total
from tests.conftest import MLP
from tests.strategies.test_torch_ddp import MAKERS, equal, leaked_resources, some_lanes

LANES = 5
CPU = torch.device("cpu")
VIEWS = {
    "three members, lanes apart": {0: [3, 4], 1: [0, 1], 2: [2]},
    "two members": {0: [0, 1, 2], 1: [3, 4]},
    "blocks that do not fit the tree": {0: [1, 2], 1: [0, 3, 4]},
}


def workers_of(carries):
    return WorkerProcesses(carries, LANES, make_sync=lambda group: DeviceAllReduceSync(LANES, group, device=CPU))


def same_bits(found, expected):
    (step, tensors, count), (step_alone, alone_tensors, count_alone) = found, expected
    assert step == step_alone
    assert all(torch.equal(a, b) for a, b in zip(tensors, alone_tensors, strict=True))
    assert (count is None) == (count_alone is None)
    assert count is None or count.item() == count_alone.item()


@pytest.mark.parametrize("carries", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("what", MAKERS)
def test_all_members_get_the_bits_of_one_worker(what, carries):
    make = MAKERS[what]

    def act(me):
        assert me.join() == ""
        replica = RecordingReplica(lane_sum(0, 0))
        outcomes = [me.sync.commit(replica, step, me.sums(make, step), halt=step == me.seat) for step in range(4)]
        return replica.totals, [outcome.halt for outcome in outcomes], outcomes[0].bytes_sent, leaked_resources(me)

    with workers_of(carries) as workers:
        results = workers.run(act)
    for totals, halts, bytes_sent, left in results.values():
        for step in range(4):
            same_bits(totals[step], single_worker_total(make, LANES, step))
        assert halts == [step in carries for step in range(4)]
        assert bytes_sent > 0
        assert left == []


def test_a_step_without_samples_does_not_count():
    def act(me):
        assert me.join() == ""
        return me.sync.commit(RecordingReplica(lane_sum(0, 0)), 0, me.sums(some_lanes(), 0))

    with workers_of(VIEWS["two members"]) as workers:
        assert set(map(type, workers.run(act).values())) == {Discarded}


@pytest.mark.parametrize("method", ["write", "run"])
def test_a_member_dies_and_the_others_go_on(method):
    """Before the members meet, and in the exchange itself."""

    def act(me):
        if me.seat == 1:
            original, calls = getattr(device_allreduce.DeviceAllReduce, method), []

            def fatal(*args, **kwargs):
                calls.append(1)
                if len(calls) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)

            setattr(device_allreduce.DeviceAllReduce, method, fatal)
        me.send("here")
        heard = threading.Thread(target=lambda: (me.receive(), me.group.abort(1)))
        heard.start()
        replica, step, why = RecordingReplica(lane_sum(0, 0)), 0, me.join()
        while not why:
            outcome = me.sync.commit(replica, step, me.sums(lane_sum, step))
            why = outcome.why if isinstance(outcome, Discarded) else ""
            step += not why
        heard.join()
        carries = {0: [0, 1, 2], 2: [3, 4]}
        assert me.join(2, carries) == ""
        assert isinstance(me.sync.commit(replica, 10, me.sums(lane_sum, 10, carries)), Committed)
        return step, replica.totals[-1], leaked_resources(me)

    with workers_of(VIEWS["three members, lanes apart"]) as workers:
        workers.start(act)
        for seat in (0, 1, 2):
            assert workers.result(seat) == "here"
        os.waitid(os.P_PID, workers.pids[1], os.WEXITED | os.WNOWAIT)
        for seat in (0, 2):
            workers.send(seat, "worker 1 died")
        results = [workers.result(seat) for seat in (0, 2)]
    assert [step for step, _, _ in results] == [2, 2]
    assert equal([total for _, total, _ in results])
    for _, total, left in results:
        same_bits(total, single_worker_total(lane_sum, LANES, 10))
        assert left == []


@pytest.mark.parametrize(
    ("exchange", "device", "nccl", "kind"),
    [
        ("auto", "cuda", True, DeviceAllReduceSync),
        ("auto", "cuda", False, OrderedAllReduceSync),
        ("auto", "cpu", True, OrderedAllReduceSync),
        ("host", "cuda", True, OrderedAllReduceSync),
        ("device", "cpu", False, DeviceAllReduceSync),
    ],
)
def test_the_exchange_stays_on_the_device_where_nccl_is_there(monkeypatch, exchange, device, nccl, kind):
    """No GPU is needed to choose."""
    for place in ("shoal.strategies.make", "shoal.collectives.view_process_group"):
        monkeypatch.setattr(f"{place}.has_nccl", lambda: nccl)
    job = make_job(MLP | {"sync": {"kind": "lanes", "exchange": exchange}}, check_names=False)
    model = SimpleNamespace(job=job, replica=SimpleNamespace(device=torch.device(device)))
    publisher = SimpleNamespace(publish_total=lambda *_: None)
    context = SimpleNamespace(peers=SimpleNamespace(state_publisher=publisher))
    assert type(WholeJobModel._plain_sync(model, SimpleNamespace(on_abort=[]), context)) is kind
    assert pick_backend("auto", torch.device(device)) == ("nccl" if nccl and device == "cuda" else "gloo")
