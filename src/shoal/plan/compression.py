"""Decisions of a compression: what to train, whether a rung is kept, whether the targets are met."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shoal.errors import error
from shoal.spec.compression.config import CompressConfig, DistilConfig, TargetConfig, parse_share
from shoal.spec.compression.measured import Certificate, Quality, RungReport
from shoal.spec.compression.steps import ModelShape, ShapeStep, TuneStep
from shoal.spec.job import InitFromConfig, Job, LRScheduleConfig

RUNTIME = "runtime: onnx float32"
"""The rung that compresses nothing."""
SMALLER = 0.99
KEPT_WEIGHTS = (0.4, 0.15, 0.08, 0.05)
"""Shares of the weights that are kept if no size is asked for."""
VERY_FEW = 0.07
PROOF_DIFFERENCE = 1e-6
"""The share of the largest output by which outputs may differ in float64 though they are equal."""
FILLED = 0.97
"""How much of the size that is asked for the codes may take; biases and lists of values take the rest."""
DEFAULT_LR = 1e-3
SCHEDULED_RATES = ("max_lr", "base_lr")
_TARGET = re.compile(r"\s*(size|latency)\s*<=?\s*(\S+)\s*")


def parse_targets(texts: Sequence[str]) -> TargetConfig:
    """From `size<25%` and `latency<50%`."""
    found: dict[str, float] = {}
    for text in texts:
        match = _TARGET.fullmatch(text)
        try:
            if match is None or match[1] in found:
                raise ValueError
            found[match[1]] = float(parse_share(match[2]))
            TargetConfig.model_validate(found)
        except ValueError:
            fix = "Write --target 'size<25%' or --target 'latency<50%', each at most once."
            raise error("SH609", f"'{text}' is not a target", where="--target", fix=fix) from None
    return TargetConfig(**found)


def parse_drop(text: str) -> float:
    """From `0.5%`."""
    try:
        return CompressConfig.model_validate({"max_drop": parse_share(text)}).max_drop
    except ValueError:
        fix = "Write a percentage, such as --max-drop 0.5%."
        raise error("SH609", f"'{text}' is not a drop", where="--max-drop", fix=fix) from None


def tune_job(
    parent: Job, step: TuneStep, *, shape: Sequence[ShapeStep], weights: str | None, teacher: str | None
) -> Job:
    """The job that trains a compressed shape: the parent's, with its optimizer at another rate. The test part is not
    looked at."""
    factor = 1.0 if step.scratch else step.lr
    steps = [*shape, *([step.hold] if step.hold else [])]
    return parent.model_copy(
        update={
            "name": "tune",
            "shape": ModelShape(steps=steps) if steps else None,
            "init_from": InitFromConfig(path=weights) if weights else None,
            "distil": DistilConfig(teacher=teacher) if teacher else None,
            "epochs": step.epochs,
            "steps": None,
            "stop_early": None,
            "evaluate": parent.evaluate.model_copy(update={"test": False}),
            "optimizer": _with_rate(parent.optimizer, factor),
            "schedule": _with_scheduled_rate(parent.schedule, factor),
            "export": [],
            "checkpoint": parent.checkpoint.model_copy(update={"path": None}),
            "compress": CompressConfig(),
            "shrink": None,
        }
    )


def _with_rate(optimizer: Any, factor: float) -> Any:
    def scaled(args: dict[str, Any], default: float | None) -> dict[str, Any]:
        rate = args.get("lr", default)
        return args if rate is None or factor == 1.0 else {**args, "lr": rate * factor}

    groups = [group.model_copy(update={"args": scaled(group.args, None)}) for group in optimizer.groups]
    return optimizer.model_copy(update={"args": scaled(optimizer.args, DEFAULT_LR), "groups": groups})


def _with_scheduled_rate(schedule: LRScheduleConfig | None, factor: float) -> LRScheduleConfig | None:
    """Schedules that name a rate of their own do not look at the optimizer's."""
    if schedule is None or factor == 1.0:
        return schedule

    def scaled(rate: Any) -> Any:
        return [scaled(one) for one in rate] if isinstance(rate, list) else rate * factor

    own = {name: scaled(schedule.args[name]) for name in SCHEDULED_RATES if name in schedule.args}
    return schedule.model_copy(update={"args": {**schedule.args, **own}})


def judge_rung(rung: RungReport, *, now: RungReport, config: CompressConfig) -> tuple[bool, str]:
    """Whether the rung replaces what there is now, and why."""
    if (loss := _quality_loss(rung, config)) is not None:
        return False, loss
    if config.target.is_set and meets_targets(rung, config.target) and not meets_targets(now, config.target):
        return True, "it meets the targets"
    smaller = _smaller(rung, now)
    faster = _faster(rung, now)
    if smaller and faster is not False:
        return True, "smaller" if faster is None else "smaller and faster"
    if faster and not smaller:
        return (True, "faster") if config.target.size is None or _size(rung) <= _size(now) else (False, "larger")
    if smaller:
        return (False, "slower") if config.target.latency is not None else (True, "smaller, and slower")
    return False, "neither smaller nor faster"


