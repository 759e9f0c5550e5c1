"""Memory that a choice needs on each host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shoal.plan.costs.model import Cluster, MeasuredJob, RunChoice
from shoal.plan.costs.traffic import DRIVER_HOST, phase_count
from shoal.plan.costs.units import format_gigabytes
from shoal.plan.costs.worker_layout import WorkerLayout


def host_memory_bytes(choice: RunChoice, measured: MeasuredJob, layout: WorkerLayout) -> Counter[int]:
    """By host: its workers, exchange buffers, servers, and the memory that processes share."""
    needed = Counter[int]()
    for seat, host in layout.host_of.items():
        needed[host] += measured.worker_bytes + _exchange_bytes(choice, measured, layout, seat)
    for host in list(needed):
        needed[host] += measured.base_bytes
    if choice.sync == "server":
        needed[DRIVER_HOST] += _server_bytes(choice, measured, layout)
    return needed


def memory_shortfall(needed: Mapping[int, float], cluster: Cluster) -> str:
    """The first host with too little memory, as a message; '' if all have enough."""
    for host, amount in needed.items():
        if amount > (has := cluster.hosts[host].memory_bytes):
            return f"needs {format_gigabytes(amount)}, the machine has {format_gigabytes(has)}"
    return ""


def _exchange_bytes(choice: RunChoice, measured: MeasuredJob, layout: WorkerLayout, seat: int) -> int:
    """Exchange buffers of one worker, in addition to the memory of a single worker."""
    flat_bytes = measured.stretch_bytes
    if choice.sync == "server":
        lane = measured.encoded_lane_bytes(choice.codec)
        sums = (
            layout.lane_counts[seat]
            if _sends_lanes_separately(choice)
            else layout.partial_sums[seat] + _extra_tree_sums(layout, seat)
        )
        return max(sums * lane + 2 * flat_bytes - measured.optimizer_bytes, 0)
    if choice.sync == "local":
        copies = flat_bytes + measured.optimizer_bytes
        return layout.lane_counts[seat] * copies + 3 * flat_bytes + _shared_buffer_bytes(flat_bytes, layout, seat)
    if choice.codec == "none":
        return _shared_buffer_bytes(flat_bytes, layout, seat) + _extra_tree_sums(layout, seat) * flat_bytes
    lane = measured.encoded_lane_bytes(choice.codec)
    others = sum(layout.lane_counts[peer] for peer in _peers_on_other_hosts(layout, seat))
    own = 2 * layout.lane_counts[seat] * (lane + measured.residual_bytes(choice.codec))
    return 2 * flat_bytes + own + others * lane


def _extra_tree_sums(layout: WorkerLayout, seat: int) -> int:
    """Summing lanes on the tree needs one sum per level; the measurement already includes two."""
    return max((layout.lane_counts[seat] - 1).bit_length() - 1, 0)


def _shared_buffer_bytes(flat_bytes: int, layout: WorkerLayout, seat: int) -> int:
    """The worker's own partial sums, those received from other hosts, and the total."""
    if len(layout.seats) == 1:
        return 0
    coming = sum(layout.partial_sums[peer] for peer in _peers_on_other_hosts(layout, seat))
    if phase_count(layout, flat_bytes) == 1:
        return (2 * layout.partial_sums[seat] + coming + 1) * flat_bytes
    return (layout.partial_sums[seat] + 1) * flat_bytes + (coming + 1) * flat_bytes // len(layout.seats)


def _server_bytes(choice: RunChoice, measured: MeasuredJob, layout: WorkerLayout) -> int:
    """Values, optimizer state and pushes of the workers, times the number of copies."""
    copies = 1 + default_backups(choice)
    pushed = sum(measured.encoded_lane_bytes(choice.codec) * sums for sums in layout.partial_sums.values())
    return copies * (measured.stretch_bytes + measured.optimizer_bytes) + pushed


def default_backups(choice: RunChoice) -> int:
    """The default of a job: one backup with two or more servers."""
    return min(1, choice.servers - 1)


def _sends_lanes_separately(choice: RunChoice) -> bool:
    return choice.codec != "none" or choice.staleness > 0


def _peers_on_other_hosts(layout: WorkerLayout, seat: int) -> list[int]:
    return [peer for peer, host in layout.host_of.items() if host != layout.host_of[seat]]
