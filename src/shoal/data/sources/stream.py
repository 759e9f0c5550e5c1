"""An IterableDataset: samples that can only be read in order. Sample i is the i-th that it gives, in every epoch.

Which samples a lane gets at a step is decided by their places in the stream, so nothing about the stream is saved: a
worker that resumes skips what was used before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shoal.data.batch import Batch
from shoal.data.source import Array, DataSource, Ids
from shoal.errors import error
from shoal.spec.resolve import is_users_failure, user_error

DEFAULT_WINDOW = 1024
_MAX_CURSORS = 2
MakeBatch = Callable[[list[Any], Ids], Batch]


class _Cursor:
    """One pass over the stream. It keeps the samples of the last windows."""

    def __init__(self, samples: Iterator[Any], *, start: int, keep: int) -> None:
        self._samples, self._keep = samples, keep
        self._kept: dict[int, Any] = {}
        self.next = start

    def has(self, first: int) -> bool:
        """Whether it can still give sample `first` and all after it."""
        return first >= self.next or first in self._kept

    def read_until(self, stop: int, *, first: int) -> None:
        """Read on to sample `stop`; those from `first` on will be asked for. SH835 if the stream ends before."""
        self._keep = max(self._keep, 2 * (stop - first))
        while self.next < stop:
            try:
                sample = next(self._samples)
            except StopIteration:
                message = f"the stream ends after {self.next} samples, and sample {stop - 1} is needed"
                raise error("SH835", message, where="data.source") from None
            except BaseException as failure:
                if not is_users_failure(failure):
                    raise
                raise user_error("SH309", failure, f"sample {self.next} of the stream") from failure
            if self.next >= stop - self._keep:  # what is skipped is not kept
                self._kept[self.next] = sample
                self._kept.pop(self.next - self._keep, None)
            self.next += 1

    def sample(self, i: int) -> Any:
        return self._kept[i]


class StreamSource(DataSource):
    """`blocks` are windows of the stream, within which samples are shuffled. Each process reads the stream itself."""

    in_memory = False
    per_sample = True
    is_sequential = True

    def __init__(self, dataset: Any, *, length: int, window: int, make_batch: MakeBatch) -> None:
        self._dataset = dataset
        self._length = length
        self._window = window
        self._make_batch = make_batch
        self._cursors: list[_Cursor] = []
        self._lock = threading.Lock()
        self.blocks = np.arange(0, length, window, dtype=np.int64)

    def __len__(self) -> int:
        return self._length

    def take(self, ids: Ids) -> Batch:
        with self._lock:
            samples = self._read(int(ids.min()), int(ids.max()) + 1, ids)
        return self._make_batch(samples, ids)

    def targets(self) -> Array:
        raise error("SH303", "a stream has no column of targets", fix="Split by the order of samples: shuffle: false.")

    def _read(self, first: int, stop: int, ids: Ids) -> list[Any]:
        cursor = next((cursor for cursor in self._cursors if cursor.has(first)), None) or self._start_at(first)
        others = [other for other in self._cursors if other is not cursor]
        self._cursors = [*others[-_MAX_CURSORS + 1 :], cursor]  # the one that was used last is the last
        cursor.read_until(stop, first=first)
        return [cursor.sample(int(i)) for i in ids]

    def _start_at(self, first: int) -> _Cursor:
        """A new pass. `skip(n)` of the dataset is used if it has one, as those of Hugging Face have."""
        keep = 3 * self._window
        start = max(0, first - self._window)
        skip = getattr(self._dataset, "skip", None)
        if callable(skip) and start:
            return _Cursor(iter(skip(start)), start=start, keep=keep)
        return _Cursor(iter(self._dataset), start=0, keep=keep)


def stream_length(dataset: Any, length: int | None) -> int:
    """The number of samples: as the job says, as the dataset says, or counted in one pass."""
    if length is not None:
        return length
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return sum(1 for _ in dataset)
