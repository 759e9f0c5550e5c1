"""What servers are started with, checked; and what of it every process must know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, PositiveInt, ValidationError

from shoal.errors import ShoalError, did_you_mean, error
from shoal.server.flat import Arrays, Flat
from shoal.server.holding import why_unfit
from shoal.spec.base import Spec
from shoal.spec.job import ELEMENTWISE, MOST_WORKERS, ServerSync
from shoal.spec.paths import write_atomically

SETTING_VIEW, TRAINING_VIEW = 1, 2
"""In the first whoever starts the servers carries everything, and sets it; in the second each worker has a lane."""

PATIENCE_S = 10.0
"""How long servers and workers stay whose starter is gone."""


class Optimizer(Spec):
    name: str
    args: dict[str, float | bool | list[float] | None] = Field(default_factory=dict)


class ServerTerms(Spec):
    """`like`: dtype and shape of the arrays by name, in their order."""

    sync: ServerSync
    workers: PositiveInt = Field(le=MOST_WORKERS)
    optimizer: Optimizer
    like: dict[str, tuple[str, tuple[int, ...]]]

    @property
    def together(self) -> bool:
        return self.sync.bound == 0

    @property
    def model(self) -> dict[str, Any]:
        """What servers are told of it."""
        flat = Flat(self.like)
        groups = [0] * len(flat.places)
        return {
            "layout": flat.describe(),
            "optimizer": self.optimizer.name,
            "groups": groups,
            "hyper": [self.optimizer.args],
        }

    def hyper(self, lr: float | None) -> bytes:
        """What goes with a push."""
        args = self.optimizer.args if lr is None else {**self.optimizer.args, "lr": float(lr)}
        return json.dumps({"groups": [args], "clip_value": None}).encode()

    @property
    def carries(self) -> dict[str, list[int]]:
        return {str(worker): [worker] for worker in range(self.workers)}

    def write(self, root: Path) -> None:
        write_atomically(root / "servers.json", self.model_dump_json())

    @classmethod
    def read(cls, root: Path) -> ServerTerms:
        return cls.model_validate_json((root / "servers.json").read_text())


def checked_terms(values: Arrays, *, optimizer: Any, workers: int, **sync: Any) -> ServerTerms:
    """SH701 says what is wrong with them."""
    try:
        made = Optimizer.model_validate({"name": optimizer} if isinstance(optimizer, str) else optimizer)
        served = ServerSync.model_validate({"kind": "server", **{k: v for k, v in sync.items() if v is not None}})
        terms = ServerTerms(sync=served, workers=workers, optimizer=made, like=Flat.of(values).like)
    except ValidationError as failure:
        first = failure.errors()[0]
        raise error("SH701", first["msg"], where=".".join(map(str, first["loc"]))) from None
    if made.name not in ELEMENTWISE:
        message = f"servers cannot use the optimizer {made.name}"
        raise error("SH701", message, where="optimizer", fix=did_you_mean(made.name, ELEMENTWISE))
    if not _is_number(made.args.get("lr")):
        raise error("SH701", "there is no learning rate", where="optimizer.args", fix="Give lr as a number.")
    if served.backups >= served.servers:
        message = f"{served.servers} servers cannot hold {served.backups + 1} copies"
        raise error("SH701", message, where="backups", fix=f"Give at most {served.servers - 1}, or more servers.")
    return terms


def checked_values(values: Mapping[str, Any] | None) -> Arrays:
    """Arrays of one's own, in their order. SH701 if servers cannot hold them."""
    if not isinstance(values, Mapping) or not values:
        raise error("SH701", "there are no values to train", where="values", fix="Give a dict of names and arrays.")
    found = {}
    for name, value in values.items():
        array = np.array(value, order="C")
        if why := why_unfit(name, array) if isinstance(name, str) else f"the name {name!r} is no text":
            raise error("SH701", why, where="values")
        found[name] = array
    if not any(array.size for array in found.values()):
        raise error("SH701", "the arrays have no elements", where="values")
    return found


def write_into(rooms: Arrays, given: Any, *, divisor: int) -> None:
    """Copy gradients to where servers take them from, divided. SH702 unless they are the arrays that are wanted."""
    if not isinstance(given, Mapping):
        raise error("SH702", f"gradients come as a dict of arrays, and this is of type {type(given).__name__}")
    if missing := [name for name in rooms if name not in given]:
        raise error("SH702", f"no gradient of {_named(missing)}")
    if unknown := [name for name in given if name not in rooms]:
        raise error("SH702", f"a gradient of {_named(unknown)}", fix=did_you_mean(str(unknown[0]), rooms))
    arrays = {name: np.asarray(given[name]) for name in rooms}
    for name, array in arrays.items():
        if failure := _unlike(name, array, rooms[name]):
            raise failure
    for name, array in arrays.items():
        np.divide(array, divisor, out=rooms[name])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unlike(name: str, array: np.ndarray[Any, Any], room: np.ndarray[Any, Any]) -> ShoalError | None:
    if array.shape != room.shape:
        return error("SH702", f"the shape is {array.shape}, and the servers have {room.shape}", where=f"'{name}'")
    if array.dtype != room.dtype:
        fix = f"Convert it: .astype('{room.dtype}')."
        return error(
            "SH702", f"the dtype is {array.dtype}, and the servers have {room.dtype}", where=f"'{name}'", fix=fix
        )
    return None


def _named(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
