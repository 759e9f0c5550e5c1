"""Real servers and real workers, each a forked process, and a driver that decides tables and views from what happens.

Whatever is killed is killed with SIGKILL: from outside when a worker has said how far it is, or by the server itself at
a named moment (`CrashPoint`), so that every moment of the protocol can be met without waiting for luck.
"""

import array
import contextlib
import mmap
import os
import queue
import random
import select
import signal
import threading
import traceback
from dataclasses import dataclass, field
from unittest.mock import patch

import torch

from shoal.checkpoint import state_format
from shoal.checkpoint.sha256 import state_sha256
from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Discarded
from shoal.collectives.transport.endpoint import Endpoint
from shoal.net.errors import LinkError
from shoal.paramserver import push_buffers
from shoal.paramserver.event_loop import ServerLoop
from shoal.paramserver.requests import Push
from shoal.paramserver.server import ServerConfig
from shoal.plan.chunk_placement import ChunkPlacement, ChunksLost
from shoal.spec import chunk_table as tables
from shoal.spec.view import View
from shoal.strategies.parameter_server_sync import ParameterServerSync
from tests.collectives.worker_processes import _receive, _send
from tests.paramserver.workloads import one_step

TOKEN = "token"
TIMEOUT_S = 60
FIRST_SERVER = 100


@dataclass(frozen=True)
class CrashPoint:
    """A server kills itself at the so-manieth frame of this kind that it gets (any kind: None): `before` it looks at
    it, `after` it did what it asks for and before anything is sent, or when all that follows from it was `sent`."""

    frame_kind: int | None = None
    count: int = 1
    when: str = "after"

    @classmethod
    def at_random(cls, rng, *kinds):
        return cls(rng.choice(kinds or [None]), rng.randint(1, 12), rng.choice(["before", "after", "sent"]))


@dataclass
class ChildProcess:
    pid: int
    from_child: int
    to_child: int
    alive: bool = True
    will_die: bool = False
    stops: list = field(default_factory=list)


