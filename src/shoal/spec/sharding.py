"""How one replica of a model is sharded over several workers.

`size`: the number of workers per replica; default: all workers, as one replica. With more workers there are several
replicas. `mirror`: with one replica, each worker keeps a copy of a neighbour's shard; default: if memory allows.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from shoal.spec.base import Spec

ShardingDegree = Annotated[int, Field(ge=2)]
INEXACT_LAYOUT = "another layout adds in another order; the same one repeats to the bit"
INEXACT_MICROBATCHES = (
    "batch norm and the like see microbatches instead of lanes: with other ones the result is another"
)
TensorParallelStyle = Literal["columns", "gathered", "rows", "sliced"]


class NoShardingConfig(Spec):
    """Every worker holds the full model."""

    kind: Literal["none"] = "none"


class FsdpConfig(Spec):
    """Every parameter is sharded, and gathered just before it is used."""

    kind: Literal["fsdp"]
    size: ShardingDegree | None = None
    mirror: bool | None = None
    inexact_reason: ClassVar[str] = INEXACT_LAYOUT


class TensorParallelConfig(Spec):
    """The matrices of linear layers and embeddings are sharded, and each worker multiplies with its shard.

    `patterns`: a predefined set, or module names with a style for each. `columns`: split by outputs, and the next layer
    uses the local outputs; `gathered`: split by outputs, which are gathered; `rows`: split by inputs, which the
    previous layer has left sharded; `sliced`: split by inputs, of which each worker takes its slice.
    """

    kind: Literal["tensor"]
    size: ShardingDegree | None = None
    patterns: Literal["transformer", "mlp"] | dict[str, TensorParallelStyle] = "transformer"
    mirror: bool | None = None
    inexact_reason: ClassVar[str] = INEXACT_LAYOUT


class PipelineParallelConfig(Spec):
    """Workers hold consecutive stages of the model; a lane's samples pass through in `microbatches`.

    `cuts`: the first modules of the second and all later stages, or auto.
    """

    kind: Literal["pipeline"]
    size: ShardingDegree | None = None
    cuts: Literal["auto"] | list[str] = "auto"
    microbatches: PositiveInt = 4
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    mirror: bool | None = None
    inexact_reason: ClassVar[str] = INEXACT_LAYOUT


ShardingConfig = Annotated[
    NoShardingConfig | FsdpConfig | TensorParallelConfig | PipelineParallelConfig, Field(discriminator="kind")
]
