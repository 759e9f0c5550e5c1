"""Real servers and real workers, each a forked process, and a driver that decides tables and views from what happens.

Whatever is killed is killed with SIGKILL: from outside when a worker has said how far it is, or by the server itself at
a named moment (`Doom`), so that every moment of the protocol can be met without waiting for luck.
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

from shoal.checkpoint import live
from shoal.checkpoint.digest import state_sha256
from shoal.parallel.links.endpoint import Endpoint
from shoal.parallel.server import lying
from shoal.parallel.server.errands import Push
from shoal.parallel.server.host import Host
from shoal.parallel.server.keeper import Terms
from shoal.parallel.sync.base import Discarded
from shoal.parallel.sync.server import ServerSync
from shoal.plan.placement import Lost, Placement
from shoal.spec import table as tables
from shoal.spec.view import View
from shoal.wire.handshake import LinkError
from tests.parallel.crowd import _receive, _send
from tests.parallel.server.cargo import one_step

TOKEN = "token"
LONGEST_S = 60
FIRST_SERVER = 100


@dataclass(frozen=True)
class Doom:
    """A server kills itself at the so-manieth frame of this kind that it gets (any kind: None): `before` it looks at
    it, `after` it did what it asks for and before anything is sent, or when all that follows from it was `sent`."""

    kind: int | None = None
    count: int = 1
    when: str = "after"

    @classmethod
    def at_random(cls, chance, *kinds):
        return cls(chance.choice(kinds or [None]), chance.randint(1, 12), chance.choice(["before", "after", "sent"]))


@dataclass
class Child:
    pid: int
    up: int
    down: int
    alive: bool = True
    doomed: bool = False
    said: list = field(default_factory=list)


class Harbour:
    """`elsewhere(seat)` is true for servers that everybody reaches over TCP; `carries` are the workers' lanes."""

    def __init__(
        self, cargo, *, servers=2, backups=1, workers=2, steps=8, staleness=0.0, elsewhere=lambda seat: False, seed=0
    ):
        self.cargo, self.steps, self.staleness, self.elsewhere = cargo, steps, float(staleness), elsewhere
        self.chance = random.Random(seed)
        self.placement = Placement(servers=servers, backups=backups)
        self.children: dict[int, Child] = {}
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
        self.late: set[int] = set()
        """Workers that get a table only when all servers have it."""
        self.begun = mmap.mmap(-1, 8 * cargo.lanes)
        """The last step that each lane has pushed, or tried to: its clock is at most one more."""
        self._begun_at(0)
        self._next_server = FIRST_SERVER
        self._addresses = {}
        self._answers: dict[tuple[int, str], object] = {}
        self._patches = contextlib.ExitStack()
        self._torn = self._changing = False
        cargo.replica()  # what torch imports late is imported before anybody is forked

    # ---- a run ----

    def __enter__(self):
        self._patches.enter_context(patch.object(tables, "LEAST_CHUNK_BYTES", 512))
        self._patches.enter_context(patch.object(tables, "MOST_PIECE_BYTES", 2048))
        self._patches.enter_context(patch.object(lying, "LEAST_BYTES", 4096))
        for seat in self.workers:
            self._fork(seat, lambda up, down, seat=seat: _work(self, seat, up, down))
        self._start_servers()
        return self

    def __exit__(self, *_):
        for child in self.children.values():
            if child.alive:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
            os.close(child.up)
            os.close(child.down)
        self._patches.close()

    def sail(self, state=None):
        """Train to the end; what the workers have then, by seat. `state` is a checkpoint's, for all of them."""
        self.begin(state)
        return self.finish()

    def begin(self, state=None):
        self.until(lambda: all(seat in self._addresses for seat in self.workers))
        if state is not None:
            self._begun_at(state["step"])
            for seat in self.workers:
                self.say(seat, "resume", state)
        self.give_view(state["step"] if state else 0, None)

    def finish(self):
        self.until(lambda: all(seat in self.results for seat in self.workers))
        return self.results

    def _begun_at(self, step):
        memoryview(self.begun).cast("q")[:] = array.array("q", [step - 1] * self.cargo.lanes)

    def give_view(self, step, source):
        """The lanes are dealt anew, not always evenly."""
        number = self.view.number + 1 if self.view else 1
        lanes = list(range(self.cargo.lanes))
        owners = self.workers + [self.chance.choice(self.workers) for _ in lanes[len(self.workers) :]]
        self.chance.shuffle(owners)
        carries = {seat: [lane for lane in lanes if owners[lane] == seat] for seat in self.workers}
        addresses = {seat: self._addresses[seat] for seat in self.workers}
        saver = self.chance.choice(self.workers)
        self.view = View(
            number=number, carries=carries, addresses=addresses, position=2 * step, source=source, saver=saver
        )
        self.results = {}
        for seat in self.workers:
            self.say(seat, "view", self.view)

    def change_view(self):
        """As the driver does it: all stop and say where they are, and those behind get the state of the furthest."""
        self._torn, self._changing = False, True
        members = list(self.workers)
        for seat in members:
            self.say(seat, "abort", self.view.number)
        at = {seat: self.ask(seat, "halt") for seat in members}
        if self._torn:
            self.change_view()
            return
        step = max(at.values())
        source = next(seat for seat, there in at.items() if there == step)
        behind = [seat for seat, there in at.items() if there < step]
        if behind:
            state = self.ask(source, "state")
            for seat in behind:
                self.say(seat, "load", state)
        self._changing = False
        self.give_view(step, source if behind else None)

    # ---- facts ----

    def until(self, done):
        while not done():
            self.turn()
            if self._torn and not self._changing and self.view:
                self.change_view()

    def turn(self):
        """One message of a process, or its end."""
        poll = select.poll()
        ups = {child.up: seat for seat, child in self.children.items() if child.alive}
        for fd in ups:
            poll.register(fd, select.POLLIN)
        ready = poll.poll(1000 * LONGEST_S)
        if not ready:
            raise TimeoutError(f"nothing happens: step {self.step}, table {self.placement.table!r:.2000}, {self.acked}")
        fd = self.chance.choice(ready)[0]
        seat = ups[fd]
        try:
            kind, *rest = _receive(fd)
        except EOFError:
            self._ended(seat)
        else:
            getattr(self, f"_on_{kind}")(seat, *rest)
        self._decide()

    def _ended(self, seat):
        child = self.children[seat]
        os.waitpid(child.pid, 0)
        child.alive = False
        if seat in self.workers:
            self.workers.remove(seat)
            self._torn = True
        else:
            self.deaths += 1
            self.placement.gone(seat)

    def _decide(self):
        self._start_servers()
        table = self.placement.decide()
        assert not isinstance(table, Lost), table.why
        for seat in self.placement.dispensable():
            self.say(seat, "stop")
        if table is None:
            return
        seats = [seat for seat, child in self.children.items() if child.alive]
        self.chance.shuffle(seats)
        for seat in set(seats) - self.late:
            self.say(seat, "table", table)
        for act in list(self.on_table):
            act(table)
        for seat in self.late & set(seats):
            for server in table.addresses:
                self.ask(server, "learnt")
            self.say(seat, "table", table)

    def _start_servers(self):
        for _ in range(self.placement.missing()):
            seat, self._next_server = self._next_server, self._next_server + 1
            self.placement.expect(seat)
            self._fork(seat, lambda up, down, seat=seat: _serve(self, seat, up, down))

    def _on_address(self, seat, address):
        if self.elsewhere(seat):
            address = address.model_copy(update={"host_id": "elsewhere"})
        self.placement.arrived(seat, address)
        if self.placement.table:
            self.say(seat, "table", self.placement.table)

    def _on_hello(self, seat, address, cuts):
        self._addresses[seat] = address
        self.placement.sized(cuts)

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
        self.children[seat].said.append((step, why))

    def _on_answer(self, seat, question, value):
        self._answers[seat, question] = value

    def _on_raised(self, seat, text):
        raise AssertionError(f"{seat}: {text}")

    # ---- acts ----

    def say(self, seat, *words):
        with contextlib.suppress(BrokenPipeError):
            _send(self.children[seat].down, words)

    def ask(self, seat, question):
        self.say(seat, question)
        self.until(lambda: (seat, question) in self._answers or not self.children[seat].alive)
        return self._answers.pop((seat, question), {"table": None})

    @property
    def servers(self):
        """Those that live and are not about to die."""
        there = [s for s, child in self.children.items() if s >= FIRST_SERVER and child.alive and not child.doomed]
        return [seat for seat in there if seat in (self.placement.table.addresses if self.placement.table else ())]

    @property
    def whole(self):
        """Has every chunk as many holders as it should?"""
        table = self.placement.table
        copies = min(self.placement.backups + 1, self.placement.wanted)
        return table is not None and not any(table.filling) and all(len(chain) == copies for chain in table.chains)

    def spares(self, *seats):
        """Would every chunk still have a holder without these, wherever it is moved before they die?"""
        table = self.placement.table
        dying = {s for s, child in self.children.items() if child.doomed and child.alive} | set(seats)
        gone = {s for s, child in self.children.items() if not child.alive} | dying
        few = len(dying) <= self.placement.backups
        return table is not None and few and all(set(chain) - gone for chain in table.chains)

    def kill(self, *seats):
        for seat in seats:
            self.children[seat].doomed = True
            os.kill(self.children[seat].pid, signal.SIGKILL)

    def doom(self, seat, doom):
        self.children[seat].doomed = True
        self.say(seat, "doom", doom)

    def kill_some(self, most=2):
        """Any servers whose death loses nothing."""
        for seat in self.chance.sample(self.servers, min(self.chance.randint(1, most), len(self.servers))):
            if self.spares(seat):
                self.kill(seat)

    def scale(self, servers):
        self.placement.scale(servers)
        self._decide()

    def drain(self, seat):
        self.placement.leaves(seat, replace=True)
        self._decide()

    def cut(self):
        """A worker's line to a server breaks, and nobody dies."""
        self.say(self.chance.choice(self.servers), "cut", self.chance.choice(self.workers))

    def signal(self, seat, number):
        os.kill(self.children[seat].pid, number)

    def lose_worker(self):
        """One worker dies; the others go on with its lanes."""
        self.signal(self.chance.choice(self.workers), signal.SIGKILL)

    def dumps(self):
        """What each server holds of each chunk, as bytes, when all of them have the newest table."""
        while True:
            self.until(lambda: self.whole)
            found = {seat: self.ask(seat, "dump") for seat in self.placement.table.addresses}
            if {held["table"] for held in found.values()} == {self.placement.table.number}:
                return found

    def check_backups(self):
        """Is every copy of every chunk the same?"""
        found = self.dumps()
        for i, chain in enumerate(self.placement.table.chains):
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
        self.children[seat] = Child(pid, up_read, down_write)


