"""A parameter server's reaction to frames. It does not touch sockets.

Rules that apply every update exactly once, whichever process dies:
- a push is labelled with table, view and step (or lane and step); a push that is already applied is answered and not
  applied again;
- the primary of a piece orders its updates, and replies only when the required servers of the chain have acknowledged;
- a new table resets everything but the chunks' state: clients repeat every request without a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from shoal.checkpoint.files import CheckpointFiles
from shoal.collectives.buckets import EncodedLayout
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory, attach
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.reduction_tree import Node, partial_nodes
from shoal.lanes.sparse.table_spec import MAX_TABLES, TableSpec
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.chunk_store import ChunkStore, optimizer_class
from shoal.paramserver.connection import PayloadTarget, ServerConnection
from shoal.paramserver.encoded_chunks import EncodedChunks
from shoal.paramserver.messages import EnterRequest, HyperparameterUpdate, parse_message, with_changed_numbers
from shoal.paramserver.piece_state import ClientSession, PieceState
from shoal.paramserver.protocol import ServerFrame, encode_json
from shoal.paramserver.replication import ChainReplication, SharedSums
from shoal.paramserver.sparse.handlers import MAX_KEYS_BYTES, RunInThread, SparseTableHandler
from shoal.paramserver.update_pipeline import UpdatePipeline, options_from_json
from shoal.spec.chunk_table import ChunkTable, build_pieces

MAX_STATE_TO_PIECE_RATIO = 12
STATE_OVERHEAD_BYTES = 4 << 20
_TABLE_BOUND_KINDS = frozenset(
    {
        protocol.ENTER,
        protocol.PUSH,
        protocol.PULL,
        protocol.SET,
        protocol.APPLY,
        protocol.LOOKUP_ROWS,
        protocol.SNAPSHOT_ROWS,
    }
)
_MAX_PAYLOAD_BYTES = {
    protocol.ENTER: protocol.MAX_JSON_BYTES,
    protocol.HYPER: 4 << 20,
    protocol.APPLY: 4 << 10,
    protocol.LOOKUP_ROWS: MAX_KEYS_BYTES,
}
"""Maximum payload by kind of frame."""


@dataclass(frozen=True)
class ServerConfig:
    """The job's settings for its servers. `staleness` may be infinite. With `staleness_aware`, a stale push has a
    smaller learning rate."""

    lanes: int
    staleness: float
    optimizer: type[torch.optim.Optimizer] | None = None
    staleness_aware: bool = False
    codec: Mapping[str, Any] | None = None
    """The settings of the job's codec; pushes are then encoded lane by lane."""
    cut_tensors: bool = True
    """Whether chunks of encoded lanes may end inside a tensor."""
    checkpoints: CheckpointFiles | None = None
    """Where the rows of sparse tables are saved."""
    views: Mapping[int, Mapping[int, Sequence[int]]] | None = None
    """The lanes of each seat in each view, if all views are known before."""
    waits_for_views: bool = False
    """Whether the driver tells the views, and no client is believed."""

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0


