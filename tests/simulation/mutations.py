"""Known mistakes, made on purpose in the real code: each breaks a rule that the simulation must see broken."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from shoal.checkpoint import writer
from shoal.checkpoint.writer import CheckpointWriter
from shoal.events import run_state
from shoal.fleet.roster import SeatNumbers
from shoal.jobs import run_driver
from shoal.plan.failure_detector import FailureDetector
from shoal.plan.membership_policy import MembershipPolicy
from shoal.spec.view import View
from shoal.strategies.catch_up import CatchUp
from shoal.strategies.replicated import ReplicatedStrategy
from shoal.train.loop import Loop


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
        with mock.patch.object(MembershipPolicy, "_training_seats", lambda self: []):
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
def hand_over_without_saving() -> Iterator[None]:
    """The only holder of the state leaves, and does not save it."""
    release = MembershipPolicy._release

    def wrong(self: MembershipPolicy, seats: list[int], *, saver: int | None = None) -> Any:
        return release(self, seats)

    with mock.patch.object(MembershipPolicy, "_release", wrong):
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
    with mock.patch.object(run_driver, "first_free_seat", lambda names: 0):
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


MUTATIONS = {
    one.__name__: one
    for one in (
        two_savers,
        no_catch_up,
        views_without_waiting,
        lowest_position,
        stale_reports_count,
        hand_over_without_saving,
        frozen_workers_stay,
        seats_are_reused,
        same_seat_twice,
        deaths_are_not_counted,
        manifest_before_blobs,
        old_checkpoints_go_first,
        steps_of_the_stream_are_skipped,
        restore_nothing,
        final_view_is_old,
    )
}
