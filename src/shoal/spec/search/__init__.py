"""The `search` section of a job: what is searched, how, and for how long."""

from shoal.spec.search.config import (
    BudgetConfig,
    ConstraintConfig,
    FullPolicyConfig,
    HyperbandPolicyConfig,
    ObjectiveConfig,
    PolicyConfig,
    PopulationPolicyConfig,
    PromotePolicyConfig,
    SamplerConfig,
    SearchConfig,
)

__all__ = [
    "BudgetConfig",
    "ConstraintConfig",
    "FullPolicyConfig",
    "HyperbandPolicyConfig",
    "ObjectiveConfig",
    "PolicyConfig",
    "PopulationPolicyConfig",
    "PromotePolicyConfig",
    "SamplerConfig",
    "SearchConfig",
]
