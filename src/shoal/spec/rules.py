"""Rules between the fields of a job: one small function per rule, all listed in `RULES`.

Each rule returns its errors; `where` of an error is the field to change.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any

from shoal.errors import ShoalError, did_you_mean, error, plural
from shoal.spec.data import ColumnSplitConfig, HoldoutSplitConfig, NoSplitConfig
from shoal.spec.engine import LocalEngineConfig
from shoal.spec.job import (
    ELEMENTWISE_OPTIMIZERS,
    NOT_IN_IDENTITY,
    EvaluationConfig,
    Job,
    LocalSgdSyncConfig,
    MonitorConfig,
    ServerSyncConfig,
)
from shoal.spec.loop.rules import CLOSURE_OPTIMIZERS, check_loop, check_passes
from shoal.spec.names import iter_refs, metric_name, metric_names
from shoal.spec.search.rules import check_search
from shoal.spec.sharding import NoShardingConfig, PipelineParallelConfig

MAX_ENCODED_LANES = 256
UNUSABLE_OPTIMIZERS = {
    "SparseAdam": ("SH420", "takes only sparse gradients; lanes add dense ones"),
}
"""torch's optimizers that need another kind of step: code and reason."""

Rule = Callable[[Job], list[ShoalError]]


def check_rules(job: Job) -> list[ShoalError]:
    """The errors of all rules."""
    return [problem for rule in RULES for problem in rule(job)]


def has_validation(job: Job) -> bool:
    """Whether the job has validation samples."""
    split = job.data.split
    if job.data.validation is not None:
        return True
    if isinstance(split, HoldoutSplitConfig):
        return split.validation > 0
    if isinstance(split, ColumnSplitConfig):
        return bool(split.validation)
    return not isinstance(split, NoSplitConfig)


def _training_length(job: Job) -> list[ShoalError]:
    if job.epochs is None and job.steps is None:
        fix = "Add `epochs:` (passes over the data) or `steps:` (updates of the weights)."
        return [error("SH104", "the length of training is not set", where="epochs", fix=fix)]
    if job.epochs is not None and job.steps is not None:
        fix = "Keep `epochs` or `steps` (--set epochs=null removes one)."
        return [error("SH107", "`epochs` and `steps` both set the length of training", where="steps", fix=fix)]
    return []


def _what_is_trained(job: Job) -> list[ShoalError]:
    if job.task is not None:
        fix = "Keep `task`, or `model` with `loss`."
        both = [name for name in ("model", "loss") if getattr(job, name) is not None]
        return [error("SH107", f"the `task` already has a {name}", where=name, fix=fix) for name in both]
    if job.model is None and job.loss is None:
        fix = "Add `model:` with `loss:`, or `task:`, as file.py:name or package.module:name."
        return [error("SH104", "the job has neither a `model` nor a `task`", where="model", fix=fix)]
    if job.loss is None:
        fix = "Add `loss:`, for example CrossEntropyLoss or MSELoss."
        return [error("SH104", "a `model` needs a `loss`", where="loss", fix=fix)]
    if job.model is None:
        fix = "Add `model:`, as file.py:name or package.module:name."
        return [error("SH104", "a `loss` needs a `model`", where="model", fix=fix)]
    return []


def _learning_rate(job: Job) -> list[ShoalError]:
    rates = {"optimizer.args.lr": job.optimizer.args.get("lr", 0.0)}
    for i, group in enumerate(job.optimizer.groups):
        rates[f"optimizer.groups.{i}.args.lr"] = group.args.get("lr", 0.0)
    fix = "Write a number without quotes, for example 0.001 or 1e-3."
    found = []
    for place, rate in rates.items():
        if isinstance(rate, str | bool):
            found.append(error("SH105", f"expected a number, found {rate!r}", where=place, fix=fix))
        elif isinstance(rate, int | float) and rate < 0:
            found.append(error("SH106", f"a learning rate of {rate} is below 0", where=place, fix=fix))
    return found