class ParameterServer:
    """Belongs to the server's one thread. `connect_to` requests a connection to a successor; `on_filled` reports that a
    successor has all its pieces."""

    def __init__(
        self,
        seat: int,
        config: ServerConfig,
        *,
        connect_to: Callable[[int, ChunkTable], None],
        on_filled: Callable[[int, int], None],
        run_in_thread: RunInThread,
    ) -> None:
        self.seat = seat
        self.config = config
        self.chunk_table: ChunkTable | None = None
        self.piece_states: dict[int, PieceState] = {}
        self.view = 0
        self._told_view, self._known_views = 0, config.views
        self.nodes: dict[int, list[Node]] = {}
        self.model: dict[str, Any] = {}
        self.encoded_chunks: EncodedChunks | None = None
        self.ignored_lanes: frozenset[int] = frozenset()
        self.replication = ChainReplication(self, connect_to=connect_to, on_filled=on_filled)
        self.sparse_handler = SparseTableHandler(
            self,
            run_in_thread=run_in_thread,
            files=config.checkpoints,
        )
        self.updates = UpdatePipeline(self)
        self._chunk_store: ChunkStore | None = None
        self._shared_parameters: SharedMemory | None = None
        self._shared_sums: SharedSums | None = None
        self._ready = False
        self._sessions: dict[ServerConnection, ClientSession] = {}

    @property
    def chunk_store(self) -> ChunkStore:
        if self._chunk_store is None:
            raise LinkError("refers to a model that this server does not have yet")
        return self._chunk_store

    @property
    def chunk_table_number(self) -> int:
        """0 without a table."""
        return self.chunk_table.number if self.chunk_table else 0

    def piece_state(self, frame: ServerFrame) -> PieceState:
        if frame.piece not in self.piece_states:
            raise LinkError(f"refers to piece {frame.piece}, which this server does not hold")
        return self.piece_states[frame.piece]

    # ---- tables and clients ----

    def set_chunk_table(self, chunk_table: ChunkTable) -> None:
        if chunk_table.number <= self.chunk_table_number:
            return
        self.chunk_table = chunk_table
        own = [piece for piece in build_pieces(chunk_table) if self.seat in piece.replication_order]
        self.piece_states = {piece.index: PieceState.of(piece, self.seat) for piece in own}
        self.replication.disconnect_all()
        self._apply_chunk_table()
        for session in self._sessions.values():
            session.connection.send(ServerFrame(protocol.STALE, self.chunk_table_number))

    def _apply_chunk_table(self) -> None:
        """Takes effect once both the table and the model's layout are known."""
        if self.chunk_table is not None and self._chunk_store is not None:
            self._drop_unowned_rows(self._chunk_store)
            self._chunk_store.set_pieces([(p.piece.first_chunk, p.piece.end_chunk) for p in self.piece_states.values()])
            self.replication.connect_successors()

    @property
    def shared_sums(self) -> SharedSums:
        if self._shared_sums is None:
            raise LinkError("refers to a model that this server does not have yet")
        return self._shared_sums

    def _drop_unowned_rows(self, chunk_store: ChunkStore) -> None:
        """Free the memory of rows in chunks that this server no longer holds."""
        if chunk_store.row_tables is None:
            return
        own = {
            i
            for piece_state in self.piece_states.values()
            for i in range(piece_state.piece.first_chunk, piece_state.piece.end_chunk)
        }
        dropped = [i for i in range(chunk_store.chunk_count) if i not in own and int(chunk_store.term[i])]
        for _, adjacent in groupby(enumerate(dropped), key=lambda pair: pair[1] - pair[0]):
            chunks = [i for _, i in adjacent]
            chunk_store.drop(chunks[0], chunks[-1] + 1)

    def add_client(self, connection: ServerConnection) -> list[ServerConnection]:
        """Register a client connection. Returns older connections of the same client; the caller closes them so that
        late messages are not mistaken for new requests."""
        old = [one for one in self._sessions if one.peer == connection.peer]
        self._sessions[connection] = ClientSession(connection, connection.peer)
        return old

    def connection_lost(self, connection: ServerConnection) -> None:
        session = self._sessions.pop(connection, None)
        self.replication.connection_lost(connection)
        if session:
            for piece_state in self.piece_states.values():
                piece_state.pending_replies = [one for one in piece_state.pending_replies if one.session is not session]
                piece_state.reductions.clear()

    def ignore_lanes(self, lanes: Iterable[int]) -> None:
        """From now on the staleness bound does not wait for these lanes."""
        self.ignored_lanes = frozenset(lanes)
        for piece_state in self.piece_states.values():
            self.updates.flush_pending(piece_state)

    # ---- frames ----

    def buffer_for(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        session = self._sessions.get(connection)
        if session is None:
            return self.replication.buffer_for(connection, frame)
        if frame.kind in _TABLE_BOUND_KINDS and frame.chunk_table_number > self.chunk_table_number:
            return "hold"  # this server has not received the table yet
        if frame.kind == protocol.ENTER and self.config.waits_for_views and frame.view > self._told_view:
            return "hold"
        if frame.kind == protocol.PUSH:
            return self.updates.buffer_for(session, frame)
        if frame.kind == protocol.SET:
            return (
                self.buffer_for_state(connection, frame)
                if frame.chunk_table_number == self.chunk_table_number
                else "skip"
            )
        max_bytes = _MAX_PAYLOAD_BYTES.get(frame.kind, 0)
        if frame.size > max_bytes:
            raise LinkError(f"sent {frame.size} bytes, and {max_bytes} is the most")
        return connection.allocate_payload(frame.size)

    def buffer_for_state(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        """A buffer for a piece's whole state, of limited size."""
        piece = self.piece_state(frame).piece
        if frame.size > MAX_STATE_TO_PIECE_RATIO * (piece.stop - piece.start) + STATE_OVERHEAD_BYTES:
            raise LinkError(f"sent a state of {frame.size} bytes, which is too large")
        return connection.allocate_payload(frame.size)

    def handle_frame(self, connection: ServerConnection, frame: ServerFrame) -> None:
        session = self._sessions.get(connection)
        if session is None:
            self.replication.handle_frame(connection, frame)
        elif frame.kind in _TABLE_BOUND_KINDS and frame.chunk_table_number < self.chunk_table_number:
            connection.send(ServerFrame(protocol.STALE, self.chunk_table_number))
        elif frame.kind == protocol.ENTER:
            self._handle_enter(session, frame)
        elif frame.kind == protocol.READY:
            self._handle_ready(session, frame.view)
        elif frame.kind == protocol.HYPER:
            session.hyper = self.parse_hyperparameters(connection.payload)
        elif frame.kind == protocol.SHARE_MEMORY:
            self._attach_shared_memory(session, frame)
        elif frame.kind == protocol.LOOKUP_ROWS:
            self.sparse_handler.handle_lookup(session, frame)
        elif frame.kind == protocol.SNAPSHOT_ROWS:
            self.sparse_handler.handle_snapshot(session, frame)
        else:
            self.updates.handle_request(session, frame)

    # ---- entering a view ----

    def set_view(self, view: int, carries: Mapping[int, Sequence[int]]) -> None:
        """The driver's newest training view."""
        self._told_view, self._known_views = view, {view: {seat: sorted(lanes) for seat, lanes in carries.items()}}

    def _handle_enter(self, session: ClientSession, frame: ServerFrame) -> None:
        request, view = parse_message(EnterRequest, session.connection.payload), frame.view
        newest = max(self.view, self._told_view)
        if view < newest:
            passed = f"view {view} has passed".encode()
            session.connection.send(ServerFrame(protocol.REFUSED, self.chunk_table_number, view=newest), passed)
            return
        self.check_model(request.model)
        if view > self.view:
            self._begin_view(view, self._parse_assignment(request, session.seat, view))
        if session.seat not in self.nodes:
            raise LinkError(f"enters view {view}, of which it is not a member")
        session.view, session.pending_enter = view, frame
        size = len(self.nodes[session.seat]) * self.chunk_store.layout.size_bytes
        needs_memory = session.shared_memory is None or self.encoded_chunks is not None
        if needs_memory and (session.memory is None or len(session.memory.raw) < size):
            session.memory = ByteBuffer.private(size)
        if request.lead and not self._ready:
            session.connection.send(
                ServerFrame(protocol.STATUS, frame.chunk_table_number, view=view), encode_json(self._status())
            )
        elif request.ready:
            self._ready = True
            self._admit(session)  # again, after it reconnected or the table changed
        self.admit_entering_clients()

    def _parse_assignment(self, request: EnterRequest, sender: int, view: int) -> dict[int, list[int]]:
        assignment = parse_assignment(request.carries, sender=sender, lanes=self.config.lanes)
        if self._known_views is not None and self._known_views.get(view) != assignment:
            raise LinkError(f"enters view {view}, which does not exist")
        return assignment

    def check_model(self, model: Any) -> None:
        """Check the model's layout, which the first client sets for the whole run."""
        try:
            if self._chunk_store is None:
                self._set_model(model)
            elif FlatLayout.from_description(model["layout"]).digest != self._chunk_store.layout.digest:
                raise ValueError("other shapes")
        except Exception as failure:  # the description names an optimizer and its options, which may raise anything
            raise LinkError(f"describes an impossible model: {failure!r:.200}") from failure

    def parse_hyperparameters(self, payload: bytearray) -> dict[str, Any]:
        """Options that the optimizer of each group takes. LinkError for anything else."""
        update, initial = parse_message(HyperparameterUpdate, payload), self.model.get("hyper", ())
        if len(update.groups) != len(initial):
            raise LinkError("sent options for other groups than the optimizer has")
        if not all(map(with_changed_numbers, update.groups, initial)):
            raise LinkError("sent options that the optimizer does not take")
        return update.model_dump()

    def _set_model(self, model: dict[str, Any]) -> None:
        layout, encoded_chunks = FlatLayout.from_description(model["layout"]), None
        if self.config.codec:
            encoded_chunks = EncodedChunks(
                EncodedLayout(layout, self.config.codec), cut_tensors=self.config.cut_tensors
            )
            layout.chunk_offsets = encoded_chunks.offsets
        if self.chunk_table is None or self.chunk_table.cuts != layout.chunk_offsets:
            raise ValueError("the chunk table is for another model")
        self.encoded_chunks = encoded_chunks
        self._shared_parameters, self._shared_sums = SharedMemory(layout.size_bytes), SharedSums.create(layout)
        self._chunk_store = ChunkStore(
            layout,
            optimizer=self.config.optimizer or optimizer_class(model["optimizer"]),
            groups=[int(group) for group in model["groups"]],
            hyper=[options_from_json(group) for group in model["hyper"]],
            lanes=self.config.lanes,
            parameters=self._shared_parameters.buffer,
            sums=self._shared_sums.memory,
            tables=parse_table_specs(model.get("tables", [])),
        )
        self.model = model
        self._apply_chunk_table()

    @property
    def has_model(self) -> bool:
        return self._chunk_store is not None

    def _begin_view(self, view: int, carries: dict[int, list[int]]) -> None:
        """Set the partial sums of each seat: one per lane if lanes push by themselves or are encoded."""
        if not self.config.synchronous or self.config.codec:
            self.nodes = {seat: [(0, lane) for lane in lanes] for seat, lanes in carries.items()}
        else:
            self.nodes = {seat: partial_nodes(lanes, self.config.lanes) for seat, lanes in carries.items()}
        self.view, self._ready = view, False
        for piece_state in self.piece_states.values():
            piece_state.drop_pushes()

    def _primary_chunks(self) -> list[int]:
        """The chunks of which this server is the primary."""
        return [
            i
            for piece_state in self.piece_states.values()
            if piece_state.is_primary
            for i in range(piece_state.piece.first_chunk, piece_state.piece.end_chunk)
        ]

    def _status(self) -> dict[str, Any]:
        """Lowest and highest applied step of the primary chunks; `set` if all have state."""
        chunks = self._primary_chunks()
        if not chunks:
            return {"set": True}
        applied, terms = self.chunk_store.applied[chunks], self.chunk_store.term[chunks]
        return {"set": bool((terms > 0).all()), "low": int(applied.min()), "high": int(applied.max())}

    def _handle_ready(self, session: ClientSession, view: int) -> None:
        if session.view == view == self.view:
            self._ready = True
            self.admit_entering_clients()

    def admit_entering_clients(self) -> None:
        """Admit entering clients once all updates here have reached the ends of the chains: their next pushes may
        overwrite memory from which a record is still being sent."""
        entering = [session for session in self._sessions.values() if session.pending_enter is not None]
        if (
            self._ready
            and entering
            and all(
                piece_state.is_replicated(piece_state.version)
                for piece_state in self.piece_states.values()
                if piece_state.is_primary
            )
        ):
            for session in entering:
                self._admit(session)

    def _admit(self, session: ClientSession) -> None:
        frame, session.pending_enter = session.pending_enter, None
        if frame is not None and frame.view == self.view:
            chunks, chunk_store = self._primary_chunks(), self.chunk_store
            next_steps = chunk_store.applied[:, None] if self.config.synchronous else chunk_store.clocks
            clocks = next_steps[chunks].min(0).tolist() if chunks else []
            fd = self._shared_parameters.fd if self._shared_parameters and session.connection.same_host else -1
            answer = ServerFrame(
                protocol.ENTERED, frame.chunk_table_number, view=frame.view, number=self.chunk_store.layout.size_bytes
            )
            session.connection.send(answer, encode_json({"clocks": clocks}), fd=fd)

    def _attach_shared_memory(self, session: ClientSession, frame: ServerFrame) -> None:
        session.shared_memory = attach(session.connection.take_fd(), frame.number)
        session.encoded = self.config.codec is not None
        for piece_state in self.piece_states.values():
            piece_state.drop_pushes_of(session)


def parse_table_specs(descriptions: Any) -> list[TableSpec]:
    """The sparse tables of a model. ValueError for an invalid description."""
    tables = [TableSpec.from_description(one) for one in descriptions]
    if [table.number for table in tables] != list(range(len(tables))) or len(tables) > MAX_TABLES:
        raise ValueError("sparse tables that are not numbered from 0")
    return tables


def parse_assignment(fields: Mapping[str, Sequence[int]], *, sender: int, lanes: int) -> dict[int, list[int]]:
    """The lanes of each seat. LinkError unless each lane is carried once, and `sender` is a member."""
    try:
        assignment = {int(seat): sorted(int(lane) for lane in carries) for seat, carries in fields.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as failure:
        raise LinkError(f"sent a malformed assignment of lanes: {failure!r:.200}") from failure
    carried = sorted(lane for carries in assignment.values() for lane in carries)
    if carried != list(range(lanes)) or sender not in assignment:
        raise LinkError("enters a view that does not carry each lane once")
    return assignment
