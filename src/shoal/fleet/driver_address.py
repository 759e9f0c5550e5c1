"""The address of the driver, in a small file that only its owner can read. A new driver replaces it.

The file also has a secret that only processes with the run's directory know. It makes the key of each seat: a process
proves with it that the driver gave it the seat. A worker that joins has the token alone, and gets the key of its own
seat with its welcome.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, error
from shoal.spec.private_file import is_open_to_others, owner_if_other

MAX_FILE_BYTES = 1 << 16
MAX_WORD = 4096


@dataclass(frozen=True)
class DriverAddress:
    host: str
    port: int
    token: str = field(repr=False)
    secret: str = field(default="", repr=False)

    def key(self, name: str) -> str:
        """The key for a seat's name (worker-2), or for "user"; '' if this process does not know the secret."""
        return make_key(self.secret, name) if self.secret else ""


def make_key(secret: str, name: str) -> str:
    return hmac.digest(secret.encode(), name.encode(), hashlib.sha256).hex()


def write_driver_address(path: Path, address: DriverAddress) -> None:
    """Replace the file atomically. At no time can other users read the token."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # created with mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(address), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_driver_address(path: Path) -> DriverAddress | None:
    """None if the file is missing or cannot be used: a driver writes a new one, and a worker asks again later."""
    try:
        return check_driver_address(path)
    except ShoalError:
        return None


def check_driver_address(path: Path) -> DriverAddress | None:
    """None if the file is missing. SH626 if it is damaged, or is not private: another user may have written it, or may
    know the token."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            owner, raw = os.fstat(file.fileno()), file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise error("SH626", f"the driver's address cannot be read: {failure.strerror}", where=str(path)) from failure
    if stranger := owner_if_other(owner):
        raise error("SH626", f"the file with the driver's address belongs to {stranger}", where=str(path))
    if is_open_to_others(owner):
        raise error("SH626", "other users can read the file with the driver's address and token", where=str(path))
    try:
        return DriverAddress(**_checked(json.loads(raw)))
    except (ValueError, RecursionError) as failure:
        reason = "it is not JSON" if isinstance(failure, json.JSONDecodeError | UnicodeDecodeError) else str(failure)
        raise error("SH626", f"the file with the driver's address is damaged: {reason}", where=str(path)) from None


def _checked(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    kept = {one.name: found.get(one.name, one.default) for one in fields(DriverAddress)}
    for one in fields(DriverAddress):
        is_valid = _is_port if one.name == "port" else _is_word
        if not is_valid(kept[one.name]) and (one.default is MISSING or kept[one.name] != one.default):
            raise ValueError(f"the field '{one.name}' is missing or not valid")
    return kept


def _is_port(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 16


def _is_word(value: Any) -> bool:
    """A host or a secret: nothing that a terminal or a header would act on."""
    return isinstance(value, str) and 0 < len(value) <= MAX_WORD and value.isprintable() and " " not in value
