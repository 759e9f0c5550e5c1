"""Turns an exception in the user's code into an error that names the user's line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shoal.errors import ShoalError, error
from shoal.net.errors import LinkError
from shoal.spec.resolve import user_line


def first_line(failure: BaseException) -> str:
    text = str(failure).strip()
    return f"{type(failure).__name__}: {text.splitlines()[0]}" if text else type(failure).__name__


@contextlib.contextmanager
def wrap_user_errors(code: str, doing: str) -> Iterator[None]:
    """Raise errors of the block as `code`, located at the user's line."""
    try:
        yield
    except (ShoalError, LinkError):  # LinkError: a peer was lost meanwhile
        raise
    except Exception as failure:
        raise as_shoal_error(failure, code, doing) from failure


def as_shoal_error(failure: Exception, code: str, doing: str) -> ShoalError:
    if is_out_of_memory(failure):
        code = "SH407"
    elif "Expected more than 1 value per channel" in str(failure):
        code = "SH412"
    return error(code, f"{doing}: {first_line(failure)}", where=user_line(failure))


def is_out_of_memory(failure: Exception) -> bool:
    text = str(failure)
    return isinstance(failure, MemoryError) or "out of memory" in text or "can't allocate memory" in text
