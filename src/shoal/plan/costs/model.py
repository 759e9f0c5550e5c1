"""The data types of the cost model: measurements, resources, choices, predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from shoal.codecs.size import FLOAT_BYTES, residual_floats, size_bytes
from shoal.errors import plural

SyncKind = Literal["lanes", "server", "local"]
ShardKind = Literal["none", "fsdp", "tensor", "pipeline"]


@dataclass(frozen=True)
class LaneTime:
    """Times of an undisturbed worker for one lane of a step and for one update of the weights."""

    forward_s: float
    backward_s: float
    apply_s: float

    @property
    def lane_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class CodecTime:
    """Times of a codec for one lane's gradients. `settings` are those of the job's `codec` section."""

    settings: Mapping[str, Any]
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class MeasuredJob:
    """A job as measured by one worker on this machine.

    `times` are by number of threads; `slow_threads` were tried and are not faster than fewer. In a real step a lane
    takes `rest_s` longer, to build batches. `stretch_bytes` is the size of the flat buffer that is summed over lanes:
    gradients, moving buffers, the loss. `fragments` are the fractions of the parameters that local SGD exchanges at a
    time. `worker_bytes` is a worker's memory without `base_bytes`, which it shares with other workers of its host.
    `no_codecs`, `no_servers`, `only_servers` and `no_shards` say why something is impossible, or are ''. `gpus` is the
    number of GPUs of the machine, if lanes are computed on them. The run has `steps`.
    """

    lanes: int
    steps_per_epoch: int
    times: Mapping[int, LaneTime]
    shapes: tuple[tuple[int, ...], ...]
    stretch_bytes: int
    rest_s: float = 0.0
    fragments: tuple[float, ...] = (0.25,) * 4
    optimizer_bytes: int = 0
    base_bytes: int = 0
    worker_bytes: int = 0
    slow_threads: tuple[int, ...] = ()
    codecs: Mapping[str, CodecTime] = field(default_factory=dict)
    no_codecs: str = ""
    no_servers: str = ""
    only_servers: str = ""
    no_shards: str = ""
    gpus: int = 0
    steps: float = math.inf

    @property
    def parameter_count(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def encoded_lane_bytes(self, codec: str) -> int:
        """Encoded size of one lane."""
        if codec == "none":
            return self.stretch_bytes
        tail = max(self.stretch_bytes - FLOAT_BYTES * self.parameter_count, 0)
        return tail + size_bytes(self.codecs[codec].settings, self.parameter_count, shapes=self.shapes)

    def residual_bytes(self, codec: str) -> int:
        """Size of a lane's residual, if this codec needs error feedback."""
        if codec not in ("int4", "int3", "sign", "topk", "lowrank"):
            return 0
        return FLOAT_BYTES * residual_floats(self.codecs[codec].settings, self.parameter_count, shapes=self.shapes)


@dataclass(frozen=True)
class HostResources:
    """`speed` is relative to the machine that measured. `each`: the relative speeds of workers that already run there;
    further workers have full speed. A host that joined with `brought` workers has exactly that number."""

    cores: int
    memory_bytes: float
    speed: float = 1.0
    each: tuple[float, ...] = ()
    brought: int = 0


@dataclass(frozen=True)
class Cluster:
    """The hosts; the driver runs on the first.

    A round of exchange takes at least `round_s`; one core sums `add_bytes_s` in memory; sockets move `socket_bytes_s`,
    which occupies a core. `crowding` is the slowdown of work when the same amount of work runs beside it.
    """

    hosts: tuple[HostResources, ...]
    round_s: float
    add_bytes_s: float
    crowding: float = 1.0
    socket_bytes_s: float = math.inf


@dataclass(frozen=True)
class NetworkLink:
    """The link of each host to all others: one-way latency, and bandwidth in each direction."""

    latency_s: float
    send_bytes_s: float
    receive_bytes_s: float


@dataclass(frozen=True)
class RunChoice:
    """A way to run a job. `every` and `settle` belong to local, `servers` and `staleness` to server. With a `shard`,
    all workers together hold one replica."""

    workers: int = 1
    hosts: int = 1
    sync: SyncKind = "lanes"
    codec: str = "none"
    threads: int = 1
    every: int = 1
    settle: int = 1
    servers: int = 0
    staleness: float = 0
    shard: ShardKind = "none"

    @property
    def name(self) -> str:
        """The kind of sync in a few words."""
        if self.shard != "none":
            return f"{self.shard} over {self.workers}"
        if self.sync == "local":
            how = f"local, every {self.every}"
        elif self.sync == "server":
            stale = f", staleness {self.staleness:g}" if self.staleness else ""
            how = f"{plural(self.servers, 'server')}{stale}"
        else:
            how = "lanes"
        return how if self.codec == "none" else f"{how}, {self.codec}"


@dataclass(frozen=True)
class CostPrediction:
    """Mean times of one step in a long run. `hidden_s` of the exchange overlaps with compute and costs nothing.

    `sent_bytes` is the largest number of bytes that a worker sends to other hosts; `memory_bytes` is the need of the
    fullest host. If `refused` says why the choice is impossible, the other numbers are zero, except the memory.
    """

    choice: RunChoice
    compute_s: float = 0.0
    encode_s: float = 0.0
    exchange_s: float = 0.0
    apply_s: float = 0.0
    hidden_s: float = 0.0
    sent_bytes: float = 0.0
    memory_bytes: float = 0.0
    steps_per_epoch: int = 0
    refused: str = ""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.encode_s + self.exchange_s + self.apply_s

    @property
    def epoch_s(self) -> float:
        return self.step_s * self.steps_per_epoch
