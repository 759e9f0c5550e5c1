"""Which settings of the training loop a way to agree on a step supports."""

from __future__ import annotations

from shoal.errors import ShoalError, error
from shoal.spec.job import Job
from shoal.spec.loop.config import AverageConfig

CLOSURE_OPTIMIZERS = ("LBFGS",)
"""torch's optimizers that compute the loss several times in a step."""


def check_loop(job: Job) -> list[ShoalError]:
    """Settings that only some kinds of `sync` support, and numbers that nothing uses."""
    wanted = {
        "average": job.average is not None and "averaged weights",
        "precision": job.precision == "fp16" and "a loss scale (`precision: fp16`)",
        "compile": job.compile and "`compile`",
        "gradient_checkpointing": bool(job.gradient_checkpointing) and "`gradient_checkpointing`",
    }
    supports = supports_loop_settings(job)
    everywhere = ("compile", "gradient_checkpointing")  # on whole models
    found = []
    for where, what in wanted.items():
        if what and not (supports or (where in everywhere and job.shard.kind == "none")):
            found.append(refusal(job, what, where))
    if wanted["precision"] and job.codec.kind != "none":
        message = f"a loss scale and `codec: {job.codec.kind}` do not go together: gradients may overflow in the codec"
        found.append(error("SH863", message, where="codec", fix="Remove `codec`, or use `precision: bf16`."))
    return found + _average(job)


def supports_loop_settings(job: Job) -> bool:
    """Whether every worker holds the whole replica and makes every update of it."""
    return job.sync.kind in ("lanes", "ddp") and job.shard.kind == "none"


def check_passes(job: Job, what: str, *, where: str) -> ShoalError | None:
    """Steps with several passes (phases, closures) need exact lanes. None if the job has them."""
    if job.sync.kind == "lanes" and job.shard.kind == "none" and job.codec.kind == "none":
        return None
    return refusal(job, what, where, "Use `sync: lanes` without `codec` and `shard`.", code="SH860")


def refusal(
    job: Job, what: str, where: str, fix: str = "Use `sync: lanes` without `shard`.", *, code: str = "SH863"
) -> ShoalError:
    if job.shard.kind != "none":
        has = f"`shard: {job.shard.kind}`"
    elif job.codec.kind != "none" and job.sync.kind == "lanes":
        has = f"`codec: {job.codec.kind}`"
    else:
        has = f"`sync: {job.sync.kind}`"
    return error(code, f"{has} does not support {what}", where=where, fix=fix)


def _average(job: Job) -> list[ShoalError]:
    if job.average is None or job.average.kind != "swa" or "decay" not in job.average.model_fields_set:
        return []
    if job.average.decay == AverageConfig.model_fields["decay"].default:
        return []  # written out in the job of a run
    fix = "Remove `decay`, or use `kind: ema`."
    return [error("SH107", "`average: swa` is a plain mean and has no decay", where="average.decay", fix=fix)]
