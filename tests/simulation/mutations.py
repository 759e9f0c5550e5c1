"""Known mistakes, made on purpose in the real code: each breaks a rule that the simulation must see broken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from shoal.checkpoint import writer
from shoal.checkpoint.writer import CheckpointWriter
from shoal.events import run_state
from shoal.fleet.roster import SeatNumbers
from shoal.jobs import run_driver
from shoal.jobs.join import JoinedWorkers
from shoal.plan.chunk_placement import ChunkPlacement
from shoal.plan.failure_detector import FailureDetector
from shoal.plan.membership_policy import MembershipPolicy
from shoal.plan.sharded_membership import ShardedMembershipPolicy
from shoal.spec.view import View
from shoal.strategies.catch_up import CatchUp
from shoal.strategies.replicated import ReplicatedStrategy
from shoal.train.loop import Loop
from shoal.train.worker import WorkerSession
from tests.simulation.shards import Rank


@contextlib.contextmanager
def two_savers() -> Iterator[None]:
    """Every member believes that it is the saver."""
    adopt = Loop._adopt_view

    def wrong(self: Loop, view: View, seat: int) -> None:
        adopt(self, view, seat)
        self._reporter.is_leader = True

    with mock.patch.object(Loop, "_adopt_view", wrong):
        yield


@contextlib.contextmanager
def no_catch_up() -> Iterator[None]:
    """A worker that is behind does not fetch what it lacks."""

    def wrong(self: ReplicatedStrategy, view: View, seat: int) -> None:
        self._progress.step = view.position // 2

    with mock.patch.object(ReplicatedStrategy, "_fetch_missing", wrong):
        yield


@contextlib.contextmanager
def views_without_waiting() -> Iterator[None]:
    """The driver decides a view while workers of the last one still train."""
    decide = MembershipPolicy._next_view

    def wrong(self: MembershipPolicy, now_s: float) -> Any:
        with mock.patch.object(MembershipPolicy, "_training_seats", return_value=[]):
            return decide(self, now_s)

    with mock.patch.object(MembershipPolicy, "_next_view", wrong):
        yield


@contextlib.contextmanager
def lowest_position() -> Iterator[None]:
    """A view continues from where the last of its workers is, not the first."""
    enter = MembershipPolicy._enter_view

    def wrong(self: MembershipPolicy, team: list[Any], savers: list[Any], best: int) -> Any:
        return enter(self, team, savers, min(m.position for m in team if m.position is not None))

    with mock.patch.object(MembershipPolicy, "_enter_view", wrong):
        yield


@contextlib.contextmanager
def stale_reports_count() -> Iterator[None]:
    """The driver believes a position that was sent before the worker saw the last view."""
    stopped_at = MembershipPolicy.stopped_at

    def wrong(self: MembershipPolicy, seat: int, now_s: float, **fields: Any) -> None:
        stopped_at(self, seat, now_s, **fields | {"view": 1 << 40})

    with mock.patch.object(MembershipPolicy, "stopped_at", wrong):
        yield


@contextlib.contextmanager
def frozen_workers_stay() -> Iterator[None]:
    """The driver waits for frozen workers, and for links that are cut."""

    def wrong(self: FailureDetector, now_s: float, heartbeats: Any) -> list[Any]:
        self.stalled = False
        return []

    with mock.patch.object(FailureDetector, "check", wrong):
        yield


@contextlib.contextmanager
def seats_are_reused() -> Iterator[None]:
    """A later driver counts seats from 0."""
    with mock.patch.object(run_driver, "SeatNumbers", side_effect=lambda first: SeatNumbers(0)):
        yield


@contextlib.contextmanager
def same_seat_twice() -> Iterator[None]:
    """A replacement takes the seat of the dead."""

    def wrong(self: SeatNumbers) -> int:
        self._next += 1
        return (self._next - 1) % 4

    with mock.patch.object(SeatNumbers, "take", wrong):
        yield


@contextlib.contextmanager
def deaths_are_not_counted() -> Iterator[None]:
    """The receipt does not know that a worker died."""
    with mock.patch.dict(run_state._HANDLERS, {"worker_died": lambda state, event, fields: None}):
        yield


@contextlib.contextmanager
def manifest_before_blobs() -> Iterator[None]:
    """A checkpoint is named before its tensors are on disk."""
    write = CheckpointWriter._write

    def wrong(self: CheckpointWriter, snapshot: Any, result: Any) -> Any:
        delayed: list[tuple[str, list[bytes]]] = []
        files = self._files

        def write_later(path: str, chunks: Any) -> None:
            if path.startswith("blobs/"):
                delayed.append((path, [bytes(chunk) for chunk in chunks]))
            else:
                files.write(path, chunks)

        self._files = SimpleNamespace(write=write_later, save_lock=files.save_lock, sizes=files.sizes)  # type: ignore[assignment]
        self._files.has_locks, self._files.open = True, files.open  # type: ignore[method-assign]
        try:
            return write(self, snapshot, result)
        finally:
            self._files = files
            for path, chunks in delayed:
                files.write(path, chunks)

    with mock.patch.object(CheckpointWriter, "_write", wrong):
        yield


@contextlib.contextmanager
def old_checkpoints_go_first() -> Iterator[None]:
    """Retention keeps the oldest checkpoint instead of the newest."""

    def wrong(metas: Any, keep: int, keep_best: int, metric_sign: int) -> list[int]:
        return sorted(step for step, _ in metas)[1:]

    clean_up = CheckpointWriter._delete_old

    def forget(self: CheckpointWriter, step: int) -> None:
        clean_up(self, -1)

    with (
        mock.patch.object(writer, "steps_to_delete", wrong),
        mock.patch.object(CheckpointWriter, "_delete_old", forget),
    ):
        yield


@contextlib.contextmanager
def steps_of_the_stream_are_skipped() -> Iterator[None]:
    """A new worker believes that it has caught up when it has not."""
    advance = CatchUp.advance_to

    def wrong(self: CatchUp, position: int) -> bool:
        advance(self, position)
        if self._progress.position is not None:
            self._progress.step = position // 2
        return self._progress.position is not None

    with mock.patch.object(CatchUp, "advance_to", wrong):
        yield


@contextlib.contextmanager
def restore_nothing() -> Iterator[None]:
    """After the death of all workers the run begins again, and says that it has not."""

    def wrong(self: ReplicatedStrategy) -> int | None:
        found = self._context.store.latest()
        self._progress.has_state = True
        if found is not None:
            self._progress.step = found.step
        return found.step if found is not None else None

    with mock.patch.object(ReplicatedStrategy, "restore", wrong):
        yield


@contextlib.contextmanager
def final_view_is_old() -> Iterator[None]:
    """Workers never hear that the run is over."""
    dismiss = MembershipPolicy.dismiss

    def wrong(self: MembershipPolicy, why: str) -> Any:
        action = dismiss(self, why)
        return replace(action, view=action.view.model_copy(update={"number": 1, "stop": ""}))

    with (
        mock.patch.object(MembershipPolicy, "dismiss", wrong),
        mock.patch.object(run_driver, "SHUTDOWN_TIMEOUT_S", 1e9),
    ):
        yield


# ---- parameter servers ----


@contextlib.contextmanager
def filling_servers_lead() -> Iterator[None]:
    """A server counts as a holder before it has received the chunk."""
    holders = ChunkPlacement._live_holders

    def wrong(self: ChunkPlacement) -> Any:
        if self.chunk_table is not None:
            pairs = zip(self.chunk_table.chains, self.chunk_table.filling, strict=True)
            self._filled_links |= {(chain[-1], seat) for chain, filling in pairs for seat in filling}
        return holders(self)

    with mock.patch.object(ChunkPlacement, "_live_holders", wrong):
        yield


@contextlib.contextmanager
def old_reports_count() -> Iterator[None]:
    """The driver believes that a server was filled under an older table."""

    def wrong(self: ChunkPlacement, by: int, seat: int, table_number: int) -> None:
        self._filled_links.add((by, seat))
        self._changed = True

    decide = ChunkPlacement.decide

    def remember(self: ChunkPlacement) -> Any:
        links = set(self._filled_links)
        decided = decide(self)
        self._filled_links |= links
        return decided

    with mock.patch.object(ChunkPlacement, "filled", wrong), mock.patch.object(ChunkPlacement, "decide", remember):
        yield


@contextlib.contextmanager
def chunks_given_up() -> Iterator[None]:
    """The driver returns to a checkpoint although a backup lives."""
    holders = ChunkPlacement._live_holders

    def wrong(self: ChunkPlacement) -> Any:
        found = holders(self)
        if self.chunk_table is None:
            return found
        return [held if chain[0] in held else [] for held, chain in zip(found, self.chunk_table.chains, strict=True)]

    with mock.patch.object(ChunkPlacement, "_live_holders", wrong):
        yield


# ---- agents and messages ----


@contextlib.contextmanager
def a_field_that_the_schema_lacks() -> Iterator[None]:
    """A worker's greeting says more than the driver knows."""
    hello = WorkerSession._hello

    def wrong(self: WorkerSession, control: Any) -> dict[str, Any]:
        return hello(self, control) | {"cores": 4}

    with mock.patch.object(WorkerSession, "_hello", wrong):
        yield


