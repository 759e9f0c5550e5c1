"""The address of the driver, in a small file that only its owner can read. A new driver replaces it."""

from __future__ import annotations

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
            return DriverAddress(host, port, token)
    return None
