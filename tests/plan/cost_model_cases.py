"""Models, machines and links for the tests of the cost model: round numbers that can be worked out by hand."""

from dataclasses import replace

from shoal.plan.costs.model import Cluster, CodecTime, HostResources, LaneTime, MeasuredJob, NetworkLink

MB, GB = 10**6, 10**9

CODECS = {
    "bf16": CodecTime({"kind": "bf16"}, 0.002, 0.002),
    "int8": CodecTime({"kind": "int8", "block": 256}, 0.007, 0.003),
    "topk": CodecTime({"kind": "topk", "keep": 0.01, "momentum": None}, 0.018, 0.001),
    "lowrank": CodecTime({"kind": "lowrank", "rank": 4}, 0.030, 0.004),
}

LARGE_MODEL = MeasuredJob(
    lanes=8,
    steps_per_epoch=100,
    times={1: LaneTime(0.010, 0.020, 0.005)},
    shapes=((1000, 1000),) * 5,
    stretch_bytes=20 * MB,
    optimizer_bytes=40 * MB,
    base_bytes=300 * MB,
    worker_bytes=200 * MB,
    codecs=CODECS,
)
"""5 M parameters, 240 ms for its 8 lanes."""

TINY_MODEL = replace(
    LARGE_MODEL, times={1: LaneTime(10e-6, 20e-6, 10e-6)}, shapes=((64, 32), (10, 32)), stretch_bytes=9472
)

HOST = HostResources(cores=4, memory_bytes=16 * GB)


def machine(*hosts):
    return Cluster(hosts or (HOST,), round_s=0.5e-3, add_bytes_s=4 * GB)


def link_of_mbit(speed, latency_s=0.2e-3):
    return NetworkLink(latency_s, speed * 125_000, speed * 125_000)


FAST_LINK, SLOW_LINK = link_of_mbit(10_000), link_of_mbit(100)
