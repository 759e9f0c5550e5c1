"""Tokens of a directory of runs: who a caller of the web page or the queue is, and what that may do.

A token is stored as its SHA-256, in a private file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from shoal.errors import error
from shoal.events.checks import make_check
from shoal.spec.private_file import PRIVATE_MODE, open_lock_file

AccessRole = Literal["read", "operate", "submit"]
ROLES: tuple[AccessRole, ...] = get_args(AccessRole)
"""Each role may do what the roles before it may do. `submit` starts processes that run a job's code."""
MACHINE = "machine"
"""The role of a machine that offers its cores to a queue. It may do nothing else."""
TOKEN_ROLES = (*ROLES, MACHINE)
TOKENS_FILE = ".web-tokens.json"
SECRET_BYTES = 32


@dataclass(frozen=True)
class Identity:
    """The caller. `runs`: the only runs that it may see; None for all."""

    name: str
    role: AccessRole
    runs: frozenset[str] | None = None
    expires_t: float | None = None

    def may(self, role: AccessRole) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)

    def sees(self, run: str) -> bool:
        return self.runs is None or run in self.runs

    @property
    def is_expired(self) -> bool:
        return self.expires_t is not None and time.time() >= self.expires_t


class TokenFields(TypedDict):
    """One token as it is stored. `runs`: empty for all runs."""

    name: str
    role: str
    runs: list[str]
    made_t: float
    expires_t: float | None
    sha256: str


_DIGEST = re.compile(r"[0-9a-f]{64}")
_is_tokens: Callable[[Any], bool] = make_check(list[TokenFields])


class TokenFile:
    """The tokens of a directory of runs. The server reads the file again when it has changed."""

    def __init__(self, runs: Path) -> None:
        self._path = runs / TOKENS_FILE
        self._lock_path = runs / ".web-tokens.lock"
        self._read: tuple[tuple[int, int], list[TokenFields]] | None = None

    def read(self) -> list[TokenFields]:
        """Tokens that have not expired. SH626 if other users can read or change the file."""
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return []
        identity = found.st_ino, found.st_mtime_ns
        if self._read is None or self._read[0] != identity:
            if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
                raise error(
                    "SH626", "others can read the tokens", where=str(self._path), fix="chmod 600, or delete it."
                )
            self._read = identity, _parse_tokens(self._path)
        return [one for one in self._read[1] if one["expires_t"] is None or one["expires_t"] > time.time()]

    def create(self, name: str, *, role: str, runs: list[str], expires_t: float | None) -> str:
        """Make a token and return it: it is shown once, and stored only as a digest."""
        if role not in TOKEN_ROLES:
            raise error("SH676", f"'{role}' is not a role", fix=f"Use one of: {', '.join(TOKEN_ROLES)}.")
        if not name or len(name) > 80 or not name.isprintable():
            raise error("SH676", "a token needs a printable name of at most 80 characters")
        token = f"shoal_{secrets.token_urlsafe(SECRET_BYTES)}"
        made: TokenFields = {
            "name": name, "role": role, "runs": runs, "made_t": time.time(), "expires_t": expires_t,
            "sha256": token_digest(token),
        }  # fmt: skip
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open_lock_file(self._lock_path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = self.read()
            if any(one["name"] == name for one in tokens):
                raise error("SH676", f"there is a token '{name}'", fix="Revoke it first, or choose another name.")
            self._write([*tokens, made])
        return token

    def revoke(self, name: str) -> None:
        with open_lock_file(self._lock_path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = self.read()
            kept = [one for one in tokens if one["name"] != name]
            if len(kept) == len(tokens):
                raise error("SH676", f"there is no token '{name}'")
            self._write(kept)

    def find(self, token: str) -> Identity | None:
        """The owner of a token; None if it is unknown, or that of a machine."""
        wanted, found = token_digest(token), None
        for one in self.read():
            if secrets.compare_digest(one["sha256"], wanted):
                found = one
        return None if found is None or found["role"] == MACHINE else _identity(found)

    def find_by_key(self, key_name: str) -> TokenFields | None:
        """The token whose digest has this name. The caller has proved nothing by it."""
        return next((one for one in self.read() if name_of_key(one["sha256"]) == key_name), None)

    def _write(self, tokens: list[TokenFields]) -> None:
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, PRIVATE_MODE)
        with os.fdopen(descriptor, "w") as file:
            json.dump(tokens, file, indent=1)
        os.replace(temporary, self._path)


def _parse_tokens(path: Path) -> list[TokenFields]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not _is_tokens(found) or not all(map(_is_sound, found)):
        raise error("SH626", "the file of tokens is damaged", where=str(path), fix="Delete it, and make new tokens.")
    return list(found)


def _is_sound(one: TokenFields) -> bool:
    return one["role"] in TOKEN_ROLES and _DIGEST.fullmatch(one["sha256"]) is not None


def _identity(one: TokenFields) -> Identity:
    role: AccessRole = next(role for role in ROLES if role == one["role"])
    return Identity(f"token {one['name']}", role, frozenset(one["runs"]) or None, one["expires_t"])


def token_digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def name_of_key(key: str) -> str:
    """Names the digest of a token without telling it: both ends of a connection prove that they know the digest."""
    return token_digest(key)[:32]
