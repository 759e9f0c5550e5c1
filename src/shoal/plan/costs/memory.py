"""How much memory a choice needs, host by host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal.plan.costs.crew import Crew
from shoal.plan.costs.facts import Choice, Machine, Measured
from shoal.plan.costs.sentences import gigabytes
from shoal.plan.costs.traffic import DRIVER, phase_count


def memory_bytes(choice: Choice, measured: Measured, crew: Crew) -> Counter[int]:
    """By host: its workers, what they exchange through, servers, and what all of them share."""
    needed = Counter[int]()
    for seat, host in crew.host.items():
        needed[host] += measured.worker_bytes + _room(choice, measured, crew, seat)
    for host in list(needed):
        needed[host] += measured.base_bytes
    if choice.sync == "server":
        needed[DRIVER] += _servers(choice, measured, crew)
    return needed


def too_much(needed: Mapping[int, float], machine: Machine) -> str:
    """Of a host that has not so much, or nothing."""
    for host, amount in needed.items():
        if amount > (has := machine.hosts[host].memory_bytes):
            return f"needs {gigabytes(amount)}, the machine has {gigabytes(has)}"
    return ""


def _room(choice: Choice, measured: Measured, crew: Crew, seat: int) -> int:
    """Of one worker, beyond what it has when it is alone."""
    stretch = measured.stretch_bytes
    if choice.sync == "server":
        lane = measured.encoded_bytes(choice.codec)
        sums = crew.carries[seat] if _apart(choice) else crew.partials[seat] + _more_sums(crew, seat)
        return max(sums * lane + 2 * stretch - measured.optimizer_bytes, 0)
    if choice.sync == "local":
        copies = stretch + measured.optimizer_bytes
        return crew.carries[seat] * copies + 3 * stretch + _arena(stretch, crew, seat)
    if choice.codec == "none":
        return _arena(stretch, crew, seat) + _more_sums(crew, seat) * stretch
    lane = measured.encoded_bytes(choice.codec)
    others = sum(crew.carries[peer] for peer in _far(crew, seat))
    own = 2 * crew.carries[seat] * (lane + measured.remembered_bytes(choice.codec))
    return 2 * stretch + own + others * lane


def _more_sums(crew: Crew, seat: int) -> int:
    """While lanes are added up on the tree, there is a sum for each of its floors; two were there when it was tried."""
    return max((crew.carries[seat] - 1).bit_length() - 1, 0)


def _arena(stretch: int, crew: Crew, seat: int) -> int:
    """Own partial sums, those that come from other hosts, and the total."""
    if len(crew.seats) == 1:
        return 0
    coming = sum(crew.partials[peer] for peer in _far(crew, seat))
    if phase_count(crew, stretch) == 1:
        return (2 * crew.partials[seat] + coming + 1) * stretch
    return (crew.partials[seat] + 1) * stretch + (coming + 1) * stretch // len(crew.seats)


def _servers(choice: Choice, measured: Measured, crew: Crew) -> int:
    """Values, optimizer state and the workers' pushes, as often as there are copies."""
    copies = 1 + backups(choice)
    pushed = sum(measured.encoded_bytes(choice.codec) * sums for sums in crew.partials.values())
    return copies * (measured.stretch_bytes + measured.optimizer_bytes) + pushed


def backups(choice: Choice) -> int:
    """What a job has that does not say: one where there are two servers."""
    return min(1, choice.servers - 1)


def _apart(choice: Choice) -> bool:
    return choice.codec != "none" or choice.staleness > 0


def _far(crew: Crew, seat: int) -> list[int]:
    return [peer for peer, host in crew.host.items() if host != crew.host[seat]]