# ---- a server ----


def _serve(harbour, seat, up, down):
    saying = threading.Lock()

    def tell(*words):
        with saying:
            _send(up, words)

    terms = Terms(harbour.cargo.lanes, harbour.staleness, harbour.cargo.kind)
    host = Host(seat, TOKEN, terms, bind="127.0.0.1", filled=lambda other, table: tell("filled", other, table))
    tell("address", host.endpoint.address)

    def listen():
        with contextlib.suppress(EOFError):
            while True:
                word, *rest = _receive(down)
                if word == "table":
                    host.learn(*rest)
                elif word == "doom":
                    host._soon(lambda rest=rest: _await_doom(host, *rest))
                elif word == "dump":
                    host._soon(lambda: tell("answer", "dump", _dump(host)))
                elif word == "cut":
                    host._soon(lambda rest=rest: _cut(host, *rest))
                elif word == "learnt":
                    host._soon(lambda: tell("answer", "learnt", host.keeper.number))
                elif word == "unsent":
                    host._soon(lambda: tell("answer", "unsent", max(x._unsent_bytes for x in host._lines.values())))
                else:
                    host.stop()

    threading.Thread(target=listen, daemon=True).start()
    host.run()


def _await_doom(host, doom):
    keeper, got, left = host.keeper, host.keeper.got, doom.count

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(line, frame):
        nonlocal left
        left -= doom.kind in (None, frame.kind)
        if left == 0 and doom.when == "before":
            die()
        got(line, frame)
        if left == 0:
            die() if doom.when == "after" else host._soon(die)

    keeper.got = watch


