"""What docs/job-file.md must say of every field: name, type and default, in the words of its tables."""

from typing import Any, get_args

from pydantic_core import PydanticUndefined

from shoal.spec import schema
from shoal.spec.base import Ref, Spec
from shoal.spec.data import FoldSplitConfig, HoldoutSplitConfig, ShuffledSamplerConfig
from shoal.spec.job import Job

HEADINGS = {
    "Job": "The job",
    "Ref": "Names",
    "OptimizerConfig": "optimizer",
    "ParamGroupConfig": "optimizer.groups",
    "LRScheduleConfig": "schedule",
    "InitFromConfig": "init_from",
    "DataConfig": "data",
    "LoaderConfig": "data.loader",
    "ClusterConfig": "data.clusters",
    "WeightedSamplerConfig": "sampler: weighted",
    "ClipConfig": "clip",
    "AverageConfig": "average",
    "WorkersConfig": "workers",
    "LanesSyncConfig": "sync: lanes",
    "ServerSyncConfig": "sync: server",
    "LocalSgdSyncConfig": "sync: local",
    "DdpSyncConfig": "sync: ddp",
    "AutoSyncConfig": "sync: auto",
    "NoCodecConfig": "codec: none",
    "Bf16CodecConfig": "codec: bf16",
    "Fp16CodecConfig": "codec: fp16",
    "Int8CodecConfig": "codec: int8",
    "Int4CodecConfig": "codec: int4",
    "Int3CodecConfig": "codec: int3",
    "SignCodecConfig": "codec: sign",
    "TopKCodecConfig": "codec: topk",
    "LowRankCodecConfig": "codec: lowrank",
    "NoShardingConfig": "shard: none",
    "FsdpConfig": "shard: fsdp",
    "TensorParallelConfig": "shard: tensor",
    "PipelineParallelConfig": "shard: pipeline",
    "LocalEngineConfig": "engine: local",
    "SshEngineConfig": "engine: ssh",
    "SshHost": "engine.hosts",
    "SlurmEngineConfig": "engine: slurm",
    "RayEngineConfig": "engine: ray",
    "MachinesEngineConfig": "engine: machines",
    "ElasticConfig": "elastic",
    "NetworkConfig": "network",
    "LimitsConfig": "limits",
    "AlertConfig": "alerts",
    "PlanConfig": "plan",
    "EvaluationConfig": "evaluate",
    "MonitorConfig": "best",
    "EarlyStoppingConfig": "stop_early",
    "CheckpointConfig": "checkpoint",
    "FaultInjectionConfig": "faults",
    "SearchConfig": "search",
    "ObjectiveConfig": "search.metric",
    "ConstraintConfig": "search.constraints",
    "ModelShape": "shape",
    "DenseStep": "shape.steps: dense",
    "FoldStep": "shape.steps: fold",
    "CutStep": "shape.steps: cut",
    "Kept": "shape.steps: cut: layers",
    "LowRankStep": "shape.steps: low_rank",
    "MaskStep": "shape.steps: mask",
    "RoundStep": "shape.steps: round",
    "ShareStep": "shape.steps: share",
    "DistilConfig": "distil",
    "ShrinkConfig": "shrink",
    "CompressConfig": "compress",
    "TargetConfig": "compress.target",
    "TuneConfig": "compress.tune",
    "BudgetConfig": "search.budget",
    "FullPolicyConfig": "search.policy: full",
    "PromotePolicyConfig": "search.policy: promote",
    "HyperbandPolicyConfig": "search.policy: hyperband",
    "PopulationPolicyConfig": "search.policy: population",
    "SamplerConfig": "search.policy.sampler",
}


def sections(kind: Any = Job, found: list[type[Spec]] | None = None) -> list[type[Spec]]:
    """The job and every section that can stand in it."""
    found = [] if found is None else found
    for member in schema.union_members(kind):
        bare = schema.strip_annotated(member)
        if schema.is_section(bare) and bare not in found:
            found.append(bare)
            for field in bare.model_fields.values():
                sections(field, found)
        elif not schema.is_section(bare):
            for part in get_args(bare):
                if not isinstance(part, str | int):
                    sections(part, found)
    return found


def heading(section: type[Spec]) -> str:
    """Under which heading of the page a section's fields stand."""
    if section.__name__ in HEADINGS:
        return HEADINGS[section.__name__]
    (kind,) = schema.literal_values(section.model_fields["kind"])
    is_split = issubclass(section, FoldSplitConfig | HoldoutSplitConfig) or section.__name__ in (
        "NoSplitConfig",
        "ColumnSplitConfig",
    )
    field = "split" if is_split else "sampler" if issubclass(section, ShuffledSamplerConfig) else "source"
    return f"{field}: {kind}"


def field_rows(section: type[Spec]) -> list[list[str]]:
    """The first three cells of each row: field, type, default."""
    fields = section.model_fields.items()
    return [
        [f"`{name}`", _type(field), _default(field.get_default(call_default_factory=True))] for name, field in fields
    ]


def _type(field: Any) -> str:
    (first, *others) = schema.union_members(field)
    if get_args(schema.strip_annotated(first))[:1] and schema.is_section(get_args(schema.strip_annotated(first))[0]):
        inner = get_args(schema.strip_annotated(first))[0]
        return "a list of names" if issubclass(inner, Ref) else "a list of sections"
    if "each item: a section with `kind" in (described := schema.describe_type(field)):
        return "a list of sections with `kind`"
    if schema.is_section(first) and not others:
        return "a name" if issubclass(schema.strip_annotated(first), Ref) else "a section"
    if schema.is_section(first):
        is_name = issubclass(schema.strip_annotated(first), Ref)
        return "a name or a list of names" if is_name else "a section with `kind`"
    return described


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ([], {}):
        return "–"
    if isinstance(value, Spec):
        kind = getattr(value, "kind", None) or getattr(value, "name", None)
        return f"`{kind}`" if kind else "its own defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`[{', '.join(map(str, value))}]`" if isinstance(value, list) else f"`{value}`"
