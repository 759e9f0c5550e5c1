"""The job: everything that determines the result of a run, and how it is run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from shoal.spec.alerts.config import AlertConfig
from shoal.spec.base import Ref, Spec
from shoal.spec.compression.config import CompressConfig, DistilConfig, ShrinkConfig
from shoal.spec.compression.steps import ModelShape
from shoal.spec.data import DataConfig, FoldSplitConfig
from shoal.spec.engine import ElasticConfig, EngineConfig, LimitsConfig, LocalEngineConfig, NetworkConfig
from shoal.spec.loop.config import AverageConfig
from shoal.spec.search import SearchConfig
from shoal.spec.sharding import NoShardingConfig, ShardingConfig

MAX_WORKERS = 1024


class ParamGroupConfig(Spec):
    """Optimizer arguments for parameters whose names match: `{match: "head.*", args: {lr: 0.01}}`."""

    match: str
    args: dict[str, Any] = Field(default_factory=dict)


class OptimizerConfig(Ref):
    """A torch optimizer by name; `groups` are tried in order, the first match counts."""

    groups: list[ParamGroupConfig] = Field(default_factory=list)


class LRScheduleConfig(Ref):
    """A torch learning-rate scheduler, stepped every step or every epoch.

    In `args`, the words `steps` and `epochs` stand for the job's totals: `{T_max: steps}`.
    """

    every: Literal["step", "epoch"] = "step"


class ClipConfig(Spec):
    """Gradients are clipped after the reduction: by their total norm, or value by value."""

    norm: PositiveFloat | None = None
    value: PositiveFloat | None = None


class EvaluationConfig(Spec):
    """When to evaluate on the validation data: every n epochs or steps, and always at the end. `test`: whether the test
    data is measured at the end."""

    every_epochs: PositiveInt | None = None
    every_steps: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    test: bool = True


class CheckpointConfig(Spec):
    """When to save, what to keep, where. `every`: auto, '100 steps', '5 minutes', '30 seconds' or never.

    With `frozen: false` neither checkpoints nor what a joining worker gets contain frozen parameters.
    """

    every: str = "auto"
    keep: PositiveInt = 2
    keep_best: NonNegativeInt = 1
    path: str | None = None
    frozen: bool = True

    @property
    def interval(self) -> tuple[Literal["auto", "steps", "seconds", "never"], float]:
        """`every` as (unit, number)."""
        if self.every in ("auto", "never"):
            return ("auto", 0) if self.every == "auto" else ("never", 0)
        number, unit = _INTERVAL.fullmatch(self.every).groups()  # type: ignore[union-attr]
        scale = {"step": 1.0, "second": 1.0, "minute": 60.0, "hour": 3600.0}[unit]
        return ("steps" if unit == "step" else "seconds", float(number) * scale)

    @field_validator("every")
    @classmethod
    def _known_interval(cls, every: str) -> str:
        if every not in ("auto", "never") and not _INTERVAL.fullmatch(every):
            raise ValueError("write auto, never, '100 steps', '30 seconds', '5 minutes' or '1 hour'")
        return every


_SMALLER_IS_BETTER = re.compile(r"loss|error|mae|mse|rmse|perplexity")
_INTERVAL = re.compile(r"(?=.*[1-9])(\d+|\d+\.\d+(?! step)) (step|second|minute|hour)s?")


class MonitorConfig(Spec):
    """The metric that ranks models. `mode` auto: min for losses and errors, max for other metrics."""

    metric: str = "loss"
    mode: Literal["auto", "min", "max"] = "auto"

    @property
    def sign(self) -> int:
        """1 if larger is better, -1 if smaller is."""
        if self.mode != "auto":
            return 1 if self.mode == "max" else -1
        return -1 if _SMALLER_IS_BETTER.search(self.metric.lower()) else 1


class EarlyStoppingConfig(MonitorConfig):
    """Stop when the monitored metric has not improved for `patience` evaluations."""

    patience: PositiveInt = 3
    min_delta: NonNegativeFloat = 0.0


class InitFromConfig(Spec):
    """Start from weights: a run, a checkpoint or a .safetensors file.

    `freeze` and `unfreeze` are name patterns, applied in this order. `rename` maps prefixes of the file's
    names to the model's. `strict: false` loads what fits and reports the rest.
    """

    path: str | None = None
    freeze: list[str] = Field(default_factory=list)
    unfreeze: list[str] = Field(default_factory=list)
    rename: dict[str, str] = Field(default_factory=dict)
    strict: bool = True


class WorkersConfig(Spec):
    """Number of workers: `2`, or `1..8` for an elastic run. In a job, `auto` means from one worker to one per lane."""

    least: PositiveInt = 1
    most: PositiveInt = 1

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return {"least": value, "most": value}
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", value)
            if not match:
                raise ValueError("write a number of workers (2) or a range (1..8), or auto in a job with `lanes`")
            return {"least": int(match[1]), "most": int(match[2] or match[1])}
        if not isinstance(value, dict | WorkersConfig):
            raise ValueError("write a number of workers (2) or a range (1..8)")
        return value

    @model_validator(mode="after")
    def _ordered(self) -> WorkersConfig:
        if self.least > self.most:
            raise ValueError(f"write the smaller number first: {self.most}..{self.least}")
        if self.most > MAX_WORKERS:
            raise ValueError(f"write at most {MAX_WORKERS} workers")
        return self


class LanesSyncConfig(Spec):
    """Exact synchronous training: the same bits on any number of workers.

    `exchange`: `host` adds in host memory, `device` on the device over torch's process group (NCCL, or gloo on the
    CPU), with the same bits. `auto` is `device` on CUDA where torch has NCCL.
    """

    kind: Literal["lanes"] = "lanes"
    exchange: Literal["auto", "host", "device"] = "auto"
    inexact_reason: ClassVar[str] = ""


class DdpSyncConfig(Spec):
    """Gradients are averaged by torch's own all-reduce. `backend` auto: nccl on CUDA, else gloo."""

    kind: Literal["ddp"]
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    inexact_reason: ClassVar[str] = "the order of additions depends on the workers"


