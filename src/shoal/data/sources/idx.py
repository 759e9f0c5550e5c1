"""MNIST's file format: a header of big-endian sizes, then the values."""

from __future__ import annotations

import gzip
import math
import struct
import zlib

import numpy as np
from torch import Tensor

from shoal.data.files import find_file
from shoal.data.source import Array, SourceOptions
from shoal.data.sources.arrays import ArraySource, InMemoryRows, check_same_length, find_good_rows
from shoal.errors import error
from shoal.spec.sources.config import IdxSourceConfig

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def open_idx(spec: IdxSourceConfig, options: SourceOptions) -> ArraySource:
    images = read_idx(find_file(spec.path, options=options))
    labels = None if spec.target is None else read_idx(find_file(spec.target, options=options))
    lengths = {spec.path: len(images)}
    if labels is not None and spec.target is not None:
        lengths[spec.target] = len(labels)
    check_same_length(lengths)
    kept = find_good_rows({spec.path: images}, skip_bad_rows=options.skip_bad_rows)
    if kept is not None:
        images, labels = images[kept], None if labels is None else labels[kept]
    skipped = lengths[spec.path] - len(images)
    return ArraySource((_image_rows(images),), None if labels is None else _label_rows(labels), skipped_rows=skipped)


def read_idx(path: str) -> Array:
    """The array in an IDX file, in this machine's byte order."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as failure:
        raise error("SH307", f"a damaged gzip file: {failure}", where=path) from failure
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _TYPES or not raw[3]:
        raise error("SH307", "not an IDX file: the first four bytes are wrong", where=path)
    body = 4 + 4 * raw[3]
    if len(raw) < body:
        raise error("SH307", "the file ends inside its header", where=path)
    shape = struct.unpack(f">{raw[3]}I", raw[4:body])
    dtype = np.dtype(_TYPES[raw[2]])
    wanted = math.prod(shape) * dtype.itemsize
    if len(raw) - body != wanted:
        raise error("SH307", f"{wanted} bytes of values expected, {len(raw) - body} found", where=path)
    return np.frombuffer(raw, dtype, offset=body).reshape(shape).astype(dtype.newbyteorder("="))


def _image_rows(images: Array) -> InMemoryRows:
    if images.ndim == 3:
        images = images[:, None]
    if images.dtype == np.uint8:
        return InMemoryRows(images, _scale_pixels)
    return InMemoryRows(images.astype(np.float32))


def _label_rows(labels: Array) -> InMemoryRows:
    return InMemoryRows(labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64))


def _scale_pixels(pixels: Tensor) -> Tensor:
    return pixels.float().div_(255)
