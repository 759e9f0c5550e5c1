"""Sessions of browsers: one-time codes and cookies. They exist only in the memory of the server."""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass

from shoal.jobs.queue.access_tokens import SECRET_BYTES, Identity, TokenFile, token_digest

OWNER = "the owner"
"""The identity that the link of `shoal web` gives."""
CODE_LIFETIME_S = 24 * 3600.0
SESSION_LIFETIME_S = 30 * 24 * 3600.0
MAX_SESSIONS = 20
"""Of one identity; the oldest of its own ends for one more."""


@dataclass(frozen=True)
class Session:
    """`token_sha256` is of the token that began it; '' for a code. `ends_s` is of the monotonic clock: a jump of the
    other clock ends no session. The token's own end is a date."""

    identity: Identity
    token_sha256: str
    ends_s: float

    @property
    def owner(self) -> tuple[str, str]:
        return self.identity.name, self.token_sha256


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
            self._codes[token_digest(code)] = identity, time.monotonic() + CODE_LIFETIME_S
        return code

    def begin_session(self, secret: str) -> tuple[str, Identity] | None:
        """Exchange a one-time code or a token for a session's secret; None if it is neither."""
        with self._lock:
            found = self._codes.pop(token_digest(secret), None)
        if found is not None:
            identity, until_s = found
            return self._open(identity, "") if time.monotonic() < until_s else None
        owner = self._tokens.find(secret)
        return None if owner is None else self._open(owner, token_digest(secret))

    def _open(self, identity: Identity, token_sha256: str) -> tuple[str, Identity]:
        secret, now = secrets.token_urlsafe(SECRET_BYTES), time.monotonic()
        session = Session(identity, token_sha256, now + SESSION_LIFETIME_S)
        with self._lock:
            self._sessions = {digest: one for digest, one in self._sessions.items() if now < one.ends_s}
            own = [digest for digest, one in self._sessions.items() if one.owner == session.owner]
            if len(own) >= MAX_SESSIONS:
                del self._sessions[own[0]]
            self._sessions[token_digest(secret)] = session
        return secret, identity

    def end_session(self, secret: str) -> None:
        with self._lock:
            self._sessions.pop(token_digest(secret), None)

    def of_session(self, secret: str) -> Identity | None:
        """A session ends with the token that it began with."""
        with self._lock:
            found = self._sessions.get(token_digest(secret))
        if found is None or time.monotonic() >= found.ends_s or found.identity.is_expired:
            return None
        if found.token_sha256 and not any(one["sha256"] == found.token_sha256 for one in self._tokens.read()):
            return None
        return found.identity

    def of_token(self, token: str) -> Identity | None:
        return self._tokens.find(token)
