"""The driver's side of `wishes`: what a user asks of a run, done, and how things stand after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.jobs.harbour import Harbour
from shoal.plan.crew import Crew
from shoal.spec.job import MOST_WORKERS


class Grants:
    """`harbour` is None for a run without servers. `stop_asked` says so when somebody wants the run to end, `scaled`
    when somebody has chosen how many workers there are."""

    def __init__(self, crew: Crew, harbour: Harbour | None) -> None:
        self.stop_asked = ""
        self.scaled = False
        self._crew = crew
        self._harbour = harbour

    def grant(self, kind: str, fields: Mapping[str, Any]) -> None:
        """KeyError, TypeError or ValueError if the wish makes no sense; then nothing is done."""
        if kind == "scale":
            self._scale({who: int(fields[who]) for who in ("wanted", "servers") if who in fields})
        elif kind == "drain" and fields.get("role") == "server":
            self._servers.drain(int(fields["seat"]))
        elif kind == "drain":
            self.scaled = True
            self._crew.leaves(int(fields["seat"]), "drained", replace=False)
        elif kind == "stop":
            self.stop_asked = "stopped"
        else:
            raise ValueError(kind)

    def facts(self) -> dict[str, Any]:
        return {
            "wanted": self._crew.wanted,
            "lanes": self._crew.lanes,
            "workers": sorted(self._crew.members),
            "stopping": self._crew.stopping,
            "servers_wanted": self._harbour.wanted if self._harbour else 0,
            "servers": self._harbour.here if self._harbour else [],
        }

    def _scale(self, numbers: Mapping[str, int]) -> None:
        if not numbers or not all(1 <= number <= MOST_WORKERS for number in numbers.values()):
            raise ValueError(f"scale to {dict(numbers)}")
        if "servers" in numbers:
            self._servers.scale(numbers["servers"])
        if "wanted" in numbers:
            self.scaled = True
            self._crew.scale(numbers["wanted"])

    @property
    def _servers(self) -> Harbour:
        if self._harbour is None:
            raise ValueError("a run without servers")
        return self._harbour
