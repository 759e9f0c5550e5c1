"""One thread for linear algebra: with several, sums are added in another order and decisions could differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    with _controller().limit(limits=1):
        yield


@cache
def _controller() -> ThreadpoolController:
    """Finds the libraries of numpy and scipy once."""
    import scipy.linalg  # noqa: F401  (so that its library is found)

    return ThreadpoolController()
