"""A worker's side of sparse tables whose rows are on servers: asking for rows, pushing gradients, saving."""

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
from shoal.paramserver.sparse.checkpoint import RowBlob
from shoal.paramserver.sparse.requests import LookupRows, SnapshotRows
from shoal.spec.chunk_table import ParameterPiece

PushPayload = Callable[[ParameterPiece], list[memoryview | bytes]]
"""What a push brings of a piece besides dense gradients."""


class SparseClient:
    """Belongs to the sync. `step` is where the replica stands: rows are wanted as they are there.

    `saved` says where a checkpoint has the rows that servers should hold, or have just written."""

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
        """In the midst of a forward pass: LinkError if the step cannot count any more."""
        errand = LookupRows(table, keys, step=self.step)
        try:
            self._client.run(errand)
        except RefusedError as failure:
            raise error("SH416", f"a server refuses rows at step {self.step}: {failure}") from failure
        except LinkError as failure:
            self._discard(failure)
            raise
        return errand.values

    def push_payload(self, sums: Sequence[LaneSum | None]) -> PushPayload:
        """For a push of these sums, which are counted."""
        bundles = [
            RowBundle(i, number, rows)
            for i, value in enumerate(sums)
            if value is not None
            for number, rows in enumerate(value.rows)
        ]

        def of(piece: ParameterPiece) -> list[memoryview | bytes]:
            return pack_rows(
                [one._replace(rows=one.rows.in_chunks(piece.first_chunk, piece.end_chunk)) for one in bundles]
            )

        return of

    # ---- what servers hold ----

    def save(self) -> list[dict[str, Any]]:
        """Let servers write their rows beside the checkpoint. LinkError if they do not."""
        if self._tables:
            self.saved = [RowBlob.from_description(found["saved"]) for _, found in self._save_or_hash_rows(saves=True)]
        return [one.describe() for one in self.saved]

    def blobs(self) -> dict[str, int]:
        """That belong to the checkpoint."""
        return {one.blob: one.size_bytes for one in self.saved}

    def saved_within(self, first: int, last: int) -> list[dict[str, Any]]:
        return [one.describe() for one in self.saved if one.first < last and first < one.last]

    def sha256(self) -> str:
        """Of all rows of all tables; '' without any."""
        if not self._tables:
            return ""
        found = [digest for _, kept in self._save_or_hash_rows(saves=False) for digest in kept["digests"]]
        return hashlib.sha256("".join(found).encode()).hexdigest()

    def _save_or_hash_rows(self, *, saves: bool) -> list[tuple[tuple[int, int], dict[str, Any]]]:
        errand = SnapshotRows(self.step, saves)
        while not errand.is_complete(self._chunks):  # if the table changed on the way, some overlap
            errand = SnapshotRows(self.step, saves)
            self._client.run(errand)
        return sorted(errand.replies.items())