def _cut(host, seat):
    for line in [line for line in host._lines.values() if line.peer == seat]:
        host._drop(line)


def _dump(host):
    keeper = host.keeper
    chunks = {}
    for post in keeper.posts.values():
        for i in range(post.piece.first, post.piece.last):
            with contextlib.suppress(ValueError, LinkError):  # it holds nothing
                chunks[i] = live.pack(keeper.shard.take(i, i + 1))
    return {"table": keeper.number, "chunks": chunks, "failures": host.failures}


# ---- a worker ----


def _work(harbour, seat, up, down):
    cargo = harbour.cargo

    saying = threading.Lock()

    def tell(*words):
        with saying:
            _send(up, words)

    endpoint = Endpoint(TOKEN, serve=lambda sock, hello: None)
    replica = cargo.replica()
    sync = ServerSync(cargo.lanes, replica, staleness=harbour.staleness, endpoint=endpoint, token=TOKEN)
    tell("hello", endpoint.address, sync.cuts)
    orders, going = queue.SimpleQueue(), threading.Event()
    going.set()

    def listen():
        with contextlib.suppress(EOFError):
            while True:
                word, *rest = _receive(down)
                if word == "table":
                    sync.learn(*rest)
                elif word == "abort":
                    Push.answer_all = _ANSWER_ALL
                    sync.abort(*rest)
                elif word == "doom":
                    Push.answer_all = _dying
                elif word == "mute":
                    Push.answer_all = lambda self: None
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
            tell("answer", "state", live.pack({**replica.state(), "step": step}))
        elif word == "load":
            state = live.unpack(rest[0])
            replica.load_state(state)
            step = state["step"]
        elif word == "resume":
            replica.load_state(live.unpack(rest[0]["replica"]))
            step = rest[0]["step"]
            sync.load_state(step, live.unpack(rest[0]["sync"]))
        elif word == "view":
            step, outcome = _train(harbour, sync, replica, rest[0], seat, step, tell, going)
            if isinstance(outcome, str):
                tell("stopped", step, outcome)
            else:
                tell("done", rest[0].number, outcome)


