"""The configuration of standalone servers, and checks of the user's values and gradients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt, ValidationError

from shoal.errors import ShoalError, did_you_mean, error
from shoal.server.numpy_layout import Arrays, NumpyLayout
from shoal.server.snapshot import why_unfit
from shoal.spec.base import Spec
from shoal.spec.job import ELEMENTWISE_OPTIMIZERS, MAX_WORKERS, ServerSyncConfig
from shoal.spec.run_paths import write_atomically

LOADING_VIEW, TRAINING_VIEW = 1, 2
"""In the loading view the process that starts the servers sets their state; in the training view each worker has one
lane."""

PATIENCE_S = 10.0
"""Seconds that servers and workers stay after the process that started the servers is gone."""


class ServerOptimizerConfig(Spec):
    name: str
    args: dict[str, float | bool | list[float] | None] = Field(default_factory=dict)


class StandaloneServerConfig(Spec):
    """`like` has dtype and shape of the arrays by name, in their order."""

    sync: ServerSyncConfig
    workers: PositiveInt = Field(le=MAX_WORKERS)
    optimizer: ServerOptimizerConfig
    like: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def synchronous(self) -> bool:
        return self.sync.staleness_bound == 0

    @property
    def model(self) -> dict[str, Any]:
        """The model's description for the servers."""
        layout = NumpyLayout(self.like)
        groups = [0] * len(layout.slots)
        return {
            "layout": layout.describe(),
            "optimizer": self.optimizer.name,
            "groups": groups,
            "hyper": [self.optimizer.args],
        }

    def encode_hyperparameters(self, lr: float | None) -> bytes:
        """The hyperparameters of a push."""
        args = self.optimizer.args if lr is None else {**self.optimizer.args, "lr": float(lr)}
        return json.dumps({"groups": [args], "clip_value": None}).encode()

    @property
    def views(self) -> dict[int, dict[int, list[int]]]:
        """The lanes of each seat, in the two views that there are."""
        lanes = list(range(self.workers))
        return {LOADING_VIEW: {self.workers: lanes}, TRAINING_VIEW: {worker: [worker] for worker in lanes}}

    def enter_fields(self, view: int) -> dict[str, Any]:
        """What a client says when it enters this view."""
        return {"carries": {str(seat): lanes for seat, lanes in self.views[view].items()}, "model": self.model}

    def write(self, root: Path) -> None:
        write_atomically(root / "servers.json", self.model_dump_json())

    @classmethod
    def read(cls, root: Path) -> StandaloneServerConfig:
        """SH701 if the file is damaged."""
        try:
            return cls.model_validate_json((root / "servers.json").read_bytes())
        except (OSError, ValueError) as failure:
            raise error("SH701", f"servers.json cannot be read: {str(failure)[:200]}", where=str(root)) from None


def build_config(values: Arrays, *, optimizer: Any, workers: int, **sync: Any) -> StandaloneServerConfig:
    """The checked configuration. SH701 names the first problem."""
    try:
        optimizer_config = ServerOptimizerConfig.model_validate(
            {"name": optimizer} if isinstance(optimizer, str) else optimizer
        )
        sync_config = ServerSyncConfig.model_validate(
            {"kind": "server", **{k: v for k, v in sync.items() if v is not None}}
        )
        config = StandaloneServerConfig(
            sync=sync_config, workers=workers, optimizer=optimizer_config, like=NumpyLayout.from_arrays(values).like
        )
    except ValidationError as failure:
        first = failure.errors()[0]
        raise error("SH701", first["msg"], where=".".join(map(str, first["loc"]))) from None
    if optimizer_config.name not in ELEMENTWISE_OPTIMIZERS:
        message = f"servers cannot use the optimizer {optimizer_config.name}"
        raise error(
            "SH701", message, where="optimizer", fix=did_you_mean(optimizer_config.name, ELEMENTWISE_OPTIMIZERS)
        )
    if not _is_number(optimizer_config.args.get("lr")):
        raise error("SH701", "there is no learning rate", where="optimizer.args", fix="Give lr as a number.")
    if sync_config.backups >= sync_config.servers:
        message = f"{sync_config.servers} servers cannot hold {sync_config.backups + 1} copies"
        raise error("SH701", message, where="backups", fix=f"Give at most {sync_config.servers - 1}, or more servers.")
    return config


def check_values(values: Mapping[str, Any] | None) -> Arrays:
    """Copies of the arrays, in their order. SH701 if servers cannot hold them."""
    if not isinstance(values, Mapping) or not values:
        raise error("SH701", "there are no values to train", where="values", fix="Give a dict of names and arrays.")
    arrays = {}
    for name, value in values.items():
        array = np.array(value, order="C")
        if why := why_unfit(name, array) if isinstance(name, str) else f"the name {name!r} is no text":
            raise error("SH701", why, where="values")
        arrays[name] = array
    if not any(array.size for array in arrays.values()):
        raise error("SH701", "the arrays have no elements", where="values")
    return arrays


def copy_gradients(buffers: Arrays, gradients: Any, *, divisor: int) -> None:
    """Divide gradients and copy them to the push buffers. SH702 unless names, shapes and dtypes match."""
    if not isinstance(gradients, Mapping):
        raise error("SH702", f"gradients must be a dict of arrays, not a {type(gradients).__name__}")
    if missing := [name for name in buffers if name not in gradients]:
        raise error("SH702", f"no gradient of {_quoted_names(missing)}")
    if unknown := [name for name in gradients if name not in buffers]:
        raise error("SH702", f"a gradient of {_quoted_names(unknown)}", fix=did_you_mean(str(unknown[0]), buffers))
    arrays = {name: np.asarray(gradients[name]) for name in buffers}
    for name, array in arrays.items():
        if failure := _mismatch(name, array, buffers[name]):
            raise failure
    for name, array in arrays.items():
        np.divide(array, divisor, out=buffers[name])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mismatch(name: str, array: np.ndarray[Any, Any], buffer: np.ndarray[Any, Any]) -> ShoalError | None:
    if array.shape != buffer.shape:
        return error("SH702", f"the shape is {array.shape}, and the servers have {buffer.shape}", where=f"'{name}'")
    if array.dtype != buffer.dtype:
        fix = f"Convert it: .astype('{buffer.dtype}')."
        return error(
            "SH702", f"the dtype is {array.dtype}, and the servers have {buffer.dtype}", where=f"'{name}'", fix=fix
        )
    return None


def _quoted_names(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