class Cluster:
    """`is_remote(seat)` is true for servers that everybody reaches over TCP; `carries` are the workers' lanes."""

    def __init__(
        self, workload, *, servers=2, backups=1, workers=2, steps=8, staleness=0.0, is_remote=lambda seat: False, seed=0
    ):
        self.workload, self.steps, self.staleness, self.is_remote = workload, steps, float(staleness), is_remote
        self.rng = random.Random(seed)
        self.placement = ChunkPlacement(servers=servers, backups=backups)
        self.children: dict[int, ChildProcess] = {}
        self.workers: list[int] = list(range(workers))
        self.view: View | None = None
        self.step = 0
        self.acked: dict[int, int] = {}
        self.results: dict[int, dict] = {}
        self.losses: dict[int, dict[int, float]] = {}
        self.deaths = 0
        self.halts: dict[int, int] = {}
        """At which steps which worker says that it must stop. To be set before anybody is forked."""
        self.halted: list[tuple[int, int]] = []
        self.on_step: dict[int, list] = {}
        self.on_table: list = []
        self.late_seats: set[int] = set()
        """Workers that get a table only when all servers have it."""
        self.pushed_steps = mmap.mmap(-1, 8 * workload.lanes)
        """The last step that each lane has pushed, or tried to: its clock is at most one more."""
        self._reset_pushed_steps(0)
        self._next_server = FIRST_SERVER
        self._addresses = {}
        self._answers: dict[tuple[int, str], object] = {}
        self._patches = contextlib.ExitStack()
        self._worker_lost = self._changing = False
        workload.replica()  # what torch imports late is imported before anybody is forked

    # ---- a run ----

    def __enter__(self):
        self._patches.enter_context(patch.object(tables, "MIN_CHUNK_BYTES", 512))
        self._patches.enter_context(patch.object(tables, "MAX_PIECE_BYTES", 2048))
        self._patches.enter_context(patch.object(push_buffers, "ZERO_COPY_MIN_BYTES", 4096))
        for seat in self.workers:
            self._fork(seat, lambda up, down, seat=seat: _worker_main(self, seat, up, down))
        self._start_servers()
        return self

    def __exit__(self, *_):
        for child in self.children.values():
            if child.alive:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            os.close(child.from_child)
            os.close(child.to_child)
        self._patches.close()

    def train(self, state=None):
        """Train to the end; what the workers have then, by seat. `state` is a checkpoint's, for all of them."""
        self.begin(state)
        return self.finish()

    def begin(self, state=None):
        self.run_until(lambda: all(seat in self._addresses for seat in self.workers))
        if state is not None:
            self._reset_pushed_steps(state["step"])
            for seat in self.workers:
                self.send(seat, "resume", state)
        self.publish_view(state["step"] if state else 0, None)

    def finish(self):
        self.run_until(lambda: all(seat in self.results for seat in self.workers))
        return self.results

    def _reset_pushed_steps(self, step):
        memoryview(self.pushed_steps).cast("q")[:] = array.array("q", [step - 1] * self.workload.lanes)

    def publish_view(self, step, source):
        """The lanes are dealt anew, not always evenly."""
        number = self.view.number + 1 if self.view else 1
        lanes = list(range(self.workload.lanes))
        owners = self.workers + [self.rng.choice(self.workers) for _ in lanes[len(self.workers) :]]
        self.rng.shuffle(owners)
        carries = {seat: [lane for lane in lanes if owners[lane] == seat] for seat in self.workers}
        addresses = {seat: self._addresses[seat] for seat in self.workers}
        saver = self.rng.choice(self.workers)
        self.view = View(
            number=number, carries=carries, addresses=addresses, position=2 * step, source=source, saver=saver
        )
        self.results = {}
        for seat in (*self.all_servers, *self.workers):
            self.send(seat, "view", self.view)

    def change_view(self):
        """As the driver does it: all stop and say where they are, and those behind get the state of the furthest."""
        self._worker_lost, self._changing = False, True
        members = list(self.workers)
        for seat in members:
            self.send(seat, "abort", self.view.number)
        at = {seat: self.request(seat, "halt") for seat in members}
        if self._worker_lost:
            self.change_view()
            return
        step = max(at.values())
        source = next(seat for seat, there in at.items() if there == step)
        behind = [seat for seat, there in at.items() if there < step]
        if behind:
            state = self.request(source, "state")
            for seat in behind:
                self.send(seat, "load", state)
        self._changing = False
        self.publish_view(step, source if behind else None)

    # ---- facts ----

    def run_until(self, done):
        while not done():
            self.poll()
            if self._worker_lost and not self._changing and self.view:
                self.change_view()

    def poll(self):
        """One message of a process, or its end."""
        poll = select.poll()
        ups = {child.from_child: seat for seat, child in self.children.items() if child.alive}
        for fd in ups:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(1000 * TIMEOUT_S)
        if not ready:
            raise TimeoutError(
                f"nothing happens: step {self.step}, table {self.placement.chunk_table!r:.2000}, {self.acked}"
            )
        fd = self.rng.choice(ready)[0]
        seat = ups[fd]
        try:
            kind, *rest = _receive(fd)
        except EOFError:
            self._on_exit(seat)
        else:
            getattr(self, f"_on_{kind}")(seat, *rest)
        self._decide()

    def _on_exit(self, seat):
        child = self.children[seat]
        os.waitpid(child.pid, 0)
        child.alive = False
        if seat in self.workers:
            self.workers.remove(seat)
            self._worker_lost = True
        else:
            self.deaths += 1
            self.placement.gone(seat)

    def _decide(self):
        self._start_servers()
        table = self.placement.decide()
        assert not isinstance(table, ChunksLost), table.why
        for seat in self.placement.releasable_seats():
            self.send(seat, "stop")
        if table is None:
            return
        seats = [seat for seat, child in self.children.items() if child.alive]
        self.rng.shuffle(seats)
        for seat in set(seats) - self.late_seats:
            self.send(seat, "table", table)
        for act in list(self.on_table):
            act(table)
        for seat in self.late_seats & set(seats):
            for server in table.addresses:
                self.request(server, "learnt")
            self.send(seat, "table", table)

    def _start_servers(self):
        for _ in range(self.placement.missing_servers()):
            seat, self._next_server = self._next_server, self._next_server + 1
            self.placement.expect(seat)
            self._fork(seat, lambda up, down, seat=seat: _server_main(self, seat, up, down))

    def _on_address(self, seat, address):
        if self.is_remote(seat):
            address = address.model_copy(update={"host_id": "elsewhere"})
        self.placement.arrived(seat, address)
        if self.placement.chunk_table:
            self.send(seat, "table", self.placement.chunk_table)
        if self.view:
            self.send(seat, "view", self.view)

    def _on_hello(self, seat, address, cuts):
        self._addresses[seat] = address
        self.placement.set_boundaries(cuts)

    def _on_filled(self, seat, other, table):
        self.placement.filled(seat, other, table)

    def _on_acked(self, seat, step, loss, halt):
        self.acked[seat] = step
        if halt:
            self.halted.append((seat, step))
        self.losses.setdefault(seat, {})[step] = loss
        while self.step < step:
            self.step += 1
            for act in self.on_step.pop(self.step, []):
                act()

    def _on_done(self, seat, view, result):
        if view == self.view.number:
            self.results[seat] = result

    def _on_stopped(self, seat, step, why):
        self.children[seat].stops.append((step, why))

    def _on_answer(self, seat, question, value):
        self._answers[seat, question] = value

    def _on_raised(self, seat, text):
        raise AssertionError(f"{seat}: {text}")

    # ---- acts ----

    def send(self, seat, *words):
        with contextlib.suppress(BrokenPipeError):
            _send(self.children[seat].to_child, words)

    def request(self, seat, question):
        self.send(seat, question)
        self.run_until(lambda: (seat, question) in self._answers or not self.children[seat].alive)
        return self._answers.pop((seat, question), {"table": None})

    @property
    def all_servers(self):
        return [seat for seat, child in self.children.items() if seat >= FIRST_SERVER and child.alive]

    @property
    def servers(self):
        """Those that live and are not about to die."""
        there = [s for s, child in self.children.items() if s >= FIRST_SERVER and child.alive and not child.will_die]
        return [
            seat
            for seat in there
            if seat in (self.placement.chunk_table.addresses if self.placement.chunk_table else ())
        ]

    @property
    def fully_replicated(self):
        """Has every chunk as many holders as it should?"""
        table = self.placement.chunk_table
        copies = min(self.placement.backups + 1, self.placement.wanted_servers)
        return table is not None and not any(table.filling) and all(len(chain) == copies for chain in table.chains)

    @property
    def dying(self):
        """Those whose death is certain and was not seen yet."""
        return {seat for seat, child in self.children.items() if child.will_die and child.alive}

    def survives_without(self, *seats):
        """Would every chunk still have a holder without these, wherever it is moved before they die?"""
        table = self.placement.chunk_table
        dying = self.dying | set(seats)
        gone = {s for s, child in self.children.items() if not child.alive} | dying
        few = len(dying) <= self.placement.backups
        return table is not None and few and all(set(chain) - gone for chain in table.chains)

    def kill(self, *seats):
        for seat in seats:
            self.children[seat].will_die = True
            os.kill(self.children[seat].pid, signal.SIGKILL)

    def schedule_crash(self, seat, crash_point):
        self.children[seat].will_die = True
        self.send(seat, "doom", crash_point)

    def kill_random_servers(self, most=2):
        """Any servers whose death loses nothing."""
        for seat in self.rng.sample(self.servers, min(self.rng.randint(1, most), len(self.servers))):
            if self.survives_without(seat):
                self.kill(seat)

    def scale(self, servers):
        self.placement.scale(servers)
        self._decide()

    def drain(self, seat):
        self.placement.drain(seat, replace=True)
        self._decide()

    def break_connection(self):
        """A worker's line to a server breaks, and nobody dies."""
        self.send(self.rng.choice(self.servers), "cut", self.rng.choice(self.workers))

    def signal(self, seat, number):
        os.kill(self.children[seat].pid, number)

    def kill_random_worker(self):
        """One worker dies; the others go on with its lanes."""
        self.signal(self.rng.choice(self.workers), signal.SIGKILL)

    def dump_servers(self):
        """What each server holds of each chunk, as bytes, when all of them have the newest table."""
        while True:
            self.run_until(lambda: self.fully_replicated)
            found = {seat: self.request(seat, "dump") for seat in self.placement.chunk_table.addresses}
            if {held["table"] for held in found.values()} == {self.placement.chunk_table.number}:
                return found

    def assert_backups_equal(self):
        """Is every copy of every chunk the same?"""
        found = self.dump_servers()
        for i, chain in enumerate(self.placement.chunk_table.chains):
            contents = {found[seat]["chunks"][i] for seat in chain}
            assert len(contents) == 1, f"chunk {i}: {chain} hold different things"
        failed = {seat: held["failures"] for seat, held in found.items() if held["failures"]}
        assert not failed, failed

    def _fork(self, seat, act):
        up_read, up_write = os.pipe()
        down_read, down_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(up_read)
                os.close(down_write)
                torch.set_num_threads(1)
                act(up_write, down_read)
            except BaseException:
                _send(up_write, ("raised", traceback.format_exc()))
            finally:
                os._exit(0)
        os.close(up_write)
        os.close(down_read)
        self.children[seat] = ChildProcess(pid, up_read, down_write)


