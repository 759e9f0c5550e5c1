"""The sampler that a policy asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shoal.plan.search.samplers.base import GridSampler, RandomSampler, SobolSampler, TrialSampler
from shoal.plan.search.samplers.cmaes import CmaEsSampler
from shoal.plan.search.samplers.gp import GpSampler
from shoal.plan.search.samplers.nsga2 import Nsga2Sampler
from shoal.plan.search.samplers.tpe import TpeSampler
from shoal.spec.search import SamplerConfig

_OWN: Mapping[str, Callable[[], TrialSampler]] = {
    "grid": GridSampler,
    "random": RandomSampler,
    "sobol": SobolSampler,
    "tpe": TpeSampler,
    "gp": GpSampler,
    "cmaes": CmaEsSampler,
    "nsga2": Nsga2Sampler,
}


def make_sampler(config: SamplerConfig) -> TrialSampler:
    if config.optuna_name:
        from shoal.plan.search.samplers.optuna import OptunaSampler

        return OptunaSampler(config.optuna_name, config.args)
    return _OWN[config.name]()