def _plain_arguments(job: Job) -> list[ShoalError]:
    """Arguments are sent to workers as text. A job made in Python could hold any object."""
    fix = "Use numbers, text, true, false, lists and mappings; make objects inside the class or function."
    groups = [(f"optimizer.groups.{i}", group.args) for i, group in enumerate(job.optimizer.groups)]
    return [
        error("SH105", "the arguments are not plain data", where=f"{place}.args", fix=fix)
        for place, args in [*((place, ref.args) for place, _, ref in iter_refs(job)), *groups]
        if not _is_plain(args)
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _clip(job: Job) -> list[ShoalError]:
    if job.clip is None:
        return []
    if job.clip.norm is None and job.clip.value is None:
        fix = "Add `norm:` or `value:`, or remove `clip`."
        return [error("SH104", "`clip` has neither a norm nor a value", where="clip.norm", fix=fix)]
    if job.clip.norm is not None and job.clip.value is not None:
        fix = "Keep `norm` or `value`."
        return [error("SH107", "`clip` has both a norm and a value", where="clip.value", fix=fix)]
    return []


def _lanes(job: Job) -> list[ShoalError]:
    lanes, least = job.lane_count, job.workers.least
    if not isinstance(job.shard, NoShardingConfig):
        least //= job.workers_per_replica  # the workers of one replica run the same lanes
    field = "workers" if job.lanes is None else "lanes"
    found = []
    if lanes > job.batch_size:
        message = f"{lanes} lanes share a batch of {job.batch_size}: some would be empty at every step"
        fix = f"Raise `batch_size` to at least {lanes}, or set `lanes` to at most {job.batch_size}."
        found.append(error("SH107", message, where=field, fix=fix))
    if lanes < least:
        message = f"{least} workers but {plural(lanes, 'lane')}: {plural(least - lanes, 'worker')} would have no lane"
        fix = f"Raise `lanes` to at least {least}, or ask for fewer workers."
        found.append(error("SH107", message, where="lanes", fix=fix))
    return found


def _codec(job: Job) -> list[ShoalError]:
    """An unused codec would mislead the user."""
    if job.codec.kind == "none":
        return []
    if job.sync.kind == "ddp":
        message = f"`sync: {job.sync.kind}` sends gradients unchanged and does not use `codec: {job.codec.kind}`"
        return [
            error("SH110", message, where="codec", fix="Remove `codec`, or use `sync: lanes`, `local` or `server`.")
        ]
    if job.lane_count > MAX_ENCODED_LANES:
        message = f"with a codec every lane is sent separately, and {job.lane_count} lanes are too many"
        return [error("SH110", message, where="lanes", fix=f"Use at most {MAX_ENCODED_LANES} lanes.")]
    return []


def _split_or_validation(job: Job) -> list[ShoalError]:
    data, found = job.data, []
    if data.validation is not None and not isinstance(data.split, NoSplitConfig):
        message = "`data.validation` and `data.split` both set the validation data"
        found.append(error("SH107", message, where="data.split", fix="Keep one of the two."))
    if data.test is not None and isinstance(data.split, HoldoutSplitConfig) and data.split.test > 0:
        message = "`data.test` and `data.split.test` both set the test data"
        found.append(error("SH107", message, where="data.split.test", fix="Keep one of the two."))
    return found


def _evaluate(job: Job) -> list[ShoalError]:
    if job.evaluate.every_epochs is None or job.evaluate.every_steps is None:
        return []
    fix = "Keep `every_epochs` or `every_steps`."
    message = "`every_epochs` and `every_steps` both set when to evaluate"
    return [error("SH107", message, where="evaluate.every_steps", fix=fix)]


def _needs_validation(job: Job) -> list[ShoalError]:
    if has_validation(job):
        return []
    asks = {
        "stop_early": job.stop_early is not None,
        "best": job.best != MonitorConfig(),
        "evaluate": job.evaluate != EvaluationConfig(batch_size=job.evaluate.batch_size),
    }
    message = "`{}` needs validation samples, but the job has none"
    fix = "Add `data.split` (for example holdout) or `data.validation`, or remove `{}`."
    return [
        error("SH107", message.format(field), where=field, fix=fix.format(field))
        for field, asked in asks.items()
        if asked
    ]


def _monitored_metrics(job: Job) -> list[ShoalError]:
    """The metrics of a task are known only to the worker. Without a task all names are known here."""
    if job.task is not None:
        return []
    known = ["loss", *metric_names(job.metrics)]
    asked = {"best.metric": job.best.metric}
    if job.stop_early is not None:
        asked["stop_early.metric"] = job.stop_early.metric
    return [
        error("SH106", f"the job computes no metric '{metric}'", where=field,
              fix=f"{did_you_mean(metric, known)} Others are added under `metrics`.")
        for field, metric in asked.items()
        if metric not in known
    ]  # fmt: skip


def _metric_named_loss(job: Job) -> list[ShoalError]:
    fix = "Rename the class or function."
    return [
        error("SH107", "a metric named 'loss' would hide the loss", where=f"metrics.{i}.name", fix=fix)
        for i, ref in enumerate(job.metrics)
        if metric_name(ref) == "loss"
    ]


def _device(job: Job) -> list[ShoalError]:
    if re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", job.device):
        return []
    fix = did_you_mean(job.device, ("auto", "cpu", "cuda", "cuda:0", "mps"))
    return [error("SH106", f"there is no device '{job.device}'", where="device", fix=fix)]


def _init_from(job: Job) -> list[ShoalError]:
    start = job.init_from
    if start is None or start.path:
        return []
    if start.rename:
        fix = "Add `path:`, or remove `rename`."
        return [error("SH104", "`rename` is set without a file", where="init_from.path", fix=fix)]
    if start.freeze or start.unfreeze:
        return []
    message = "`init_from` has neither a path nor patterns to freeze"
    fix = "Add `path:` to weights, or patterns to `freeze`; or remove `init_from`."
    return [error("SH104", message, where="init_from.path", fix=fix)]


def _listen(job: Job) -> list[ShoalError]:
    """Peers connect to this address, so it must identify this machine."""
    where = job.network.listen
    try:
        everywhere = ipaddress.ip_address(where.strip("[]")).is_unspecified
    except ValueError:  # a name
        everywhere = not where.strip() or where == "*"
    if not everywhere:
        return []
    fix = "Give the one address at which other machines reach this one, such as 192.168.1.5."
    return [error("SH106", f"'{where}' is not one address of this machine", where="network.listen", fix=fix)]


def _without_directory(job: Job) -> list[ShoalError]:
    """What only workers have that cannot open the run's directory."""
    engine = job.engine
    if not engine.shares_run_dir:
        return []
    if isinstance(engine, LocalEngineConfig) and engine.machines > 1:
        fix = "Add `apart: true`, or remove `machines`."
        return [error("SH107", "`machines` is for workers apart", where="engine.machines", fix=fix)]
    if engine.notice:
        fix = "Add `apart: true`, or send SIGTERM to the driver: all workers save and stop."
        return [error("SH107", "`notice` is for workers apart", where="engine.notice", fix=fix)]
    return []


def _torch_exchange(job: Job) -> list[ShoalError]:
    """What torch's own all-reduce does not offer."""
    if job.sync.kind != "ddp" and isinstance(job.shard, NoShardingConfig):
        return []
    problems = []
    if job.network.tls is not None:
        fix = (
            "Use another sync and no shard, or remove `network.tls` and use a tunnel (WireGuard) between the machines."
        )
        problems.append(error("SH110", "torch's own all-reduce cannot be encrypted", where="network.tls", fix=fix))
    if job.network.ports is not None:
        fix = "Use another sync and no shard, or remove `network.ports` and let the machines reach all ports."
        problems.append(
            error("SH110", "torch's own all-reduce chooses its ports itself", where="network.ports", fix=fix)
        )
    return problems


def _outer_optimizer(job: Job) -> list[ShoalError]:
    """Unused numbers would mislead the user."""
    sync = job.sync
    if not isinstance(sync, LocalSgdSyncConfig) or sync.outer != "average":
        return []
    fix = "Remove it, or use `outer: nesterov`."
    unused = [
        name for name in ("lr", "momentum") if getattr(sync, name) != LocalSgdSyncConfig.model_fields[name].default
    ]
    return [error("SH107", f"`outer: average` has no {name}", where=f"sync.{name}", fix=fix) for name in unused]


def _server_copies(job: Job) -> list[ShoalError]:
    sync = job.sync
    if not isinstance(sync, ServerSyncConfig) or sync.backups < sync.servers:
        return []
    message = f"{sync.servers} {'server' if sync.servers == 1 else 'servers'} cannot hold {sync.backups + 1} copies"
    fix = f"Set `servers` to at least {sync.backups + 1}, or `backups` to at most {sync.servers - 1}."
    return [error("SH107", message, where="sync.backups", fix=fix)]


def _elementwise_optimizer(job: Job) -> list[ShoalError]:
    """Servers, and workers with `shard`, update slices of tensors."""
    name = _torch_name(job.optimizer.name, "torch.optim")
    whole = not isinstance(job.sync, ServerSyncConfig) and isinstance(job.shard, NoShardingConfig)
    if whole or name in ELEMENTWISE_OPTIMIZERS or name in UNUSABLE_OPTIMIZERS or name in CLOSURE_OPTIMIZERS:
        return []
    holders, instead = (
        ("servers", "`sync: lanes`") if isinstance(job.shard, NoShardingConfig) else ("workers", "`shard: none`")
    )
    message = f"{holders} hold slices of tensors, but '{job.optimizer.name}' may need full tensors"
    fix = f"Use one of {', '.join(ELEMENTWISE_OPTIMIZERS)}; or {instead}, where others work too."
    return [error("SH110", message, where="optimizer.name", fix=fix)]


def _unusable_optimizer(job: Job) -> list[ShoalError]:
    code, why = UNUSABLE_OPTIMIZERS.get(_torch_name(job.optimizer.name, "torch.optim"), ("", ""))
    return [error(code, f"{job.optimizer.name} {why}", where="optimizer.name")] if code else []


def _closures(job: Job) -> list[ShoalError]:
    """An optimizer with a closure computes several passes in a step."""
    name = _torch_name(job.optimizer.name, "torch.optim")
    if job.task is not None or name not in CLOSURE_OPTIMIZERS:
        return []
    problem = check_passes(job, f"{name}, which computes the loss several times in a step", where="optimizer.name")
    if problem is None and job.precision == "fp16":
        fix = "Use `precision: bf16`."
        problem = error("SH863", f"{name} has no loss scale", where="precision", fix=fix)
    return [problem] if problem else []


def _frozen(job: Job) -> list[ShoalError]:
    """Servers and shards hold parameters in their own way."""
    if job.checkpoint.frozen:
        return []
    others = {"sync": job.sync.kind in ("server", "auto"), "shard": job.shard.kind != "none"}
    message = "checkpoints without frozen parameters are for workers that hold the whole model"
    return [error("SH110", message, where=field) for field, found in others.items() if found]


def _reduction(job: Job) -> list[ShoalError]:
    """A sum over a lane's samples grows with the lane, and lanes average it."""
    if job.loss is None or not _torch_name(job.loss.name, "torch.nn"):
        return []
    args = job.loss.args
    is_sum = args.get("reduction") == "sum" or args.get("size_average") is False
    is_whole = job.lane_count == 1 and not isinstance(job.shard, PipelineParallelConfig)
    if args.get("reduction") == "none" or args.get("reduce") is False:
        message = "without a reduction the loss is no single number"
    elif is_sum and not is_whole:
        message = "a loss that is a sum would depend on the number of lanes"
    else:
        return []
    field = next(name for name in ("reduction", "reduce", "size_average") if name in args)
    fix = "Remove it: the loss is then the mean. A sum over the batch is a mean with a larger learning rate."
    return [error("SH421", message, where=f"loss.args.{field}", fix=fix)]


def _torch_name(name: str, package: str) -> str:
    """The name of torch's own class or function of a package, or ''."""
    module, _, short = name.rpartition(":")
    return short if f"{module or package}.".startswith(f"{package}.") else ""


def _shard(job: Job) -> list[ShoalError]:
    """Settings that sharded jobs do not support."""
    if isinstance(job.shard, NoShardingConfig):
        return []
    found = []
    if job.device not in ("auto", "cpu"):
        fix = "Use `device: cpu`, or remove `shard`."
        found.append(error("SH110", f"sharded models need the CPU, not '{job.device}'", where="device", fix=fix))
    if isinstance(job.shard, PipelineParallelConfig) and job.precision != "float32":
        message = "pipeline stages do not support mixed precision"
        fix = "Use `precision: float32`, or `shard: fsdp`."
        found.append(error("SH110", message, where="precision", fix=fix))
    if job.sync.kind == "local":
        message = "with local SGD each lane needs a full model"
        found.append(error("SH110", message, where="shard", fix="Use `sync: lanes`, or remove `shard`."))
    if job.sync.kind == "server":
        message = "servers already hold the parameters, so there is nothing to shard"
        found.append(error("SH110", message, where="shard", fix="Use `sync: lanes`, or remove `shard`."))
    if job.sync.kind == "auto":
        message = "`sync: auto` does not support sharded models"
        found.append(error("SH110", message, where="sync", fix="Use `sync: lanes`, or remove `shard`."))
    for name in (name for name in ("shape", "distil") if getattr(job, name) is not None):
        message = f"`{name}` changes a model before it is sharded, which is not supported"
        found.append(error("SH110", message, where=name, fix=f"Remove `{name}` or `shard`."))
    if job.codec.kind != "none":
        message = f"sharded gradients are sent unchanged and do not use `codec: {job.codec.kind}`"
        found.append(error("SH110", message, where="codec", fix="Remove `codec` or `shard`."))
    return found + _whole_replicas(job)


def _whole_replicas(job: Job) -> list[ShoalError]:
    """The number of workers must be a multiple of the workers per replica."""
    least, most, shard = job.workers.least, job.workers.most, job.shard
    assert not isinstance(shard, NoShardingConfig)
    size = job.workers_per_replica
    found = []
    if size < 2:
        fix = "Ask for two workers or more, or remove `shard`."
        found.append(error("SH107", "one worker has nobody to share a model with", where="workers", fix=fix))
    elif least % size or most % size:
        message = f"{least if least % size else most} workers do not make whole replicas of {size}"
        fix = f"Ask for a multiple of {size} workers, or change `shard.size`."
        found.append(error("SH107", message, where="shard.size", fix=fix))
    if isinstance(shard, PipelineParallelConfig) and shard.cuts != "auto" and len(shard.cuts) != size - 1:
        message = f"{len(shard.cuts)} cuts make {len(shard.cuts) + 1} stretches, not {size}"
        fix = f"Name {size - 1} modules, or write `cuts: auto`."
        found.append(error("SH107", message, where="shard.cuts", fix=fix))
    return found


def _search(job: Job) -> list[ShoalError]:
    known = ["loss", *metric_names(job.metrics)] if job.task is None else None
    found = check_search(job, not_searched=sorted(NOT_IN_IDENTITY), known_metrics=known)
    if job.search is not None and not has_validation(job):
        fix = "Add `data.split` (for example holdout) or `data.validation`."
        found.append(error("SH107", "a search needs validation samples, but the job has none", where="search", fix=fix))
    return found


def _shrink(job: Job) -> list[ShoalError]:
    """A model that changes its shape must be whole in one checkpoint, without state of another shape beside it."""
    if job.shrink is None:
        return []
    obstacles = {
        "sync": job.sync.kind != "lanes" and f"`sync: {job.sync.kind}`",
        "codec": job.codec.kind != "none" and f"`codec: {job.codec.kind}`",
        "shard": job.shard.kind != "none" and f"`shard: {job.shard.kind}`",
        "shape": job.shape is not None and "`shape`",
        "search": job.search is not None and "`search`",
        "data.split": job.fold_count > 1 and "folds",
        "data": not has_validation(job) and "no validation part",
        "checkpoint.path": job.checkpoint.path is not None and "`checkpoint.path`",
        "checkpoint.frozen": not job.checkpoint.frozen and "`checkpoint.frozen: false`",
    }
    return [error("SH668", f"the job has {what}", where=where) for where, what in obstacles.items() if what]


RULES: tuple[Rule, ...] = (
    _training_length,
    _what_is_trained,
    _learning_rate,
    _plain_arguments,
    _clip,
    _lanes,
    _codec,
    _split_or_validation,
    _evaluate,
    _needs_validation,
    _monitored_metrics,
    _metric_named_loss,
    _device,
    _init_from,
    _listen,
    _without_directory,
    _torch_exchange,
    _outer_optimizer,
    _server_copies,
    _elementwise_optimizer,
    _unusable_optimizer,
    _reduction,
    _frozen,
    _shard,
    _search,
    _shrink,
    _closures,
    check_loop,
)
