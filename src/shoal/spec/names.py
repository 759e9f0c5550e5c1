"""The fields of a job that refer to classes and functions, and their short names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec.base import Ref, Spec
from shoal.spec.definitions import Definition, definitions_in_file, definitions_in_module
from shoal.spec.job import Job
from shoal.spec.resolve import FIX_NOT_CALLABLE, check_ref, parse_ref, standard_library_error
from shoal.spec.signatures.static import argument_problems

DEFAULT_MODULES: Mapping[str, Sequence[str]] = {
    "optimizer": ("torch.optim",),
    "loss": ("torch.nn",),
    "schedule": ("torch.optim.lr_scheduler",),
    "metrics": ("torchmetrics",),
    "augment": ("shoal.data.augmentations",),
}

MODEL_LOSS = "model"
"""`loss: model`: the model computes its loss itself."""

METRIC_ALIASES: Mapping[str, Ref] = {
    "accuracy": Ref(name="torchmetrics:Accuracy"),
    "precision": Ref(name="torchmetrics:Precision"),
    "recall": Ref(name="torchmetrics:Recall"),
    "f1": Ref(name="torchmetrics:F1Score"),
    "auc": Ref(name="torchmetrics:AUROC"),
    "average_precision": Ref(name="torchmetrics:AveragePrecision"),
    "specificity": Ref(name="torchmetrics:Specificity"),
    "kappa": Ref(name="torchmetrics:CohenKappa"),
    "mcc": Ref(name="torchmetrics:MatthewsCorrCoef"),
    "confusion": Ref(name="torchmetrics:ConfusionMatrix"),
    "mse": Ref(name="torchmetrics:MeanSquaredError"),
    "rmse": Ref(name="torchmetrics:MeanSquaredError", args={"squared": False}),
    "mae": Ref(name="torchmetrics:MeanAbsoluteError"),
    "r2": Ref(name="torchmetrics:R2Score"),
    "perplexity": Ref(name="torchmetrics.text:Perplexity"),
}

WATCH_ALIASES: Mapping[str, Ref] = {
    "tensorboard": Ref(name="shoal.train.watchers:TensorBoard"),
    "csv": Ref(name="shoal.train.ready_watchers:CsvCurves"),
    "mlflow": Ref(name="shoal.train.ready_watchers:MLflow"),
    "wandb": Ref(name="shoal.train.ready_watchers:WeightsAndBiases"),
    "lr_finder": Ref(name="shoal.train.ready_watchers:LearningRateFinder"),
    "profiler": Ref(name="shoal.train.ready_watchers:TorchProfiler"),
}

_ALIASES = {"metrics": METRIC_ALIASES, "watchers": WATCH_ALIASES}


def expand_alias(ref: Ref, *, field: str) -> Ref:
    """The reference that an alias of a field stands for, with the user's arguments over its own."""
    alias = _ALIASES.get(field, {}).get(ref.name)
    return ref if alias is None else Ref(name=alias.name, args={**alias.args, **ref.args})


def metric_name(ref: Ref) -> str:
    """The name of a metric in events, receipts and `best.metric`: `accuracy`, `F1Score`, `top5`."""
    return ref.name.rpartition(":")[2].rpartition(".")[2]


def metric_names(refs: Sequence[Ref]) -> list[str]:
    """The names of several metrics. A repeated name gets its number in the list: `f1_3`."""
    names: list[str] = []
    for number, ref in enumerate(refs):
        name = metric_name(ref)
        names.append(f"{name}_{number}" if name in names else name)
    return names


def iter_refs(job: Job) -> Iterator[tuple[str, str, Ref]]:
    """Every reference in a job: its path (`metrics.0`), its field (`metrics`), and the reference."""
    yield from _iter_refs(job, "", "")


def _iter_refs(value: Any, place: str, field: str) -> Iterator[tuple[str, str, Ref]]:
    if isinstance(value, Ref):
        yield place, field, value
    elif isinstance(value, Spec):
        for key in type(value).model_fields:
            yield from _iter_refs(getattr(value, key), f"{place}.{key}" if place else key, key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _iter_refs(item, f"{place}.{i}", field)


def check_names(job: Job) -> list[ShoalError]:
    """An error for each name that cannot be found, or that leads to something that its field cannot use, and for each
    argument that it does not take; nothing is imported. `where` of each error is the field."""
    found = []
    for place, field, ref in iter_refs(job):
        if field == "loss" and ref.name == MODEL_LOSS:
            continue
        full = expand_alias(ref, field=field)
        try:
            check_ref(full, base_dir=job.base_dir, default_modules=DEFAULT_MODULES.get(field, ()))
            definitions = find_definitions(full, field=field, base_dir=job.base_dir)
            _check_kind(full, definitions, field=field)
        except ShoalError as problem:
            found.append(_located_in_job(problem, place, field, ref))
        else:
            found += _argument_problems(full, definitions, place, field)
    return found


def _argument_problems(ref: Ref, definitions: Sequence[Definition], place: str, field: str) -> list[ShoalError]:
    if len(definitions) != 1 or field == "metrics":  # metrics get arguments that follow from the predictions
        return []
    problems = argument_problems(ref.name, ref.args, definitions[0], field=field)
    return [problem.at(f"{place}.args.{word}" if word else f"{place}.name") for word, problem in problems]


def find_definitions(ref: Ref, *, field: str, base_dir: str) -> list[Definition]:
    """Where the code of a name is, as far as source code tells; several if that depends on what is installed."""
    name, base = parse_ref(ref), str(Path(base_dir).resolve())
    if name.file:
        return definitions_in_file(Path(base, name.file), name.attrs, base=base)
    modules = (name.module,) if name.module else DEFAULT_MODULES.get(field, ())
    in_each = (definitions_in_module(module, name.attrs, base=base) for module in modules)
    return next((found for found in in_each if found), [])


def _check_kind(ref: Ref, definitions: Sequence[Definition], *, field: str) -> None:
    """Refuse what the field cannot use, before anybody calls it."""
    kinds = {one.kind for one in definitions}
    if kinds == {"module"}:
        raise error("SH206", f"'{ref.name}' is a module", fix="Name a class or a function in it, after the colon.")
    if kinds == {"value"} and field != "factory":  # a list of samples is a dataset
        raise error("SH206", f"'{ref.name}' is a plain value, which cannot be called", fix=FIX_NOT_CALLABLE)
    if definitions and all(one.is_standard_library for one in definitions):
        raise standard_library_error(ref.name, definitions[0].place)


def _located_in_job(problem: ShoalError, place: str, field: str, ref: Ref) -> ShoalError:
    """The same problem with the field of the job as its place; the place in the user's code moves into the message."""
    message = f"{problem.where}: {problem.message}" if problem.where else problem.message
    short = ref.name.isidentifier() and field in _ALIASES
    fix = problem.fix
    if short and problem.code in ("SH202", "SH203"):
        message = f"`{field}` has no short name '{ref.name}'"
        fix = f"{did_you_mean(ref.name, _ALIASES[field])} Or write file.py:name or package.module:name."
    return error(problem.code, message, where=f"{place}.name", fix=fix)