# ---- a server ----


def _server_main(cluster, seat, up, down):
    saying = threading.Lock()

    def tell(*words):
        with saying:
            _send(up, words)

    config = ServerConfig(
        cluster.workload.lanes, cluster.staleness, cluster.workload.optimizer_class, waits_for_views=True
    )
    server_loop = ServerLoop(
        seat, TOKEN, config, bind="127.0.0.1", on_filled=lambda other, table: tell("filled", other, table)
    )
    tell("address", server_loop.endpoint.address)

    def listen():
        with contextlib.suppress(EOFError):
            while True:
                word, *rest = _receive(down)
                if word == "table":
                    server_loop.set_chunk_table(*rest)
                elif word == "view":
                    server_loop.set_view(*rest)
                elif word == "doom":
                    server_loop._call_soon(lambda rest=rest: _install_crash_point(server_loop, *rest))
                elif word == "dump":
                    server_loop._call_soon(lambda: tell("answer", "dump", _dump(server_loop)))
                elif word == "cut":
                    server_loop._call_soon(lambda rest=rest: _drop_connections(server_loop, *rest))
                elif word == "learnt":
                    server_loop._call_soon(lambda: tell("answer", "learnt", server_loop.server.chunk_table_number))
                elif word == "unsent":
                    server_loop._call_soon(
                        lambda: tell(
                            "answer", "unsent", max(x._unsent_bytes for x in server_loop._connections.values())
                        )
                    )
                else:
                    server_loop.stop()

    threading.Thread(target=listen, daemon=True).start()
    server_loop.run()


