"""Real workers for the tests of the exchange: forked processes, each with an endpoint and a sync of its own.

What a worker does is a function `act(worker)` of the test; what it returns comes back over a pipe.
"""

import contextlib
import os
import pickle
import select
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.collectives.group import ViewGroup
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.transport.endpoint import Endpoint
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import LaneSum, add
from shoal.spec.view import View, position_of
from shoal.strategies.base import GradientSync
from shoal.strategies.ordered_sync import OrderedAllReduceSync

TOKEN = "token"
TIMEOUT_S = 60


class RecordingReplica:
    """Keeps the totals instead of applying them."""

    device = torch.device("cpu")

    def __init__(self, template):
        self.template = template
        self.totals = []

    def sum_template(self):
        return self.template

    def apply(self, step, total):
        kept = [t.clone() for t in (*total.grads, *total.float_buffers, *total.int_buffers, total.loss)]
        self.totals.append((step, kept, None if total.count is None else total.count.clone()))
        return total.loss


@dataclass
class WorkerHandle:
    seat: int
    lanes: int
    carries: dict[int, list[int]]
    addresses: dict
    peers: PeerServices
    group: ViewGroup
    sync: GradientSync
    send: Callable[[object], None]
    receive: Callable[[], object]
    inherited: set[str]

    @property
    def endpoint(self) -> Endpoint:
        return self.peers.endpoint

    def view(self, number=1, carries=None, step=0):
        carries, position = carries or self.carries, position_of(step, evaluated=False)
        return View(number=number, carries=carries, addresses=self.addresses, position=position)

    def join(self, number=1, carries=None, step=0):
        """'' when all members have come, or why that failed."""
        discarded = self.sync.reconfigure(self.view(number, carries, step), self.seat)
        return discarded.why if discarded else ""

    def leaked_resources(self):
        """After this worker has closed everything: descriptors and shared memory that it should not have any more."""
        self.sync.close()
        self.peers.close()
        return sorted((open_descriptors() | shared_memory_maps()) - self.inherited)

    def sums(self, make, step, carries=None):
        """The tree over this worker's lanes; `make(step, lane)` gives a LaneSum or None."""
        tree = TreeSum(self.lanes, add)
        for lane in (carries or self.carries)[self.seat]:
            tree.push_lane(lane, make(step, lane))
        return tree


class WorkerProcesses:
    """`remote_seats` are seats that others reach over TCP, as if they were on another host; `make_sync(group)` makes
    the sync of a worker."""

    def __init__(self, carries, lanes, *, remote_seats=(), make_sync=None):
        self.carries = carries
        self.lanes = lanes
        self.remote_seats = remote_seats
        self.make_sync = make_sync or (lambda group: OrderedAllReduceSync(lanes, group))
        self.pids = {}
        self._pipes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fds in self._pipes.values():
            for fd in fds:
                os.close(fd)

    def start(self, act):
        told = {seat: self._fork(seat, act) for seat in self.carries}
        addresses = {}
        for seat in told:
            address = self._read(seat)
            addresses[seat] = (
                address.model_copy(update={"host_id": "elsewhere"}) if seat in self.remote_seats else address
            )
        for seat in told:
            _send(self._pipes[seat][1], addresses)
        return self

    def run(self, act):
        """What each worker's `act` returned, by seat."""
        self.start(act)
        return {seat: self.result(seat) for seat in self.carries}

    def result(self, seat):
        outcome, value = self._read(seat)
        assert outcome == "returned", value
        return value

    def send(self, seat, value):
        """To a worker that will `receive` it."""
        _send(self._pipes[seat][1], value)

    def kill(self, seat):
        os.kill(self.pids[seat], signal.SIGKILL)

    def _read(self, seat):
        fd = self._pipes[seat][0]
        if not select.select([fd], [], [], TIMEOUT_S)[0]:
            raise TimeoutError(f"worker {seat} says nothing")
        return _receive(fd)

    def _fork(self, seat, act):
        up_read, up_write = os.pipe()
        down_read, down_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(up_read)
            os.close(down_write)
            self._worker_main(seat, act, up_write, down_read)
        os.close(up_write)
        os.close(down_read)
        self.pids[seat] = pid
        self._pipes[seat] = (up_read, down_write)

    def _worker_main(self, seat, act, up, down):
        try:
            torch.set_num_threads(1)
            inherited = open_descriptors() | shared_memory_maps()  # of tests before this one
            peers = PeerServices(TOKEN, bind="127.0.0.1")
            _send(up, peers.endpoint.address)
            group = ViewGroup(peers.endpoint, TOKEN)
            sync = self.make_sync(group)
            send = lambda value: _send(up, ("returned", value))  # noqa: E731
            receive = lambda: _receive(down)  # noqa: E731
            worker = WorkerHandle(
                seat, self.lanes, self.carries, receive(), peers, group, sync, send, receive, inherited
            )
            _send(up, ("returned", act(worker)))
        except BaseException:
            _send(up, ("raised", traceback.format_exc()))
        finally:
            os._exit(0)


def open_descriptors():
    """What this process has open, by the names that the kernel gives."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def shared_memory_maps():
    with open("/proc/self/maps") as file:
        return {line for line in file if "memfd:shoal" in line}


def _send(fd, value):
    content = pickle.dumps(value)
    view = memoryview(len(content).to_bytes(8, "little") + content)
    while view:
        view = view[os.write(fd, view) :]


def _receive(fd):
    size = int.from_bytes(_read_exactly(fd, 8), "little")
    return pickle.loads(_read_exactly(fd, size))


def _read_exactly(fd, size):
    content = b""
    while len(content) < size:
        part = os.read(fd, size - len(content))
        if not part:
            raise EOFError("the worker is gone")
        content += part
    return content


def lane_sum(step, lane, sizes=((33, 7), (257,)), *, counted=False, more_kinds=True):
    """A made-up lane; every number tells where it comes from, and sums of them depend on the order."""
    generator = torch.Generator().manual_seed(1000 * step + lane)
    grads = [torch.randn(size, generator=generator) for size in sizes]
    float_buffers, int_buffers = [], []
    if more_kinds:
        grads.append(torch.randn(129, generator=generator).bfloat16())
        grads.append(torch.randn(4, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last))
        float_buffers = [torch.randn(17, generator=generator), torch.randn(3, generator=generator, dtype=torch.float64)]
        int_buffers = [torch.tensor(lane), torch.tensor([lane % 2 == 0, True])]
    loss = torch.randn((), generator=generator, dtype=torch.float64)
    count = torch.tensor(float(lane + 1), dtype=torch.float64) if counted else None
    return LaneSum(grads, float_buffers, int_buffers, loss, count)


def single_worker_total(make, lanes, step):
    """What one worker that carries everything gets."""
    tree = TreeSum(lanes, add)
    for lane in range(lanes):
        tree.push_lane(lane, make(step, lane))
    replica = RecordingReplica(None)
    replica.apply(step, tree.total())
    return replica.totals[0]


def assert_same_bits(a, b):
    (step_a, tensors_a, count_a), (step_b, tensors_b, count_b) = a, b
    assert step_a == step_b
    assert len(tensors_a) == len(tensors_b)
    for x, y in zip(tensors_a, tensors_b, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x.contiguous().flatten().view(torch.uint8), y.contiguous().flatten().view(torch.uint8))
    assert (count_a is None) == (count_b is None)
    assert count_a is None or count_a.item() == count_b.item()
