"""The servers' whole state as named arrays: split into chunks, merged from chunks, saved to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from shoal.errors import error
from shoal.server.numpy_format import pack, unpack
from shoal.server.numpy_layout import CODES, Arrays, ArraySlice, NumpyLayout

_DEEP_OR_HUGE = (RecursionError, OverflowError)
_PREFIX = "shoal.optimizer/"


@dataclass(frozen=True)
class ServerSnapshot:
    """`state` is the optimizer's for each name: flat arrays with one number per element, and scalars. `clocks` has the
    next step of each worker, or a single step if they are synchronous."""

    values: Arrays
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    clocks: list[int] = field(default_factory=lambda: [0])

    def chunk_state(self, layout: NumpyLayout, first: int, last: int, *, lanes: int) -> bytes:
        """The packed state of the chunks [first, last)."""
        start, stop = layout.cuts[first], layout.cuts[last]
        content = np.zeros(stop - start, np.uint8)
        slices = []
        for part in layout.slices(start, stop):
            name, elements = layout.slots[part.place].name, _element_range(layout, part)
            content[part.start - start : part.stop - start] = _flattened(self.values[name])[elements].view(np.uint8)
            state = {key: _slice_value(value, elements) for key, value in self.state.get(name, {}).items()}
            slices.append({**part._asdict(), "state": state})
        count = last - first
        clocks = self.clocks if len(self.clocks) == lanes else [min(self.clocks)] * lanes
        stamps = {name: np.zeros(count, np.int64) for name in ("term", "seq")}
        stamps["applied"] = np.full(count, min(self.clocks), np.int64)
        stamps["clocks"] = np.tile(np.array(clocks, np.int64), (count, 1))
        return pack({"parameters": content, "runs": slices, **stamps, "manner": np.zeros((count, 3))})


def snapshot_from_chunks(
    layout: NumpyLayout, found: Mapping[tuple[int, int], bytes], *, synchronous: bool
) -> ServerSnapshot:
    """Merge all chunks. If slices of an array have had different numbers of updates, the optimizer's scalars are those
    of the first slice."""
    values = {place.name: np.zeros(place.shape, place.dtype) for place in layout.slots}
    whole: dict[str, dict[str, Any]] = {place.name: {} for place in layout.slots}
    clocks = []
    for (first, last), packed in sorted(found.items()):
        state, start = unpack(packed), layout.cuts[first]
        for part in layout.slices(start, layout.cuts[last]):
            place = layout.slots[part.place]
            content = state["parameters"][part.start - start : part.stop - start]
            values[place.name].reshape(-1)[_element_range(layout, part)] = content.view(place.dtype)
        for row in state["runs"]:
            part = ArraySlice(row["place"], row["start"], row["stop"])
            _merge_optimizer_state(whole[layout.slots[part.place].name], row["state"], layout, part)
        clocks.append(state["applied"][:, None].min(0) if synchronous else state["clocks"].min(0))
    return ServerSnapshot(values, whole, np.min(clocks, axis=0).tolist())


def _merge_optimizer_state(
    whole: dict[str, Any], state: dict[str, Any], layout: NumpyLayout, array_slice: ArraySlice
) -> None:
    place = layout.slots[array_slice.place]
    for key, value in state.items():
        if not _per_element(value):
            whole.setdefault(key, value)
            continue
        if key not in whole:
            whole[key] = np.zeros((place.stop - place.start) // place.dtype.itemsize, value.dtype)
        whole[key][_element_range(layout, array_slice)] = value


def _element_range(layout: NumpyLayout, array_slice: ArraySlice) -> slice:
    """The slice's elements in its array."""
    place = layout.slots[array_slice.place]
    size = place.dtype.itemsize
    return slice((array_slice.start - place.start) // size, (array_slice.stop - place.start) // size)


def _flattened(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array).reshape(-1)


def _per_element(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0


def _slice_value(value: Any, elements: slice) -> Any:
    return np.ascontiguousarray(value[elements]) if _per_element(value) else value


# ---- files ----


def save(snapshot: ServerSnapshot, path: str | os.PathLike[str], *, optimizer: Mapping[str, Any]) -> None:
    """Write one safetensors file atomically: values under their names, the optimizer's state beside them, and the rest
    as JSON in its header."""
    arrays, single = dict(snapshot.values), {}
    for name, state in snapshot.state.items():
        arrays |= {f"{_PREFIX}{key}/{name}": value for key, value in state.items() if isinstance(value, np.ndarray)}
        single[name] = {key: value for key, value in state.items() if not isinstance(value, np.ndarray)}
    header = {"names": list(snapshot.values), "single": single, "clocks": snapshot.clocks, "optimizer": dict(optimizer)}
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        save_file(plain, temporary, {"shoal": json.dumps(header)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as failure:
        raise error("SH503", f"cannot write {target}: {failure}") from failure
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> tuple[ServerSnapshot, dict[str, Any]]:
    """The saved snapshot and its optimizer. SH705 if the file was not written by `save`."""
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            header = json.loads((file.metadata() or {})["shoal"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        values = {name: arrays.pop(name) for name in header["names"]}
        state: dict[str, dict[str, Any]] = {name: dict(header["single"].get(name, {})) for name in values}
        for key, array in arrays.items():
            slot, _, name = key.removeprefix(_PREFIX).partition("/")
            state[name][slot] = array
        loaded = ServerSnapshot(values, state, [int(clock) for clock in header["clocks"]])
        return loaded, dict(header["optimizer"])
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError, *_DEEP_OR_HUGE) as failure:
        raise error("SH705", f"not a file that `save` wrote: {failure}", where=str(path)) from failure


def is_reserved(name: str) -> bool:
    """Whether saved files use this name for something else."""
    return name.startswith(_PREFIX)


def why_unfit(name: str, array: NDArray[Any]) -> str:
    """Why servers cannot hold this array; '' if they can."""
    if array.dtype.name not in CODES:
        return f"'{name}' is of dtype {array.dtype}, and servers train {', '.join(CODES)}"
    return f"the name '{name}' is reserved" if is_reserved(name) else ""
