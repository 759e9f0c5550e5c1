"""A worker's side of sparse tables: reads rows from servers, pushes gradients, saves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from shoal.collectives.outcome import Discarded
from shoal.errors import error
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.sparse.embedding import SparseTable
from shoal.lanes.sparse.keys import Floats, Keys
from shoal.lanes.sparse.rows import RowBundle, pack_rows
from shoal.lanes.sparse.table_spec import TableSpec
from shoal.net.errors import LinkError
from shoal.paramserver.client import ParameterServerClient, RefusedError
from shoal.paramserver.messages import RowsSnapshot
from shoal.paramserver.sparse.checkpoint import RowBlob
from shoal.paramserver.sparse.requests import LookupRows, SnapshotRows
from shoal.spec.chunk_table import ParameterPiece

PushPayload = Callable[[ParameterPiece], list[memoryview | bytes]]
"""A push's payload for a piece besides dense gradients."""


class SparseClient:
    """Belongs to the parameter-server strategy. `step` is the replica's step: rows are read as of this step.

    `saved` describes the rows of the checkpoint that servers should hold, or have just written."""

    def __init__(
        self,
        tables: Sequence[SparseTable],
        client: ParameterServerClient,
        *,
        chunks: int,
        discard: Callable[[LinkError], Discarded],
    ) -> None:
        self.step = 0
        self.saved: list[RowBlob] = []
        self._tables = list(tables)
        self._client = client
        self._chunks = chunks
        self._discard = discard
        for table in tables:
            table.bind(self, chunks=chunks - 1)  # the tail has no rows

    def __bool__(self) -> bool:
        return bool(self._tables)

    def describe(self) -> list[dict[str, Any]]:
        return [table.spec.describe() for table in self._tables]

    def read(self, table: TableSpec, keys: Keys) -> Floats:
        """Called during a forward pass. LinkError if the step must be discarded."""
        request = LookupRows(table, keys, step=self.step)
        try:
            self._client.run(request)
        except RefusedError as failure:
            raise error("SH416", f"a server refused rows at step {self.step}: {failure}") from failure
        except LinkError as failure:
            self._discard(failure)
            raise
        return request.values

    def push_payload(self, sums: Sequence[LaneSum | None]) -> PushPayload:
        """The rows of these partial sums, tagged by their index."""
        bundles = [
            RowBundle(i, number, rows)
            for i, value in enumerate(sums)
            if value is not None
            for number, rows in enumerate(value.rows)
        ]

        def payload(piece: ParameterPiece) -> list[memoryview | bytes]:
            return pack_rows(
                [one._replace(rows=one.rows.in_chunks(piece.first_chunk, piece.end_chunk)) for one in bundles]
            )

        return payload

    # ---- the servers' rows ----

    def save(self) -> list[dict[str, Any]]:
        """Have servers write their rows beside the checkpoint. LinkError if that fails."""
        if self._tables:
            self.saved = [RowBlob.from_description(found.saved) for _, found in self._save_or_hash_rows(saves=True)]
        return [one.describe() for one in self.saved]

    def blobs(self) -> dict[str, int]:
        """The checkpoint's row blobs, with their sizes."""
        return {one.blob: one.size_bytes for one in self.saved}

    def saved_within(self, first: int, last: int) -> list[dict[str, Any]]:
        return [one.describe() for one in self.saved if one.first < last and first < one.last]

    def sha256(self) -> str:
        """The digest of all rows of all tables; '' without tables."""
        if not self._tables:
            return ""
        digests = [digest for _, reply in self._save_or_hash_rows(saves=False) for digest in reply.digests]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def _save_or_hash_rows(self, *, saves: bool) -> list[tuple[tuple[int, int], RowsSnapshot]]:
        request = SnapshotRows(self.step, saves)
        while not request.is_complete(self._chunks):  # replies overlap if the table changed meanwhile
            request = SnapshotRows(self.step, saves)
            self._client.run(request)
        return sorted(request.replies.items())
