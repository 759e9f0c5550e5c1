"""What codecs remember, through the views of a run: every lane's memory is found where it is, or begins anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shoal.collectives.outcome import Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.residuals import ResidualStates
from shoal.spec.view import View, step_of

Report = Callable[..., object]


class ResidualTransfer:
    """Used by the loop's thread. `floats` are remembered for each lane. Told: `residual_lost`, when one begins anew."""

    def __init__(self, peers: PeerServices, floats: int, report: Report | None = None) -> None:
        self._peers = peers
        self._floats = floats
        self._report = report or (lambda kind, **fields: None)
        self._view: View | None = None
        self._seat = 0
        self._carried: Mapping[int, list[int]] = {}
        """Who carried which lanes at the last step that this worker committed."""
        self._lost_worker: dict[int, str] = {}

    def enter(self, view: View, seat: int) -> Discarded | None:
        """Get what the lanes of this seat remember from members that know it. Discarded if the view cannot begin."""
        self._view, self._seat = view, seat
        memories, step = self._peers.residuals, step_of(view.position)
        missing = memories.enter(step, view.carries[seat])
        if step:
            found, failures = self._fetch_from_peers(view, step, missing)
            if why := next((why for source, why in failures.items() if source in view.carries), ""):
                return Discarded(why)
            memories.adopt(found, self._floats)
            missing -= found.keys()
        memories.start_empty(missing, self._floats, lost=step > 0)
        self._lost_worker |= {
            lane: f"worker-{who}" for who, lanes in self._carried.items() for lane in missing & {*lanes}
        }
        return None

    def _fetch_from_peers(self, view: View, step: int, lanes: Iterable[int]) -> tuple[ResidualStates, dict[int, str]]:
        """Members, and those who were until now: first who carried the lanes before. Also whom it could not ask."""
        wanted, found, failures = set(lanes), ResidualStates(), dict[int, str]()
        likely = {source for source, lanes in self._carried.items() if wanted & set(lanes)}
        for source in sorted(view.addresses.keys() - {self._seat}, key=lambda s: (s not in likely, s)):
            if not wanted:
                break
            answer = self._peers.fetch_residuals(
                view, self._seat, source=source, step=step, lanes=wanted, floats=self._floats
            )
            if isinstance(answer, Discarded):
                failures[source] = answer.why
            else:
                found |= answer
                wanted -= answer.keys()
        return found, failures

    def commit(self, step: int) -> None:
        """The step counts."""
        for lane in sorted(self._peers.residuals.commit()):
            self._report("residual_lost", step=step, lane=lane, worker=self._lost_worker.get(lane, ""))
        assert self._view is not None
        self._carried = self._view.carries

    def state(self) -> dict[str, Any]:
        """What all lanes remember; of those that cannot be asked any more, nothing."""
        if self._view is None:
            return {}
        memories = self._peers.residuals
        found = memories.at_step(memories.step)
        missing = {lane for lanes in self._view.carries.values() for lane in lanes} - found.keys()
        others, _ = self._fetch_from_peers(self._view, memories.step, missing)
        return {"remembered": found | others}

    def load_state(self, step: int, state: Mapping[str, Any]) -> None:
        self._peers.residuals.load(step, state.get("remembered", {}), self._floats)
