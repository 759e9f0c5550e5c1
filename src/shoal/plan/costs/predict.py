"""Predict the time of a step and its parts. Pure: the same inputs give the same prediction.

The model consists of sums and maxima. Workers on one host share its cores and its link. A step waits for the slowest
worker. Gradients of the last lane are sent while its backward runs, which hides part of the first phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import plural
from shoal.plan.costs import traffic
from shoal.plan.costs.memory import default_backups, host_memory_bytes, memory_shortfall
from shoal.plan.costs.model import Cluster, CostPrediction, MeasuredJob, NetworkLink, RunChoice
from shoal.plan.costs.sharded import predict_sharded
from shoal.plan.costs.traffic import BUCKET_BYTES, DRIVER_HOST, ExchangePhase
from shoal.plan.costs.worker_layout import WorkerLayout, lay_out_workers, workers_per_host
from shoal.spec.rules import MAX_ENCODED_LANES

SERVER_ROUNDS = 3
"""Push, replication among the servers, and pull."""
LANE_PASSES, OUTER_PASSES = 6, 5
"""Passes over all parameters in a synchronisation of local SGD: per lane, and for the outer step."""


def predict(choice: RunChoice, measured: MeasuredJob, cluster: Cluster, link: NetworkLink) -> CostPrediction:
    """`link` connects hosts; a choice on one host does not use it."""
    if why := _infeasible_reason(choice, measured, cluster):
        return CostPrediction(choice, refused=why)
    if choice.shard != "none":
        return predict_sharded(choice, measured, cluster, link)
    case = PredictionCase(choice, measured, cluster, link, lay_out_workers(choice, measured, cluster))
    needed = host_memory_bytes(choice, measured, case.layout)
    most = max(needed.values())
    if why := memory_shortfall(needed, cluster):
        return CostPrediction(choice, memory_bytes=most, refused=why)
    parts = {"lanes": _lanes_cost, "server": _server_cost, "local": _local_cost}[choice.sync](case)
    return CostPrediction(
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


def _infeasible_reason(choice: RunChoice, measured: MeasuredJob, cluster: Cluster) -> str:
    if choice.workers > measured.lanes and choice.shard == "none":
        lanes = plural(measured.lanes, "lane")
        return f"the job has {lanes}: of {choice.workers} workers {choice.workers - measured.lanes} would have no lane"
    if choice.sync != "server" and measured.only_servers:
        return measured.only_servers
    if choice.shard != "none" and measured.no_shards:
        return measured.no_shards
    if choice.sync == "server" and measured.no_servers:
        return measured.no_servers
    if choice.codec != "none" and measured.no_codecs:
        return measured.no_codecs
    if choice.codec != "none" and measured.lanes > MAX_ENCODED_LANES:
        return f"with a codec every lane is sent separately, and {measured.lanes} lanes are too many"
    if measured.gpus and (most := max(workers_per_host(choice, cluster))) > measured.gpus:
        return f"{most} workers on a machine with {plural(measured.gpus, 'GPU')}"
    fewest = min(host.cores for host in cluster.hosts[: choice.hosts])
    if choice.threads > fewest:
        return f"{choice.threads} threads, but a machine has {plural(fewest, 'core')}"
    return ""


@dataclass(frozen=True)
class SyncCost:
    """Costs of a step beyond the compute of the lanes."""

    exchange_s: float
    apply_s: float
    encode_s: float = 0.0
    hidden_s: float = 0.0
    sent_bytes: float = 0.0


@dataclass(frozen=True)
class PredictionCase:
    """One choice with all inputs, and the times that are common to all kinds of sync."""

    choice: RunChoice
    measured: MeasuredJob
    cluster: Cluster
    link: NetworkLink
    layout: WorkerLayout

    @property
    def compute_s(self) -> float:
        """Lanes, and their sum within each worker. All workers wait for the slowest sooner or later; with unbounded
        staleness no worker waits, and a step is any set of as many lanes."""
        choice, add_s = self.choice, self.add_s(self.measured.stretch_bytes)
        lane_s = self.measured.times[choice.threads].lane_s + self.measured.rest_s
        if math.isinf(choice.staleness):
            return self.layout.lanes * lane_s / sum(1 / slow for slow in self.layout.slowdown.values())
        whole = choice.sync != "local" and choice.codec == "none" and not choice.staleness
        return max(
            self.layout.slowdown[seat] * (n * lane_s + (n - self.layout.partial_sums[seat]) * add_s * whole)
            for seat, n in self.layout.lane_counts.items()
        )

    @property
    def apply_s(self) -> float:
        return self.max_slowdown * self.measured.times[self.choice.threads].apply_s

    @property
    def max_slowdown(self) -> float:
        return max(self.layout.slowdown.values())

    @property
    def backward_s(self) -> float:
        """Backward time of the worker that has the least time to send during it."""
        return min(self.layout.slowdown.values()) * self.measured.times[self.choice.threads].backward_s

    @property
    def single_worker(self) -> bool:
        return len(self.layout.seats) == 1

    @property
    def server_parallelism(self) -> float:
        """Number of servers that compute at the same time. They work while workers wait."""
        here = self.cluster.hosts[DRIVER_HOST]
        return min(self.choice.servers, here.cores) * here.speed

    def add_s(self, size_bytes: float) -> float:
        return size_bytes / self.cluster.add_bytes_s

    def transfer_s(self, phases: list[ExchangePhase]) -> list[float]:
        return [phase.duration_s(self.link) for phase in phases]

    def overlap_cpu_s(self, phases: list[ExchangePhase], hidden_s: float, wire_s: float) -> float:
        """Core time for transfers during compute. They cost no waiting, but slow the worker's compute down."""
        if not wire_s:
            return 0.0
        moved = max(
            (phase.egress_bytes[h] + phase.ingress_bytes[h] for phase in phases for h in phase.egress_bytes), default=0
        )
        return self.max_slowdown * moved * hidden_s / wire_s / self.cluster.socket_bytes_s

    def round_trips_s(self, rounds: int) -> float:
        """Time of the rounds, which was measured with two workers."""
        slow = max(self.max_slowdown / self.cluster.crowding, 1.0)
        return 0.0 if self.single_worker else slow * rounds * self.cluster.round_s


