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
from dataclasses import asdict, dataclass, field
from pathlib import Path


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
    """None if the file is missing or malformed."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    match found:
        case {"host": str(host), "port": int(port), "token": str(token)}:
            return DriverAddress(host, port, token, str(found.get("secret") or ""))
    return None
