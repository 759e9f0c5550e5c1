"""What a step of a choice would take, and where it goes. Pure: the same facts give the same prediction.

The model is one of sums and maxima. Workers on one host share its cores and its link; a step waits for the slowest;
gradients of the last lane go ahead while its backward runs, and hide that much of the first phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.plan.costs import traffic
from shoal.plan.costs.crew import Crew, crew, numbers_on
from shoal.plan.costs.facts import Choice, Link, Machine, Measured, Prediction
from shoal.plan.costs.memory import backups, memory_bytes, too_much
from shoal.plan.costs.shards import predict_sharded
from shoal.plan.costs.traffic import BUCKET_BYTES, DRIVER, Phase
from shoal.spec.rules import MOST_ENCODED_LANES

SERVER_ROUNDS = 3
"""There, among the servers, and back."""
LANE_PASSES, OUTER_PASSES = 6, 5
"""Over all parameters, when lanes that train by themselves agree: of every lane, and of what they agree on."""


def predict(choice: Choice, measured: Measured, machine: Machine, link: Link) -> Prediction:
    """`link` is the one between hosts; who stays on one host does not use it."""
    if why := _impossible(choice, measured, machine):
        return Prediction(choice, refused=why)
    if choice.shard != "none":
        return predict_sharded(choice, measured, machine, link)
    case = Case(choice, measured, machine, link, crew(choice, measured, machine))
    needed = memory_bytes(choice, measured, case.crew)
    most = max(needed.values())
    if why := too_much(needed, machine):
        return Prediction(choice, memory_bytes=most, refused=why)
    parts = {"lanes": _lanes, "server": _server, "local": _local}[choice.sync](case)
    return Prediction(
        choice,
        compute_s=case.compute_s,
        encode_s=parts.encode_s,
        exchange_s=parts.exchange_s,
        apply_s=parts.apply_s,
        hidden_s=parts.hidden_s,
        sent_bytes=parts.sent_bytes,
        memory_bytes=most,
        steps_per_epoch=measured.steps_per_epoch,
    )


def _impossible(choice: Choice, measured: Measured, machine: Machine) -> str:
    if choice.workers > measured.lanes and choice.shard == "none":
        lanes = f"{measured.lanes} lane{'s' if measured.lanes > 1 else ''}"
        return f"the job has {lanes}: of {choice.workers} workers {choice.workers - measured.lanes} would carry nothing"
    if choice.sync != "server" and measured.only_servers:
        return measured.only_servers
    if choice.shard != "none" and measured.no_shards:
        return measured.no_shards
    if choice.sync == "server" and measured.no_servers:
        return measured.no_servers
    if choice.codec != "none" and measured.no_codecs:
        return measured.no_codecs
    if choice.codec != "none" and measured.lanes > MOST_ENCODED_LANES:
        return f"with a codec every lane is sent by itself, and {measured.lanes} are too many"
    if measured.gpus and (most := max(numbers_on(choice, machine))) > measured.gpus:
        return f"{most} workers on a machine with {measured.gpus} GPU{'s' if measured.gpus > 1 else ''}"
    fewest = min(host.cores for host in machine.hosts[: choice.hosts])
    if choice.threads > fewest:
        return f"{choice.threads} threads, and a machine has {fewest} core{'s' if fewest > 1 else ''}"
    return ""


@dataclass(frozen=True)
class Parts:
    """What comes after the lanes' own work."""

    exchange_s: float
    apply_s: float
    encode_s: float = 0.0
    hidden_s: float = 0.0
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class Case:
    """One choice with all that is known, and the times that every kind of sync has."""

    choice: Choice
    measured: Measured
    machine: Machine
    link: Link
    crew: Crew

    @property
    def compute_s(self) -> float:
        """Lanes, and adding them up in the worker that carries them. All wait for the slowest, sooner or later; where
        nobody ever waits, a step is as many lanes as it has, whoever makes them."""
        choice, add_s = self.choice, self.adding_s(self.measured.stretch_bytes)
        lane_s = self.measured.times[choice.threads].lane_s + self.measured.rest_s
        if math.isinf(choice.staleness):
            return self.crew.lanes * lane_s / sum(1 / slow for slow in self.crew.slowness.values())
        whole = choice.sync != "local" and choice.codec == "none" and not choice.staleness
        return max(
            self.crew.slowness[seat] * (n * lane_s + (n - self.crew.partials[seat]) * add_s * whole)
            for seat, n in self.crew.carries.items()
        )

    @property
    def apply_s(self) -> float:
        return self.slowest * self.measured.times[self.choice.threads].apply_s

    @property
    def slowest(self) -> float:
        return max(self.crew.slowness.values())

    @property
    def backward_s(self) -> float:
        """Of the worker that has least time to send during it."""
        return min(self.crew.slowness.values()) * self.measured.times[self.choice.threads].backward_s

    @property
    def alone(self) -> bool:
        return len(self.crew.seats) == 1

    @property
    def hands(self) -> float:
        """How much the servers get done at once: they work while workers wait."""
        here = self.machine.hosts[DRIVER]
        return min(self.choice.servers, here.cores) * here.speed

    def adding_s(self, size_bytes: float) -> float:
        return size_bytes / self.machine.add_bytes_s

    def wire_s(self, phases: list[Phase]) -> list[float]:
        return [phase.seconds(self.link) for phase in phases]

    def beside_s(self, phases: list[Phase], hidden_s: float, wire_s: float) -> float:
        """What travels while a worker computes costs no waiting, but time of its core. Who waits has time for it."""
        if not wire_s:
            return 0.0
        moved = max((phase.leaving[h] + phase.reaching[h] for phase in phases for h in phase.leaving), default=0)
        return self.slowest * moved * hidden_s / wire_s / self.machine.socket_bytes_s

    def rounds_s(self, rounds: int) -> float:
        """They were measured with two workers at work."""
        slow = max(self.slowest / self.machine.crowding, 1.0)
        return 0.0 if self.alone else slow * rounds * self.machine.round_s


