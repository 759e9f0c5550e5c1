"""What docs/job-file.md must say of every field: name, type and default, in the words of its tables."""

from typing import Any, get_args

from pydantic_core import PydanticUndefined

from shoal.spec import schema
from shoal.spec.base import Ref, Spec
from shoal.spec.data import FoldSplit, HoldoutSplit, ShuffledDeal
from shoal.spec.job import Job

HEADINGS = {
    "Job": "The job",
    "Ref": "Names",
    "Optimizer": "optimizer",
    "Group": "optimizer.groups",
    "Schedule": "schedule",
    "InitFrom": "init_from",
    "Data": "data",
    "Loader": "data.loader",
    "Clip": "clip",
    "Workers": "workers",
    "LanesSync": "sync: lanes",
    "ServerSync": "sync: server",
    "LocalSync": "sync: local",
    "DdpSync": "sync: ddp",
    "AutoSync": "sync: auto",
    "NoCodec": "codec: none",
    "Bf16Codec": "codec: bf16",
    "Fp16Codec": "codec: fp16",
    "Int8Codec": "codec: int8",
    "Int4Codec": "codec: int4",
    "Int3Codec": "codec: int3",
    "SignCodec": "codec: sign",
    "TopKCodec": "codec: topk",
    "LowRankCodec": "codec: lowrank",
    "NoShard": "shard: none",
    "FsdpShard": "shard: fsdp",
    "TensorShard": "shard: tensor",
    "PipelineShard": "shard: pipeline",
    "LocalEngine": "engine",
    "Planning": "plan",
    "Evaluate": "evaluate",
    "Monitor": "best",
    "StopEarly": "stop_early",
    "Checkpoint": "checkpoint",
    "Faults": "faults",
}


def sections(kind: Any = Job, found: list[type[Spec]] | None = None) -> list[type[Spec]]:
    """The job and every section that can stand in it."""
    found = [] if found is None else found
    for member in schema.members(kind):
        bare = schema.bare(member)
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
    (kind,) = schema.choices(section.model_fields["kind"])
    is_split = issubclass(section, FoldSplit | HoldoutSplit) or section.__name__ in ("NoSplit", "ColumnSplit")
    place = "split" if is_split else "deal" if issubclass(section, ShuffledDeal) else "source"
    return f"{place}: {kind}"


def rows(section: type[Spec]) -> list[list[str]]:
    """The first three cells of each row: field, type, default."""
    fields = section.model_fields.items()
    return [
        [f"`{name}`", _type(field), _default(field.get_default(call_default_factory=True))] for name, field in fields
    ]


def _type(field: Any) -> str:
    (first, *others) = schema.members(field)
    if get_args(schema.bare(first))[:1] and schema.is_section(get_args(schema.bare(first))[0]):
        inner = get_args(schema.bare(first))[0]
        return "a list of names" if issubclass(inner, Ref) else "a list of sections"
    if schema.is_section(first) and not others:
        return "a name" if issubclass(schema.bare(first), Ref) else "a section"
    if schema.is_section(first):
        return "a section with `kind`"
    return schema.expected(field)


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
