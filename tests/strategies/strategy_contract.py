"""What every strategy must do, whatever it is made of: members are real processes, and the test is their driver.

A body is a change of one small job; its strategy is made as a worker makes it. See `test_strategies.py` for the bodies.
"""

import contextlib
import os
import signal
import threading
from dataclasses import dataclass, field

import torch

from shoal.checkpoint.sha256 import state_sha256, weights_sha256
from shoal.collectives.outcome import Committed, Discarded
from shoal.events import EventWriter
from shoal.fleet.membership import InMemoryMembership
from shoal.paramserver.event_loop import ServerLoop
from shoal.paramserver.server import ServerConfig
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths
from shoal.strategies.base import FinalModel
from shoal.train.activity import Activity
from shoal.train.build import TrainingSession, build, build_loop
from tests.collectives.worker_processes import TOKEN, WorkerProcesses, _receive, _send
from tests.conftest import FIXTURES, MLP

LANES, STEPS, SERVER = 4, 6, 100
JOB = MLP | {"lanes": LANES, "steps": 24, "checkpoint": {"every": "never"}}
ONE, TWO = {0: [0, 1, 2, 3]}, {0: [0, 1], 1: [2, 3]}


@dataclass(frozen=True)
class Body:
    """A strategy as a job asks for it. `steps` is how far one commit leads."""

    name: str
    changes: dict = field(default_factory=dict)
    steps: int = 1
    any_number: bool = True
    """Does one member make the same bits as two?"""
    holds_all: bool = True
    """Does each member hold the whole state?"""

    def job(self):
        return make_job(JOB | self.changes, base_dir=str(FIXTURES))

    @property
    def uses_servers(self):
        return self.changes.get("sync", {}).get("kind") == "server"


class Member:
    """A worker's strategy, with what it works with, in a process of its own."""

    def __init__(self, me, body, directory, chunk_table):
        self.me = me
        quiet = EventWriter.to_callback(lambda row: None, f"worker-{me.seat}")
        built = build(body.job(), cache_dir=directory, report=lambda *_, **__: None)
        session = TrainingSession(
            InMemoryMembership(), me.peers, Activity(), lambda offsets, learn: learn(chunk_table), lambda: ""
        )
        loop, self.context = build_loop(built, RunPaths.at(directory), session=session, stream=quiet, has_state=True)
        self.strategy, self.progress, self.splits = loop.strategy, loop.progress, loop.splits

    def enter(self, number=1, carries=None):
        view = self.me.view(number, carries, step=self.progress.step)
        places = {seat: rank for rank, seat in enumerate(sorted(view.carries))}
        return self.strategy.enter(view.model_copy(update={"saver": 0, "places": places}), self.me.seat)

    def steps(self, count, halt_at=None):
        """So many commits, all of which must count."""
        outcomes = []
        for _ in range(count):
            outcomes.append(self.strategy.run_step(lambda: self.progress.step == halt_at))
            assert isinstance(outcomes[-1], Committed), outcomes[-1]
        return outcomes

    def digest(self):
        """Of what this member holds."""
        state = self.strategy.state()
        return weights_sha256(self.strategy._replica.all_tensors()) if state is None else state_sha256(state)

    def finish(self):
        """The digests that the leader would put into a receipt; None for other members."""
        found: list[FinalModel] = []
        assert self.strategy.finish(found.append) is None
        return (found[0].weights_sha256, found[0].state_sha256) if found else None

    def abort_when_told(self, view=1):
        """As the control client does, in a thread of its own."""
        thread = threading.Thread(target=lambda: (self.me.receive(), self.strategy.abort(view)), daemon=True)
        thread.start()
        return thread


@contextlib.contextmanager
def members(body, carries, directory):
    """Processes whose `act(member)` gets a Member; and parameter servers, where the body needs them."""
    build(body.job(), cache_dir=directory, report=lambda *_, **__: None)  # what is imported late is imported once
    with contextlib.ExitStack() as stack:
        chunk_table = stack.enter_context(parameter_server(body, directory)) if body.uses_servers else None
        workers = stack.enter_context(WorkerProcesses(carries, LANES))
        start = workers.start
        workers.start = lambda act: start(lambda me: act(Member(me, body, directory, chunk_table)))
        yield workers


@contextlib.contextmanager
def parameter_server(body, directory):
    """One server that holds every chunk."""
    job = body.job()
    offsets = build(job, cache_dir=directory, report=lambda *_, **__: None).replica.layout.chunk_offsets
    (up_read, up), (down, down_write) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        server = ServerLoop(SERVER, TOKEN, ServerConfig(LANES, 0, torch.optim.SGD), bind="127.0.0.1")
        _send(up, server.endpoint.address)
        threading.Thread(target=lambda: server.set_chunk_table(_receive(down)), daemon=True).start()
        server.run()
        os._exit(0)
    try:
        chains = [[SERVER] for _ in offsets[1:]]
        table = ChunkTable(
            number=1,
            cuts=offsets,
            chains=chains,
            filling=[[] for _ in chains],
            addresses={SERVER: _receive(up_read)},
        )
        _send(down_write, table)
        yield table
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for fd in (up_read, up, down, down_write):
            os.close(fd)


# ---- the contract ----


