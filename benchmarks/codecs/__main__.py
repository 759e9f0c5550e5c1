"""python -m benchmarks.codecs [--quick]"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import report
from benchmarks.overhead.side_by_side import Numbers, Row, in_turns, median
from shoal.codecs.codec import Codec
from shoal.codecs.make import make_codec
from shoal.codecs.residual import Residual

SIDE = 1000  # rows and columns of the matrices for `lowrank`
COPY, RIVAL = "copy", "torch.topk 1 %"
CODECS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "bf16": {"kind": "bf16"},
    "fp16": {"kind": "fp16"},
    "int8": {"kind": "int8", "block": 256},
    "int4": {"kind": "int4", "block": 64},
    "int3": {"kind": "int3", "block": 256},
    "sign": {"kind": "sign"},
    "topk 1 %": {"kind": "topk", "keep": 0.01},
    "topk 1 %, momentum": {"kind": "topk", "keep": 0.01, "momentum": 0.9},
    "lowrank 2": {"kind": "lowrank", "rank": 2},
    "lowrank 4": {"kind": "lowrank", "rank": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description="What codecs cost.")
    parser.add_argument("--quick", action="store_true", help="a million floats, few turns, nothing written")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    for count in (1_000_000,) if asked.quick else (1_000_000, 10_000_000):
        rows = measure(count, repeats=3 if asked.quick else 9)
        console.print(report.table(f"codecs: {count:,} floats, one thread", rows))
        if not asked.quick:
            report.keep("codecs", f"{count}", {"load": os.getloadavg()[0], "rows": rows})


def measure(count: int, *, repeats: int) -> list[Row]:
    """Times are CPU ms, medians over the rounds. `encode` includes the residual that the codec needs in training."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 1e-3
    sides: dict[str, Callable[[], Numbers]] = {COPY: copying(values), RIVAL: picking(values, count // 100)}
    codecs = {name: make_codec(kind, shapes=[(SIDE, SIDE)] * (count // SIDE**2)) for name, kind in CODECS.items()}
    sides |= {name: coding(codec, values) for name, codec in codecs.items()}
    found = in_turns(sides, repeats)
    sizes = {COPY: 4 * count, RIVAL: count // 100 * 8} | {
        name: codec.size_bytes(count) for name, codec in codecs.items()
    }
    return [
        {"codec": name, "bytes": sizes[name], "ratio": 4 * count / sizes[name]}
        | {what: 1000 * median(numbers, what) for what in numbers[0]}
        | {"of copy": median(numbers, "both") / median(found[COPY], "both")}
        for name, numbers in found.items()
    ]


def copying(values: Tensor) -> Callable[[], Numbers]:
    out = torch.empty_like(values)
    return lambda: timed(lambda: out.copy_(values), lambda: values.copy_(out), lambda: out.add_(values))


def picking(values: Tensor, k: int) -> Callable[[], Numbers]:
    """The conversions of torch itself, without error feedback."""
    out = torch.zeros_like(values)
    chosen = torch.arange(k)

    def encode() -> None:
        nonlocal chosen
        chosen = values.abs().topk(k, sorted=False).indices

    return lambda: timed(
        encode,
        lambda: out.zero_().index_add_(0, chosen, values[chosen]),
        lambda: out.index_add_(0, chosen, values[chosen]),
    )


def coding(codec: Codec, values: Tensor) -> Callable[[], Numbers]:
    count = values.numel()
    data, out = torch.empty(codec.size_bytes(count), dtype=torch.uint8), torch.zeros(count)
    memory = Residual(codec.residual_floats(count))

    def encode() -> None:
        if not codec.needs_residual:
            return codec.encode(values, data)
        before, after = memory.before_and_after()
        codec.encode(values, data, residual_in=before, residual_out=after)
        return memory.commit()

    return lambda: timed(encode, lambda: codec.decode(data, out), lambda: codec.decode(data, out, add=True))


def timed(encode: Callable[[], object], decode: Callable[[], object], add: Callable[[], object]) -> Numbers:
    """Seconds of processor time, the best of three, to exclude cold caches and other load."""
    found = {"encode": best(encode), "decode": best(decode), "decode, add": best(add)}
    return {**found, "both": found["encode"] + found["decode"]}


def best(act: Callable[[], object]) -> float:
    return min(spent(act) for _ in range(3))


def spent(act: Callable[[], object]) -> float:
    start = time.thread_time()
    act()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
