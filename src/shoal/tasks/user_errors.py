"""Turns an exception in the user's code into an error that names the user's line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shoal.errors import ShoalError, describe_exception, error, is_out_of_memory
from shoal.net.errors import LinkError
from shoal.spec.resolve import is_users_failure, user_error
from shoal.tasks.batch_facts import GIVEN, known_failure


@contextlib.contextmanager
def wrap_user_errors(code: str, doing: str) -> Iterator[None]:
    """Raise errors of the block as `code`, located at the user's line."""
    try:
        yield
    except BaseException as failure:
        if isinstance(failure, LinkError) or not is_users_failure(failure):  # LinkError: a peer was lost meanwhile
            raise
        raise as_shoal_error(failure, code, doing) from failure


def as_shoal_error(failure: BaseException, code: str, doing: str) -> ShoalError:
    if not isinstance(failure, Exception):
        code = "SH428"
    elif is_out_of_memory(failure):
        code = "SH407"
    elif type(failure).__name__ == "FailOnRecompileLimitHit":
        code = "SH867"
    elif "Expected more than 1 value per channel" in describe_exception(failure):
        code = "SH412"
    elif code == "SH401" and (known := known_failure(failure)):
        return known
    made = user_error(code, failure, doing)
    given = next((note for note in getattr(failure, "__notes__", ()) if note.startswith(GIVEN)), "")
    return made if not given else error(made.code, f"{made.message}; {given}", where=made.where, fix=made.fix)