def _lanes(case: Case) -> Parts:
    if case.choice.codec != "none":
        return _encoded(case)
    if case.alone:
        return Parts(0.0, case.apply_s)
    stretch = case.measured.stretch_bytes
    phases = traffic.of_lanes(case.crew, stretch)
    first, *rest = case.wire_s(phases)
    hidden = _hidden(case, first, stretch)
    exchange = first - hidden + sum(rest) + _adding_up(case) + case.beside_s(phases[:1], hidden, first)
    return Parts(exchange, case.apply_s, hidden_s=hidden, sent_bytes=_most_sent(phases))


def _adding_up(case: Case) -> float:
    """Laying down one's partial sums, taking part in adding all of them up, and collecting the total."""
    stretch, crew = case.measured.stretch_bytes, case.crew
    count = traffic.phase_count(crew, stretch)
    own, partials = max(crew.partials.values()), sum(crew.partials.values())
    moved = own * stretch + (partials * stretch if count == 1 else partials * stretch / len(crew.seats) + stretch)
    return case.slowest * case.adding_s(moved) + case.rounds_s(count)


def _encoded(case: Case) -> Parts:
    """Every lane is encoded by who carries it and decoded by everybody, also where there is but one worker."""
    phases = traffic.of_encoded(case.crew, case.measured.encoded_bytes(case.choice.codec))
    (wire,) = case.wire_s(phases)
    hidden = _hidden(case, wire, case.measured.stretch_bytes)
    exchange = wire - hidden + case.rounds_s(1) + case.beside_s(phases, hidden, wire)
    return Parts(exchange, case.apply_s, encode_s=_coding(case), hidden_s=hidden, sent_bytes=_most_sent(phases))


def _coding(case: Case) -> float:
    """The own lanes to bytes, and all lanes back."""
    crew, codec = case.crew, case.measured.codecs[case.choice.codec]
    written_s = case.adding_s(case.measured.stretch_bytes)
    encode = max(crew.slowness[seat] * n * (codec.encode_s + written_s) for seat, n in crew.carries.items())
    return encode + case.slowest * crew.lanes * codec.decode_s