def _install_crash_point(server_loop, crash_point):
    server, handle_frame, left = server_loop.server, server_loop.server.handle_frame, crash_point.count

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(connection, frame):
        nonlocal left
        left -= crash_point.frame_kind in (None, frame.kind)
        if left == 0 and crash_point.when == "before":
            die()
        handle_frame(connection, frame)
        if left == 0:
            die() if crash_point.when == "after" else server_loop._call_soon(die)

    server.handle_frame = watch


def _drop_connections(server_loop, seat):
    for connection in [one for one in server_loop._connections.values() if one.peer == seat]:
        server_loop._disconnect(connection)


def _dump(server_loop):
    server = server_loop.server
    chunks = {}
    for piece_state in server.piece_states.values():
        for i in range(piece_state.piece.first_chunk, piece_state.piece.end_chunk):
            with contextlib.suppress(ValueError, LinkError):  # it holds nothing
                chunks[i] = state_format.pack_state(server.chunk_store.read_state(i, i + 1))
    return {"table": server.chunk_table_number, "chunks": chunks, "failures": server_loop.failures}


# ---- a worker ----


def _worker_main(cluster, seat, up, down):
    workload = cluster.workload

    saying = threading.Lock()

    def tell(*words):
        with saying:
            _send(up, words)

    endpoint = Endpoint(TOKEN)
    replica = workload.replica()
    group = ViewGroup(endpoint, TOKEN)
    sync = ParameterServerSync(workload.lanes, replica, group=group, token=TOKEN, staleness=cluster.staleness)
    tell("hello", endpoint.address, sync.chunk_offsets)
    orders, going = queue.SimpleQueue(), threading.Event()
    going.set()

    def listen():
        with contextlib.suppress(EOFError):
            while True:
                word, *rest = _receive(down)
                if word == "table":
                    sync.set_chunk_table(*rest)
                elif word == "abort":
                    Push.follow_up = _ANSWER_ALL
                    group.abort(*rest)
                elif word == "doom":
                    Push.follow_up = _die_after_first_answer
                elif word == "mute":
                    Push.follow_up = lambda self: None
                    tell("answer", "mute", True)
                elif word in ("pause", "go"):
                    going.clear() if word == "pause" else going.set()
                else:
                    orders.put((word, *rest))

    threading.Thread(target=listen, daemon=True).start()
    step = 0
    while True:
        word, *rest = orders.get()
        if word == "halt":
            tell("answer", "halt", step)
        elif word == "state":
            tell("answer", "state", state_format.pack_state({**replica.state(), "step": step}))
        elif word == "load":
            state = state_format.unpack_state(rest[0])
            replica.load_state(state)
            step = state["step"]
        elif word == "resume":
            replica.load_state(state_format.unpack_state(rest[0]["replica"]))
            step = rest[0]["step"]
            sync.load_state(step, state_format.unpack_state(rest[0]["sync"]))
        elif word == "view":
            step, outcome = _train(cluster, sync, replica, rest[0], seat, step, tell, going)
            if isinstance(outcome, str):
                tell("stopped", step, outcome)
            else:
                tell("done", rest[0].number, outcome)