@contextlib.contextmanager
def early_output_is_dropped() -> Iterator[None]:
    """An agent drops what a worker prints before its seat is known."""
    send = JoinedWorkers._send_reports

    def wrong(self: JoinedWorkers, worker: Any) -> None:
        send(self, worker)
        worker.unsent.clear()

    with mock.patch.object(JoinedWorkers, "_send_reports", wrong):
        yield


@contextlib.contextmanager
def exits_are_misreported() -> Iterator[None]:
    """`shoal join` says that all was well when a worker has died."""

    def wrong(self: JoinedWorkers, worker: Any, exited: Any) -> None: ...

    with mock.patch.object(JoinedWorkers, "_handle_exit", wrong):
        yield


# ---- sharded membership ----


@contextlib.contextmanager
def places_by_seat() -> Iterator[None]:
    """A place is a seat's number, not a rank in the view."""
    enter = ShardedMembershipPolicy._enter_sharded_view

    def wrong(self: ShardedMembershipPolicy, members: Any, replicas: int) -> Any:
        action = enter(self, members, replicas)
        view = action.view.model_copy(update={"places": {seat: seat for seat in action.view.places}})
        return replace(action, view=view)

    with mock.patch.object(ShardedMembershipPolicy, "_enter_sharded_view", wrong):
        yield