def _server(case: Case) -> Parts:
    """There, the servers' work, and back: nothing goes ahead, but the values of the first chunks come back while the
    last are on their way there. Above staleness 0 every lane goes by itself."""
    choice, measured, crew = case.choice, case.measured, case.crew
    stretch, lane = measured.stretch_bytes, measured.encoded_bytes(choice.codec)
    stale = choice.staleness > 0
    pushes = crew.carries if stale or choice.codec != "none" else crew.partials
    pulls = crew.carries if stale else dict.fromkeys(crew.seats, 1)
    updates = crew.lanes if stale else 1
    phases = traffic.of_servers(crew, lambda seat: lane * pushes[seat], lambda seat: stretch * pulls[seat])
    there, back = case.wire_s(phases)
    laid_s = case.slowest * case.adding_s(max(pushes.values()) * lane)
    moved = sum(pushes.values()) + sum(pulls.values()) + backups(choice) * updates
    rounds = SERVER_ROUNDS * (max(crew.carries.values()) if stale else 1)
    exchange = max(there, back) + min(case.link.latency_s, there, back) + laid_s
    exchange += case.adding_s(stretch * moved) / case.hands + rounds * case.machine.round_s
    apply = updates * measured.times[min(measured.times)].apply_s / case.hands
    return Parts(exchange, apply, encode_s=_coding_for_servers(case), sent_bytes=_most_sent(phases))


def _coding_for_servers(case: Case) -> float:
    if case.choice.codec == "none":
        return 0.0
    codec, crew = case.measured.codecs[case.choice.codec], case.crew
    encode = max(crew.slowness[seat] * n * codec.encode_s for seat, n in crew.carries.items())
    return encode + crew.lanes * codec.decode_s / case.hands


def _local(case: Case) -> Parts:
    """Every lane has weights of its own and updates them in each step. What `every` steps moved is exchanged as one
    step of lanes is; of every `settle` rounds all but the last happen beside the next one, fragment by fragment."""
    choice, crew = case.choice, case.crew
    updates = max(crew.slowness[seat] * n for seat, n in crew.carries.items())
    apply = updates * case.measured.times[choice.threads].apply_s
    stretch, fragments, encode = case.measured.stretch_bytes, case.measured.fragments, 0.0
    if choice.codec == "none":
        phases = traffic.of_lanes(crew, stretch)
        work = 0.0 if case.alone else _adding_up(case)
    else:
        phases = traffic.of_encoded(crew, case.measured.encoded_bytes(choice.codec))
        encode, work = _coding(case), case.rounds_s(1)
    wire = sum(case.wire_s(phases))
    passes = LANE_PASSES * updates + OUTER_PASSES * case.slowest
    work += case.rounds_s(len(fragments) - 1) + passes * case.adding_s(stretch)
    each_s = max(choice.every // len(fragments), 1) * (case.compute_s + apply)
    beside = (choice.settle - 1) / choice.settle
    hidden = beside * sum(min(wire * part, each_s) for part in fragments)
    work += case.beside_s(phases, hidden, wire)
    return Parts(
        (wire - hidden + work) / choice.every,
        apply + case.apply_s / choice.every,
        encode_s=encode / choice.every,
        hidden_s=hidden / choice.every,
        sent_bytes=_most_sent(phases) / choice.every,
    )


def _hidden(case: Case, wire_s: float, stretch_bytes: int) -> float:
    """How much of the first phase is over when backward is: all but the last bucket, if there is time for it."""
    early = max(1 - BUCKET_BYTES / stretch_bytes, 0.0) if stretch_bytes else 0.0
    return min(wire_s * early, case.backward_s)


def _most_sent(phases: list[Phase]) -> float:
    seats = {seat for phase in phases for seat in phase.sent}
    return max((sum(phase.sent[seat] for phase in phases) for seat in seats), default=0)
