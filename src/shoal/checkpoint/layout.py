"""The sections of a run's state in a checkpoint, and how one form of them is read as the other.

One process that holds a whole replica writes `model`, `optimizer`, `schedule`, `moving` and `loop`; local SGD adds
`outer`. Members that hold a model together write `pieces` (which block of which tensor lies where), `names`, `settings`
(the optimizer's, without parameters), `schedule`, `layout` and `loop`; their `model` is None. Checkpoints of earlier
versions have these names too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shoal.checkpoint.sharded_files import (
    NAMES_SECTION,
    PIECES_SECTION,
    PieceRecord,
    SavedPieces,
    open_full_tensors,
    open_pieces,
)
from shoal.checkpoint.state_tree import State
from shoal.checkpoint.store import CheckpointStore

LOOP, SYNC, SCHEDULE, LAYOUT, SETTINGS = "loop", "sync", "schedule", "layout", "settings"
_PARAM_GROUPS, _STATE_BY_NUMBER = "optimizer/param_groups", "/optimizer/state/"


def is_sharded(state: Mapping[str, Any]) -> bool:
    """Was it written by members that held the model together?"""
    return PIECES_SECTION in state


def whole_state(held: State, loop: State, sync: State | None) -> State:
    """What a process writes that holds the whole replica."""
    return {**held, LOOP: {**loop, SYNC: sync}}


def sharded_state(shared: State, records: Iterable[PieceRecord], names: Mapping[str, str]) -> State:
    """What the leader of the members writes; `records` are those of all members, `shared` is what all have alike."""
    rows = [record_fields(one) for one in records]
    return {**shared, "model": None, PIECES_SECTION: rows, NAMES_SECTION: dict(names)}


def record_fields(record: PieceRecord) -> dict[str, Any]:
    """As a checkpoint and a message have it."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in record.to_dict().items()}


class SharedSections(NamedTuple):
    """What every member needs of a checkpoint before it can build its part. `layout` is None where one process wrote
    it."""

    loop: State
    schedule: Any
    layout: Any

    @classmethod
    def load(cls, store: CheckpointStore, step: int) -> SharedSections:
        return cls(*(store.load(step, section=name)[1] for name in (LOOP, SCHEDULE, LAYOUT)))


def load_pieces(store: CheckpointStore, step: int, *, param_order: list[str]) -> tuple[SavedPieces, Any]:
    """The tensors of a checkpoint, whoever wrote it, and the optimizer's settings. Nothing is read yet but the rows."""
    manifest, rows = store.load(step, section=PIECES_SECTION)
    if rows is not None:
        return open_pieces(store.files, {PIECES_SECTION: rows}), store.load(step, section=SETTINGS)[1]
    groups = store.load(step, section=_PARAM_GROUPS)[1]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return open_full_tensors(store.files, manifest, rename=_named_as_pieces(param_order)), settings


def _named_as_pieces(param_order: list[str]) -> Callable[[str], str]:
    """One process writes an optimizer's state by the numbers of parameters, members by their names."""

    def rename(name: str) -> str:
        number, _, rest = name.removeprefix(_STATE_BY_NUMBER).partition("/")
        if not name.startswith(_STATE_BY_NUMBER) or not number.isdigit() or int(number) >= len(param_order):
            return name
        return f"/optimizer/{param_order[int(number)]}/{rest}"

    return rename
