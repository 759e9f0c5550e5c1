"""numpy files: .npy is memory-mapped; arrays in an .npz are mapped if the zip file holds them uncompressed."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.files import find_file
from shoal.data.source import Array, SourceOptions
from shoal.data.sources.arrays import (
    ArraySource,
    InMemoryRows,
    MemoryMappedRows,
    RowArray,
    check_same_length,
    find_good_rows,
)
from shoal.errors import did_you_mean, error
from shoal.spec.sources.config import NpySourceConfig, NpzSourceConfig

HELD_BYTES = 256 << 20


def open_npy(spec: NpySourceConfig, options: SourceOptions) -> ArraySource:
    arrays = {spec.path: _load_npy(find_file(spec.path, options=options))}
    if spec.target is not None:
        arrays[spec.target] = _load_npy(find_file(spec.target, options=options))
    return from_arrays(arrays, inputs=(spec.path,), target=spec.target, options=options)


def open_npz(spec: NpzSourceConfig, options: SourceOptions) -> ArraySource:
    path = find_file(spec.path, options=options)
    members = _members(path)
    inputs = (spec.inputs,) if isinstance(spec.inputs, str) else tuple(spec.inputs)
    arrays = {}
    for name in (*inputs, *([spec.target] if spec.target is not None else [])):
        if name not in members:
            raise error("SH303", f"no array '{name}'", where=path, fix=did_you_mean(name, members))
        arrays[name] = _load_member(path, members[name])
    return from_arrays(
        arrays,
        inputs=inputs,
        target=spec.target,
        options=options,
        names=tuple(members),
        lookup=lambda name: _load_member(path, members[name]),
    )


def from_arrays(
    arrays: Mapping[str, Array],
    *,
    inputs: tuple[str, ...],
    target: str | None,
    options: SourceOptions,
    names: tuple[str, ...] = (),
    lookup: Callable[[str], Array] | None = None,
) -> ArraySource:
    """A source of named arrays. Values are checked now if they are in memory or if rows may be skipped, otherwise in
    `take`."""
    for name, array in arrays.items():
        _check_type(name, array)
    check_same_length({name: len(array) for name, array in arrays.items()})
    now = {n: a for n, a in arrays.items() if options.skip_bad_rows or not isinstance(a, np.memmap)}
    kept = find_good_rows(now, skip_bad_rows=options.skip_bad_rows) if now else None

    def kept_lookup(name: str) -> Array:
        assert lookup is not None
        column = lookup(name)
        check_same_length({inputs[0]: len(arrays[inputs[0]]), name: len(column)})
        return column if kept is None else column[kept]

    return ArraySource(
        tuple(_row_array(name, arrays[name], _input_dtype) for name in inputs),
        None if target is None else _row_array(target, arrays[target], _target_dtype),
        good_rows=kept,
        skipped_rows=0 if kept is None else len(arrays[inputs[0]]) - len(kept),
        names=names,
        lookup=kept_lookup,
    )


def _row_array(name: str, array: Array, dtype_of: Callable[[np.dtype[Any]], torch.dtype]) -> RowArray:
    wanted = dtype_of(array.dtype)
    if not isinstance(array, np.memmap):
        # Bytes become four times as large as floats: they are converted batch by batch.
        small = array.dtype.itemsize < wanted.itemsize and (array.dtype.kind != "u" or array.dtype.itemsize == 1)
        return InMemoryRows(array, _cast(wanted)) if small else InMemoryRows(array.astype(_NUMPY[wanted], copy=False))
    return MemoryMappedRows(array, name, None if array.dtype == _NUMPY[wanted] else _cast(wanted))


_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.int64: np.dtype(np.int64),
}


def _cast(wanted: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(wanted)


def _input_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.float32 if dtype.kind in "fb" or dtype.itemsize == 1 else torch.int64


def _target_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.float32 if dtype.kind == "f" else torch.int64


def _check_type(name: str, array: Array) -> None:
    if array.ndim == 0:
        raise error("SH306", "a single value is not a set of samples", where=name)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise error("SH310", f"the values are of type {array.dtype}; numbers are needed", where=name)


# ---- reading ----


def _load_npy(path: str) -> Array:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as failure:
        raise error("SH307", f"not an .npy file: {failure}", where=path) from failure
    if not isinstance(array, np.memmap):
        raise error("SH307", "not an .npy file but an archive", where=path, fix="Use source.kind: npz.")
    return _native_byte_order(_load_if_small(array))


def _load_if_small(array: Array) -> Array:
    """Arrays in memory need no prefetching, and their values are checked before training starts."""
    return np.array(array) if array.nbytes <= HELD_BYTES else array


def _native_byte_order(array: Array) -> Array:
    """torch needs this machine's byte order and contiguous rows."""
    if array.dtype.isnative and (array.flags.c_contiguous or isinstance(array, np.memmap)):
        return array
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _members(path: str) -> dict[str, zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    except (zipfile.BadZipFile, OSError) as failure:
        raise error("SH307", f"not an .npz file: {failure}", where=path) from failure


def _load_member(path: str, info: zipfile.ZipInfo) -> Array:
    try:
        if info.compress_type == zipfile.ZIP_STORED:
            return _native_byte_order(_load_if_small(_map_member(path, info)))
        with zipfile.ZipFile(path) as archive, archive.open(info) as file:
            return _native_byte_order(np.lib.format.read_array(file, allow_pickle=False))
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as failure:
        raise error("SH307", f"{failure}", where=f"{path}, array '{info.filename}'") from failure


def _map_member(path: str, info: zipfile.ZipInfo) -> Array:
    """An uncompressed member is an .npy file at an offset."""
    with open(path, "rb") as file:
        file.seek(info.header_offset + 26)
        lengths = np.frombuffer(file.read(4), dtype="<u2")
        file.seek(int(lengths.sum()), 1)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject:
            raise ValueError("the array holds Python objects; numbers are needed")
        if 0 in shape:
            return np.empty(shape, dtype=dtype)
        return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
