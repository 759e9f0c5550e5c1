"""The fields of `search`. Rules between them, and those of its space, are in `rules.py`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from shoal.spec.base import Spec

SAMPLERS = ("grid", "random", "sobol", "tpe", "gp", "cmaes", "nsga2")
FACTS = ("parameters", "flops", "size", "latency")
"""Names of what is known of a trial before it is trained. They may be objectives and constraints. `size` is in bytes,
`latency` in milliseconds for one sample; it is measured, so it is the machine's."""
_SMALLER_IS_BETTER = re.compile(
    r"loss|error|mae|mse|rmse|perplexity|parameters|flops|latency|size|bytes|seconds|memory|_m?s$"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(KB|MB|GB|TB)", re.IGNORECASE)
_BUDGET = re.compile(r"(\d+(?:\.\d+)?) (training|trial|hour|minute)s?")
_CONSTRAINT = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(<=|>=)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")


class ObjectiveConfig(Spec):
    """A metric of the job, or a fact of a trial. `mode` auto: min for losses, errors, sizes and times, else max."""

    metric: str = Field(min_length=1)
    mode: Literal["auto", "min", "max"] = "auto"

    @property
    def sign(self) -> int:
        """1 if larger is better, -1 if smaller is."""
        if self.mode != "auto":
            return 1 if self.mode == "max" else -1
        return -1 if _SMALLER_IS_BETTER.search(self.metric.lower()) else 1

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value


class ConstraintConfig(Spec):
    """`parameters <= 1e6`: a trial that breaks it cannot win. One that breaks it by a fact is not trained at all."""

    metric: str = Field(min_length=1)
    least: float | None = None
    most: float | None = None

    def violation(self, value: float) -> float:
        """By how much a value breaks the constraint; 0 if it does not."""
        over = value - self.most if self.most is not None else 0.0
        under = self.least - value if self.least is not None else 0.0
        return max(0.0, over, under)

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = _CONSTRAINT.fullmatch(value)
        if not match:
            raise ValueError("write a metric or fact, <= or >=, and a number: parameters <= 1e6")
        return {"metric": match[1], "most" if match[2] == "<=" else "least": float(match[3])}

    @model_validator(mode="after")
    def _bounded(self) -> ConstraintConfig:
        if self.least is None and self.most is None:
            raise ValueError("write `least` or `most`, or a text such as parameters <= 1e6")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError("`least` is above `most`, so no trial keeps it")
        return self


class SamplerConfig(Spec):
    """Where the values of new trials come from. `args` are for `optuna:Name`: arguments of that sampler's class."""

    name: str = Field(min_length=1)
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def optuna_name(self) -> str:
        """The class of Optuna, or ''."""
        package, _, name = self.name.partition(":")
        return name if package == "optuna" else ""


class FullPolicyConfig(Spec):
    """Every trial is trained to its end."""

    kind: Literal["full"]
    sampler: SamplerConfig = SamplerConfig(name="gp")


class PromotePolicyConfig(Spec):
    """ASHA with pause: at each rung, the best one in `factor` of the trials there is trained `factor` times as long.

    `first`: number of units (evaluations, or folds) up to the first rung; auto is 6 % of the training.
    """

    kind: Literal["promote"] = "promote"
    first: PositiveInt | Literal["auto"] = "auto"
    factor: Annotated[int, Field(ge=2, le=16)] = 2
    sampler: SamplerConfig = SamplerConfig(name="gp")


class HyperbandPolicyConfig(Spec):
    """Several brackets of rungs side by side: each begins one rung later, so fewer trials are judged early."""

    kind: Literal["hyperband"]
    first: PositiveInt = 1
    factor: Annotated[int, Field(ge=2, le=16)] = 3
    brackets: PositiveInt = 3
    sampler: SamplerConfig = SamplerConfig(name="gp")


class PopulationPolicyConfig(Spec):
    """Population based training: at each milestone, a member of the worst `quantile` becomes a copy of one of the best,
    with values multiplied or divided by up to `perturb`.

    `every`: units between milestones; auto is a tenth of the training. `resample`: probability that a value is drawn
    anew instead.
    """

    kind: Literal["population"]
    size: Annotated[int, Field(ge=2, le=1024)] = 8
    every: PositiveInt | Literal["auto"] = "auto"
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    perturb: Annotated[float, Field(gt=1, le=10)] = 1.25
    resample: Annotated[float, Field(ge=0, le=1)] = 0.25
    sampler: SamplerConfig = SamplerConfig(name="sobol")


PolicyConfig = Annotated[
    FullPolicyConfig | PromotePolicyConfig | HyperbandPolicyConfig | PopulationPolicyConfig,
    Field(discriminator="kind"),
]


class BudgetConfig(Spec):
    """When no more trials are begun: `40 trainings`, `64 trials` or `2 hours`. With several, the first that is reached.

    A training is as much as one whole training of a trial; parts of trainings count as parts.
    """

    trainings: PositiveFloat | None = None
    trials: PositiveInt | None = None
    hours: PositiveFloat | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = _BUDGET.fullmatch(value.strip())
        if not match:
            raise ValueError("write '40 trainings', '64 trials', '2 hours' or '30 minutes'")
        if match[2] == "trial":
            return {"trials": int(match[1]) if match[1].isdecimal() else float(match[1])}
        number = float(match[1])
        return (
            {"trainings": number} if match[2] == "training" else {"hours": number / (60 if match[2] == "minute" else 1)}
        )

    @model_validator(mode="after")
    def _some(self) -> BudgetConfig:
        if self.trainings is None and self.trials is None and self.hours is None:
            raise ValueError("write '40 trainings', '64 trials' or '2 hours'")
        return self


class SearchConfig(Spec):
    """A search over jobs. Trials are this job with the values that the search chose.

    `slots`: trials under way at once. They are part of the result, like lanes; the number of workers is not.
    `order: virtual` is reproducible; `order: clock` counts results when they come. `cost`: virtual time of a training.
    `keep`: space for checkpoints of paused trials. `start`: values, runs or earlier searches to try first.
    `repeat`: number of seeds with which the best few are trained at the end. `seeds`: number of seeds of every trial,
    whose mean counts; a seed is then a unit, as a fold is.
    """

    space: dict[str, Any] = Field(min_length=1)
    metric: list[ObjectiveConfig] = Field(default_factory=list)
    policy: PolicyConfig = Field(default_factory=PromotePolicyConfig)
    budget: BudgetConfig = BudgetConfig(trainings=40)
    slots: Annotated[int, Field(ge=1, le=1024)] = 4
    order: Literal["virtual", "clock"] = "virtual"
    seed: NonNegativeInt | None = None
    cost: Literal["flops", "samples", "steps"] = "flops"
    keep: str = "10 GB"
    start: list[dict[str, Any] | str] = Field(default_factory=list)
    constraints: list[ConstraintConfig] = Field(default_factory=list)
    repeat: Annotated[int, Field(ge=1, le=100)] = 1
    seeds: Annotated[int, Field(ge=1, le=100)] = 1

    @property
    def wants_latency(self) -> bool:
        asked = [objective.metric for objective in self.metric] + [rule.metric for rule in self.constraints]
        return "latency" in asked

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`policy: full` stands for `policy: {kind: full}`; one metric needs no list."""
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if isinstance(value.get("policy"), str):
            value["policy"] = {"kind": value["policy"]}
        elif isinstance(value.get("policy"), dict):
            value["policy"] = {"kind": "promote", **value["policy"]}
        for field in ("metric", "constraints"):
            if isinstance(value.get(field), str | dict):
                value[field] = [value[field]]
        return value

    @field_validator("keep")
    @classmethod
    def _is_size(cls, keep: str) -> str:
        if keep != "all" and not _SIZE.fullmatch(keep.strip()):
            raise ValueError("write a size such as 500 MB or 10 GB, or all")
        return keep

    @property
    def keep_bytes(self) -> int | None:
        """`keep` in bytes; None is no limit."""
        match = _SIZE.fullmatch(self.keep.strip())
        return int(float(match[1]) * 1000 ** (1 + "KMGT".index(match[2][0].upper()))) if match else None
