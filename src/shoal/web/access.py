"""What a caller may do: roles, tokens in a private file, one-time codes, and sessions of browsers.

A token is stored as its SHA-256. A one-time code and a session exist only in the memory of the server.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from shoal.errors import error
from shoal.events.checks import make_check
from shoal.spec.private_file import PRIVATE_MODE, open_lock_file
from shoal.storage.locks import locked

AccessRole = Literal["read", "operate", "submit"]
ROLES: tuple[AccessRole, ...] = get_args(AccessRole)
"""Each role may do what the roles before it may do. `submit` starts processes that run a job's code."""
OWNER = "the owner"
"""The identity that the link of `shoal web` gives."""
TOKENS_FILE = ".web-tokens.json"
SECRET_BYTES = 32
CODE_LIFETIME_S = 24 * 3600.0
SESSION_LIFETIME_S = 30 * 24 * 3600.0
MAX_SESSIONS = 1000


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

    def create(self, name: str, *, role: AccessRole, runs: list[str], expires_t: float | None) -> str:
        """Make a token and return it: it is shown once, and stored only as a digest."""
        if role not in ROLES:
            raise error("SH676", f"'{role}' is not a role", fix=f"Use one of: {', '.join(ROLES)}.")
        if not name or len(name) > 80 or not name.isprintable():
            raise error("SH676", "a token needs a printable name of at most 80 characters")
        token = f"shoal_{secrets.token_urlsafe(SECRET_BYTES)}"
        made: TokenFields = {
            "name": name, "role": role, "runs": runs, "made_t": time.time(), "expires_t": expires_t,
            "sha256": _sha256(token),
        }  # fmt: skip
        with locked(open_lock_file(self._lock_path)):
            tokens = self.read()
            if any(one["name"] == name for one in tokens):
                raise error("SH676", f"there is a token '{name}'", fix="Revoke it first, or choose another name.")
            self._write([*tokens, made])
        return token

    def revoke(self, name: str) -> None:
        with locked(open_lock_file(self._lock_path)):
            tokens = self.read()
            kept = [one for one in tokens if one["name"] != name]
            if len(kept) == len(tokens):
                raise error("SH676", f"there is no token '{name}'")
            self._write(kept)

    def find(self, token: str) -> Identity | None:
        wanted, found = _sha256(token), None
        for one in self.read():
            if secrets.compare_digest(one["sha256"], wanted):
                found = one
        return None if found is None else _identity(found)

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
    if not _is_tokens(found) or not all(one["role"] in ROLES for one in found):
        raise error("SH626", "the file of tokens is damaged", where=str(path), fix="Delete it, and make new tokens.")
    return list(found)


def _identity(one: TokenFields) -> Identity:
    role: AccessRole = next(role for role in ROLES if role == one["role"])
    return Identity(f"token {one['name']}", role, frozenset(one["runs"]) or None, one["expires_t"])


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


@dataclass(frozen=True)
class Session:
    identity: Identity
    token_name: str
    ends_t: float


class AccessControl:
    """Codes and sessions of one server, and the tokens of its directory. Safe for several threads."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._codes: dict[str, tuple[Identity, float]] = {}
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def make_code(self, identity: Identity) -> str:
        """A code that begins one session."""
        code = secrets.token_urlsafe(SECRET_BYTES)
        with self._lock:
            self._codes[_sha256(code)] = identity, time.time() + CODE_LIFETIME_S
        return code

    def begin_session(self, secret: str) -> tuple[str, Identity] | None:
        """Exchange a one-time code or a token for a session's secret; None if it is neither."""
        with self._lock:
            found = self._codes.pop(_sha256(secret), None)
        if found is not None:
            identity, until_t = found
            return self._open(identity, "") if time.time() < until_t else None
        owner = self._tokens.find(secret)
        return None if owner is None else self._open(owner, owner.name.removeprefix("token "))

    def _open(self, identity: Identity, token_name: str) -> tuple[str, Identity]:
        secret = secrets.token_urlsafe(SECRET_BYTES)
        ends_t = min(time.time() + SESSION_LIFETIME_S, identity.expires_t or float("inf"))
        with self._lock:
            while len(self._sessions) >= MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_sha256(secret)] = Session(replace(identity, expires_t=ends_t), token_name, ends_t)
        return secret, identity

    def end_session(self, secret: str) -> None:
        with self._lock:
            self._sessions.pop(_sha256(secret), None)

    def of_session(self, secret: str) -> Identity | None:
        """A session ends with the token that it began with."""
        with self._lock:
            found = self._sessions.get(_sha256(secret))
        if found is None or time.time() >= found.ends_t:
            return None
        if found.token_name and not any(one["name"] == found.token_name for one in self._tokens.read()):
            return None
        return found.identity

    def of_token(self, token: str) -> Identity | None:
        return self._tokens.find(token)