_ANSWER_ALL = Push.answer_all


def _dying(self):
    """When one server knows that it may apply the sums, and the others do not."""
    tell = _ANSWER_ALL(self)

    def then_die(server, frame):
        tell(server, frame)
        server.line.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    return then_die


def _train(harbour, sync, replica, view, seat, step, tell, going):
    """The step at which it ended, and the result or why there is none."""
    if why := sync.reconfigure(view, seat):
        return step, why
    lanes = sorted(view.carries[seat])
    step = sync.first_step(step, lanes)
    begun = memoryview(harbour.begun).cast("q")
    while step < harbour.steps:
        going.wait()
        for lane in lanes:
            begun[lane] = max(begun[lane], step)
        outcome = one_step(replica, sync, harbour.cargo, step, lanes, halt=harbour.halts.get(step) == seat)
        if isinstance(outcome, Discarded):
            return step, outcome.why
        step += 1
        ahead = step - (min(begun) + 1)
        assert ahead <= harbour.staleness, f"step {step} was acknowledged {ahead} steps ahead of the slowest"
        tell("acked", step, float(outcome.loss), outcome.halt)
    if isinstance(gone := sync.settle(replica, 4 * step + 3), Discarded):
        return step, gone.why
    if isinstance(gone := sync.complete(replica, step), Discarded):
        return step, gone.why
    state = replica.state()
    kept = {"replica": live.pack(state), "sync": live.pack(sync.state()), "step": step}
    return step, {"sha256": state_sha256(state), "state": kept}
