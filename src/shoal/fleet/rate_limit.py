"""A bound on what one process may send in the long run and at once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RateLimit:
    """Allows `burst` bytes at once, and `per_s` bytes a second in the long run. `dropped` counts what it refused."""

    per_s: float
    burst: float
    dropped: int = 0
    _used: float = 0.0
    _at_s: float | None = field(default=None)

    def allows(self, size: int, now_s: float) -> bool:
        elapsed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._used, self._at_s = max(0.0, self._used - self.per_s * elapsed_s), now_s
        if self._used + size > self.burst:
            self.dropped += 1
            return False
        self._used += size
        return True