class StrategyContract:
    def test_members_agree_and_their_number_changes_no_bit(self, body, tmp_path):
        def act(member):
            assert member.enter() is None
            assert member.progress.position == 0
            member.steps(STEPS)
            assert member.progress.step == STEPS * body.steps
            return member.digest(), member.finish()

        found = {}
        for carries in (ONE, TWO) if body.any_number else (TWO,):
            with members(body, carries, tmp_path) as workers:
                results = workers.run(act)
            digests = [digest for digest, _ in results.values()]
            assert len(set(digests)) == 1 or not body.holds_all
            assert [final is None for _, final in results.values()] == [False] + [True] * (len(carries) - 1)
            found[len(carries)] = results[0][1]
        assert len(set(found.values())) == 1

    def test_a_lost_member_is_a_discarded_step_and_weights_stay_at_the_last_commit(self, body, tmp_path):
        def act(member):
            assert member.enter() is None
            member.steps(2)
            if member.me.seat == 1:
                member.me.send("committed")
                os.kill(os.getpid(), signal.SIGKILL)
            before, told = member.digest(), member.abort_when_told()
            member.me.send("committed")
            outcome = member.strategy.run_step(lambda: False)
            told.join()
            again = member.strategy.run_step(lambda: False)
            return type(outcome), type(again), member.progress.step, member.digest() == before

        with members(body, TWO, tmp_path) as workers:
            workers.start(act)
            assert [workers.result(seat) for seat in (0, 1)] == ["committed"] * 2
            os.waitid(os.P_PID, workers.pids[1], os.WEXITED | os.WNOWAIT)
            workers.send(0, "worker-1 is gone")
            assert workers.result(0) == (Discarded, Discarded, 2 * body.steps, True)

    def test_abort_wakes_a_member_that_waits(self, body, tmp_path):
        """For another one that lives and does nothing."""

        def act(member):
            assert member.enter() is None
            member.steps(1)
            if member.me.seat == 1:
                member.me.send("stands still")
                return member.me.receive()
            before, told = member.digest(), member.abort_when_told()
            member.me.send("goes on")
            outcome = member.strategy.run_step(lambda: False)
            told.join()
            return type(outcome), member.digest() == before

        with members(body, TWO, tmp_path) as workers:
            workers.start(act)
            assert [workers.result(seat) for seat in (0, 1)] == ["goes on", "stands still"]
            workers.send(0, "do not wait for it")
            assert workers.result(0) == (Discarded, True)
            workers.send(1, "go")
            assert workers.result(1) == "go"

    def test_an_abort_of_an_older_view_changes_nothing(self, body, tmp_path):
        def act(member):
            assert member.enter(number=2) is None
            member.strategy.abort(1)
            return len(member.steps(1))

        with members(body, TWO, tmp_path) as workers:
            assert workers.run(act) == {0: 1, 1: 1}

    def test_an_evaluation_is_the_same_for_every_member(self, body, tmp_path):
        def act(member):
            assert member.enter() is None
            member.steps(2)
            metrics = member.strategy.evaluate(member.splits["validation"])
            assert not isinstance(metrics, Discarded), metrics
            before = member.digest()
            assert member.strategy.evaluate(member.splits["validation"]) == metrics
            return metrics, member.digest() == before

        found = []
        for carries in (ONE, TWO) if body.any_number else (TWO,):
            with members(body, carries, tmp_path) as workers:
                found += workers.run(act).values()
        assert all(one == found[0] for one in found)
        metrics, unchanged = found[0]
        assert unchanged
        assert metrics.keys() == {"loss", "accuracy"}

    def test_a_member_that_must_halt_halts_all(self, body, tmp_path):
        def act(member):
            assert member.enter() is None
            outcomes = member.steps(2, halt_at=body.steps if member.me.seat == 1 else None)
            assert member.strategy.leave_view() is None
            return [outcome.halt for outcome in outcomes]

        with members(body, TWO, tmp_path) as workers:
            assert workers.run(act) == {0: [False, True], 1: [False, True]}

    def test_what_was_saved_is_restored(self, body, tmp_path):
        def save(member):
            assert member.enter() is None
            member.steps(3)
            member.strategy.save(force=True)
            member.context.store.wait()
            return member.digest()

        def restore(member):
            member.strategy.restore()
            assert member.enter() is None
            assert member.progress.step == 3 * body.steps
            digest = member.digest()
            member.steps(1)
            return digest

        with members(body, TWO, tmp_path) as workers:
            saved = workers.run(save)
        with members(body, TWO, tmp_path) as workers:
            restored = workers.run(restore)
        compared = [0] if body.uses_servers else [0, 1]  # the member that saves brings what servers hold
        assert [saved[seat] for seat in compared] == [restored[seat] for seat in compared]

    def test_a_member_that_is_behind_gets_what_the_view_starts_from(self, body, tmp_path):
        """Seat 0 trains alone at first; where one worker cannot, both enter at once and this is the plain case."""

        def act(member):
            seat = member.me.seat
            if seat == 0 and body.any_number:
                assert member.enter(1, ONE) is None
                member.steps(2)
            done = 2 * body.steps if body.any_number else 0
            view = member.me.view(2, TWO, step=done)
            view = view.model_copy(update={"saver": 0, "source": 0, "places": {0: 0, 1: 1}})
            assert member.strategy.enter(view, seat) is None
            assert member.progress.step == done
            member.steps(1)
            return member.digest()

        with members(body, TWO, tmp_path) as workers:
            digests = workers.run(act)
        assert len(set(digests.values())) == 1 or not body.holds_all
