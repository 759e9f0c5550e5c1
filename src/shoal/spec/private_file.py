"""Files that only their owner may use: locks, and the file with the address and token of a driver.

The kernel lets everybody lock a file that they can open, even if they can only read it. A lock file that others can
open would let them keep a run from being resumed. So these files have mode 0600, and a file of another user is refused.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path
from typing import IO

PRIVATE_MODE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_lock_file(path: Path) -> IO[str]:
    """Open a lock file for reading and writing; create it if it does not exist. Its content stays as it is.

    PermissionError if it belongs to another user. A link is refused: it would lead to a file of somebody else.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE)
    except OSError as failure:
        if failure.errno == errno.ELOOP:
            raise PermissionError(f"{path} is a link") from None
        raise
    try:
        found = os.fstat(descriptor)
        if stranger := owner_if_other(found):
            raise PermissionError(f"{path} belongs to {stranger}")
        if is_open_to_others(found):  # written by an earlier version
            os.fchmod(descriptor, PRIVATE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")


def owner_if_other(found: os.stat_result) -> str:
    """The name of the file's owner; '' if that is the user of this process. Root may use the files of all."""
    if os.geteuid() in (0, found.st_uid):
        return ""
    try:
        return f"user {pwd.getpwuid(found.st_uid).pw_name}"
    except KeyError:
        return f"user {found.st_uid}"


def is_open_to_others(found: os.stat_result) -> bool:
    """Whether users other than the owner can open the file."""
    return bool(found.st_mode & _OTHERS)