def _lanes_cost(case: PredictionCase) -> SyncCost:
    if case.choice.codec != "none":
        return _encoded_cost(case)
    if case.single_worker:
        return SyncCost(0.0, case.apply_s)
    stretch = case.measured.stretch_bytes
    phases = traffic.allreduce_phases(case.layout, stretch)
    first, *rest = case.transfer_s(phases)
    hidden = _overlapped_s(case, first, stretch)
    exchange = first - hidden + sum(rest) + _reduction_s(case) + case.overlap_cpu_s(phases[:1], hidden, first)
    return SyncCost(exchange, case.apply_s, hidden_s=hidden, sent_bytes=_most_sent_bytes(phases))


def _reduction_s(case: PredictionCase) -> float:
    """Time to publish partial sums, to add a share of all of them, and to collect the total."""
    stretch, layout = case.measured.stretch_bytes, case.layout
    count = traffic.phase_count(layout, stretch)
    own, partials = max(layout.partial_sums.values()), sum(layout.partial_sums.values())
    moved = own * stretch + (partials * stretch if count == 1 else partials * stretch / len(layout.seats) + stretch)
    return case.max_slowdown * case.add_s(moved) + case.round_trips_s(count)


def _encoded_cost(case: PredictionCase) -> SyncCost:
    """Each worker encodes its own lanes and decodes all lanes, even if there is only one worker."""
    phases = traffic.encoded_phases(case.layout, case.measured.encoded_lane_bytes(case.choice.codec))
    (wire,) = case.transfer_s(phases)
    hidden = _overlapped_s(case, wire, case.measured.stretch_bytes)
    exchange = wire - hidden + case.round_trips_s(1) + case.overlap_cpu_s(phases, hidden, wire)
    return SyncCost(
        exchange, case.apply_s, encode_s=_codec_s(case), hidden_s=hidden, sent_bytes=_most_sent_bytes(phases)
    )


def _codec_s(case: PredictionCase) -> float:
    """Time to encode the worker's own lanes and to decode all lanes."""
    layout, codec = case.layout, case.measured.codecs[case.choice.codec]
    written_s = case.add_s(case.measured.stretch_bytes)
    encode = max(layout.slowdown[seat] * n * (codec.encode_s + written_s) for seat, n in layout.lane_counts.items())
    return encode + case.max_slowdown * layout.lanes * codec.decode_s