def _quality_loss(rung: RungReport, config: CompressConfig) -> str | None:
    """Why the rung is not good enough; None if it is. A proof counts more than samples, if no sample contradicts it."""
    quality, certificate = rung.quality, rung.certificate
    if certificate is not None and certificate.claim == "proven":
        if (doubt := _contradiction(certificate)) is not None:
            return doubt
        if quality is None or quality.drop <= 0:
            return None
    if quality is None:
        return "its quality was not measured"
    if quality.drop_bound <= config.max_drop:
        return None
    if undecidable(quality, config.max_drop):
        least = f"{quality.smallest_bound:.2%} is the least that they can"
        return (
            f"{quality.samples} samples cannot show a drop of {config.max_drop:.2%} or less: "
            f"{least if math.isfinite(quality.smallest_bound) else 'so few have no bound of their mean'}"
        )
    return f"the drop may be {quality.drop_bound:.2%}, more than {config.max_drop:.2%}"


def _contradiction(certificate: Certificate) -> str | None:
    """Why what was measured speaks against the proof; None if it does not. Sums in another order differ in float64,
    too, but by far less."""
    found = [certificate.difference_float64, certificate.difference_points]
    if all(value <= PROOF_DIFFERENCE * certificate.largest_output for value in found):  # false for NaN
        return None
    return (
        f"a proof says that it is equal, and its outputs differ by {found[0]:.1e} on samples and {found[1]:.1e} on "
        f"random inputs, of at most {certificate.largest_output:.1e}"
    )


def _size(rung: RungReport) -> float:
    return 1.0 if rung.size_ratio is None else rung.size_ratio


def _smaller(rung: RungReport, now: RungReport) -> bool:
    return _size(rung) < _size(now) * SMALLER


def latency_ratio(rung: RungReport) -> float | None:
    """The ratio at the batch size where the rung does worst; None if it was not measured."""
    return max((one.median for one in rung.latency.ratios.values()), default=None) if rung.latency else None


def best_rungs(rungs: Sequence[RungReport]) -> list[RungReport]:
    """The Pareto front: files that no other rung's file beats in size, drop and latency, the smallest first. Latencies
    are those against the parent in torch; a file without one runs as the parent does."""
    points = [
        (one, (one.size_ratio, one.quality.drop, max(one.eager_ratio.values(), default=1.0)))
        for one in rungs
        if one.size_ratio and one.quality and one.name != RUNTIME
    ]
    front = [one for one, mine in points if not any(_beats(other, mine) for _, other in points)]
    return sorted(front, key=lambda one: (one.size_ratio or 1.0, one.name))


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(mine <= its for mine, its in zip(one, other, strict=True))


def _faster(rung: RungReport, now: RungReport) -> bool | None:
    """By the ratios to the parent in torch, which files of all runtimes have. None if it cannot be told: not measured,
    or the ratios differ by no more than their quartiles. A file that was not measured counts as fast as the parent."""
    if rung.latency is None or not rung.latency.eager:
        return None
    mine, other = (list(one.latency.eager.values()) if one.latency else [] for one in (rung, now))
    worst, known = (max((ratio.median for ratio in one), default=1.0) for one in (mine, other))
    spread = max(ratio.high - ratio.low for ratio in [*mine, *other])
    return None if abs(worst - known) <= spread else worst < known


def meets_targets(rung: RungReport, target: TargetConfig) -> bool:
    """A latency target holds at every batch size that was measured, in the same runtime as the parent."""
    size_met = target.size is None or _size(rung) < target.size
    ratio = latency_ratio(rung)
    latency_met = target.latency is None or (ratio is not None and ratio < target.latency)
    return size_met and latency_met


def shrink_step(job: Job, steps: int, evaluations: Sequence[int]) -> int:
    """The step after which the model shrinks: the first evaluation at or after `shrink.at`. SH668 if there is none
    before the end."""
    assert job.shrink is not None
    found = next((step for step in evaluations if job.shrink.at * steps <= step < steps), None)
    if found is None:
        message = f"no evaluation lies between {job.shrink.at:.0%} of the {steps} steps and the end"
        raise error("SH668", message, where="shrink.at", fix="Evaluate more often (`evaluate`), or shrink earlier.")
    return found


def packed_share(keep: float, *, bits: int) -> float:
    """About how large a packed file is if this share of the weights is not zero: the entropy of which ones, and their
    codes. Files are a few percent larger or smaller than that."""
    which = -(keep * math.log2(keep) + (1 - keep) * math.log2(1 - keep)) if keep < 1 else 0.0
    return (which + keep * bits) / 32


def kept_shares(size: float | None) -> list[float]:
    """The shares of the weights that are kept, one after the other, to what a file of this size holds with 4 bits each:
    in three steps, or in four with smaller ones at the end if very few are left."""
    if size is None:
        return list(KEPT_WEIGHTS)
    goal = next((n / 1000 for n in range(500, 0, -1) if packed_share(n / 1000, bits=4) < FILLED * size), 0.001)
    parts = (1 / 3, 2 / 3, 1) if goal >= VERY_FEW else (0.4, 0.7, 0.88, 1)
    return [goal**part for part in parts]


def divide_lanes(lanes: int, workers: int) -> list[list[int]]:
    """The lanes that each worker measures: neighbours, as equal in number as possible."""
    parts = min(workers, lanes)
    ends = [lanes * part // parts for part in range(parts + 1)]
    return [list(range(first, last)) for first, last in pairwise(ends)]


def join_ranges(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, tuple[float, float]]:
    """The smallest and largest values of all workers, by name."""
    found: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (low, high) in part.items():
            known = found.get(name, (low, high))
            found[name] = min(known[0], low), max(known[1], high)
    return dict(sorted(found.items()))


def undecidable(quality: Quality, max_drop: float) -> bool:
    """Whether no change of any prediction could be allowed with so few samples."""
    return quality.smallest_bound > max_drop
