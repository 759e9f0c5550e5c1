"""The effect of codecs on the loss. The bits of a run depend neither on the number of workers nor on the link, so one
worker with two lanes is enough, and the number of steps to a loss is the same on every link."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.links.models import BATCH, job
from benchmarks.links.sides import CODECS, LOCALS, local
from benchmarks.overhead.side_by_side import Row
from shoal.events import Event, RunState
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_dir
from shoal.jobs.run_driver import RunDriver
from shoal.spec.load import make_job

UNCOMPRESSED = "none"
TITLE, STEPS = "loss after", "steps to "
VALIDATION = {"gpt": 0.005, "cnn": 0.02}
SMOOTH_STEPS = 20
TOGETHER = 4
AT_ONCE = 2
TARGET_AT = 2 / 3
"""The target loss is the loss of the uncompressed run at this fraction of its steps."""


Curves = dict[str, list["Curve"]]
"""Curves by codec, one per seed."""


@dataclass
class Curve:
    """The training loss at each reported step, and the validation loss at the end."""

    batch: int
    losses: list[tuple[int, float, int]] = field(default_factory=list)
    final: float = float("nan")

    @classmethod
    def from_plain(cls, batch: int, plain: Mapping[str, Any]) -> Curve:
        losses = map(float, plain["losses"].split())
        told = [((i + 1) * TOGETHER, loss, TOGETHER * batch) for i, loss in enumerate(losses)]
        return cls(batch, told, plain["final"])

    def plain(self) -> dict[str, Any]:
        """A compact form: means over several steps."""
        found = defaultdict[int, list[tuple[float, int]]](list)
        for step, loss, samples in self.losses:
            found[(step - 1) // TOGETHER].append((loss, samples))
        means = [sum(loss * n for loss, n in it) / sum(n for _, n in it) for _, it in sorted(found.items())]
        return {"losses": " ".join(f"{mean:.4f}" for mean in means), "final": self.final}

    def on_event(self, event: Event, state: RunState) -> None:
        if event.kind == "step":
            self.losses.append((int(event.step or 0), event["loss"], event["samples"]))
        elif event.kind == "evaluated":
            self.final = float(event["metrics"]["loss"])

    def smooth(self) -> Iterator[tuple[int, float]]:
        return smooth(self.losses, SMOOTH_STEPS * self.batch)


def smooth(losses: Iterable[tuple[Any, float, int]], over: int) -> Iterator[tuple[Any, float]]:
    """(time, mean loss over at least `over` samples) from (time, loss, samples): a single batch is too noisy."""
    recent: deque[tuple[float, int]] = deque()
    total, seen = 0.0, 0
    for when, loss, samples in losses:
        recent.append((loss, samples))
        total, seen = total + loss * samples, seen + samples
        while seen - recent[0][1] >= over:
            old, count = recent.popleft()
            total, seen = total - old * count, seen - count
        if seen >= over:
            yield when, total / seen


def train_curves(
    model: str,
    data: Path,
    wanted: Iterable[tuple[str, int]],
    *,
    steps: int,
    fork_server: ForkServer,
    scratch: Path,
    done: Callable[[str, int, Curve], None],
) -> None:
    """Train one run per codec and seed, and call `done` with each curve."""
    waiting, going = list(wanted), dict[tuple[str, int], tuple[RunDriver, Curve]]()
    try:
        while waiting or going:
            if waiting and len(going) < AT_ONCE:
                codec, seed = waiting.pop(0)
                plain, curve = _job(model, data, codec, seed=seed, steps=steps), Curve(BATCH[model])
                going[codec, seed] = _started(plain, scratch / "quality", fork_server, curve), curve
            for name, (run, curve) in list(going.items()):
                run.wait(0.02)
                if outcome := run.tick():
                    del going[name]
                    if outcome.receipt is None:
                        raise outcome.error or RuntimeError(f"the run is {outcome.status}")
                    done(*name, curve)
    finally:
        for run, _ in going.values():
            run.close()


def train_missing_curves(
    model: str, data: Path, codecs: Sequence[str], *, seeds: int, steps: int, keep: bool, **how: Any
) -> Curves:
    """Train only the curves that are not stored under the same title yet, and store each new one at once."""
    title = f"{model}: {TITLE} {steps} steps"
    kept: dict[str, dict[str, Any]] = report.kept("links").get(title, {}).get("curves", {}) if keep else {}

    def curves() -> Curves:
        return {codec: [Curve.from_plain(BATCH[model], it) for it in found.values()] for codec, found in kept.items()}

    def done(codec: str, seed: int, curve: Curve) -> None:
        kept.setdefault(codec, {})[str(seed)] = curve.plain()
        if keep and UNCOMPRESSED in kept:
            found = curves()
            report.keep("links", title, {"rows": rows(found, goal(found, steps)), "curves": kept})

    wanted = [(codec, seed) for seed in range(seeds) for codec in dict.fromkeys([UNCOMPRESSED, *codecs])]
    missing = [(codec, seed) for codec, seed in wanted if str(seed) not in kept.get(codec, {})]
    train_curves(model, data, missing, steps=steps, done=done, **how)
    return curves()


def _job(model: str, data: Path, codec: str, *, seed: int, steps: int) -> Mapping[str, Any]:
    plain = dict(job(model, data, seed=seed, steps=steps, workers=1, evaluate={"every_steps": steps}))
    plain |= local(codec) if codec in LOCALS else {"codec": CODECS[codec]}
    plain["data"] = {**plain["data"], "split": {"kind": "holdout", "validation": VALIDATION[model], "test": 0}}
    return plain


def _started(plain: Mapping[str, Any], runs: Path, fork_server: ForkServer, curve: Curve) -> RunDriver:
    made = make_job(dict(plain))
    run = RunDriver(made, run_dir.create(made, runs), fork_server, on_event=curve.on_event)
    run.start()
    return run


@dataclass(frozen=True)
class Goal:
    """The target loss, and the steps to it by codec; None for codecs that never reach it."""

    loss: float
    steps: Mapping[str, float | None]


def goal(curves: Mapping[str, list[Curve]], steps: int) -> Goal:
    loss = target(curves, steps)
    return Goal(loss, {codec: steps_to(found, loss) for codec, found in curves.items()})


def kept_goal(model: str) -> Goal | None:
    """The stored goal of an earlier benchmark, if any."""
    parts = [it["rows"] for part, it in report.kept("links").items() if part.startswith(f"{model}: {TITLE}")]
    if not parts:
        return None
    column = next(name for name in parts[-1][0] if name.startswith(STEPS))
    found = {row["codec"]: float(row[column]) if row[column] else None for row in parts[-1]}
    return Goal(float(column.removeprefix(STEPS)), found)


def target(curves: Mapping[str, list[Curve]], steps: int) -> float:
    """The target loss."""
    return statistics.fmean(
        next(loss for step, loss in reversed(list(curve.smooth())) if step <= TARGET_AT * steps)
        for curve in curves[UNCOMPRESSED]
    )


def steps_to(curves: Sequence[Curve], loss: float) -> float | None:
    """Median over the seeds; None if one of them never reaches the loss."""
    found = [next((step for step, value in curve.smooth() if value <= loss), None) for curve in curves]
    return None if None in found else float(statistics.median(step for step in found if step))


def rows(curves: Mapping[str, list[Curve]], wanted: Goal) -> list[Row]:
    """`within`: whether the mean is at most the worst uncompressed run. `of none`: difference to their mean."""
    worst = max(curve.final for curve in curves[UNCOMPRESSED])
    usual = statistics.fmean(curve.final for curve in curves[UNCOMPRESSED])
    return [
        {
            "codec": codec,
            "final loss": f"{(mean := statistics.fmean(one.final for one in found)):.4f}",
            "seeds": ", ".join(f"{one.final:.4f}" for one in found),
            "within": "yes" if mean <= worst else "no",
            "of none": f"{100 * (mean / usual - 1):+.2f} %",
            f"{STEPS}{wanted.loss:.2f}": wanted.steps[codec] or "",
        }
        for codec, found in curves.items()
    ]
