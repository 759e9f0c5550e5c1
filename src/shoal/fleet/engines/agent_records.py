"""Which agents of a run may outlive its driver: a file in the run's directory, for the next driver."""

from __future__ import annotations

import secrets
from typing import Annotated

from pydantic import Field, NonNegativeInt, ValidationError

from shoal.spec.base import Spec
from shoal.spec.run_paths import RunPaths, write_atomically
from shoal.spec.view import Seat

MAX_RECORDS = 1 << 12


class KeptAgents(Spec):
    """`keeper` has the agents with these numbers. `requests`: numbers up to it were used. `seats`: the seat that each
    agent was given; it may claim no other."""

    keeper: Annotated[str, Field(pattern=r"^[^/\s]{1,300}$")]
    requests: NonNegativeInt = 0
    numbers: Annotated[tuple[NonNegativeInt, ...], Field(max_length=MAX_RECORDS)] = ()
    seats: Annotated[dict[NonNegativeInt, str], Field(max_length=MAX_RECORDS)] = Field(default_factory=dict)


class AgentRecords:
    """`kept` is what an earlier driver left behind, and from then on what this one has."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.kept_agents
        try:
            self.kept = KeptAgents.model_validate_json(self._path.read_bytes())
        except (OSError, ValidationError):
            # another run may have the same name
            self.kept = KeptAgents(keeper=f"shoal-{paths.name}-{secrets.token_hex(4)}")

    def add(self) -> int:
        """The number of a new agent, which is on record before it exists."""
        number = self.kept.requests + 1
        self._write(requests=number, numbers=(*self.kept.numbers, number))
        return number

    def give(self, number: int, seat: Seat) -> None:
        """The agent has this seat from now on."""
        self._write(seats=self.kept.seats | {number: seat.name})

    def remove(self, number: int) -> None:
        seats = {one: seat for one, seat in self.kept.seats.items() if one != number}
        self._write(numbers=tuple(one for one in self.kept.numbers if one != number), seats=seats)

    def _write(self, **changes: object) -> None:
        self.kept = self.kept.model_copy(update=changes)
        write_atomically(self._path, self.kept.model_dump_json())