_ANSWER_ALL = Push.follow_up


def _die_after_first_answer(self):
    """When one server knows that it may apply the sums, and the others do not."""
    tell = _ANSWER_ALL(self)

    def then_die(server, frame):
        tell(server, frame)
        server.connection.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    return then_die


def _train(cluster, sync, replica, view, seat, step, tell, going):
    """The step at which it ended, and the result or why there is none."""
    if discarded := sync.reconfigure(view, seat):
        return step, discarded.why
    lanes = sorted(view.carries[seat])
    step = sync.first_step(step, lanes)
    begun = memoryview(cluster.pushed_steps).cast("q")
    while step < cluster.steps:
        going.wait()
        for lane in lanes:
            begun[lane] = max(begun[lane], step)
        outcome = one_step(replica, sync, cluster.workload, step, lanes, halt=cluster.halts.get(step) == seat)
        if isinstance(outcome, Discarded):
            return step, outcome.why
        step += 1
        ahead = step - (min(begun) + 1)
        assert ahead <= cluster.staleness, f"step {step} was acknowledged {ahead} steps ahead of the slowest"
        tell("acked", step, float(outcome.loss), outcome.halt)
    if isinstance(gone := sync.barrier(replica, step), Discarded):
        return step, gone.why
    if isinstance(gone := sync.pull_state(replica, step), Discarded):
        return step, gone.why
    state = replica.state()
    try:
        of_sync = state_format.pack_state(sync.state())
    except LinkError as failure:  # a new view came meanwhile
        return step, str(failure)
    kept = {"replica": state_format.pack_state(state), "sync": of_sync, "step": step}
    return step, {"sha256": state_sha256(state), "state": kept}