@contextlib.contextmanager
def the_worker_that_is_ahead_leaves() -> Iterator[None]:
    """A worker may leave with steps that no other worker has."""

    def wrong(self: MembershipPolicy) -> list[int]:
        return [m.seat for m in self.members.values() if m.leaving and m.stopped]

    with mock.patch.object(MembershipPolicy, "_releasable_seats", wrong):
        yield


@contextlib.contextmanager
def only_copies_leave() -> Iterator[None]:
    """A worker may leave with the only copy of a shard."""
    with mock.patch.object(ShardedMembershipPolicy, "_may_hold_only_copy", return_value=False):
        yield


@contextlib.contextmanager
def commit_without_a_rank() -> Iterator[None]:
    """A rank applies a step before it has seen the last vote."""

    def wrong(self: Rank, view: View) -> None:
        votes = self._mail[view.number, f"vote {self.held.step}"]
        if self.entered and len(votes) >= len(view.carries) - 1 and self.held.pending == view.number:
            self._apply(view, halt=any(votes.values()))
        else:
            go_on(self, view)

    go_on = Rank._go_on
    with mock.patch.object(Rank, "_go_on", wrong):
        yield


Mutation = Callable[[], contextlib.AbstractContextManager[None]]

MUTATIONS: dict[str, Mutation] = {
    one.__name__: one
    for one in (
        two_savers,
        no_catch_up,
        views_without_waiting,
        lowest_position,
        stale_reports_count,
        frozen_workers_stay,
        seats_are_reused,
        same_seat_twice,
        deaths_are_not_counted,
        manifest_before_blobs,
        old_checkpoints_go_first,
        steps_of_the_stream_are_skipped,
        restore_nothing,
        final_view_is_old,
        a_field_that_the_schema_lacks,
        early_output_is_dropped,
        exits_are_misreported,
    )
}

SERVER_MUTATIONS: dict[str, Mutation] = {
    one.__name__: one for one in (filling_servers_lead, old_reports_count, chunks_given_up)
}

SHARD_MUTATIONS: dict[str, Mutation] = {
    one.__name__: one for one in (places_by_seat, only_copies_leave, commit_without_a_rank)
}
