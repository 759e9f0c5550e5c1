"""Turns pushes into updates, in one order on all servers of a chain, and replies when chain and staleness allow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint import state_format
from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.sparse.rows import scale_rows
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.connection import PayloadTarget
from shoal.paramserver.encoded_chunks import EncodedChunks
from shoal.paramserver.messages import ApplyRequest, parse_message
from shoal.paramserver.piece_state import ClientSession, PendingReply, PieceState, PushRound
from shoal.paramserver.protocol import ServerFrame
from shoal.paramserver.sparse.handlers import RowsUnreadableError
from shoal.paramserver.sparse.row_tables import RowGradients

if TYPE_CHECKING:
    from shoal.paramserver.server import ParameterServer

_NO_GRADIENTS: RowGradients = {}
_UPDATE_COUNT_MASK = (1 << 32) - 1
"""The bits of a stamp's `seq` that count updates since the piece was set. The bits above have the view of that set."""


@dataclass
class UpdateStats:
    """Counters of a server since its start."""

    pushes: int = 0
    repeats: int = 0
    records: int = 0
    staleness_sum: float = 0.0
    staleness_max: float = 0.0


class UpdatePipeline:
    """Belongs to the parameter server, and to its one thread."""

    def __init__(self, server: ParameterServer) -> None:
        self.stats = UpdateStats()
        self._server = server
        self._lane_buffers: dict[int, ByteBuffer] = {}

    # ---- requests ----

    def buffer_for(self, session: ClientSession, frame: ServerFrame) -> PayloadTarget:
        """The buffers for a push."""
        server = self._server
        if frame.chunk_table_number != server.chunk_table_number or not session.view == frame.view == server.view:
            return "skip"
        piece_state, size = server.piece_state(frame), server.chunk_store.layout.size_bytes
        if not piece_state.is_primary:
            raise LinkError(f"pushed piece {frame.piece} to a server that is not its primary")
        partials = self._pushed_partials(session, frame)
        if frame.flags & protocol.EMPTY:
            if server.config.synchronous:
                raise LinkError("pushed nothing, although all lanes are updated together")
        elif bool(frame.flags & protocol.SHARED) is (session.shared_memory is None):
            raise LinkError("pushed otherwise than it shares its memory")
        if piece_state.push_round is not None:
            piece_state.push_round.pushes.pop(session.seat, None)  # the client pushes again
        if frame.flags & (protocol.SHARED | protocol.EMPTY):
            return server.sparse_handler.buffers_with_rows(session.connection, frame, [])
        if server.encoded_chunks is not None:
            max_bytes = len(partials) * server.encoded_chunks.max_bytes(piece_state.piece)
            if frame.size > max_bytes:
                raise LinkError(f"sent {frame.size} bytes of encoded values, and {max_bytes} is the most")
            return session.connection.allocate_payload(frame.size)
        if session.memory is None:
            raise LinkError("sent a payload, but shares its memory")
        starts = [i * size for i in partials]
        dense = [
            session.memory.raw[start + piece_state.piece.start : start + piece_state.piece.stop] for start in starts
        ]
        return server.sparse_handler.buffers_with_rows(session.connection, frame, dense)

    def _pushed_partials(self, session: ClientSession, frame: ServerFrame) -> list[int]:
        """The indices of the partial sums in a push."""
        nodes = self._server.nodes[session.seat]
        if self._server.config.synchronous:
            if frame.number >> len(nodes):
                raise LinkError("pushed for lanes that it does not carry")
            return [i for i in range(len(nodes)) if frame.number >> i & 1]
        if (0, frame.seat) not in nodes:
            raise LinkError(f"pushed for lane {frame.seat}, which it does not carry")
        return [nodes.index((0, frame.seat))]

    def handle_request(self, session: ClientSession, frame: ServerFrame) -> None:
        server = self._server
        if frame.kind == protocol.PULL:
            piece_state = server.piece_state(frame)
            if not piece_state.is_primary:
                raise LinkError(f"pulled piece {frame.piece} from a server that is not its primary")
            if not bool(server.chunk_store.term[piece_state.piece.first_chunk : piece_state.piece.end_chunk].all()):
                raise LinkError(f"pulled piece {frame.piece}, which has no state yet")
            self._queue_reply(piece_state, session, frame)
        elif not session.view == frame.view == server.view:
            return  # of an older view: the client does not wait for a reply
        elif frame.kind == protocol.PUSH:
            self._handle_push(session, frame)
        elif frame.kind == protocol.APPLY:
            self._handle_apply(frame, parse_message(ApplyRequest, session.connection.payload))
        elif frame.kind == protocol.SET:
            piece_state = server.piece_state(frame)
            try:
                self.set_piece(piece_state, session.connection.payload, seq=frame.view << 32)
            except RowsUnreadableError as failure:
                server.sparse_handler.refuse(session, str(failure))
            else:
                self._queue_reply(piece_state, session, frame)
        else:
            raise LinkError(f"sent a frame of kind {frame.kind}")

    def _handle_push(self, session: ClientSession, frame: ServerFrame) -> None:
        encoded_chunks, layout = self._server.encoded_chunks, self._server.chunk_store.layout
        size = len(self._server.nodes[session.seat]) * (
            encoded_chunks.encoded_layout.lane_bytes if encoded_chunks else layout.size_bytes
        )
        if frame.flags & protocol.SHARED and (session.shared_memory is None or len(session.shared_memory.raw) < size):
            raise LinkError("shares too little memory")
        if session.hyper is None:
            raise LinkError("pushed before it sent hyperparameters")
        self.stats.pushes += 1
        piece_state = self._server.piece_state(frame)
        next_step = self._next_step(piece_state, frame)
        if next_step > frame.step:
            self.stats.repeats += 1
            self._queue_reply(piece_state, session, frame)
        elif next_step < frame.step and (self._server.config.synchronous or not frame.flags & protocol.EMPTY):
            why = f"got step {frame.step}, but step {next_step} is missing"
            session.connection.send(ServerFrame(protocol.REFUSED, self._server.chunk_table_number), why.encode())
        else:
            if encoded_chunks is not None and not frame.flags & protocol.EMPTY:
                self._decode(encoded_chunks, session, frame, piece_state)
            (self._add_to_round if self._server.config.synchronous else self._apply_lane_push)(
                session, frame, piece_state
            )

    def _decode(
        self, encoded_chunks: EncodedChunks, session: ClientSession, frame: ServerFrame, piece_state: PieceState
    ) -> None:
        """Decode a push into the session's partial sums."""
        layout, pushed = encoded_chunks.encoded_layout, self._pushed_partials(session, frame)
        if not pushed:
            return
        if frame.flags & protocol.SHARED:
            assert session.shared_memory is not None
            lanes = [session.shared_memory.tensor[i * layout.lane_bytes :][: layout.lane_bytes] for i in pushed]
            data = torch.cat([part for lane in lanes for part in encoded_chunks.parts(piece_state.piece, lane)])
        else:
            data = torch.frombuffer(session.connection.payload, dtype=torch.uint8)
        flat_buffers = [session.partial(i, layout.layout.size_bytes).tensor for i in pushed]
        encoded_chunks.decode(piece_state.piece, data, flat_buffers)

    def _next_step(self, piece_state: PieceState, frame: ServerFrame) -> int:
        """The step that the piece waits for."""
        chunks = slice(piece_state.piece.first_chunk, piece_state.piece.end_chunk)
        chunk_store = self._server.chunk_store
        if self._server.config.synchronous:
            return int(chunk_store.applied[chunks].min())
        if frame.seat >= self._server.config.lanes:
            raise LinkError(f"refers to lane {frame.seat}, which does not exist")
        return int(chunk_store.clocks[chunks, frame.seat].min())

    # ---- synchronous: all lanes in one update ----

    def _add_to_round(self, session: ClientSession, frame: ServerFrame, piece_state: PieceState) -> None:
        if piece_state.push_round is None or (piece_state.push_round.view, piece_state.push_round.step) != (
            frame.view,
            frame.step,
        ):
            piece_state.push_round = PushRound(frame.view, frame.step)
        piece_state.push_round.rows[session.seat] = self._server.sparse_handler.parse_rows(
            piece_state, session.connection
        )
        piece_state.push_round.pushes[session.seat] = (session, frame)
        if piece_state.push_round.pushes.keys() == self._server.nodes.keys():
            self._reduce_round(piece_state, piece_state.push_round)

    def _reduce_round(self, piece_state: PieceState, push_round: PushRound) -> None:
        server, chunk_store = self._server, self._server.chunk_store
        needs_total = push_round.flags & (protocol.NORMS | protocol.COUNTED)
        if not needs_total and (partial := piece_state.single_partial(server.nodes, chunk_store.layout.size_bytes)):
            self._apply_round(piece_state, push_round, partial)
            return
        server.shared_sums.begin_write(piece_state)
        if not piece_state.reduce_pushes(
            chunk_store.layout, server.nodes, server.config.lanes, chunk_store.sums.tensor
        ):
            for session, _ in push_round.pushes.values():
                session.connection.send(
                    ServerFrame(protocol.REFUSED, server.chunk_table_number), b"no lane had samples"
                )
            return
        push_round.summed = True
        if not needs_total:
            self._apply_round(piece_state, push_round, chunk_store.sums)
            return
        answer = self._norms_or_tail(piece_state, norms=bool(push_round.flags & protocol.NORMS))
        for session, frame in push_round.pushes.values():
            session.connection.send(frame._replace(kind=protocol.SUMMED, flags=push_round.flags), answer)

    def _norms_or_tail(self, piece_state: PieceState, *, norms: bool) -> memoryview:
        """This piece's part of what clients need before servers can apply: norms, or the tail with the count."""
        chunk_store, piece = self._server.chunk_store, piece_state.piece
        if piece.end_chunk == chunk_store.chunk_count:
            return chunk_store.sums.raw[piece.start : piece.stop]
        values = chunk_store.norms(piece.first_chunk, piece.end_chunk) if norms else []
        return torch.tensor(values, dtype=torch.float64).numpy().data.cast("B")

    def _handle_apply(self, frame: ServerFrame, request: ApplyRequest) -> None:
        """Apply with the total norm and count. The first client's message counts; all clients compute the same."""
        for piece_state in self._server.piece_states.values():
            push_round = piece_state.push_round
            if push_round and push_round.summed and push_round.pushes and push_round.step == frame.step:
                sums = self._server.chunk_store.sums
                self._apply_round(piece_state, push_round, sums, count=request.count, coefficient=request.coefficient)

    def _apply_round(
        self,
        piece_state: PieceState,
        push_round: PushRound,
        source: ByteBuffer,
        *,
        count: float | None = None,
        coefficient: float | None = None,
    ) -> None:
        chunk_store, piece_state.push_round = self._server.chunk_store, None
        session, _ = next(iter(push_round.pushes.values()))
        if count is not None or coefficient is not None:
            chunk_store.scale(
                piece_state.piece.first_chunk, piece_state.piece.end_chunk, count=count, coefficient=coefficient
            )
        record = ServerFrame(protocol.RECORD, step=push_round.step, flags=push_round.flags & protocol.HOW_APPLIED_FLAGS)
        if push_round.flags & (protocol.NORMS | protocol.COUNTED):
            record = record._replace(divisor=count or 0.0, coefficient=1.0 if coefficient is None else coefficient)
        gradients = {
            table: scale_rows(rows, count=count)
            for table, rows in self._server.sparse_handler.reduce_rows(push_round).items()
        }
        self.apply_record(piece_state, record, session.hyper or {}, source, gradients)
        for session, frame in push_round.pushes.values():
            self._queue_reply(piece_state, session, frame)

    # ---- stale-synchronous: each lane by itself ----

    def _apply_lane_push(self, session: ClientSession, frame: ServerFrame, piece_state: PieceState) -> None:
        server, chunk_store = self._server, self._server.chunk_store
        (index,) = self._pushed_partials(session, frame)
        updates = int(chunk_store.seq[piece_state.piece.first_chunk])
        steps = (
            max(updates - session.base_versions.get(piece_state.piece.first_chunk, updates), 0) / server.config.lanes
        )
        self.stats.staleness_sum += steps
        self.stats.staleness_max = max(self.stats.staleness_max, steps)
        scale = frame.scale / max(1.0, steps) if server.config.staleness_aware else frame.scale
        record = ServerFrame(
            protocol.RECORD, seat=frame.seat, step=frame.step, flags=frame.flags & protocol.EMPTY, scale=scale
        )
        gradients = server.sparse_handler.parse_row_gradients(piece_state, session.connection)
        self.apply_record(
            piece_state, record, session.hyper or {}, session.partial(index, chunk_store.layout.size_bytes), gradients
        )
        self._queue_reply(piece_state, session, frame)

    def lane_buffer(self, lane: int) -> ByteBuffer:
        """The buffer for a predecessor's records of this lane. Per lane, because forwarding may not be finished."""
        if lane >= self._server.config.lanes:
            raise LinkError(f"refers to lane {lane}, which does not exist")
        if lane not in self._lane_buffers:
            self._lane_buffers[lane] = ByteBuffer.private(self._server.chunk_store.layout.size_bytes)
        return self._lane_buffers[lane]

    # ---- updates, applied and forwarded ----

    def apply_record(
        self,
        piece_state: PieceState,
        record: ServerFrame,
        hyper: dict[str, Any],
        source: ByteBuffer,
        gradients: RowGradients = _NO_GRADIENTS,
    ) -> None:
        """Update the piece once, as ordered by this primary or by a predecessor, and forward the record."""
        chunk_store, piece = self._server.chunk_store, piece_state.piece
        for first, last in self._chunks_without(piece_state, record):
            if not record.flags & protocol.EMPTY:
                self._update_parameters(first, last, record, hyper, source)
                self._update_rows(first, last, record, hyper, gradients)
            chunk_store.term[first:last] = self._server.chunk_table_number
            chunk_store.seq[first:last] += 1
            if self._server.config.synchronous:
                chunk_store.applied[first:last] = record.step + 1
                chunk_store.how_applied[first:last] = (
                    record.flags & protocol.HOW_APPLIED_FLAGS,
                    record.divisor,
                    record.coefficient,
                )
        if not self._server.config.synchronous:
            chunk_store.clocks[piece.first_chunk : piece.end_chunk, record.seat] = record.step + 1
        piece_state.version += 1
        self.stats.records += 1
        self._server.replication.forward(piece_state, record, hyper, source, gradients)
        self.flush_pending(piece_state)

    def _chunks_without(self, piece_state: PieceState, record: ServerFrame) -> Iterator[tuple[int, int]]:
        """The chunks of the piece without this update: nearly always all of them."""
        chunk_store, first, last = self._server.chunk_store, piece_state.piece.first_chunk, piece_state.piece.end_chunk
        next_steps = chunk_store.applied if self._server.config.synchronous else chunk_store.clocks[:, record.seat]
        lacking = next_steps[first:last] <= record.step
        if bool(lacking.all()):
            yield first, last
            return
        for i in lacking.nonzero()[0].tolist():
            yield first + i, first + i + 1

    def _update_parameters(
        self, first: int, last: int, record: ServerFrame, hyper: dict[str, Any], source: ByteBuffer
    ) -> None:
        chunk_store = self._server.chunk_store
        if last == chunk_store.chunk_count:
            self._update_tail(source)
            return
        try:
            groups = [options_from_json(group) for group in hyper["groups"]]
            for group in groups:
                group["lr"] *= record.scale
            chunk_store.apply(first, last, source=source.tensor, hyper=groups, clip_value=hyper.get("clip_value"))
        except Exception as failure:  # the options come from the client, and no optimizer checks all of them
            raise LinkError(f"requested an impossible update: {failure!r:.200}") from failure

    def _update_rows(
        self, first: int, last: int, record: ServerFrame, hyper: dict[str, Any], gradients: RowGradients
    ) -> None:
        row_tables = self._server.chunk_store.row_tables
        if row_tables is not None:
            clip, synchronous = hyper.get("clip_value"), self._server.config.synchronous
            row_tables.apply(first, last, gradients, scale=record.scale, clip=clip, keep_previous=synchronous)

    def _update_tail(self, source: ByteBuffer) -> None:
        """Update buffers and loss. Lanes that push by themselves are averaged: each moves the values by 1 / lanes."""
        chunk_store, config = self._server.chunk_store, self._server.config
        first = not int(chunk_store.seq[-1]) & _UPDATE_COUNT_MASK
        for region in chunk_store.layout.regions:
            if region.start >= chunk_store.layout.tail:
                old, new = region.view_in(chunk_store.parameters.tensor), region.view_in(source.tensor)
                if config.synchronous or first or not region.is_summed or not old.is_floating_point():
                    old.copy_(new)
                else:
                    old.lerp_(new, 1 / config.lanes)

    def set_piece(self, piece_state: PieceState, content: bytearray, *, seq: int | None = None) -> None:
        """Replace a piece's whole state, here and on the successor. Empty content: the state here is already right."""
        chunk_store, chunks = (
            self._server.chunk_store,
            slice(piece_state.piece.first_chunk, piece_state.piece.end_chunk),
        )
        if content:
            try:
                state = state_format.unpack_state(bytes(content))
                rows = self._server.sparse_handler.rows_for_piece(piece_state, state)
                chunk_store.write_state(chunks.start, chunks.stop, state)
                if chunk_store.row_tables is not None:
                    chunk_store.row_tables.write_bundles(chunks.start, chunks.stop, rows)
            except (ValueError, KeyError, TypeError) as failure:
                raise LinkError(f"sent a state that does not match the piece: {failure}") from failure
        if seq is not None:
            chunk_store.term[chunks] = self._server.chunk_table_number
            chunk_store.seq[chunks] = seq
        piece_state.valid = True
        if content:  # without content nothing changed, and the chain need not acknowledge
            piece_state.version += 1
        self._server.replication.resend(piece_state, changed=bool(content))

    # ---- replies ----

    def _queue_reply(self, piece_state: PieceState, session: ClientSession, frame: ServerFrame) -> None:
        # a client that repeats its request gets one reply
        others = [one for one in piece_state.pending_replies if one.session is not session]
        piece_state.pending_replies = [*others, PendingReply(session, frame, piece_state.version)]
        self.flush_pending(piece_state)

    def flush_pending(self, piece_state: PieceState) -> None:
        """Send the acknowledgements and replies that need not wait any longer."""
        while piece_state.pending_acks and piece_state.is_replicated(piece_state.pending_acks[0].version):
            pending = piece_state.pending_acks.popleft()
            pending.connection.send(
                ServerFrame(
                    protocol.ACK,
                    self._server.chunk_table_number,
                    piece_state.piece.index,
                    number=pending.predecessor_version,
                )
            )
        if piece_state.pending_replies:
            due = [
                piece_state.is_replicated(one.version) and self._within_staleness_bound(piece_state, one.frame)
                for one in piece_state.pending_replies
            ]
            for one, is_due in zip(piece_state.pending_replies, due, strict=True):
                if is_due:
                    self._reply(piece_state, one.session, one.frame)
            piece_state.pending_replies = [
                one for one, is_due in zip(piece_state.pending_replies, due, strict=True) if not is_due
            ]

    def _within_staleness_bound(self, piece_state: PieceState, frame: ServerFrame) -> bool:
        """Whether the lane's lead over the slowest lane is within the staleness bound."""
        config = self._server.config
        if config.synchronous or frame.kind != protocol.PUSH:
            return True
        clocks = self._server.chunk_store.clocks[piece_state.piece.first_chunk : piece_state.piece.end_chunk]
        if ignored := self._server.ignored_lanes - {frame.seat}:
            clocks = clocks[:, [lane for lane in range(config.lanes) if lane not in ignored]]
        return frame.step + 1 - int(clocks.min()) <= config.staleness

    def _reply(self, piece_state: PieceState, session: ClientSession, frame: ServerFrame) -> None:
        chunk_store, piece = self._server.chunk_store, piece_state.piece
        updates = int(chunk_store.seq[piece.first_chunk])
        flags, divisor, coefficient = self._how_applied(piece_state)
        answer = frame._replace(
            kind=protocol.DONE, flags=flags, number=updates, divisor=divisor, coefficient=coefficient
        )
        if frame.kind == protocol.SET:
            session.connection.send(answer)
        elif frame.flags & protocol.WHOLE:
            state = state_format.pack_state(chunk_store.read_state(piece.first_chunk, piece.end_chunk))
            session.connection.send(answer._replace(kind=protocol.STATE), state)
        else:
            session.base_versions[piece.first_chunk] = updates
            if (
                session.connection.same_host and session.view > 0
            ):  # only a client that has entered has mapped the memory
                session.connection.send(answer._replace(kind=protocol.VALUES, flags=flags | protocol.SHARED))
            else:
                values = chunk_store.parameters.raw[piece.start : piece.stop]
                # in a synchronous step no value changes before all clients have received theirs
                stable = self._server.config.synchronous and frame.kind == protocol.PUSH
                session.connection.send(answer._replace(kind=protocol.VALUES), values if stable else bytes(values))

    def _how_applied(self, piece_state: PieceState) -> tuple[int, float, float]:
        """How the last step was applied (flags, divisor, coefficient), for clients that missed the reply."""
        rows = self._server.chunk_store.how_applied[piece_state.piece.first_chunk : piece_state.piece.end_chunk]
        flags = 0
        for found in set(rows[:, 0].tolist()):
            flags |= int(found)
        _, divisor, coefficient = rows[0].tolist()
        return flags, divisor, coefficient


def options_from_json(group: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where torch needs tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
