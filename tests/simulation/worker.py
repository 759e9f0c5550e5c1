"""A worker without a process: the real session, loops and strategy, over weights that are a chain of hashes.

A commit of step s changes the weights from chain[s] to hash(chain[s], s, lanes in order). So weights of a step are
right if and only if every step before was committed exactly once, with all lanes, in order.
"""

from __future__ import annotations

import contextlib
import operator
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.store import CheckpointStore
from shoal.collectives.group import Channel
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.state_stream import CAUGHT_UP
from shoal.collectives.transport.mesh import CONNECT_TIMEOUT_S
from shoal.errors import ShoalError
from shoal.events import Event, EventWriter
from shoal.fleet.process_main import WELCOME_TIMEOUT_S
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.spec.job import Job
from shoal.spec.view import Address, View
from shoal.strategies.context import StepContext
from shoal.strategies.replicated import ReplicatedStrategy
from shoal.train.activity import Activity
from shoal.train.build import conclude_run
from shoal.train.elastic import ElasticLoop
from shoal.train.loop import Loop, LoopResult, TrainSchedule
from shoal.train.progress import Progress
from shoal.train.reporting import Reporter, StepStats
from shoal.train.run_output import DirectoryOutput
from shoal.train.watchers import BestMetric
from shoal.train.worker import JOINED, STARTED_BY_ENGINE, WorkerSession, emit_to_both
from tests.simulation.agents import SimulatedPaths
from tests.simulation.machine import SIGKILL, SimulatedStream
from tests.simulation.network import SimulatedControlClient
from tests.simulation.world import Process, require

if TYPE_CHECKING:
    from tests.simulation.run import SimulatedRun

PATHS = SimulatedPaths.at("/simulated/run-1")
LOSS = torch.tensor(1.0)
MASK = (1 << 62) - 1
SAMPLER = SimpleNamespace(batch_samples=lambda step: 8, samples_before=lambda step: 8 * step)
STATELESS = SimpleNamespace(state=lambda: None, load_state=lambda state: None)


def next_link(before: int, step: int, lanes: tuple[int, ...]) -> int:
    return hash((before, step, lanes)) & MASK


def undisturbed_chain(steps: int, lanes: int) -> list[int]:
    chain = [0]
    for step in range(steps):
        chain.append(next_link(chain[-1], step, tuple(range(lanes))))
    return chain


