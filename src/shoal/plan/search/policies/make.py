"""The policy that a search asks for."""

from __future__ import annotations

from shoal.plan.search.policies.base import Full, Policy
from shoal.plan.search.policies.folds import FoldRace
from shoal.plan.search.policies.population import Population
from shoal.plan.search.policies.promote import Promote
from shoal.spec.search import HyperbandPolicyConfig, PolicyConfig, PopulationPolicyConfig, PromotePolicyConfig


def make_policy(config: PolicyConfig, *, folds: bool) -> Policy:
    """`folds`: a unit is a whole fold, and trials race fold by fold."""
    if isinstance(config, PromotePolicyConfig):
        if folds:
            return FoldRace(2 if config.first == "auto" else config.first)
        return Promote(config.first, config.factor)
    if isinstance(config, HyperbandPolicyConfig):
        return Promote(config.first, config.factor, config.brackets)
    if isinstance(config, PopulationPolicyConfig):
        return Population(config.size, config.every, config.quantile, config.perturb, config.resample)
    return Full()