ELEMENTWISE_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")
"""torch's elementwise optimizers: a slice of a tensor is updated exactly as in the full tensor."""


class ServerSyncConfig(Spec):
    """Servers hold the parameters in chunks, each on a primary and `backups` replicas, and apply pushed gradients.

    `staleness`: how many steps a lane may be ahead of the slowest lane. 0 is exact, inf is asynchronous. Above 0
    gradients are applied in order of arrival; `staleness_aware` scales late gradients down.
    """

    kind: Literal["server"]
    servers: PositiveInt = 1
    backups: NonNegativeInt = 0
    staleness: NonNegativeInt | Literal["inf"] = 0
    staleness_aware: bool = False
    placement: Literal["table", "ring"] = "table"

    @property
    def inexact_reason(self) -> str:
        return "servers apply gradients in the order of arrival" if self.staleness else ""

    @property
    def staleness_bound(self) -> float:
        """`staleness` as a number."""
        return math.inf if self.staleness == "inf" else self.staleness

    @model_validator(mode="before")
    @classmethod
    def _default_backups(cls, value: Any) -> Any:
        """With two or more servers, losing one must not lose parameters."""
        several = isinstance(value, dict) and isinstance(value.get("servers"), int) and value["servers"] > 1
        return {"backups": 1, **value} if several else value

    @field_validator("staleness", mode="before")
    @classmethod
    def _normalise_infinity(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("write a whole number of at least 0, or inf")
        return "inf" if value == math.inf else value  # YAML has a number for it: .inf


class LocalSgdSyncConfig(Spec):
    """Local SGD: each lane trains alone for `every` steps, then all lanes apply the mean of their changes.

    `outer`: how that mean is applied: `average` adopts it, `nesterov` takes a step with a rate and a momentum, like
    DiLoCo. `rounds_per_sync`: lanes wait for the exchange only in the last of this many rounds; in the others,
    fragments are exchanged while the lanes continue.
    """

    kind: Literal["local"]
    every: PositiveInt = 32
    outer: Literal["nesterov", "average"] = "nesterov"
    lr: PositiveFloat = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    rounds_per_sync: PositiveInt = 8
    fragments: PositiveInt = 4
    inexact_reason: ClassVar[str] = ""


class AutoSyncConfig(Spec):
    """The driver plans at the start. The job of the run then has the chosen sync and number of workers."""

    kind: Literal["auto"]
    inexact_reason: ClassVar[str] = ""


SyncConfig = Annotated[
    LanesSyncConfig | LocalSgdSyncConfig | ServerSyncConfig | DdpSyncConfig | AutoSyncConfig,
    Field(discriminator="kind"),
]
"""`inexact_reason` says why another number of workers gives other bits; '' if it does not."""


class NoCodecConfig(Spec):
    """Values are sent unchanged."""

    kind: Literal["none"] = "none"


class Bf16CodecConfig(Spec):
    """Half the bytes: float32's range with 8 bits of precision."""

    kind: Literal["bf16"]


class Fp16CodecConfig(Spec):
    """Half the bytes: 11 bits of precision, and no values above 65504."""

    kind: Literal["fp16"]


class Int8CodecConfig(Spec):
    """A quarter of the bytes: integers, with a scale for every `block` values."""

    kind: Literal["int8"]
    block: Annotated[int, Field(ge=8, le=65536)] = 256


class Int4CodecConfig(Spec):
    """A seventh of the bytes: as int8, with integers from -7 to 7 and error feedback."""

    kind: Literal["int4"]
    block: Annotated[int, Field(ge=8, le=65536)] = 64


class Int3CodecConfig(Spec):
    """A tenth of the bytes: integers from -3 to 3, with error feedback."""

    kind: Literal["int3"]
    block: Annotated[int, Field(ge=8, le=65536)] = 256


class SignCodecConfig(Spec):
    """One bit per value, with a scale per block and error feedback."""

    kind: Literal["sign"]


class TopKCodecConfig(Spec):
    """Only the largest values; the others accumulate until they are sent. `momentum` accumulates velocities instead."""

    kind: Literal["topk"]
    keep: Annotated[float, Field(gt=0, le=1)] = 0.01
    momentum: Annotated[float, Field(gt=0, lt=1)] | None = None


class LowRankCodecConfig(Spec):
    """Matrices as products of two thin matrices, with error feedback."""

    kind: Literal["lowrank"]
    rank: PositiveInt = 4


CodecConfig = Annotated[
    NoCodecConfig
    | Bf16CodecConfig
    | Fp16CodecConfig
    | Int8CodecConfig
    | Int4CodecConfig
    | Int3CodecConfig
    | SignCodecConfig
    | TopKCodecConfig
    | LowRankCodecConfig,
    Field(discriminator="kind"),
]


class FaultInjectionConfig(Spec):
    """Injected delays, for experiments: before each step a worker pauses this long, with this probability."""

    pause_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    pause_s: NonNegativeFloat = 0.1


class PlanConfig(Spec):
    """What `shoal plan` and `sync: auto` may choose although it changes the result."""

    allow: list[Literal["codecs", "local", "staleness", "threads"]] = Field(default_factory=list)


NOT_IN_IDENTITY = {
    "name",
    "workers",
    "engine",
    "elastic",
    "self_check",
    "accumulate",
    "gradient_checkpointing",
    "network",
    "limits",
    "alerts",
    "plan",
    "checkpoint",
    "watchers",
    "export",
    "faults",
    "search",
    "compress",
    "base_dir",
}
_LATER_DATA_FIELDS = ("clusters", "weight")
_LATER_SOURCE_FIELDS = ("encode", "missing", "collate", "length", "window", "encoding", "null_values")
_HASHED_NAMES = {
    "data": {"sampler": "deal"},
    "shard": {"size": "ways"},
    "sync": {"rounds_per_sync": "settle"},
}
"""Names under which fields enter the identity of a job. Checkpoints store it: whatever a field is called later, its
name in the hash stays. tests/spec/job_identities.json has recorded hashes."""


def _accumulating_lanes(job: dict[str, Any], accumulate: int) -> dict[str, int]:
    """The fields of a job that accumulates; none if its lanes or workers are not valid."""
    lanes = job.get("lanes")
    if lanes is None:
        try:
            lanes = WorkersConfig.model_validate(job.get("workers") or 1).most
        except ValidationError:
            return {}
    return {"lanes": lanes * accumulate, "accumulate": 1} if type(lanes) is int and lanes > 0 else {}


_SHORT_FORM_FIELDS = ("sync", "codec", "shard", "engine", "average")


class Job(Spec):
    """The job as the user wrote it. It is validated completely before anything starts."""

    name: str = "job"
    seed: NonNegativeInt = 0
    seeds: Annotated[int, Field(ge=1, le=100)] = 1

    model: Ref | None = None
    loss: Ref | None = None
    metrics: list[Ref] = Field(default_factory=list)
    task: Ref | None = None
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(name="AdamW"))
    schedule: LRScheduleConfig | None = None
    init_from: InitFromConfig | None = None
    shape: ModelShape | None = None
    distil: DistilConfig | None = None
    shrink: ShrinkConfig | None = None

    data: DataConfig
    batch_size: PositiveInt = 32
    epochs: PositiveInt | None = None
    steps: PositiveInt | None = None
    drop_last: bool = False
    accumulate: PositiveInt = 1
    clip: ClipConfig | None = None
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    average: AverageConfig | None = None
    gradient_checkpointing: bool | list[str] = False
    compile: bool = False

    lanes: PositiveInt | None = None
    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    threads: PositiveInt = 1
    device: str = "auto"
    sync: SyncConfig = Field(default_factory=LanesSyncConfig)
    codec: CodecConfig = Field(default_factory=NoCodecConfig)
    shard: ShardingConfig = Field(default_factory=NoShardingConfig)
    engine: EngineConfig = Field(default_factory=LocalEngineConfig)
    elastic: ElasticConfig = Field(default_factory=ElasticConfig)
    self_check: Annotated[float, Field(ge=0, le=1)] = 0.003
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    alerts: Annotated[list[AlertConfig], Field(max_length=50)] = Field(default_factory=list)
    plan: PlanConfig = Field(default_factory=PlanConfig)

    evaluate: EvaluationConfig = Field(default_factory=EvaluationConfig)
    best: MonitorConfig = Field(default_factory=MonitorConfig)
    stop_early: EarlyStoppingConfig | None = None
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    export: list[Literal["program"]] = Field(default=["program"])
    watchers: list[Ref] = Field(default_factory=list)
    faults: FaultInjectionConfig = Field(default_factory=FaultInjectionConfig)
    search: SearchConfig | None = None
    compress: CompressConfig = Field(default_factory=CompressConfig)

    base_dir: str = "."

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """`sync: lanes` stands for `sync: {kind: lanes}`; the same for codec, shard and engine.

        `workers: auto` means from one worker to one per lane. It is the default with `sync: auto` and `lanes`. A lane
        that accumulates over several parts of its batch is that many lanes, so `accumulate` becomes 1.
        """
        if not isinstance(value, dict):
            return value
        value = {k: {"kind": v} if k in _SHORT_FORM_FIELDS and isinstance(v, str) else v for k, v in value.items()}
        if isinstance(engine := value.get("engine"), dict):
            value["engine"] = {"kind": "local"} | engine
        if isinstance(value.get("metrics"), str):
            value["metrics"] = [value["metrics"]]
        undecided = value.get("sync") == {"kind": "auto"} and value.get("workers") is None
        if (undecided or value.get("workers") == "auto") and type(lanes := value.get("lanes")) is int and lanes > 0:
            value["workers"] = {"least": 1, "most": min(lanes, MAX_WORKERS)}
        if type(accumulate := value.get("accumulate")) is int and accumulate > 1:
            value |= _accumulating_lanes(value, accumulate)
        return value

    @field_validator("name")
    @classmethod
    def _valid_directory_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise ValueError("write at most 64 letters, digits, '.', '_' and '-', the first a letter or digit")
        return name

    @property
    def lane_count(self) -> int:
        """`lanes`, or the maximum number of workers."""
        return self.lanes or self.workers.most

    @property
    def clips_by_norm(self) -> bool:
        return self.clip is not None and self.clip.norm is not None

    @property
    def workers_per_replica(self) -> int:
        """Number of workers over which one replica of the model is sharded."""
        return 1 if isinstance(self.shard, NoShardingConfig) else self.shard.size or self.workers.most

    @property
    def inexact_reason(self) -> str:
        """Why another number of workers gives other bits; '' if it does not."""
        return self.sync.inexact_reason if isinstance(self.shard, NoShardingConfig) else self.shard.inexact_reason

    @property
    def fold_count(self) -> int:
        """Number of runs of this job: its folds times its seeds."""
        return self.seeds * self._folds

    @property
    def _folds(self) -> int:
        split = self.data.split
        return split.folds if isinstance(split, FoldSplitConfig) and split.fold is None else 1

    @property
    def averages_seeds(self) -> bool:
        """Whether a trial of this job is trained with several seeds."""
        return self.seeds > 1 or (self.search is not None and self.search.seeds > 1)

    @property
    def averages_runs(self) -> bool:
        """Whether a trial of this job is several runs, whose mean counts."""
        return self.fold_count > 1 or self.averages_seeds

    def fold(self, number: int) -> Job:
        """One of the runs of this job: all folds with the first seed, then all with the next one."""
        update: dict[str, Any] = {"seed": self.seed + number // self._folds, "seeds": 1}
        if self._folds > 1:
            split = self.data.split.model_copy(update={"fold": number % self._folds})
            update["data"] = self.data.model_copy(update={"split": split})
        return self.model_copy(update=update)

    def dump(self) -> dict[str, Any]:
        """The job as plain data, without fields whose value and default are None."""
        return self.model_dump(mode="json", exclude_none=True)

    def resume_compatibility_sha256(self) -> str:
        """Equal for jobs that can resume from each other's checkpoints, even if the model is sharded differently."""
        return self.model_copy(update={"shard": NoShardingConfig(), "lanes": self.lane_count}).sha256()

    def sha256(self) -> str:
        """The identity of what the job produces. How it is run (workers, servers, engine) is not part of it."""
        body = self.model_dump(mode="json", exclude=NOT_IN_IDENTITY)
        if isinstance(self.sync, ServerSyncConfig):
            stale = self.sync.model_dump(include={"kind", "staleness", "staleness_aware"})
            body["sync"] = stale if self.sync.inexact_reason else LanesSyncConfig().model_dump()
        body["sync"].pop("exchange", None)  # the same bits
        body["lanes"] = self.lane_count
        unused = [name for name in ("shape", "distil", "shrink") if getattr(self, name) is None]
        unused += [name for name, unset in (("seeds", 1), ("average", None), ("compile", False))
                   if getattr(self, name) == unset]  # fmt: skip
        for name in unused + ["shard"] * (self.shard.kind == "none"):
            del body[name]
        _drop_unused_data_fields(body["data"])
        if self.evaluate.test:
            del body["evaluate"]["test"]
        for section, names in _HASHED_NAMES.items():
            if section in body:
                body[section] = {names.get(name, name): value for name, value in body[section].items()}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _drop_unused_data_fields(data: dict[str, Any]) -> None:
    """Fields that came later and are not used do not change the identity of a job."""
    sources = [source for name in ("source", "validation", "test") if (source := data[name])]
    for part, names in ((data, _LATER_DATA_FIELDS), *((source, _LATER_SOURCE_FIELDS) for source in sources)):
        for name in names:
            if part.get(name, 0) is None:
                del part[name]
