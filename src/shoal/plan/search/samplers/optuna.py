"""Optuna's samplers: the only module that imports it.

For every proposal a study is made anew from the ledger, with a seed of that proposal. So the proposal depends on what
is known in virtual time only, and a study needs no storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.errors import error
from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.samplers.base import first_free, random_places
from shoal.plan.search.space import Axis, Point
from shoal.spec.search.space import Choice

OWN_INSTEAD = {"CmaEsSampler": "cmaes", "QMCSampler": "sobol", "GridSampler": "grid", "BruteForceSampler": "grid"}
"""Samplers that keep what they know in a study, which is made anew here, or that need steps; and what does the same."""


class OptunaSampler:
    """`optuna:Name` with `args` of its class. Choices are categories; numbers are places in the unit interval."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self.name, self.args = name, dict(args)
        self._optuna = _import()
        if not isinstance(getattr(self._optuna.samplers, name, None), type):
            known = [n for n in dir(self._optuna.samplers) if n.endswith("Sampler")]
            fix = f"Use one of {', '.join(known)}."
            raise error("SH202", f"Optuna has no sampler '{name}'", where="search.policy.sampler", fix=fix)
        if name in OWN_INSTEAD:
            message = f"optuna's {name} would forget at every proposal what it knows"
            raise error("SH106", message, where="search.policy.sampler", fix=f"Use the sampler {OWN_INSTEAD[name]}.")
        self._generation_size: int | None = getattr(self._make(0), "population_size", None)

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        study = self._optuna.create_study(
            directions=["maximize"] * len(ledger.objectives),
            sampler=self._make(int(ledger.generator(8, number).integers(2**31))),
        )
        spaces = {f"{i:03}": self._distribution(axis) for i, axis in enumerate(ledger.space.axes)}
        complete = 0
        for trial in ledger.searched():
            told = self._told(ledger, trial, spaces)
            if self._generation_size and told.state == self._optuna.trial.TrialState.COMPLETE:
                told.system_attrs = {f"{self.name}:generation": complete // self._generation_size}
                complete += 1
            study.add_trial(told)
        asked = study.ask(spaces)
        cube = [self._place(axis, asked.params[f"{i:03}"]) for i, axis in enumerate(ledger.space.axes)]
        return first_free(ledger, [np.array(cube), *random_places(ledger, number)])

    def _make(self, seed: int) -> Any:
        made = getattr(self._optuna.samplers, self.name)
        try:
            return made(**{"seed": seed, **self.args})
        except (TypeError, ValueError, ImportError) as failure:
            place = "search.policy.sampler.args"
            raise error("SH205", f"optuna's {self.name} cannot be made: {failure}", where=place) from failure

    def _told(self, ledger: Ledger, trial: TrialState, spaces: Mapping[str, Any]) -> Any:
        """A trial as Optuna knows it: complete with the values known so far, failed, or running."""
        state = self._optuna.trial.TrialState
        params = {f"{i:03}": self._param(axis, trial.point.cube[i]) for i, axis in enumerate(ledger.space.axes)}
        values = list(map(float, ledger.curve_at(trial))) if trial.rows else None
        if trial.status == "failed" or (values and not all(abs(v) < float("inf") for v in values)):
            kind, values = state.FAIL, None
        else:
            kind = state.COMPLETE if values else state.RUNNING
        broken = {"search": ledger.violation(trial)} if ledger.constraints and kind == state.COMPLETE else None
        return self._optuna.trial.create_trial(
            state=kind, params=params, distributions=dict(spaces), values=values, constraints=broken
        )

    def _distribution(self, axis: Axis) -> Any:
        if isinstance(axis.values, Choice) and not axis.values.ordered:
            return self._optuna.distributions.CategoricalDistribution(list(range(len(axis.values.options))))
        return self._optuna.distributions.FloatDistribution(0.0, 1.0)

    def _param(self, axis: Axis, place: float) -> float | int:
        if isinstance(axis.values, Choice) and not axis.values.ordered:
            count = len(axis.values.options)
            return min(int(place * count), count - 1)
        return float(min(max(place, 0.0), 1.0))

    def _place(self, axis: Axis, param: float) -> float:
        if isinstance(axis.values, Choice) and not axis.values.ordered:
            return (param + 0.5) / len(axis.values.options)
        return float(param)


def _import() -> Any:
    try:
        import optuna
    except ImportError as failure:
        fix = "pip install 'shoal[optuna]', or use the sampler tpe, gp or cmaes."
        raise error("SH207", "Optuna is not installed", where="search.policy.sampler", fix=fix) from failure
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
