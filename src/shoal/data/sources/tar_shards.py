"""Tar shards as WebDataset writes them. The shards are indexed once, so that samples can be read in any order."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.data.cache import cached_directory
from shoal.data.files import DataFile, find_files, local_path
from shoal.data.source import Array, DataSource, Ids, SourceOptions, format_ids
from shoal.data.sources.image_pixels import PixelReader
from shoal.errors import ShoalError, describe_exception, did_you_mean, error
from shoal.spec.sources.config import TarSourceConfig

_SUFFIXES = (".tar",)
_IMAGES = ("png", "jpg", "jpeg", "bmp", "gif", "webp", "tif", "tiff", "ppm", "pgm")
_NUMBERS = ("cls", "cls2", "index", "count")
_ARRAYS = ("npy",)
_DECODED = (*_IMAGES, *_NUMBERS, *_ARRAYS, "json", "txt")


@dataclass(frozen=True)
class TarEntry:
    """Where the bytes of a file stand."""

    shard: int
    offset: int
    size: int


def open_tar_shards(spec: TarSourceConfig, options: SourceOptions) -> TarShardSource:
    files = find_files(spec.path, options=options, suffixes=_SUFFIXES)
    paths = [local_path(file, options=options) for file in files]
    keys, entries = _read_index(files, paths, options)
    return TarShardSource(spec, options, paths=paths, keys=keys, entries=entries)


class TarShardSource(DataSource):
    """Samples of shards. Files are opened for each read, so that threads and forks cannot interfere."""

    in_memory = False
    per_sample = True
    name_column = "key"

    def __init__(
        self,
        spec: TarSourceConfig,
        options: SourceOptions,
        *,
        paths: Sequence[str],
        keys: list[str],
        entries: list[dict[str, TarEntry]],
    ) -> None:
        self._paths, self._keys, self._entries = paths, keys, entries
        self._inputs = (spec.inputs,) if isinstance(spec.inputs, str) else tuple(spec.inputs)
        self._target_field = spec.target
        fields = (*self._inputs, *([spec.target] if spec.target else []))
        self._pixels = PixelReader(channels=spec.channels, size=spec.size) if _has_images(fields) else None
        self._check_fields(fields, skip=options.skip_bad_rows)
        self.classes = options.classes
        self._words: dict[str, int] | None = None
        if spec.target == "txt":
            words = [str(self._decode(i, "txt")) for i in range(len(self))]
            self.classes = options.classes or tuple(sorted(set(words)))
            self._words = {word: number for number, word in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self._keys)

    def take(self, ids: Ids) -> Batch:
        inputs = tuple([self._stack(name, ids) for name in self._inputs])
        target = None if self._target_field is None else self._stack(self._target_field, ids)
        return Batch(inputs, target, len(ids))

    def sizes(self) -> Array:
        """Bytes of the inputs of each sample in its shard."""
        return np.array([sum(entry[name].size for name in self._inputs) for entry in self._entries], dtype=np.int64)

    def targets(self) -> Array:
        if self._target_field is None:
            raise error("SH303", "the data has no target", fix="Name an extension in data.source.target.")
        return self._stack(self._target_field, np.arange(len(self), dtype=np.int64)).numpy()

    def own_columns(self) -> list[str]:
        return ["key", "shard"]

    def own_column(self, name: str) -> Array:
        if name == "key":
            return np.array(self._keys, dtype=str)
        return np.array([next(iter(entry.values())).shard for entry in self._entries], dtype=np.int64)

    def _check_fields(self, fields: Sequence[str], *, skip: bool) -> None:
        for name in fields:
            if name.rsplit(".", 1)[-1] not in _DECODED:
                fix = f"Extensions that are read: {', '.join(_DECODED)}. Pickles are never read."
                raise error("SH834", f"files '.{name}' are not decoded", where="data.source", fix=fix)
        bad = [i for i, entry in enumerate(self._entries) if any(name not in entry for name in fields)]
        if bad and not skip:
            entry, place = self._entries[bad[0]], self._place(bad[0])
            name = next(name for name in fields if name not in entry)
            raise error("SH303", f"the sample has no file '.{name}'", where=place, fix=did_you_mean(name, entry))
        if len(bad) == len(self._keys):
            raise error("SH302", "no sample has all of the files", where=self._paths[0])
        gone = set(bad)
        self.skipped_rows = len(bad)
        self._keys = [key for i, key in enumerate(self._keys) if i not in gone]
        self._entries = [entry for i, entry in enumerate(self._entries) if i not in gone]

    def _stack(self, name: str, ids: Ids) -> Tensor:
        values = [self._decode(int(i), name) for i in ids]
        shapes = {value.shape for value in values if isinstance(value, np.ndarray)}
        if len(shapes) > 1:
            message = f"files '.{name}' of samples {format_ids(ids)} have different shapes: {sorted(shapes)[:3]}"
            raise error("SH306", message, where=self._place(int(ids[0])), fix="Images: set data.source.size.")
        if name.rsplit(".", 1)[-1] in _IMAGES:
            return torch.from_numpy(np.stack(values)).permute(0, 3, 1, 2).contiguous().float().div_(255)
        if self._words is not None and name == self._target_field:
            values = [self._class_number(str(value), int(i)) for i, value in zip(ids, values, strict=True)]
        stacked = np.stack([np.asarray(value) for value in values])
        kind = np.float32 if stacked.dtype.kind == "f" else np.int64
        return torch.from_numpy(stacked.astype(kind))

    def _class_number(self, word: str, i: int) -> int:
        assert self._words is not None
        if word not in self._words:
            raise error("SH310", f"the training data has no class {word!r}", where=self._place(i))
        return self._words[word]

    def _decode(self, i: int, name: str) -> Any:
        entry = self._entries[i][name]
        with open(self._paths[entry.shard], "rb") as file:
            content = os.pread(file.fileno(), entry.size, entry.offset)
        try:
            return self._value(content, name.rsplit(".", 1)[-1], self._place(i))
        except ShoalError:
            raise
        except (ValueError, UnicodeDecodeError) as failure:
            message = f"'.{name}' cannot be read: {describe_exception(failure)}"
            raise error("SH307", message, where=self._place(i)) from failure

    def _value(self, content: bytes, extension: str, place: str) -> Any:
        if extension in _IMAGES:
            assert self._pixels is not None
            return self._pixels.read(io.BytesIO(content), place)
        if extension in _NUMBERS:
            return int(content)
        if extension in _ARRAYS:
            return np.load(io.BytesIO(content), allow_pickle=False)
        if extension == "json":
            value = np.asarray(json.loads(content))
            if value.dtype.kind not in "biuf":
                raise error("SH310", "the json holds no number and no list of numbers", where=place)
            return value
        return content.decode().strip()

    def _place(self, i: int) -> str:
        entry = next(iter(self._entries[i].values()))
        return f"{self._paths[entry.shard]}, sample {self._keys[i]}"


def _has_images(fields: Sequence[str]) -> bool:
    return any(name.rsplit(".", 1)[-1] in _IMAGES for name in fields)


# ---- index ----


def _read_index(
    files: Sequence[DataFile], paths: Sequence[str], options: SourceOptions
) -> tuple[list[str], list[dict[str, TarEntry]]]:
    """Keys and files of all samples. The headers of a shard are read once; the index is kept in the cache."""
    keys: list[str] = []
    entries: list[dict[str, TarEntry]] = []
    for shard, (file, path) in enumerate(zip(files, paths, strict=True)):

        def make(directory: Path, path: str = path) -> None:
            (directory / "index.json").write_text(json.dumps(_index_shard(path)))

        directory = cached_directory(options.cache_dir, ["tar", *file.cache_key], make)
        for key, found in json.loads((directory / "index.json").read_text()):
            keys.append(key)
            entries.append({name: TarEntry(shard, *place) for name, place in found.items()})
    if not keys:
        raise error("SH302", "the shards have no samples", where=paths[0])
    return keys, entries


def _index_shard(path: str) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """(key, {extension: (offset, size)}) of each sample: neighbours whose names are equal up to the first dot."""
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                stem, dot, extension = name.partition(".")
                if not member.isfile() or not dot or not stem or name.startswith("__"):
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if not samples or samples[-1][0] != key:
                    samples.append((key, {}))
                samples[-1][1][extension.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError, EOFError) as failure:
        fix = "Shards are plain tar files, not compressed ones: gunzip them."
        raise error("SH834", f"cannot be read as tar: {failure}", where=path, fix=fix) from failure
    return samples