class ChainReplica:
    """Weights that are one number. See HeldWeights and what ReplicatedStrategy uses of a Replica."""

    lr, device, schedule_needs_metric = 0.1, torch.device("cpu"), False
    schedule = observer = layout = carry = average = loss_scale = None
    has_evaluation_weights = False
    evaluation_weights = contextlib.nullcontext

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker, self.link = worker, 0
        self._before = 0
        self.model = self

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def begin_step(self) -> None:
        self._before = self.link

    def undo_step(self) -> None:
        self.link = self._before

    def forward_backward(self, step: int, lane: int, batch: Any, *, share: float, sink: object) -> tuple[int, ...]:
        return (lane,)

    def apply(self, step: int, total: tuple[int, ...]) -> torch.Tensor:
        self.link = next_link(self.link, step, total)
        self._worker.run.check_weights(self._worker, step, self.link)
        return LOSS

    def state(self) -> dict[str, Any]:
        return {"model": {"chain": torch.tensor([self.link])}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.link = int(state["model"]["chain"][0])


class SimulatedGroup:
    """See ViewGroup: members of a view exchange messages over the simulated network."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self.view: View | None = None
        self.seat = 0
        self._broken = ""
        self._aborted = 0
        self._moved = 0

    def enter(self, view: View, seat: int) -> Discarded | None:
        self.leave()
        self.view, self.seat = view, seat
        self._broken = f"view {view.number} was aborted" if self.aborted() else ""
        found = self.gather(Channel.RENDEZVOUS.label(view.number), view.carries, timeout_s=CONNECT_TIMEOUT_S)
        if isinstance(found, Discarded):
            self._disconnect()
            return found
        require(all(one == view.carries for one in found.values()), f"members of view {view.number} have other views")
        return None

    @property
    def broken(self) -> str:
        return self._broken or ("aborted" if self.aborted() else "")

    def gather(self, label: int, content: Any, timeout_s: float | None = None) -> dict[int, Any] | Discarded:
        worker, view = self._worker, self.view
        assert view is not None
        if self.broken:
            return Discarded(self.broken)
        others = [seat for seat in view.carries if seat != self.seat]
        for seat in others:
            worker.send_peer(view.addresses[seat], "gathered", (view.number, label, self.seat), content)
        found = worker.mail[view.number, label]
        fiber = worker.world.current
        assert fiber is not None
        complete = fiber.block(lambda: self.broken or all(seat in found for seat in others), timeout_s)
        self._moved += len(found)
        if self.broken or not complete:
            self._broken = self.broken or "a member was not reached"
            self._disconnect()
            return Discarded(self._broken)
        return {seat: found[seat] for seat in others} | {self.seat: content}

    def lost(self, number: int) -> None:
        """A member of this view has left it."""
        if self.view is not None and self.view.number == number:
            self._broken = self._broken or "a member left"
            self._worker.wake()

    def leave(self) -> None:
        self._disconnect()
        self.view = None

    def _disconnect(self) -> None:
        if self.view is not None:
            for seat in self.view.carries:
                if seat != self.seat:
                    self._worker.send_peer(self.view.addresses[seat], "left", self.view.number)

    def abort(self, view: int) -> None:
        self._aborted = max(self._aborted, view)
        if self.aborted():
            self._disconnect()
        self._worker.wake()

    def aborted(self) -> bool:
        return self.view is not None and self.view.number <= self._aborted

    def moved_bytes(self) -> int:
        return self._moved


class ChainSync:
    """See GradientSync: partial sums of all members make one total. `lanes` is the number of lanes."""

    exact = True

    def __init__(self, worker: SimulatedWorker, group: SimulatedGroup, lanes: int) -> None:
        self._worker, self._group, self._lanes = worker, group, lanes

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        return self._group.enter(view, seat)

    def begin_step(self) -> TreeSum[tuple[int, ...]]:
        return TreeSum(self._lanes, operator.add)

    def gradient_sink(self, *_: object, **__: object) -> None:
        return None

    def commit(
        self, held: ChainReplica, step: int, sums: TreeSum[tuple[int, ...]], *, halt: bool = False
    ) -> Committed | Discarded:
        label = Channel.STEP_HEADER.label(step)
        found = self._group.gather(label, (held.link, halt, dict(sums.partials)))
        if isinstance(found, Discarded):
            return found
        require(all(link == held.link for link, _, _ in found.values()), f"step {step} of different weights")
        for seat, (_, _, partials) in found.items():
            if seat != self._group.seat:
                for node, value in partials.items():
                    sums.push(node, value)
        total = sums.total()
        assert total is not None
        assert self._group.view is not None
        self._worker.run.check_commit(self._worker, self._group.view)
        self._worker.peers.state_publisher.publish({"kind": "step", "step": step, "total": total})
        return Committed(held.apply(step, total), halt=any(halt for _, halt, _ in found.values()))

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, step: int, state: Mapping[str, Any]) -> None: ...

    def hand_over(self, given_up: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


class SimulatedSubscription:
    """See StateSubscription: the entries that a source has sent."""

    def __init__(self, worker: SimulatedWorker, source: SimulatedWorker) -> None:
        self.worker, self.source = worker, source
        self.queue: deque[dict[str, Any]] = deque()
        self.closed = self.started = False

    def put(self, entry: Mapping[str, Any]) -> None:
        self.source.run.network.send(self, self.source, self.worker, self._arrived, dict(entry))

    def _arrived(self, entry: dict[str, Any]) -> None:
        self.queue += (entry, CAUGHT_UP)
        self.worker.wake()

    def ended(self) -> None:
        self.closed = True
        self.worker.wake()

    def ready(self, timeout_s: float) -> bool:
        fiber = self.worker.world.current
        assert fiber is not None
        return fiber.block(lambda: self.queue or self.closed or not self.source.alive, timeout_s)

    def receive(self) -> dict[str, Any]:
        if not self.queue:
            raise LinkError("the stream has ended")
        return self.queue.popleft()

    def close(self) -> None:
        self.source.peers.state_publisher.remove(self)


class SimulatedPublisher:
    """See StatePublisher."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._subscribers: list[SimulatedSubscription] = []

    @property
    def active(self) -> bool:
        return bool(self._subscribers)

    def add(self, subscription: SimulatedSubscription) -> None:
        self._subscribers.append(subscription)

    def remove(self, subscription: SimulatedSubscription) -> None:
        if subscription in self._subscribers:
            self._subscribers.remove(subscription)

    def start_subscribers(self, state: Callable[[], Any]) -> None:
        for one in self._subscribers:
            if not one.started:
                one.started = True
                one.put({"kind": "state", "state": state()})

    def publish(self, entry: Mapping[str, Any]) -> None:
        for one in self._subscribers:
            if one.started:
                one.put(entry)

    def drop_subscribers(self) -> None:
        for one in self._subscribers:
            self._worker.run.network.send(one, self._worker, one.worker, one.ended)
        self._subscribers = []


class SimulatedPeers:
    """See PeerServices."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self.state_server = self
        self.state_publisher = SimulatedPublisher(worker)
        self.endpoint = SimpleNamespace(address=worker.address)
        self._open: tuple[int, Callable[[], Any]] | None = None
        self._newest = 0
        self._callers: list[tuple[int, SimulatedWorker]] = []
        self._received: dict[int, Any] = {}
        self._aborted = 0

    # ---- the state server ----

    def open(self, view: int, state: Callable[[], Any]) -> None:
        self._open, self._newest = (view, state), view
        callers, self._callers = self._callers, []
        for caller in callers:
            self.serve(*caller)

    def close(self) -> None:
        self._open = None

    def serve(self, view: int, caller: SimulatedWorker) -> None:
        if view < self._newest:
            self._worker.run.network.send(self, self._worker, caller, caller.peers.answered, view, None)
        elif self._open is not None and self._open[0] == view:
            state = self._open[1]()
            self._worker.run.network.send(self, self._worker, caller, caller.peers.answered, view, state)
        else:
            self._callers.append((view, caller))

    def answered(self, view: int, state: Any) -> None:
        self._received[view] = state
        self._worker.wake()

    # ---- requests ----

    def fetch_state(self, view: View, seat: int, *, max_bytes: int) -> Any:
        assert view.source is not None
        worker, source = self._worker, self._worker.run.worker_at(view.addresses[view.source])
        worker.run.network.send(self, worker, source, source.peers.serve, view.number, worker)
        fiber = worker.world.current
        assert fiber is not None
        fiber.block(
            lambda: view.number in self._received or self._aborted >= view.number or not source.alive,
            CONNECT_TIMEOUT_S,
        )
        found = self._received.pop(view.number, None)
        return Discarded(f"no state from worker-{view.source}") if found is None else found

    def subscribe(self, address: Address, seat: int, *, view: int, max_bytes: int) -> Any:
        source = self._worker.run.worker_at(address)
        if not source.alive or self._worker.run.network.is_cut(self._worker, source):
            return Discarded("not reached")
        subscription = SimulatedSubscription(self._worker, source)
        self._worker.run.network.send(
            subscription, self._worker, source, source.peers.state_publisher.add, subscription
        )
        return subscription

    def measure_link(self, view: View, seat: int) -> None:
        return None

    def abort(self, view: int) -> None:
        self._aborted = max(self._aborted, view)
        self._worker.wake()

    def stats(self) -> dict[str, Any]:
        return {}


class SimulatedWorker(Process):
    """One worker's process: `managed` by the engine, or joined from another machine. `exit_code` is set at its end.

    A worker that an agent has forked prints to the file `output`, and keeps a copy of its events in `own_events`.
    """

    def __init__(
        self,
        run: SimulatedRun,
        number: int,
        *,
        seat: int | None,
        agent: str = "",
        output: str = "",
        own_events: str = "",
    ) -> None:
        super().__init__(run.world, f"process-{number}")
        self.run = run
        self.managed = seat is not None
        self.address = Address(host="simulated", port=number, host_id=self.name)
        self.exit_code: int | None = None
        self.on_exit: Callable[[], None] = lambda: None
        self.mail: defaultdict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self.peers = SimulatedPeers(self)
        self.activity = Activity()
        attachment = STARTED_BY_ENGINE if self.managed else JOINED
        self.session = WorkerSession(run.driver_address, self.peers, self.activity, attachment, seat)  # type: ignore[arg-type]
        self.session.agent, self.output, self._own_events = agent, output, own_events
        self.seats: list[int] = []
        """All seats that drivers gave it."""
        control = self.session.make_control_client(None)
        assert isinstance(control, SimulatedControlClient)
        self.control = control
        self.control.attach(self, run.network)
        self._watch_seats()
        self.group = SimulatedGroup(self)
        self.replica = ChainReplica(self)
        self.progress: Progress | None = None
        self.elastic: ElasticLoop | None = None
        self.start(self._main)

    def _watch_seats(self) -> None:
        welcome = self.control._on_welcome
        assert welcome is not None

        def watched(fields: dict[str, Any]) -> None:
            welcome(fields)
            self.seats.append(fields["seat"])

        self.control._on_welcome = watched

    @property
    def changed_seat(self) -> bool:
        return len(set(self.seats)) > 1

    @property
    def position(self) -> int | None:
        return self.progress.position if self.progress is not None else None

    def leads_in(self, view: int) -> bool:
        """Would it save in this view?"""
        leads = self.progress is not None and self.progress.reporter.is_leader
        return leads and self.group.view is not None and self.group.view.number == view

    # ---- peers ----

    def send_peer(self, address: Address, kind: str, *content: Any) -> None:
        peer = self.run.worker_at(address)
        self.run.network.send("peers", self, peer, peer.receive_peer, kind, *content)

    def receive_peer(self, kind: str, *content: Any) -> None:
        if kind == "left":
            self.group.lost(content[0])
            return
        (view, label, seat), value = content
        self.mail[view, label][seat] = value
        self.wake()

    # ---- its life ----

    def _main(self) -> None:
        fiber = self.world.current
        assert fiber is not None
        fiber.sleep(0.1 * self.world.rng.random())
        try:
            self.control.connect(WELCOME_TIMEOUT_S)
        except ShoalError:
            self.end(1)
            return
        fiber.sleep(0.05 + 0.3 * self.world.rng.random())
        result = self._train()
        if not self.managed:
            self.control.send("bye")
        self.world.log(f"{self.name} returned", result.why or result.finished)
        self.end(0)

    def _train(self) -> LoopResult:
        job, session = self.run.job, self.session
        assert session.seat is not None
        who = f"worker-{session.seat}"
        stream: Any = SimulatedStream(self.run.log, who)
        if not self.managed:
            stream = EventWriter.to_callback(lambda row: emit_to_both(self.control, self, row), who)  # type: ignore[arg-type]
        if self.output:
            self.print(f"joined run {PATHS.name} as {who}")
            fiber = self.world.current
            assert fiber is not None
            fiber.sleep(0.2 * self.world.rng.random())  # torch is prepared
        stream.emit("worker_started", pid=self.address.port, host=self.name, threads=1, torch="")
        best = BestMetric(job.best)
        reporter = Reporter(stream, [best])
        stats = StepStats(reporter, every_step=False)
        self.progress = Progress(
            sampler=SAMPLER,  # type: ignore[arg-type]
            task=STATELESS,  # type: ignore[arg-type]
            reporter=reporter,
            stats=stats,
            activity=self.activity,
            best=best,
            has_state=session.attachment.can_save,
        )
        store = CheckpointStore(
            "simulated", job_sha256=self.run.job_sha256, every=job.checkpoint.interval, emit=reporter.report
        )
        loop = self._loop(job, store, reporter, stats)
        save_lock: Any = self.run.save_lock if session.attachment.can_save else None
        self.elastic = ElasticLoop(loop, peers=self.peers, seat=session.seat, save_lock=save_lock)  # type: ignore[arg-type]
        session.on_view, session.on_seat_changed = self.elastic.on_view, self.elastic.on_seat_changed
        try:
            return self.elastic.run()
        finally:
            if self.alive:
                store.close()

    def append(self, event: Event) -> None:
        """See EventWriter: the copy of an event that a worker of an agent keeps."""
        self.run.directories.events[self._own_events].append(event)

    def print(self, line: str) -> None:
        lines = self.run.directories.lines[self.output]
        lines.append(f"{len(lines)} {line}")

    def _loop(self, job: Job, store: CheckpointStore, reporter: Reporter, stats: StepStats) -> Loop:
        assert self.progress is not None
        context: Any = StepContext(
            sampler=SAMPLER,  # type: ignore[arg-type]
            batches=self,  # type: ignore[arg-type]
            task=STATELESS,  # type: ignore[arg-type]
            evaluator=self,  # type: ignore[arg-type]
            store=store,
            peers=self.peers,  # type: ignore[arg-type]
            progress=self.progress,
            activity=self.activity,
            stats=stats,
            report=reporter.report,
            place_chunks=lambda offsets, on_table: None,
        )
        sync = ChainSync(self, self.group, job.lane_count)
        strategy = ReplicatedStrategy(context, self.replica, group=self.group, sync=sync)  # type: ignore[arg-type]
        self.activity.moved_bytes = strategy.moved_bytes
        source = SimpleNamespace(classes=None, encoders={}, input_columns=None)
        built: Any = SimpleNamespace(
            job=job,
            sampler=SAMPLER,
            example=SimpleNamespace(inputs=None),
            data=SimpleNamespace(train=SimpleNamespace(source=source)),
        )
        splits: Any = {"validation": SimpleNamespace(name="validation")}
        return Loop(
            TrainSchedule(self.run.steps, self.run.evaluate_every),
            strategy=strategy,
            progress=self.progress,
            splits=splits,
            store=store,
            membership=self.control,
            conclude=partial(conclude_run, built, DirectoryOutput(PATHS), self.progress, store),
            leave_reason=self._leave_reason,
        )

    def _leave_reason(self) -> str:
        """See `install_leave_handler`."""
        silent_s, patience_s = self.control.driver_silence_s, self.run.job.elastic.patience_s
        if self.session.leaving and silent_s > 0:
            return "terminated"
        return f"no driver came back in {patience_s:g} s" if silent_s > patience_s else ""

    # ---- batches and evaluator ----

    def set_lanes(self, lanes: list[int], step: int) -> None: ...

    def get(self, step: int, lane: int) -> Any:
        """Computing takes time."""
        fiber = self.world.current
        assert fiber is not None
        fiber.sleep(self.run.lane_s * (0.5 + self.world.rng.random()))
        if self.output:
            self.print(f"step {step}, lane {lane}")
        return SimpleNamespace(size=8 // self.run.lanes)

    def evaluate_distributed(
        self, replica: ChainReplica, split: Any, *, gather: Callable[[bytes], Any], **_: Any
    ) -> Any:
        found = gather(b"")
        if isinstance(found, Discarded):
            return found
        step = self.progress.step if self.progress is not None else 0
        return {"loss": float(1 + (replica.link + step) % 7)}

    # ---- its end ----

    def terminate(self) -> None:
        """SIGTERM: it asks to leave. Before it handles signals, it dies of it."""
        if self.progress is not None:
            self.session.leaving = True
        elif self.alive:
            self.end(-signal.SIGTERM)

    def kill(self) -> None:
        if self.alive:
            self.end(SIGKILL)

    def end(self, code: int) -> None:
        """The process is gone: its connections are closed by the kernel."""
        self.world.log(f"{self.name} ends", code)
        self.frozen = False
        self.control.close() if code != SIGKILL else self._break()
        self.group.leave()
        self.peers.state_publisher.drop_subscribers()
        self.alive, self.exit_code = False, code
        self.run.on_worker_end(self)
        self.on_exit()

    def _break(self) -> None:
        link = self.control._link
        if link is not None:
            link.close_client("killed")