def _server_cost(case: PredictionCase) -> SyncCost:
    """Push, update on the servers, and pull. Nothing is sent early, but the first chunks are pulled while the last are
    pushed. Above staleness 0 every lane is pushed separately."""
    choice, measured, layout = case.choice, case.measured, case.layout
    stretch, lane = measured.stretch_bytes, measured.encoded_lane_bytes(choice.codec)
    stale = choice.staleness > 0
    pushes = layout.lane_counts if stale or choice.codec != "none" else layout.partial_sums
    pulls = layout.lane_counts if stale else dict.fromkeys(layout.seats, 1)
    updates = layout.lanes if stale else 1
    phases = traffic.push_pull_phases(layout, lambda seat: lane * pushes[seat], lambda seat: stretch * pulls[seat])
    push_s, pull_s = case.transfer_s(phases)
    laid_s = case.max_slowdown * case.add_s(max(pushes.values()) * lane)
    moved = sum(pushes.values()) + sum(pulls.values()) + default_backups(choice) * updates
    rounds = SERVER_ROUNDS * (max(layout.lane_counts.values()) if stale else 1)
    exchange = max(push_s, pull_s) + min(case.link.latency_s, push_s, pull_s) + laid_s
    exchange += case.add_s(stretch * moved) / case.server_parallelism + rounds * case.cluster.round_s
    apply = updates * measured.times[min(measured.times)].apply_s / case.server_parallelism
    return SyncCost(exchange, apply, encode_s=_server_codec_s(case), sent_bytes=_most_sent_bytes(phases))


def _server_codec_s(case: PredictionCase) -> float:
    if case.choice.codec == "none":
        return 0.0
    codec, layout = case.measured.codecs[case.choice.codec], case.layout
    encode = max(layout.slowdown[seat] * n * codec.encode_s for seat, n in layout.lane_counts.items())
    return encode + layout.lanes * codec.decode_s / case.server_parallelism


def _local_cost(case: PredictionCase) -> SyncCost:
    """Every lane updates its own weights in each step. The change over `every` steps is exchanged like the gradients of
    one step of lanes. Of `settle` rounds all but the last overlap with the next round, fragment by fragment."""
    choice, layout = case.choice, case.layout
    updates = max(layout.slowdown[seat] * n for seat, n in layout.lane_counts.items())
    apply = updates * case.measured.times[choice.threads].apply_s
    stretch, fragments, encode = case.measured.stretch_bytes, case.measured.fragments, 0.0
    if choice.codec == "none":
        phases = traffic.allreduce_phases(layout, stretch)
        work = 0.0 if case.single_worker else _reduction_s(case)
    else:
        phases = traffic.encoded_phases(layout, case.measured.encoded_lane_bytes(choice.codec))
        encode, work = _codec_s(case), case.round_trips_s(1)
    wire = sum(case.transfer_s(phases))
    passes = LANE_PASSES * updates + OUTER_PASSES * case.max_slowdown
    work += case.round_trips_s(len(fragments) - 1) + passes * case.add_s(stretch)
    each_s = max(choice.every // len(fragments), 1) * (case.compute_s + apply)
    beside = (choice.settle - 1) / choice.settle
    hidden = beside * sum(min(wire * part, each_s) for part in fragments)
    work += case.overlap_cpu_s(phases, hidden, wire)
    return SyncCost(
        (wire - hidden + work) / choice.every,
        apply + case.apply_s / choice.every,
        encode_s=encode / choice.every,
        hidden_s=hidden / choice.every,
        sent_bytes=_most_sent_bytes(phases) / choice.every,
    )


def _overlapped_s(case: PredictionCase, wire_s: float, stretch_bytes: int) -> float:
    """The part of the first phase that overlaps with backward: all but the last bucket, if there is time."""
    early = max(1 - BUCKET_BYTES / stretch_bytes, 0.0) if stretch_bytes else 0.0
    return min(wire_s * early, case.backward_s)


def _most_sent_bytes(phases: list[ExchangePhase]) -> float:
    seats = {seat for phase in phases for seat in phase.sent_bytes}
    return max((sum(phase.sent_bytes[seat] for phase in phases) for seat in seats), default=0)
