"""The nouns of the cost model: what was measured, what there is, what could be done, what it would cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from shoal.codecs.size import FLOAT_BYTES, residual_floats, size_bytes

SyncKind = Literal["lanes", "server", "local"]
ShardKind = Literal["none", "fsdp", "tensor", "pipeline"]


@dataclass(frozen=True)
class LaneTime:
    """What a worker that nobody disturbs takes for one lane of a step, and for one update of the weights."""

    forward_s: float
    backward_s: float
    apply_s: float

    @property
    def lane_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class CodecTime:
    """What a codec takes for one lane's gradients. `settings` are those of the job's `codec` section."""

    settings: Mapping[str, Any]
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class MeasuredJob:
    """A job, as one worker of this machine found it.

    `times` are by the number of threads; `slow_threads` were tried and are no faster than fewer. In a real step a lane
    takes `rest_s` longer: batches are made for it. `stretch_bytes` is what is added up of a lane: gradients, moving
    buffers, the loss. `fragments` are the parts, of one, in which parameters travel between lanes that train by
    themselves. `worker_bytes` is a worker's memory without what it shares with others of its host, `base_bytes`. The
    words that follow say why something cannot be, or nothing. Where lanes are computed on `gpus`, the machine has so
    many of them. The run has `steps`.
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
        """What is sent of one lane."""
        if codec == "none":
            return self.stretch_bytes
        tail = max(self.stretch_bytes - FLOAT_BYTES * self.parameter_count, 0)
        return tail + size_bytes(self.codecs[codec].settings, self.parameter_count, shapes=self.shapes)

    def residual_bytes(self, codec: str) -> int:
        """What a lane carries from step to step where this codec loses something that must not be lost."""
        if codec not in ("int4", "int3", "sign", "topk", "lowrank"):
            return 0
        return FLOAT_BYTES * residual_floats(self.codecs[codec].settings, self.parameter_count, shapes=self.shapes)


@dataclass(frozen=True)
class HostResources:
    """`speed` is relative to the machine that measured. `each`: the speeds, relative to that, of workers that are there
    already; further ones have all of it. Where others brought `brought` workers, it has neither more nor fewer."""

    cores: int
    memory_bytes: float
    speed: float = 1.0
    each: tuple[float, ...] = ()
    brought: int = 0


@dataclass(frozen=True)
class Cluster:
    """The hosts there are; the driver runs on the first.

    A round of exchange takes `round_s`, however little there is to exchange, and one core adds up what lies in memory
    at `add_bytes_s`. Sockets move `socket_bytes_s`, which takes a core's time. `crowding`: how many times as long as on
    an idle host work takes beside as much work again.
    """

    hosts: tuple[HostResources, ...]
    round_s: float
    add_bytes_s: float
    crowding: float = 1.0
    socket_bytes_s: float = math.inf


@dataclass(frozen=True)
class NetworkLink:
    """From each host to all others: one way there, and what it can send and receive at the same time."""

    latency_s: float
    send_bytes_s: float
    receive_bytes_s: float


@dataclass(frozen=True)
class RunChoice:
    """A way to run a job. `every` and `settle` belong to local, `servers` and `staleness` to server. With a `shard` all
    workers hold one replica together."""

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
        """How workers agree, in a few words."""
        if self.shard != "none":
            return f"{self.shard} over {self.workers}"
        if self.sync == "local":
            how = f"local, every {self.every}"
        elif self.sync == "server":
            stale = f", staleness {self.staleness:g}" if self.staleness else ""
            how = f"{self.servers} server{'s' if self.servers > 1 else ''}{stale}"
        else:
            how = "lanes"
        return how if self.codec == "none" else f"{how}, {self.codec}"


@dataclass(frozen=True)
class CostPrediction:
    """One step, over a long run. Of the exchange, `hidden_s` happens while the workers compute and costs nothing.

    `sent_bytes` is what the worker that sends most sends to other hosts; `memory_bytes` what the fullest host needs.
    Where `refused` says why it cannot be, the other numbers are zero, but for the memory.
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
