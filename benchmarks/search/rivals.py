"""Policies of other tools on the same tables: random search, Ray Tune's ASHA, and the real Optuna.

They are asked when a worker is free and told each epoch, as in those tools. A place in the unit cube stands for the
nearest row that was not used, for every side.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Protocol

import numpy as np

from benchmarks.search.tables import CurveTable


class Rival(Protocol):
    """`ask` returns a trial (any handle) and its place; `report` says whether it goes on after this epoch."""

    def ask(self) -> tuple[Any, np.ndarray]: ...

    def report(self, trial: Any, epoch: int, error: float) -> bool: ...

    def end(self, trial: Any, error: float, stopped: bool) -> None: ...


class RandomSearch:
    """Random configurations, trained to their end."""

    def __init__(self, axes: int, seed: int) -> None:
        self.generator, self.axes = np.random.default_rng(seed), axes

    def ask(self) -> tuple[Any, np.ndarray]:
        return None, self.generator.random(self.axes)

    def report(self, trial: Any, epoch: int, error: float) -> bool:
        return True

    def end(self, trial: Any, error: float, stopped: bool) -> None:
        pass


class RayAsha(RandomSearch):
    """A port of Ray Tune's AsyncHyperBandScheduler (stopping, one bracket): at a rung a trial stops unless it is in the
    best one of four of those that reached the rung before or with it. Defaults: grace period 1, reduction factor 4."""

    def __init__(self, axes: int, seed: int, *, epochs: int, grace: int = 1, factor: int = 4) -> None:
        super().__init__(axes, seed)
        self.factor = factor
        most = int(math.log(epochs / grace) / math.log(factor) + 1)
        self.rungs = [grace * factor**k for k in reversed(range(most))]
        self.recorded: dict[int, list[float]] = defaultdict(list)

    def report(self, trial: Any, epoch: int, error: float) -> bool:
        if epoch not in self.rungs:
            return True
        seen, value = self.recorded[epoch], -error
        cutoff = np.nanpercentile(seen, (1 - 1 / self.factor) * 100) if seen else None
        seen.append(value)
        return cutoff is None or bool(value >= cutoff)


class Optuna:
    """Optuna's TPESampler with its defaults, and HyperbandPruner, SuccessiveHalvingPruner (its ASHA) or no pruner."""

    def __init__(self, axes: int, seed: int, *, epochs: int, pruner_name: str) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        pruners = {
            "hyperband": lambda: optuna.pruners.HyperbandPruner(min_resource=1, max_resource=epochs),
            "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
            "": optuna.pruners.NopPruner,
        }
        self.study = optuna.create_study(
            direction="minimize",
            sampler=optuna.samplers.TPESampler(seed=seed),
            pruner=pruners[pruner_name](),
            study_name=f"study-{seed}",
        )
        self.spaces: dict[str, Any] = {f"x{i}": optuna.distributions.FloatDistribution(0.0, 1.0) for i in range(axes)}
        self.states = optuna.trial.TrialState

    def ask(self) -> tuple[Any, np.ndarray]:
        trial = self.study.ask(self.spaces)
        return trial, np.array([trial.params[name] for name in self.spaces])

    def report(self, trial: Any, epoch: int, error: float) -> bool:
        trial.report(error, epoch)
        return not trial.should_prune()

    def end(self, trial: Any, error: float, stopped: bool) -> None:
        if not math.isfinite(error):
            self.study.tell(trial, state=self.states.FAIL)
        elif stopped:
            self.study.tell(trial, state=self.states.PRUNED)
        else:
            self.study.tell(trial, error)


def make_rival(name: str, table: CurveTable, seed: int) -> Rival:
    axes, epochs = table.cube.shape[1], table.error.shape[1]
    if name == "random":
        return RandomSearch(axes, seed)
    if name == "asha":
        return RayAsha(axes, seed, epochs=epochs)
    return Optuna(axes, seed, epochs=epochs, pruner_name=name.partition("+")[2])
